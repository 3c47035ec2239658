"""The meeting of a job's launching processes: they agree before TensorFlow opens a port, and stay in touch.

Each process listens at its task's control port. All but the leader call the leader, which compares
what they are (`identity`), lets one process hold each task, and says go when all are there. The leader
calls who is missing, to say why, and to find out whether it is held by another job. From then on both
ends of each connection speak once a second; the leader passes on who was lost, who has ended, and
that somebody was told to stop. See `leader` and `follower` for the two sides.
"""

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import CONTROL_PORT_SHIFT
from tf2dist.control import port
from tf2dist.control.channel import MAX_MESSAGE_BYTES, Message
from tf2dist.control.connections import Link, Links
from tf2dist.control.follower import Following
from tf2dist.control.identity import Identity
from tf2dist.control.leader import Leading
from tf2dist.control.member import Seat
from tf2dist.control.token import NO_TOKEN_KEY
from tf2dist.errors import ClusterError, Interrupted, TaskLostError

Event = dict[str, Any]

TELL_EVERY_SECS = 5.0
TURN_SECS = 0.1
CLOSE_SECS = 10.0
MAX_COMPARED_BYTES = MAX_MESSAGE_BYTES * 3 // 4  # as the text of Python; in JSON it may be longer


class Role(Protocol):
    """What leader and followers do differently; all of it in the meeting's thread.

    Attributes:
        waiting_for: who has not come yet and why, for people.
        held: who holds this task, as told to a process that asks; None while nobody does.
    """

    waiting_for: str
    held: dict[str, Any] | None

    def tick(self, now: float) -> None: ...

    def say(self, message: Message) -> None:
        """Brings the message to all others, the followers' by way of the leader."""

    def on_open(self, link: Link) -> None: ...

    def on_join(self, link: Link, hello: Message) -> None: ...

    def on_message(self, link: Link, message: Message) -> None: ...

    def on_closed(self, link: Link, why: str) -> None: ...


