"""Addresses on the network: is mine mine, are the others there; with a deadline and a name for who is missing."""

import errno
import socket
import time
from collections.abc import Callable
from typing import Any

from tf2dist import pulse
from tf2dist.addresses import port_holder, split
from tf2dist.cluster import Cluster, Task
from tf2dist.errors import ClusterError, TaskLostError

PROBE_SECS = 2.0
TELL_EVERY_SECS = 5.0


def check_own_address(cluster: Cluster, task: Task) -> None:
    """Finds out before TensorFlow does, which would only say that it could not start a server.

    Raises:
        ClusterError: the task's address is not this host's, or its port is taken.
    """
    address = cluster.address(task)
    host, port = split(address)
    name = f"{task.job} {task.index} ({address})"
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise ClusterError(f"{name}: this host does not know the name {host}; correct it, or use an address") from None
    if errno.EADDRINUSE in (_bind_error(socket.AF_INET, ("", port)), *(_bind_error(i[0], i[4]) for i in infos)):
        by = f" by {holder}" if (holder := port_holder(port)) else ""
        raise ClusterError(f"{name}: the port is taken on this host{by}; does the same task run here already?")
    if all(_bind_error(info[0], info[4]) in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) for info in infos):
        raise ClusterError(
            f"{name}: is not an address of this host, so this is another task; correct task type and index, or give "
            "cluster.check_address=false if a proxy leads from there to here"
        )


def _bind_error(family: int, address: Any) -> int:
    """The error number of binding to an address, 0 for none."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:  # a kernel without IPv6 refuses this already
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what closed a moment ago is free
            probe.bind(address)
    except OSError as error:
        return error.errno or 0
    return 0


def problem(address: str) -> str:
    """Why nobody answers at "host:port", or "" if somebody does."""
    try:
        socket.create_connection(split(address), timeout=PROBE_SECS).close()
    except (socket.gaierror, UnicodeError):
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
        found = {task: problem(cluster.address(task)) for task in missing}
        missing = {task: why for task, why in found.items() if why}
        if not missing:
            return
        waited = time.monotonic() - start
        names = ", ".join(f"{task} at {cluster.address(task)} ({why})" for task, why in missing.items())
        if waited > timeout_secs:
            raise TaskLostError(f"after {waited:.0f} s still waiting for {names}; see startup_timeout_secs")
        if time.monotonic() - told > TELL_EVERY_SECS:
            told = time.monotonic()
            tell(f"waiting for {names}, {waited:.0f} s")
        pulse.beat(pulse.START_SECS)
        time.sleep(0.05)


def wait_until_gone(cluster: Cluster, tasks: list[Task], timeout_secs: float) -> None:
    """Waits until no task listens any more, or until the time is over."""
    deadline = time.monotonic() + timeout_secs
    while any(not problem(cluster.address(task)) for task in tasks) and time.monotonic() < deadline:
        time.sleep(0.02)
