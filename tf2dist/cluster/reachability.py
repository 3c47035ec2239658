"""Checks that a task's address belongs to this host, and waits until the other tasks can be reached at theirs.

A `Wait` for other processes, here and in other modules, has a deadline, and the user reads lines about it meanwhile.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from tf2dist.cluster.addresses import Ip, ips_of, port_holder, resolve_own, split
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError, TaskLostError, brief_reason

LINE_EVERY_SECS = 5.0


class Wait:
    """A wait that begins now.

    Attributes:
        deadline: the end of `timeout_secs`, in seconds of the monotonic clock.

    Args:
        notify: takes a line for the user.
        first_line_secs: the time until the first line; by default that between lines.
        every_secs: the time between lines; by default LINE_EVERY_SECS.
    """

    def __init__(
        self,
        timeout_secs: float,
        notify: Callable[[str], None],
        first_line_secs: float | None = None,
        every_secs: float | None = None,
    ) -> None:
        # The monotonic clock: the time of day may jump when a host that has just started sets its clock.
        self._start = time.monotonic()
        self._notify, self._every_secs = notify, LINE_EVERY_SECS if every_secs is None else every_secs
        self._next_line_at = self._start + (self._every_secs if first_line_secs is None else first_line_secs)
        self.deadline = self._start + timeout_secs

    @property
    def secs(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def notify(self, what: str) -> None:
        """Tells the user what is waited for, unless the last line is too recent."""
        now = time.monotonic()
        if now > self._next_line_at:
            self._next_line_at = now + self._every_secs
            self._notify(f"waiting for {what}, {now - self._start:.0f} s")


def still_waiting(secs: float, what: str) -> str:
    """The message of the error that ends a wait; `what`: what is still missing."""
    return f"after {secs:.0f} s still waiting for {what}; see startup_timeout_secs"


Answer = TypeVar("Answer")

PROBE_SECS = 2.0  # for one connection; a host that drops packets gives no answer at all
PROBES_SECS = PROBE_SECS + 1.0  # for those to all tasks at once
NO_ANSWER, REFUSED = "no answer", "connection refused"
FIRST_LINE_SECS = 1.0  # an unknown name is most often a mistake, of which the user should learn soon
LOOK_UP_EVERY_SECS = 0.25
ALIAS_SECS = 2.0  # names that take longer to resolve are not compared
MAX_LOOKED_UP = 64  # names of other tasks, each in a thread of its own


def wait_for_own_name(
    cluster: Cluster, task: Task, timeout_secs: float, notify: Callable[[str], None], *, must_lead_here: bool = True
) -> None:
    """Waits until this host can resolve the name in its task's address, to an address of its own if it is its name.

    Args:
        notify: takes a line for the user every few seconds.
        must_lead_here: whether the address is checked; otherwise a proxy may lead from there to here.
    """
    # In Kubernetes the name of a pod is published only some seconds after the pod has started, and until then leads to
    # the pod that it replaces.
    host, _ = split(cluster.address(task))
    wait = Wait(timeout_secs, notify, FIRST_LINE_SECS)
    while True:
        ips = ask_all(lambda _: ips_of(host), [task], wait.deadline - time.monotonic()).get(task)
        if ips and not (must_lead_here and _is_name_of_this_host(host) and not any(map(_is_own, ips))):
            return
        if wait.is_over and ips:
            return  # the check of the address says what is wrong
        if wait.is_over:
            raise TaskLostError(
                f"{cluster.label(task)}: after {wait.secs:.0f} s this host still does not know the name {host}; "
                "correct it, use an address, or see startup_timeout_secs"
            )
        wait.notify(f"this host's own name {host} to {f'lead here and not to {ips[0]}' if ips else 'be known'}")
        time.sleep(LOOK_UP_EVERY_SECS)


def _is_name_of_this_host(host: str) -> bool:
    """Whether a name is the one that this host has given itself, so that a record of it that leads elsewhere is old."""
    return host.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower()


def _is_own(ip: Ip) -> bool:
    """Whether an address is one of this host."""
    return _bind_error(socket.AF_INET if ip.version == 4 else socket.AF_INET6, (str(ip), 0)) == 0


def check_no_alias(cluster: Cluster, task: Task, timeout_secs: float, notify: Callable[[str], None]) -> None:
    """Checks that no other task has this task's address under another name; names that are still unknown pass."""
    # In Kubernetes a new pod may have the address of one that is gone, to which the name of that one leads for a while.
    host, _ = split(cluster.address(task))
    wait = Wait(timeout_secs if _is_name_of_this_host(host) else 0.0, notify, FIRST_LINE_SECS)
    while alias := _alias(cluster, task):
        other, ip = alias
        if wait.is_over:
            raise ClusterError(
                f"{cluster.label(other)}: is {ip}, the same address as {cluster.label(task)}; every task needs its own"
            )
        wait.notify(f"the name of {other}, {split(cluster.address(other))[0]}, to lead to another host than this one")
        time.sleep(LOOK_UP_EVERY_SECS)


