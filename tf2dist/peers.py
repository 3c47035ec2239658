"""Waiting for the other tasks of a cluster, with a deadline and a name for everyone who is missing."""

import socket
import time
from collections.abc import Callable

from tf2dist.cluster import Cluster, Task
from tf2dist.errors import TaskLostError

PROBE_SECS = 2.0
TELL_EVERY_SECS = 5.0


def _problem(address: str) -> str:
    """Why nobody answers at "host:port", or "" if somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECS).close()
    except socket.gaierror:
        return "name unknown"
    except ConnectionRefusedError:
        return "connection refused"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def wait_for_peers(cluster: Cluster, tasks: list[Task], timeout_secs: float, tell: Callable[[str], None]) -> None:
    """Waits until every task listens at its address.

    Raises:
        TaskLostError: naming all who did not within `timeout_secs`, and why.
    """
    start, told = time.monotonic(), time.monotonic()
    missing = dict.fromkeys(tasks, "")
    while True:
        missing = {task: problem for task in missing if (problem := _problem(cluster.address(task)))}
        if not missing:
            return
        waited = time.monotonic() - start
        names = ", ".join(f"{task} at {cluster.address(task)} ({problem})" for task, problem in missing.items())
        if waited > timeout_secs:
            raise TaskLostError(f"after {waited:.0f} s still waiting for {names}; see startup_timeout_secs")
        if time.monotonic() - told > TELL_EVERY_SECS:
            told = time.monotonic()
            tell(f"waiting for {names}, {waited:.0f} s")
        time.sleep(0.05)


def wait_until_gone(cluster: Cluster, tasks: list[Task], timeout_secs: float) -> None:
    """Waits until no task listens any more, or until the time is over."""
    deadline = time.monotonic() + timeout_secs
    while any(not _problem(cluster.address(task)) for task in tasks) and time.monotonic() < deadline:
        time.sleep(0.02)