class Meeting:
    """This process's place among the others; a `with` block holds its port and its thread.

    Args:
        identity: see `identity.identity_of`.
        key: see `token.job_key`.
        tell: called with lines for people, always in the thread of `join` and `events`.
        lost_after_secs: a member that says nothing for so long is lost.
        port_shift: from a task's port to its control port.

    Raises:
        ClusterError: a control port is another task's port, or the identity is too long to be sent.
    """

    def __init__(
        self,
        cluster: Cluster,
        task: Task,
        identity: Identity,
        key: bytes,
        tell: Callable[[str], None],
        *,
        lost_after_secs: float,
        port_shift: int = CONTROL_PORT_SHIFT,
    ) -> None:
        port.check_ports(cluster, port_shift)
        self._seat = Seat(cluster, task, identity, key != NO_TOKEN_KEY, lost_after_secs, port_shift)
        self._key, self._tell = key, tell
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = False
        if len(repr(self._seat.hello("join", cluster.leader))) > MAX_COMPARED_BYTES:
            raise ClusterError("cluster: the host list and the configuration are too long to be compared")

    def __enter__(self) -> Self:
        """Raises ClusterError if the control port cannot be had."""
        seat = self._seat
        self._links = Links(port.listen(seat.cluster, seat.task, seat.port_shift), self._key, self)
        self._role: Role = (Leading if seat.leads else Following)(seat, self._links)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()
        return self

    def join(self, timeout_secs: float, check: Callable[[], None]) -> None:
        """Waits until all are there and agree, and the leader says go.

        Args:
            check: called about ten times a second; what it raises ends the waiting.

        Raises:
            ClusterError: this task differs from the others, or is held by another process.
            TaskLostError: names all who did not come within `timeout_secs`, and why; or the job runs without us.
            Interrupted: another task was told to stop.
        """
        start = told = time.monotonic()
        while not self._seat.agreed.wait(TURN_SECS):
            check()
            self._pass_on_lines()
            if self._seat.failure:
                raise self._seat.failure
            now = time.monotonic()
            names = self._role.waiting_for
            if now - start > timeout_secs:
                conflict = self._seat.conflict or ("; the cluster lists differ" if self._seat.lists_differ else "")
                text = f"after {now - start:.0f} s still waiting for {names}{conflict}"
                raise (ClusterError if conflict else TaskLostError)(f"{text}; see startup_timeout_secs")
            if now - told > TELL_EVERY_SECS:
                told = now
                self._tell(f"waiting for {names}, {now - start:.0f} s")
        self._pass_on_lines()

    def events(self) -> list[Event]:
        """What has happened since the last call; never waits.

        Each has "event" and "task": "lost" with "why", "back" (on the leader), "stop" with "signum" (the task was
        told to stop, and so should all), "ended" with "code" and "message".
        """
        self._pass_on_lines()
        return _drain(self._seat.events)

    def stop(self, signum: int) -> None:
        """Tells all others that this task was told to stop by a signal."""
        self._say({"type": "stop", "task": str(self._seat.task), "signum": signum})

    def ended(self, code: int, message: str) -> None:
        """Tells all others that this task has ended: its connection will close, and that is no loss."""
        self._ended = True
        self._say({"type": "ended", "task": str(self._seat.task), "code": code, "message": message[:2000]})

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._ended:
            if isinstance(error, Interrupted):
                self.stop(error.exit_code - 128)
            code = getattr(error, "exit_code", 1) if error else 0
            self.ended(code, (str(error) or type(error).__name__) if error else "")
        self._commands.put(None)
        self._links.wake()
        self._thread.join(CLOSE_SECS)
        self._pass_on_lines()

    def _say(self, message: Message) -> None:
        self._commands.put(lambda: self._role.say(message))
        self._links.wake()

    def _pass_on_lines(self) -> None:
        for line in _drain(self._seat.lines):
            self._tell(line)

    # What follows belongs to the meeting's thread.

    def _run(self) -> None:
        try:
            while True:
                for command in _drain(self._commands):
                    if command is None:
                        return
                    command()
                self._role.tick(time.monotonic())
                self._links.turn(TURN_SECS)
        except Exception as error:  # never silently: the run would go on with nobody watching
            self._seat.fail(TaskLostError(f"the control connection failed: {error!r}"))
            self._seat.event("lost", self._seat.cluster.leader, why=f"the control connection failed: {error!r}")
        finally:
            self._links.end()

    def on_open(self, link: Link) -> None:
        self._role.on_open(link)

    def on_closed(self, link: Link, why: str) -> None:
        self._role.on_closed(link, why)

    def on_message(self, link: Link, message: Message) -> None:
        if link.owner is not None:
            self._role.on_message(link, message)
        elif message["type"] not in ("join", "probe"):
            raise ValueError(message["type"])
        elif answer := self._seat.misdirected(message):
            link.send(answer)
            link.finish()
        elif message["type"] == "join":
            self._role.on_join(link, message)
        else:
            self._on_probe(link, message)

    def _on_probe(self, link: Link, probe: Message) -> None:
        """A leader asks who is here. If it is not ours, and of our own list, one of the two lists is wrong."""
        seat, leader = self._seat, self._seat.cluster.leader
        state = {"cluster": seat.identity["cluster"], "leads": seat.leads, "held": self._role.held}
        link.send({"type": "state", **seat.me, **state})
        link.finish()
        taken = seat.agreed.is_set() or (self._role.held and not seat.leads)
        if taken or probe["address"] == seat.cluster.address(leader):
            return
        caller = f"{probe['job']}-{probe['index']} at {probe['address']} (host {probe['host']} pid {probe['pid']})"
        text = f"{caller} claims to lead, and here that is {seat.at(leader)}: {seat.compare_lists(probe['cluster'])}"
        if probe["address"] in map(seat.cluster.address, seat.cluster.tasks):
            seat.fail(ClusterError(text))
        else:
            seat.conflict = seat.conflict or f"; {text}"
            seat.line(text)


def _drain(source: "queue.SimpleQueue[Any]") -> list[Any]:
    found = []
    while not source.empty():
        found.append(source.get_nowait())
    return found
