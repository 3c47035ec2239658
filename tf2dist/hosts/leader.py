"""The leader's side of a meeting: which processes may join, which tasks are missing, and which were lost."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tf2dist.cluster.addresses import control_address
from tf2dist.cluster.spec import Task
from tf2dist.errors import ClusterError, TaskLostError
from tf2dist.hosts.connections import Dialer, Link, Links
from tf2dist.hosts.identity import differences, explain, list_differences
from tf2dist.hosts.member import BEAT_EVERY_SECS, Membership
from tf2dist.hosts.protocol import (
    MAX_CHARACTERS,
    Accepted,
    Back,
    Beat,
    Difference,
    Ended,
    FromFollower,
    FromLeader,
    Go,
    HoldingJob,
    Join,
    Lost,
    Process,
    Refused,
    State,
    Stop,
    ToJoin,
    ToProbe,
    TryAgain,
)

# Why a connection of a stranger is reported; a port scanner, which sends nothing, is not worth a line.
REPORTED_REASONS = ("token", "version", "malformed", "unknown type")
PROBE_EVERY_SECS = 1.0
LATE_SECS = 3.5  # a holder that is silent for longer may be gone: its successor has to wait, and is not refused


@dataclass
class Member:
    """The process that holds a task."""

    task: Task
    link: Link
    process: Process


class Leader:
    """The side of the leader, with the attributes of a `follower.Follower`. All methods run in the meeting's thread.

    The owner of a connection is the missing task whose address we have dialed, or the `Member` that has joined by it.
    """

    def __init__(self, membership: Membership, links: Links) -> None:
        self._membership, self._links = membership, links
        self._members: dict[Task, Member] = {}
        cluster = membership.cluster
        self._dialers = {task: self._dialer(task) for task in cluster.awaited([membership.task])}
        self._known: set[Task] = set()  # the tasks that have ever joined
        self._refused: dict[Task, str] = {}
        self._beat_at = 0.0
        self.waiting_for = ", ".join(str(membership.task_address(task)) for task in self._dialers)
        self.held = HoldingJob(membership.job_id, membership.task_address(membership.task), membership.process)

    def _dialer(self, task: Task) -> Dialer:
        address = control_address(self._membership.cluster.address(task), self._membership.port_shift)
        return Dialer(self._links, *address, PROBE_EVERY_SECS)

    def tick(self, now: float) -> None:
        # A frozen process, or a host that was cut off, leaves its connection open; `on_closed` reports the loss.
        for member in list(self._members.values()):
            if now - member.link.heard_at > self._membership.lost_after_secs:
                self._links.close(member.link, f"silent for {now - member.link.heard_at:.0f} s")
        if not self._membership.agreed.is_set() and not self._membership.failure:
            self._gather()
        if now - self._beat_at >= BEAT_EVERY_SECS:
            self._beat_at = now
            # Followers show the missing tasks too: a user may look at the terminal of any host.
            self.announce(Beat(self.waiting_for[:MAX_CHARACTERS]))

    def _gather(self) -> None:
        """Says go if enough tasks have joined; otherwise asks which processes are at the addresses of the others."""
        membership = self._membership
        missing = [task for task in self._dialers if task not in self._members]
        if not membership.cluster.awaited({membership.task, *self._members}):
            self.waiting_for = ""
            if missing:
                addresses = ", ".join(str(membership.task_address(task)) for task in missing)
                membership.notify(f"beginning without {addresses}; each may join later")
            membership.agreed.set()
            self.announce(Go())
            return
        for task in missing:
            self._dialers[task].tick(task)
        self.waiting_for = ", ".join(self._membership.describe_missing(task, self._why(task)) for task in missing)

    def _why(self, task: Task) -> str:
        refused = self._refused.get(task)
        return self._dialers[task].why + (f", was refused before: {refused}" if refused else "")

    def announce(self, message: FromLeader, excluding: Member | None = None) -> None:
        for member in self._members.values():
            if member is not excluding:
                member.link.send(message)

    def on_open(self, link: Link) -> None:
        link.ask(self._membership.probe(link.owner), ToProbe)

    def on_join(self, link: Link, join: Join) -> None:
        answer = self._answer(join)
        if not isinstance(answer, Accepted):
            link.send(answer)
            link.finish()
            return
        task = join.caller.task
        # Removed before its link is closed, so that `on_closed` reports no loss.
        former = self._members.pop(task, None)
        if former:  # of the same process, which has lost its connection before we have
            self._links.close(former.link, "connected again")
        self._refused.pop(task, None)
        self._members[task] = link.owner = Member(task, link, join.process)
        link.keep(FromFollower)
        link.send(answer)
        is_first = task not in self._known
        self._known.add(task)
        if self._membership.agreed.is_set():
            self._membership.notify(f"{task} {'has joined' if is_first else 'is back'}, {join.process}")
            self._membership.events.put(Back(str(task), is_first))
            # All others have had their go; this process waits for one like every process that joins.
            link.send(Go())

    def _answer(self, join: Join) -> ToJoin:
        """Decides whether a process may hold the task that it claims."""
        membership, task = self._membership, join.caller.task
        # Compared first: with another cluster list the name of the task means something else.
        if diffs := differences(membership.identity, join.identity):
            self._refused[task] = explain(diffs, "here", "there")
            return self._refuse(join, ClusterError.exit_code, self._refused[task], diffs)
        if task == membership.task or task not in membership.cluster.tasks:
            return self._refuse(join, ClusterError.exit_code, "held by the leader itself, or not in its list")
        # In TensorFlow a second process with the same task kills the running job or hangs, and names no reason.
        holder = self._members.get(task)
        if holder and holder.process != join.process:
            held = f"{task.job} {task.index} is already held by {holder.process}"
            silent_secs = time.monotonic() - holder.link.heard_at
            if silent_secs > LATE_SECS:
                return TryAgain(f"{held}, which has been silent for {silent_secs:.0f} s", lists_differ=False)
            return self._refuse(join, ClusterError.exit_code, held)
        # Only tasks without state of their own can join a running job; for any other the whole job has to start again.
        may_return = membership.cluster.can_lose(task)
        if membership.agreed.is_set() and not may_return:
            why = f"the job is running, and the {task} that it started with is gone"
            return self._refuse(join, TaskLostError.exit_code, why)
        return Accepted(self.held)

    def _refuse(self, join: Join, code: int, why: str, diffs: Sequence[Difference] = ()) -> Refused:
        self._membership.notify(f"{join.caller.task} on {join.process} is refused: {why}")
        return Refused(code, why, tuple(diffs))

    def on_message(self, link: Link, message: ToProbe | FromFollower) -> None:
        match message:
            case State():
                link.finish()
                self._on_state(link.owner, message)
            case TryAgain() | Refused():  # another process is at that address, and may leave
                link.finish()
                self._dialers[link.owner].why = message.text
            case Stop():
                stop = Stop(str(link.owner.task), message.signum)
                self._membership.stopped(stop)
                self.announce(stop, excluding=link.owner)
            case Ended():
                self._on_ended(link.owner, message)

    def _on_ended(self, member: Member, ended: Ended) -> None:
        del self._members[member.task]
        member.link.finish()
        if self._membership.agreed.is_set():
            ended = replace(ended, task=str(member.task))
            self._membership.events.put(ended)
            self.announce(ended)
        else:
            self._membership.notify(f"{member.task} has left ({member.process}): {ended.message}")

    def _on_state(self, task: Task, state: State) -> None:
        """Handles the answer of a process that listens at the address of a missing task."""
        membership, dialer = self._membership, self._dialers[task]
        # It may have joined while the answer to the probe was on its way.
        if task in self._members or membership.agreed.is_set():
            return
        peer = f"{membership.task_address(task)} ({state.process})"
        if state.leads:
            lists = membership.compare_lists(state.cluster)
            membership.fail(ClusterError, f"{peer} is the leader in its own list: {lists}")
        elif state.held and state.held.job_id != membership.job_id:
            self._on_held(peer, dialer, state.held)
        elif list_differences(membership.identity.cluster, state.cluster):
            lists = membership.compare_lists(state.cluster)
            dialer.why = f"another cluster list there: {lists}"
            membership.notify(f"{peer} has another cluster list: {lists}")
        else:
            dialer.why = "is running and has not connected yet"

    def _on_held(self, peer: str, dialer: Dialer, held: HoldingJob) -> None:
        """Another job holds a task of ours.

        If it is an earlier job, with its leader at the same address and on the same host as ours, we wait: the
        holder will find out that its job has ended. Any other job keeps the task, so this one fails.
        """
        own_job = self.held
        if (held.leader.address, held.process.host) == (own_job.leader.address, own_job.process.host):
            dialer.why = f"still held by {held}"
            return
        role = "coordinator" if self._membership.cluster.has_coordinator else "leader"
        self._membership.fail(ClusterError, f"{peer} is already held by {held}; a second {role} is refused")

    def on_closed(self, link: Link, why: str) -> None:
        match link.owner:
            case Task() as task:
                if not link.finishing:
                    self._dialers[task].why = "another job token there" if link.denied else why
            case Member() as member:
                if self._members.get(member.task) is member and not link.finishing:
                    self._on_lost(member, why)
            case _:  # closed before its peer had joined or was known
                if any(reason in why for reason in REPORTED_REASONS):
                    self._membership.notify(f"refused a connection from {link.peer}: {why}")

    def _on_lost(self, member: Member, why: str) -> None:
        del self._members[member.task]
        if not self._membership.agreed.is_set():
            self._membership.notify(f"{member.task} is gone ({member.process}): {why}")
            return
        lost = Lost(str(member.task), why)
        self._membership.events.put(lost)
        if member.task.job != "evaluator":  # no task needs anything of an evaluator
            self.announce(lost)
