"""Participants of a meeting for the tests of the control connections: threads, on real sockets."""

import contextlib
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from tests.conftest import ports_of_tasks
from tf2dist.cluster.addresses import control_address
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import Interrupted, TfDistError
from tf2dist.hosts.connections import Channel
from tf2dist.hosts.identity import NO_TOKEN_KEY
from tf2dist.hosts.meeting import Meeting
from tf2dist.hosts.protocol import Back, Ended, Identity, Lost, MeetingEvent, Stop
from tf2dist.linux import unused_ports

WAIT_SECS = 20.0
AnEvent = TypeVar("AnEvent", Lost, Back, Stop, Ended)


def wait_for(holds: Callable[[], Any], what: str = "") -> Any:
    deadline = time.monotonic() + WAIT_SECS
    while not (value := holds()):
        assert time.monotonic() < deadline, f"never true: {what or holds}"
        time.sleep(0.01)
    return value


class Participant:
    """A meeting, and its `join` in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, meeting: Meeting, timeout_secs: float) -> None:
        self.printed: list[str] = []
        self.seen: list[MeetingEvent] = []
        self.meeting, self.pool, self.timeout_secs = meeting, pool, timeout_secs
        self.signum = 0
        self.left = False

    def check(self) -> None:
        if self.signum:
            raise Interrupted(self.signum)

    def start(self) -> "Participant":
        self.meeting.__enter__()
        self.joined: Future[None] = self.pool.submit(self._join)
        return self

    def _join(self) -> None:
        try:
            self.meeting.join(self.timeout_secs, self.check)
        except TfDistError as error:
            self.leave(error)
            raise

    def go(self) -> "Participant":
        self.joined.result(WAIT_SECS)
        return self

    def error(self) -> TfDistError:
        error = self.joined.exception(WAIT_SECS)
        assert isinstance(error, TfDistError)
        return error

    @property
    def waiting_for(self) -> str:
        return self.meeting._role.waiting_for

    def leave(self, error: TfDistError | None = None) -> None:
        if not self.left:
            self.left = True
            self.meeting.__exit__(type(error) if error else None, error, None)

    def vanish(self) -> None:
        """Ends like a process that is killed: its sockets close without a message."""
        self.left = True
        self.meeting._role.announce = lambda message: None  # type: ignore[method-assign]
        self.meeting._commands.put(None)
        self.meeting._thread.join(WAIT_SECS)

    def events(self) -> list[MeetingEvent]:
        self.seen += self.meeting.events()
        return self.seen

    def event(self, kind: type[AnEvent], task: str) -> AnEvent:
        """Waits for an event of a class about a task."""

        def find() -> list[AnEvent]:
            return [event for event in self.events() if isinstance(event, kind) and event.task == task]

        result: list[AnEvent] = wait_for(find, f"{kind.__name__} of {task}")
        return result[0]


class Meetings:
    """Lets participants enter meetings, all of which end with the test."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.participants: list[Participant] = []

    def __call__(
        self,
        cluster: Cluster,
        task: str,
        versions: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
        key: bytes = NO_TOKEN_KEY,
        timeout_secs: float = 60.0,
        lost_after_secs: float = 30.0,
    ) -> Participant:
        job, _, index = task.partition("-")
        identity = Identity(cluster.jobs, versions or {}, config or {}, (), {})
        printed: list[str] = []
        meeting = Meeting(
            cluster, Task(job, int(index)), identity, key, printed.append, lost_after_secs=lost_after_secs
        )
        participant = Participant(self.pool, meeting, timeout_secs)
        participant.printed = printed
        self.participants.append(participant)
        return participant.start()


def cluster_of(mode: str = "sync", **counts: int) -> Cluster:
    ports = ports_of_tasks(sum(counts.values()))
    return Cluster(mode, {job: tuple(f"localhost:{ports.pop()}" for _ in range(n)) for job, n in counts.items()})


def all_of(enter: Meetings, cluster: Cluster, **options: Any) -> dict[str, Participant]:
    participants = {str(task): enter(cluster, str(task), **options) for task in cluster.tasks}
    for participant in participants.values():
        participant.go()
    return participants


def claimant(enter: Meetings, cluster: Cluster, task: str) -> Participant:
    """A second process that claims a task: it listens elsewhere, as another host behind the same list would."""
    with pytest.MonkeyPatch.context() as patch:
        (port,) = unused_ports(1)
        listener = socket.create_server(("localhost", port))
        listener.setblocking(False)
        patch.setattr("tf2dist.hosts.meeting.listen_at_control_port", lambda *args: listener)
        return enter(cluster, task)


ASYNC = {"chief": 1, "ps": 1, "worker": 2}
Healthy = tuple[Cluster, list[Participant]]


def assert_job_runs(healthy: Healthy) -> None:
    """Asserts that no task was lost, and that a message of one still reaches all others."""
    _, participants = healthy
    source = participants[-1]
    source.meeting.stop(10)
    for participant in participants[:-1]:
        participant.event(Stop, "worker-1")
        assert {type(event) for event in participant.seen} == {Stop}
        participant.seen.clear()


def call(cluster: Cluster) -> socket.socket:
    return socket.create_connection(control_address(cluster.address(cluster.leader)), timeout=WAIT_SECS)


def is_closed(line: socket.socket) -> bool:
    """Whether the other side closes the connection; reads what it has sent before."""
    with contextlib.suppress(ConnectionError):
        while line.recv(65536):
            pass
    return True


def peer_with_token(cluster: Cluster) -> tuple[socket.socket, Channel]:
    """A connection to the leader with a completed handshake, over which the test can send anything."""
    line, channel = call(cluster), Channel(NO_TOKEN_KEY, dials=True)
    shake_hands(line, channel)
    return line, channel


def shake_hands(line: socket.socket, channel: Channel) -> None:
    while True:
        line.sendall(channel.unsent)
        channel.unsent.clear()
        if channel.open:
            return
        channel.receive(line.recv(65536))
