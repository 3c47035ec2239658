"""Under pytest-xdist, the tests of each file run in a process of their own, and their memory goes with it.

TensorFlow stops no server before its process ends: each task of a cluster in the process of a test keeps some 40 MB and
90 threads. So a process of pytest-xdist, which has imported all tests, forks one for each file: nothing is imported
twice, and what was imported is in memory once. As in the launcher's fork server, no op may have run before. One warm
process is lent to all.
"""

import faulthandler
import functools
import gc
import os
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.conftest import warm_process_to_lend
from tf2dist import linux

# Or, where tests connect one coordinator after another, TensorFlow logs an error for each function of an earlier one.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # this is a process of pytest-xdist
        config.pluginmanager.register(ProcessPerFile(config))


class ProcessPerFile:
    """Has every test run by the process of its file."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_of_a_file = False
        self._pid = 0  # of the process of the present file
        self._connection: Connection | None = None  # between the two; None if there is no such process now
        self._lent: dict[str, str] = {}
        self._descriptor = self._copy = 0  # of the warm process; 0 until there is one

    @functools.cached_property
    def _interactor(self) -> Any:
        """What tells the process of the whole run about tests and warnings, which pytest-xdist registers later."""
        return next(plugin for plugin in self._config.pluginmanager.get_plugins() if hasattr(plugin, "sendevent"))

    def pytest_collection_finish(self) -> None:
        eager = sys.modules.get("tensorflow.python.eager.context")
        assert not (eager and eager.context()._initialized), "a file of tests runs an op when it is imported"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        hook = item.ihook
        if self._is_of_a_file:
            runtestprotocol(item, nextitem=nextitem)
            return True
        faulthandler.cancel_dump_traceback_later()  # the process of the file has this limit as well
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._run(item, nextitem if nextitem and nextitem.path == item.path else None)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool | None:
        return None if self._is_of_a_file else True  # the process of the file sets it

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Has a test run; if its process is lost the test has failed, and the next one gets another process."""
        items = item.session.items
        connection = self._connection or self._fork(items)
        try:
            connection.send((items.index(item), nextitem and items.index(nextitem)))
            while event := connection.recv():
                self._interactor.channel.send(event)
        except (EOFError, ConnectionError):
            text = f"the process of {item.path.name} has ended with code {self._end()}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            item.ihook.pytest_runtest_logreport(report=report)
        else:
            if not nextitem:
                self._end()

    def _fork(self, items: list[pytest.Item]) -> Connection:
        gc.freeze()  # or the first collection in the new process would copy every page with an object of Python
        self._connection, connection = Pipe()
        parent = os.getpid()
        if not self._copy:
            self._lent, (self._descriptor,) = warm_process_to_lend()
            self._copy = os.dup(self._descriptor)
        self._pid = os.fork()  # closes the descriptor in the new process, which has no warm process of its own
        if not self._pid:
            self._connection.close()
            self._is_of_a_file = True
            # Two processes that wrote to one pipe would tear each other's messages: the process that forked passes on.
            self._interactor.channel = connection
            linux.die_with_parent(parent)
            os.dup2(self._copy, self._descriptor)
            os.environ.update(self._lent)
            self._serve(items, connection)
        connection.close()
        return self._connection

    def _serve(self, items: list[pytest.Item], connection: Connection) -> None:
        """In the process of a file: runs the tests that it is told, until there are no more."""
        try:
            while True:
                index, following = connection.recv()
                nextitem = None if following is None else items[following]
                self._interactor.item_index = index
                # This comes to the method above, and to what plugins do around it, such as the limit of time.
                items[index].ihook.pytest_runtest_protocol(item=items[index], nextitem=nextitem)
                connection.send(None)
        except EOFError:
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)

    def _end(self) -> int:
        """Waits until the process has ended, and returns its exit code."""
        assert self._connection
        self._connection.close()
        self._connection = None
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
