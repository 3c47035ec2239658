"""A follower's side of a meeting: it joins at the leader, and gets news of the other tasks from it."""

from tf2dist.cluster.addresses import control_address
from tf2dist.errors import ClusterError, LeaderLostError, TaskLostError, TfDistError
from tf2dist.hosts.connections import Dialer, Link, Links
from tf2dist.hosts.identity import VARIABLE, explain
from tf2dist.hosts.member import BEAT_EVERY_SECS, Membership
from tf2dist.hosts.protocol import (
    Accepted,
    Beat,
    Ended,
    FromFollower,
    FromLeader,
    Go,
    HoldingJob,
    Join,
    Lost,
    Refused,
    Stop,
    ToJoin,
    TryAgain,
)

CALL_EVERY_SECS = 0.25
MAX_DENIALS = 3  # in a row: a leader that ends in the middle of a handshake looks like one denial


class Follower:
    """The side of a task that is not the leader. All methods run in the meeting's thread.

    Attributes:
        waiting_for: the tasks that have not joined yet and why, for the user.
        held: the job that holds this task, for a process that asks; None while none does.
    """

    def __init__(self, membership: Membership, links: Links) -> None:
        self._membership, self._links = membership, links
        self._leader = membership.task_address(membership.cluster.leader)
        self._dialer = Dialer(links, *control_address(self._leader.address, membership.port_shift), CALL_EVERY_SECS)
        self._link: Link | None = None  # to the leader, once it has accepted us
        self._num_denials = 0
        self._beat_at = 0.0
        self._ended = False  # our end was announced: the leader then closes the connection, which is no loss
        self.held: HoldingJob | None = None
        self.waiting_for = str(self._leader)

    def tick(self, now: float) -> None:
        if not self._link:
            # Once the job runs, a follower that has lost its leader does not join again: both have reported the loss.
            if not self._membership.agreed.is_set() and not self._membership.failure:
                self._dialer.tick(self._leader.task)
                self.waiting_for = self._membership.describe_missing(self._leader.task, self._dialer.why)
            return
        silent = now - self._link.heard_at
        if silent > self._membership.lost_after_secs:
            self._links.close(self._link, f"silent for {silent:.0f} s")
        # Without these a host that was cut off would be noticed by TCP alone, after many minutes.
        elif now - self._beat_at >= BEAT_EVERY_SECS:
            self._beat_at = now
            self._link.send(Beat())

    def announce(self, message: FromFollower) -> None:
        """Sends the message to the leader, which passes it on to all other tasks."""
        self._ended = self._ended or isinstance(message, Ended)
        if self._link:
            self._link.send(message)

    def on_open(self, link: Link) -> None:
        link.ask(self._membership.join(), ToJoin)

    def on_join(self, link: Link, join: Join) -> None:
        """Refuses a process that takes this task for the leader: its cluster list differs from ours."""
        membership = self._membership
        lists = membership.compare_lists(join.cluster)
        membership.notify(f"{join.caller.task} on {join.process} takes this task for the leader: {lists}")
        text = f"this is {membership.task}, and its leader is {self._leader}"
        reason = f"{text}; where the lists differ (here is {membership.task}): {lists}"
        link.send(Refused(ClusterError.exit_code, reason))
        link.finish()

    def on_message(self, link: Link, message: ToJoin | FromLeader) -> None:
        match message:
            case Accepted():
                self._on_accepted(link, message.held)
            case TryAgain():
                self._dialer.why = message.text
                # Not fatal: the leader of another job may have taken the address, and may leave again.
                self._membership.lists_differ = message.lists_differ
                link.finish()
            case Refused():
                link.finish()
                self._on_refused(message)
            case Go():
                self._membership.agreed.set()
            case Beat():
                self.waiting_for = message.waiting_for or self.waiting_for
            case Stop():
                self._membership.stopped(message)
            case Ended():
                self._on_ended(message)
            case Lost():
                self._membership.events.put(message)

    def _on_accepted(self, link: Link, held: HoldingJob) -> None:
        self._link, self.held = link, held
        self._num_denials = 0
        self._membership.lists_differ = False
        self.waiting_for = f"{self._leader} (to say go)"  # until its first beat names the missing tasks
        link.keep(FromLeader)

    def _on_refused(self, refused: Refused) -> None:
        if refused.differences:
            diffs = explain(refused.differences, f"at {self._leader.task}", "here")
            text = f"{self._membership.task} differs from {self._leader}: {diffs}"
        else:
            text = f"{self._leader} refuses {self._membership.task}: {refused.text}"
        self._membership.fail(_kind_of(refused.code, TaskLostError), text)

    def _on_ended(self, ended: Ended) -> None:
        is_leader = ended.task == str(self._leader.task)
        if self._membership.agreed.is_set():
            self._membership.events.put(ended)
        elif is_leader:
            self._membership.fail(_kind_of(ended.code, LeaderLostError), f"{self._leader} has ended: {ended.message}")
        if is_leader and self._link:
            # The leader closes the connection next; once it is forgotten here, `on_closed` reports no loss.
            self._link.finish()
            self._link = None

    def on_closed(self, link: Link, why: str) -> None:
        if link is self._link:
            self._link = self.held = None
            self._dialer.why = why
            if self._membership.agreed.is_set() and not (self._ended or link.finishing):
                self._membership.events.put(Lost(str(self._leader.task), why))
        # Without an owner it is a connection that somebody else has opened, and says nothing about the leader.
        elif link.owner is not None and not link.finishing:
            self._dialer.why = "the job token differs" if link.denied else why
            if link.other_version:
                self._membership.fail(ClusterError, f"{self._leader} cannot take {self._membership.task}: {why}")
            self._num_denials = self._num_denials + 1 if link.denied else 0
            if self._num_denials >= MAX_DENIALS:
                text = f"the job token differs from the leader's, {self._token_hint()}"
                self._membership.fail(ClusterError, text)

    def _token_hint(self) -> str:
        if self._membership.has_token:
            return f"{self._leader}; give every task the same {VARIABLE}"
        return f"{self._leader}: it has one, and this task has none; set {VARIABLE} here too"


def _kind_of(code: int, lost: type[TaskLostError]) -> type[TfDistError]:
    """The error to raise when the leader has refused us, or has ended, with this exit code; `lost`: for a loss."""
    return ClusterError if code == ClusterError.exit_code else lost
