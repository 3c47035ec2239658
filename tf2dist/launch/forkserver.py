"""The fork server of a run: forks a task in milliseconds on request, with TensorFlow imported.

It is itself a fork of the `warm_process`, and runs no op and starts no thread. Launcher and server exchange messages
(see `messages`), one per packet, over a Unix socket. The tasks inherit the socket and send their own packets through
it; they read the launcher's messages from their standard input, one per line. Each side may die at any time: at the end
of the socket the server kills every task and exits, and if the server dies, the kernel kills the tasks.
"""

import contextlib
import importlib
import importlib.util
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tf2dist import linux
from tf2dist.config.checks import MAX_LOCAL_TASKS
from tf2dist.files import open_log
from tf2dist.messages import DROPPABLE, Exited, Forward, Ready, Start, Started, ToLauncher, ToServer, receive, send
from tf2dist.signals import STOP_SIGNALS
from tf2dist.tf_constants import AUTOGRAPH_FILE

Post = Callable[[Any], None]


def poster(sock: socket.socket) -> Post:
    """Returns a function that sends one message.

    A task must not wait for a launcher that is suspended. Messages that are repeated anyway are dropped then.
    """

    def post(message: Any) -> None:
        flags = socket.MSG_DONTWAIT if isinstance(message, DROPPABLE) else 0
        with contextlib.suppress(BlockingIOError):
            send(sock, message, flags)

    return post


# AutoGraph would remove the files into which it writes its versions of functions when a process ends as usual; a task
# does not, and may be killed. So a task notes their names in a list, which lies in memory, and its fork server removes
# them once the task has ended.
def new_generated_list() -> int:
    """The descriptor of an empty list, for a process that is forked."""
    return os.memfd_create("generated files")


def note_generated(generated: int) -> None:
    """In a task: from now on the names of these files are added to the list."""

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        if event == "tempfile.mkstemp" and AUTOGRAPH_FILE in str(arguments[0]):
            os.write(generated, os.fsencode(f"{arguments[0]}\n"))

    sys.addaudithook(on_event)


def remove_generated(generated: int) -> None:
    """Removes the files in the list, with the bytecode that Python has put beside them, and closes it."""
    os.lseek(generated, 0, os.SEEK_SET)
    with open(generated, "rb") as lines:
        paths = lines.read().splitlines()
    for path in map(os.fsdecode, paths):
        for file in (path, importlib.util.cache_from_source(path)):
            with contextlib.suppress(OSError):
                os.remove(file)


def run_child(request: Start, sock: socket.socket, parent_pid: int, inbox: int, generated: int) -> int:
    """The forked child: log file, module path, then ``target(payload, to_launcher) -> exit code``."""
    # A group of its own, so that a kill reaches what the task itself has started.
    os.setpgid(0, 0)
    linux.die_with_parent(parent_pid)
    to_launcher = ToLauncher(request.task, poster(sock))
    to_launcher.send(Started(os.getpid()))
    for number in (signal.SIGCHLD, signal.SIGCONT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    # The pipe is the server's: a signal to this task would wake the server.
    signal.set_wakeup_fd(-1)
    note_generated(generated)
    log = open_log(request.log)
    os.dup2(inbox, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:] = request.sys_path or sys.path
    module, function = request.target.split(":")
    target = getattr(importlib.import_module(module), function)
    return int(target(request.payload, to_launcher))


class Forked(NamedTuple):
    """A task that was forked.

    Attributes:
        name: of the task.
        inbox: the end of a pipe that leads to its standard input.
        generated: the list of what AutoGraph has written.
    """

    name: str
    inbox: int
    generated: int

    def close(self) -> None:
        """Once the task has ended."""
        os.close(self.inbox)
        remove_generated(self.generated)

    def close_in_child(self) -> None:
        """In a task that was forked after this one, which would otherwise keep its input open."""
        os.close(self.inbox)
        os.close(self.generated)


def fork_task(request: Start, sock: socket.socket, others: Iterable[Forked] = ()) -> tuple[int, Forked]:
    """Forks one task; returns its process id.

    Args:
        others: the tasks that were forked before and have not ended.
    """
    parent_pid = os.getpid()
    read_end, write_end = os.pipe()
    generated = new_generated_list()
    pid = os.fork()
    if pid:
        os.close(read_end)
        # A task that does not read must not block the server, which serves all tasks.
        os.set_blocking(write_end, False)
        with contextlib.suppress(OSError):  # the child does the same; either may come first
            os.setpgid(pid, pid)
        return pid, Forked(request.task, write_end, generated)
    code = 1
    try:
        os.close(write_end)
        for other in others:
            other.close_in_child()
        code = run_child(request, sock, parent_pid, read_end, generated)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # the destructors of a TensorFlow server may wait for peers that are gone


def forward(inbox: int | None, line: str) -> None:
    """Writes a line to a task's standard input; drops it if the task has ended or does not read."""
    if inbox is not None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(inbox, line.encode() + b"\n")


def reap(tasks: dict[int, Forked], post: Post) -> None:
    """Reports every task that has ended; a negative code is the signal that killed it."""
    while tasks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        kill_group(pid)  # processes that the task has started and left behind
        if pid in tasks:
            task = tasks.pop(pid)
            task.close()
            post(Exited(task.name, code, time.time()))


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def serve(sock: socket.socket, wakeup: int) -> int:
    """Forks tasks until the launcher's end of the socket closes, then kills what still runs; returns the exit code."""
    post = poster(sock)
    tasks: dict[int, Forked] = {}
    try:
        while True:
            readable = linux.poll(sock.fileno(), wakeup)
            if wakeup in readable:
                os.read(wakeup, 4096)
                reap(tasks, post)
            if sock.fileno() in readable:
                request = receive(sock, ToServer)
                if request is None:
                    return 0
                if isinstance(request, Forward):
                    inboxes = {task.name: task.inbox for task in tasks.values()}
                    forward(inboxes.get(request.task), request.line)
                    continue
                try:
                    pid, task = fork_task(request, sock, tasks.values())
                except OSError as error:  # no more processes or memory
                    print(f"cannot start {request.task}: {error}", file=sys.stderr, flush=True)
                    return 1
                tasks[pid] = task
    except OSError:  # the launcher is gone
        return 0
    finally:
        for pid, task in tasks.items():
            kill_group(pid)
            task.close()


def woken_by(*signals: int) -> tuple[int, int]:
    """Makes signals wake this process; returns the descriptor that can be read then, and that of Python's handler."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # Python writes to the wakeup descriptor only for signals that have a handler.
    for number in signals:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end)
    return read_end, write_end


def main(sock: socket.socket, isolate: bool) -> int:
    """In a process of its own: serves a launcher to its end; returns the exit code.

    Args:
        sock: the server's end.
        isolate: whether to put the tasks into a private loopback network.
    """
    isolated = isolate and linux.enter_private_network()
    # The server has tasks to kill when its launcher dies, which it sees at the end of the socket. So the death of the
    # warm process only wakes it.
    linux.set_death_signal(signal.SIGCONT)
    ports = list(range(2222, 2222 + MAX_LOCAL_TASKS)) if isolated else linux.unused_ports(MAX_LOCAL_TASKS)
    wakeup, _ = woken_by(signal.SIGCHLD)
    poster(sock)(Ready(os.getpid(), isolated, tuple(ports)))
    return serve(sock, wakeup)
