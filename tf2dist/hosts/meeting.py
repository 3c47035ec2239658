"""The meeting of a job's launching processes: they agree before TensorFlow opens a port, and stay in touch.

Each process listens at its task's control port. All others connect to the leader, which compares their
identities (see `identity`), lets one process hold each task, and says go when all tasks are there. The
leader also connects to the addresses of missing tasks, to learn why they are missing and whether another job
holds them. Both ends of each connection send a sign of life every second. The leader tells all others
which tasks were lost, which have ended, and that a task was told to stop. See `leader` and `follower`
for the two sides.
"""

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from tf2dist.cluster.addresses import listen_at_control_port
from tf2dist.cluster.reachability import Wait, still_waiting
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import CONTROL_PORT_SHIFT
from tf2dist.errors import ClusterError, Interrupted, LeaderLostError, TaskLeft, TaskLostError
from tf2dist.hosts.connections import Link, Links
from tf2dist.hosts.follower import Follower
from tf2dist.hosts.identity import NO_TOKEN_KEY
from tf2dist.hosts.leader import Leader
from tf2dist.hosts.member import Membership
from tf2dist.hosts.protocol import MAX_CHARACTERS, Call, Ended, Identity, Join, Lost, MeetingEvent, Probe, State, Stop

POLL_SECS = 0.1
CLOSE_SECS = 10.0  # for the last messages; the peers may be frozen
T = TypeVar("T")