def _alias(cluster: Cluster, task: Task) -> tuple[Task, str] | None:
    """Another task with the port and an address of this one, and that address."""
    _, port = split(cluster.address(task))
    # Only a task with the same port can have the same address, so most clusters need no look-up here.
    same_port = [other for other in cluster.tasks if other != task and split(cluster.address(other))[1] == port]
    if not same_port:
        return None
    compared = [task, *same_port[:MAX_LOOKED_UP]]
    ips = ask_all(lambda candidate: ips_of(split(cluster.address(candidate))[0]), compared, ALIAS_SECS)
    # A task whose name was not resolved in time has no addresses here, and passes.
    own_ips = set(ips.get(task, []))
    for other in same_port:
        if shared := sorted(map(str, own_ips & set(ips.get(other, [])))):
            return other, shared[0]
    return None


def ask_all(question: Callable[[Task], Answer], tasks: Iterable[Task], secs: float) -> dict[Task, Answer]:
    """Calls a function for tasks in parallel, since each call may block: the look-up of a name has no timeout.

    Returns:
        The answers that came within `secs`. The threads of the other calls are abandoned.
    """
    answers: dict[Task, Answer] = {}

    def ask(task: Task) -> None:
        answers[task] = question(task)

    threads = [threading.Thread(target=ask, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    # One deadline for all of them, or the waits would add up.
    deadline = time.monotonic() + secs
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # A copy: threads that are late still write into the original, perhaps while the caller iterates over it.
    return answers.copy()


def check_own_address(cluster: Cluster, task: Task) -> None:
    """Checks the task's address before TensorFlow uses it, since TensorFlow's error does not say what is wrong."""
    _, port = split(cluster.address(task))
    name = cluster.label(task)
    errors = [_bind_error(family, address) for family, address in resolve_own(cluster, task, port)]
    # TensorFlow's server listens on all interfaces, so the port must be free on each of them.
    if errno.EADDRINUSE in (_bind_error(socket.AF_INET, ("", port)), *errors):
        by = f" by {holder}" if (holder := port_holder(port)) else ""
        raise ClusterError(f"{name}: the port is taken on this host{by}; does the same task run here already?")
    if all(error in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) for error in errors):
        raise ClusterError(
            f"{name}: is not an address of this host, so this is the task of another host; correct task type and "
            "index, or give cluster.check_address=false if a proxy leads from there to here"
        )


def _bind_error(family: int, address: tuple[str, int]) -> int:
    """The error number of binding to an address; 0 if it succeeds."""
    # Binding is the only test that covers interfaces, address families and other processes alike.
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:  # a kernel without IPv6 refuses the socket
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
            probe.bind(address)
    except OSError as error:
        return error.errno or 0
    return 0


def why_unreachable(address: str) -> str:
    """Why no connection to "host:port" can be made; "" if one can."""
    try:
        socket.create_connection(split(address), timeout=PROBE_SECS).close()
    except (socket.gaierror, UnicodeError):
        return "name unknown"
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return NO_ANSWER
    except OSError as error:
        return brief_reason(error)
    return ""


def unreachable(cluster: Cluster, tasks: Iterable[Task], secs: float = PROBES_SECS) -> dict[Task, str]:
    """Those of the tasks to which no connection can be made within `secs`, and why."""
    tasks = list(tasks)
    answers = ask_all(lambda task: why_unreachable(cluster.address(task)), tasks, secs)
    return {task: why for task in tasks if (why := answers.get(task, NO_ANSWER))}


def wait_for_peers(
    cluster: Cluster,
    tasks: list[Task],
    timeout_secs: float,
    loading_secs: float,
    notify: Callable[[str], None],
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Waits until every task listens at its address, or enough of them to begin with; see `Cluster.awaited`.

    Args:
        timeout_secs: how long to wait for hosts that do not answer.
        loading_secs: how much longer for tasks on hosts that answer, since they may still load their data.
        notify: takes a line for the user every few seconds.
        on_round: called after every round of probes, which takes `PROBES_SECS` at most.
    """
    wait, answered_at = Wait(timeout_secs + loading_secs, notify), 0.0
    # Tasks that have been found are not probed again: each probe is a connection that the other side must handle.
    missing = dict.fromkeys(tasks, "")
    while True:
        missing = unreachable(cluster, missing)
        if not cluster.awaited([task for task in cluster.tasks if task not in missing]):
            return
        names = ", ".join(f"{task} at {cluster.address(task)} ({reason})" for task, reason in missing.items())
        if all(reason == REFUSED for reason in missing.values()):
            answered_at = wait.secs
        if wait.is_over or wait.secs - answered_at > timeout_secs:
            raise TaskLostError(still_waiting(wait.secs, names))
        wait.notify(names)
        on_round()
        time.sleep(min(0.05, 0.01 + wait.secs / 20))  # tasks of one machine are there within 0.1 s


def wait_until_gone(cluster: Cluster, tasks: list[Task], timeout_secs: float) -> None:
    """Waits until none of the tasks listens any more, at most `timeout_secs`."""
    deadline = time.monotonic() + timeout_secs
    while (left_secs := deadline - time.monotonic()) > 0:
        gone = unreachable(cluster, tasks, min(PROBES_SECS, left_secs))
        # Those are not probed again: where a host drops packets, each round would take `PROBE_SECS`.
        if not (tasks := [task for task in tasks if task not in gone]):
            return
        time.sleep(0.05)
