"""Addresses on the network: is mine mine, are the others there; with a deadline and a name for who is missing."""

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tf2dist.cluster.addresses import Ip, port_holder, resolve, split
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError, TaskLostError

PROBE_SECS = 2.0
TELL_EVERY_SECS = 5.0
FIRST_TOLD_SECS = 1.0
LOOK_UP_EVERY_SECS = 0.25
ALIAS_SECS = 2.0
MAX_LOOKED_UP = 64  # names of other tasks, each by a thread of its own


def wait_for_own_name(
    cluster: Cluster, task: Task, timeout_secs: float, check: Callable[[], None], tell: Callable[[str], None]
) -> None:
    """Waits until this host knows the name in the task's address: a new pod's may be known later than the pod runs.

    Args:
        check: called several times a second; what it raises ends the waiting.

    Raises:
        TaskLostError: it is not known within `timeout_secs`.
    """
    address = cluster.address(task)
    host, _ = split(address)
    start = time.monotonic()
    told = start - TELL_EVERY_SECS + FIRST_TOLD_SECS
    while not _look_up_aside(host, start + timeout_secs, check):
        now = time.monotonic()
        if now - start >= timeout_secs:
            raise TaskLostError(
                f"{task.job} {task.index} ({address}): after {now - start:.0f} s this host still does not know the "
                f"name {host}; correct it, use an address, or see startup_timeout_secs"
            )
        if now - told > TELL_EVERY_SECS:
            told = now
            tell(f"waiting for the own name {host} to be known on this host, {now - start:.0f} s")
        time.sleep(LOOK_UP_EVERY_SECS)


def _look_up_aside(host: str, deadline: float, check: Callable[[], None]) -> list[Ip]:
    """What a name means, none if it is not known by the deadline: a name server may take longer to say nothing."""
    found: queue.SimpleQueue[list[Ip]] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(resolve(host)), daemon=True).start()
    while True:
        check()
        with contextlib.suppress(queue.Empty):
            return found.get(timeout=LOOK_UP_EVERY_SECS)
        if time.monotonic() >= deadline:
            return []


def check_no_alias(cluster: Cluster, task: Task) -> None:
    """Looks whether another task's name means this task's address and port; names that are not known yet pass.

    Raises:
        ClusterError: two tasks of the list are one.
    """
    _, port = split(cluster.address(task))
    same_port = [other for other in cluster.tasks if other != task and split(cluster.address(other))[1] == port]
    if not same_port:
        return
    with_names = [task, *same_port[:MAX_LOOKED_UP]]
    means: dict[Task, list[Ip]] = {}

    def look_up(one: Task) -> None:
        means[one] = resolve(split(cluster.address(one))[0])

    threads = [threading.Thread(target=look_up, args=(one,), daemon=True) for one in with_names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ALIAS_SECS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    mine = set(means.get(task, []))
    for other in same_port:
        if shared := sorted(map(str, mine & set(means.get(other, [])))):
            raise ClusterError(
                f"{other.job} {other.index} ({cluster.address(other)}): is {shared[0]}, the same address as {task.job} "
                f"{task.index} ({cluster.address(task)}); every task needs its own"
            )


def check_own_address(cluster: Cluster, task: Task) -> None:
    """Finds out before TensorFlow does, which would only say that it could not start a server.

    Raises:
        ClusterError: the task's address is not this host's, or its port is taken.
        TaskLostError: its name is not known (any more).
    """
    address = cluster.address(task)
    host, port = split(address)
    name = f"{task.job} {task.index} ({address})"
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise TaskLostError(f"{name}: this host does not know the name {host}; correct it, or use an address") from None
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


def why_unreachable(address: str) -> str:
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


def wait_for_peers(
    cluster: Cluster,
    tasks: list[Task],
    timeout_secs: float,
    tell: Callable[[str], None],
    on_look: Callable[[], None] = lambda: None,
) -> None:
    """Waits until every task listens at its address.

    Args:
        tell: takes a line for the user every few seconds.
        on_look: called after every look, about ten times a second.

    Raises:
        TaskLostError: naming all who did not within `timeout_secs`, and why.
    """
    start, told = time.monotonic(), time.monotonic()
    missing = dict.fromkeys(tasks, "")
    while True:
        found = {task: why_unreachable(cluster.address(task)) for task in missing}
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
        on_look()
        time.sleep(0.05)


def wait_until_gone(cluster: Cluster, tasks: list[Task], timeout_secs: float) -> None:
    """Waits until no task listens any more, or until the time is over."""
    deadline = time.monotonic() + timeout_secs
    while any(not why_unreachable(cluster.address(task)) for task in tasks) and time.monotonic() < deadline:
        time.sleep(0.02)
