"""The side of everybody else in a meeting: call the leader, be accepted, hear what it says."""

from typing import Any

from tf2dist.control.channel import Message
from tf2dist.control.connections import Link, Links
from tf2dist.control.dialer import Dialer
from tf2dist.control.identity import explain
from tf2dist.control.member import BEAT_EVERY_SECS, Seat, plain
from tf2dist.control.port import control_address
from tf2dist.control.token import VARIABLE
from tf2dist.errors import ClusterError, TaskLostError, TfDistError

CALL_EVERY_SECS = 0.25
MAX_DENIALS = 3  # a leader that ends in the middle of a handshake looks the same


class Following:
    """See `meeting.Role`."""

    def __init__(self, seat: Seat, links: Links) -> None:
        self._seat, self._links = seat, links
        self._leader = seat.cluster.leader
        address = control_address(seat.cluster.address(self._leader), seat.port_shift)
        self._dialer = Dialer(links, *address, CALL_EVERY_SECS)
        self._link: Link | None = None  # once accepted
        self._num_denials = 0
        self._beat_at = 0.0
        self._ended = False  # then the leader closes the connection, and that is no loss
        self.held: dict[str, Any] | None = None
        self.waiting_for = seat.at(self._leader)

    def tick(self, now: float) -> None:
        if not self._link:
            if not self._seat.agreed.is_set() and not self._seat.failure:
                self._dialer.tick(self._leader)
                self.waiting_for = self._seat.missing(self._leader, self._dialer.why)
            return
        silent = now - self._link.heard_at
        if silent > self._seat.lost_after_secs:
            self._links.close(self._link, f"silent for {silent:.0f} s")
        elif now - self._beat_at >= BEAT_EVERY_SECS:
            self._beat_at = now
            self._link.send({"type": "beat"})

    def say(self, message: Message) -> None:
        self._ended = self._ended or message["type"] == "ended"
        if self._link:
            self._link.send(message)

    def on_open(self, link: Link) -> None:
        link.send(self._seat.hello("join", self._leader))

    def on_join(self, link: Link, hello: Message) -> None:
        """Somebody takes us for the leader, so the lists differ."""
        text = f"this is {self._seat.task}, and its leader is {self._seat.at(self._leader)}"
        lists = self._seat.compare_lists(hello["identity"]["cluster"])
        caller = f"{hello['job']}-{hello['index']} on host {hello['host']} pid {hello['pid']}"
        self._seat.line(f"{caller} takes this task for the leader: {lists}")
        found = f"{text}; where the lists differ (here is {self._seat.task}): {lists}"
        link.send({"type": "refused", "code": 2, "text": found, "differences": []})
        link.finish()

    def on_message(self, link: Link, message: Message) -> None:
        match message["type"]:
            case "accepted":
                self._link, self.held = link, dict(message["held"])
                self._num_denials = 0
                self._seat.lists_differ = False
                self.waiting_for = f"{self._seat.at(self._leader)} (to say go)"
                link.keep()
            case "wait":
                self._dialer.why = plain(message["text"])
                # Those of another job perhaps, whose leader has taken the address: it may leave again.
                self._seat.lists_differ = bool(message.get("lists_differ"))
                link.finish()
            case "refused":
                link.finish()
                self._on_refused(message)
            case "go":
                self._seat.agreed.set()
            case "beat":
                self.waiting_for = plain(message["waiting_for"]) or self.waiting_for
            case "stop":
                self._seat.stopped(plain(message["task"]), int(message["signum"]))
            case "ended":
                self._on_ended(plain(message["task"]), int(message["code"]), plain(message["message"]))
            case "lost":
                self._seat.event("lost", plain(message["task"]), why=plain(message["why"]))
            case other:
                raise ValueError(other)

    def _on_refused(self, message: Message) -> None:
        leader = self._seat.at(self._leader)
        found = [(str(name), str(theirs), str(mine)) for name, theirs, mine in message["differences"]]
        if found:
            text = f"{self._seat.task} differs from {leader}: {explain(found, f'at {self._leader}', 'here')}"
        else:
            text = f"{leader} refuses {self._seat.task}: {message['text']}"
        self._seat.fail((ClusterError if message["code"] == 2 else TaskLostError)(plain(text)))

    def _on_ended(self, task: str, code: int, message: str) -> None:
        if self._seat.agreed.is_set():
            self._seat.event("ended", task, code=code, message=message)
        elif task == str(self._leader):
            error: type[TfDistError] = ClusterError if code == 2 else TaskLostError
            self._seat.fail(error(f"{self._seat.at(self._leader)} has ended: {message}"))
        if task == str(self._leader) and self._link:
            self._link.finish()
            self._link = None

    def on_closed(self, link: Link, why: str) -> None:
        if link is self._link:
            self._link = self.held = None
            self._dialer.why = why
            if self._seat.agreed.is_set() and not (self._ended or link.finishing):
                self._seat.event("lost", self._leader, why=why)
        elif link.owner is not None and not link.finishing:
            self._dialer.why = "the job token differs" if link.denied else why
            self._num_denials = self._num_denials + 1 if link.denied else 0
            if self._num_denials >= MAX_DENIALS:
                self._seat.fail(ClusterError(f"the job token differs from the leader's, {self._token_hint()}"))

    def _token_hint(self) -> str:
        leader = self._seat.at(self._leader)
        if self._seat.has_token:
            return f"{leader}; give every task the same {VARIABLE}"
        return f"{leader}: it has one, and this task has none; set {VARIABLE} here too"