class Meeting:
    """This process's part in the meeting; within a `with` block it listens in a thread of its own.

    Args:
        identity: see `identity.identity_of`.
        key: see `identity.job_key`.
        notify: takes lines for the user, always in the caller's thread and never in the meeting's.
        lost_after_secs: a member that sends nothing for so long is lost.
        port_shift: the distance from a task's port to its control port; see `check_control_ports`.
    """

    def __init__(
        self,
        cluster: Cluster,
        task: Task,
        identity: Identity,
        key: bytes,
        notify: Callable[[str], None],
        *,
        lost_after_secs: float,
        port_shift: int = CONTROL_PORT_SHIFT,
    ) -> None:
        self._membership = membership = Membership(
            cluster, task, identity, key != NO_TOKEN_KEY, lost_after_secs, port_shift
        )
        self._notify = notify
        self._links = Links(key, self)
        self._role = Leader(membership, self._links) if membership.leads else Follower(membership, self._links)
        # Only the meeting's thread uses the connections and the role; other threads hand it functions to run.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a meeting that cannot close must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def __enter__(self) -> Self:
        """Raises ClusterError if the control port is taken, TaskLostError if the host's name is unknown."""
        membership = self._membership
        listener = listen_at_control_port(membership.cluster, membership.task, membership.port_shift)
        self._links.open(listener)
        self._thread.start()
        return self

    def join(self, timeout_secs: float, check: Callable[[], None]) -> None:
        """Waits until all tasks have joined and agree, and the leader says go.

        Args:
            check: called about ten times a second; an exception that it raises ends the wait.

        Raises:
            ClusterError: this task differs from the others, or is held by another process.
            TaskLostError: tasks did not join within `timeout_secs`; the message names them and says why. Or the
                job runs already, without this task.
            LeaderLostError: the leader did not come within `timeout_secs`, or has ended.
            Interrupted: another task was told to stop.
        """
        wait = Wait(timeout_secs, self._notify)
        while not self._membership.agreed.wait(POLL_SECS):
            check()
            self._pass_on_lines()
            if self._membership.failure:
                raise self._membership.failure
            names = self._role.waiting_for
            if wait.is_over:
                # If the lists differ, a retry cannot succeed: that is an error of the request.
                conflict = self._membership.conflict
                if not conflict and self._membership.lists_differ:
                    conflict = "; the cluster lists differ"
                lost = TaskLostError if self._role.held else LeaderLostError
                raise (ClusterError if conflict else lost)(still_waiting(wait.secs, f"{names}{conflict}"))
            wait.notify(names)
        self._pass_on_lines()

    def events(self) -> list[MeetingEvent]:
        """The events of the other tasks since the last call; never waits."""
        self._pass_on_lines()
        return _drain(self._membership.events)

    def stop(self, signum: int) -> None:
        """Tells all other tasks that this one was told to stop by a signal."""
        self._say(Stop(str(self._membership.task), signum))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # The others learn the reason before the connection closes, or they would report a loss.
        if isinstance(error, Interrupted):
            self.stop(error.signum)
        code = getattr(error, "exit_code", 1) if error else 0
        # On one line: the others show it in the middle of their own.
        reason = " ".join((str(error) or type(error).__name__).split())[:MAX_CHARACTERS] if error else ""
        self._say(Ended(str(self._membership.task), code, reason, isinstance(error, TaskLeft)))
        self._commands.put(None)  # ends the thread, after the messages that were put before
        self._links.wake()
        self._thread.join(CLOSE_SECS)
        self._pass_on_lines()

    def _say(self, message: Stop | Ended) -> None:
        self._commands.put(lambda: self._role.announce(message))
        self._links.wake()

    def _pass_on_lines(self) -> None:
        for line in _drain(self._membership.lines):
            self._notify(line)

    # What follows belongs to the meeting's thread.

    def _run(self) -> None:
        ran_at = time.monotonic()
        try:
            while True:
                for command in _drain(self._commands):
                    if command is None:
                        return
                    command()
                ran_at = self._check_own_silence(ran_at)
                self._role.tick(ran_at)
                # Never longer than POLL_SECS: the role has beats to send and silent members to find.
                self._links.poll(POLL_SECS)
        except Exception as error:  # a thread that ended silently would leave the other hosts unwatched
            why = f"the control connection failed: {error!r}"
            self._membership.fail(TaskLostError, why)
            self._membership.events.put(Lost(str(self._membership.cluster.leader), why))
        finally:
            self._links.end()

    def _check_own_silence(self, ran_at: float) -> float:
        """Reports a loss of this task itself if this process did not run since `ran_at`; returns the time now."""
        membership, now = self._membership, time.monotonic()
        # Before the role looks for silent members: to a process that was stopped, or starved, all others seem silent.
        if membership.agreed.is_set() and now - ran_at > membership.lost_after_secs:
            why = f"stood still for {now - ran_at:.0f} s, longer than the others wait for it"
            membership.events.put(Lost(str(membership.task), why))
        return now

    def on_open(self, link: Link) -> None:
        self._role.on_open(link)

    def on_closed(self, link: Link, why: str) -> None:
        self._role.on_closed(link, why)

    def on_message(self, link: Link, message: Any) -> None:
        if not isinstance(message, Call):
            self._role.on_message(link, message)
        elif answer := self._membership.misdirected(message):
            link.send(answer)
            link.finish()
        elif isinstance(message, Join):
            self._role.on_join(link, message)
        else:
            self._on_probe(link, message)

    def _on_probe(self, link: Link, probe: Probe) -> None:
        """Answers a process that claims to lead and asks which process is here.

        If our list names another leader, one of the two lists is wrong. This task fails if the caller is on our list;
        a caller that is not is reported, and named as a possible reason if the meeting times out.
        """
        membership, held = self._membership, self._role.held
        leader = membership.task_address(membership.cluster.leader)
        link.send(State(membership.process, membership.identity.cluster, membership.leads, held))
        link.finish()
        # A job that runs, or has a leader, does not end because of a process with a wrong list.
        has_job = membership.agreed.is_set() or (held and not membership.leads)
        if has_job or probe.caller.address == leader.address:
            return
        caller = f"{probe.caller} ({probe.process})"
        text = f"{caller} claims to lead, and here that is {leader}: {membership.compare_lists(probe.cluster)}"
        if probe.caller.address in map(membership.cluster.address, membership.cluster.tasks):
            membership.fail(ClusterError, text)
        else:
            membership.conflict = membership.conflict or f"; {text}"
            membership.notify(text)


def _drain(source: "queue.SimpleQueue[T]") -> list[T]:
    # Each queue has only one reader, so what it holds cannot be gone before it is taken.
    items: list[T] = []
    while not source.empty():
        items.append(source.get_nowait())
    return items
