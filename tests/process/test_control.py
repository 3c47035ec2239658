"""The meeting of several processes' control planes, here in threads, on real sockets."""

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf2dist import wire
from tf2dist.cluster import Cluster, Task
from tf2dist.control import Event, Meeting
from tf2dist.control_port import control_address
from tf2dist.errors import ClusterError, Interrupted, TaskLostError, TfDistError, TrainingError
from tf2dist.job_token import NO_TOKEN_KEY
from tf2dist.netns import unused_ports
from tf2dist.wire import Channel

WAIT_SECS = 20.0


def wait_for(holds: Callable[[], Any], what: str = "") -> Any:
    deadline = time.monotonic() + WAIT_SECS
    while not (value := holds()):
        assert time.monotonic() < deadline, f"never true: {what or holds}"
        time.sleep(0.01)
    return value


class Party:
    """A meeting, and its `join` in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, meeting: Meeting, timeout_secs: float) -> None:
        self.told: list[str] = []
        self.seen: list[Event] = []
        self.meeting, self.pool, self.timeout_secs = meeting, pool, timeout_secs
        self.signum = 0
        self.left = False

    def check(self) -> None:
        if self.signum:
            raise Interrupted(self.signum)

    def start(self) -> "Party":
        self.meeting.__enter__()
        self.joined: Future[None] = self.pool.submit(self._join)
        return self

    def _join(self) -> None:
        try:
            self.meeting.join(self.timeout_secs, self.check)
        except TfDistError as error:
            self.leave(error)
            raise

    def go(self) -> "Party":
        self.joined.result(WAIT_SECS)
        return self

    def error(self) -> TfDistError:
        error = self.joined.exception(WAIT_SECS)
        assert isinstance(error, TfDistError)
        return error

    def leave(self, error: TfDistError | None = None) -> None:
        if not self.left:
            self.left = True
            self.meeting.__exit__(type(error) if error else None, error, None)

    def vanish(self) -> None:
        """As a process that is killed: its sockets close without a word."""
        self.left = True
        self.meeting._ended = True
        self.meeting._role.say = lambda message: None  # type: ignore[method-assign]
        self.meeting._commands.put(None)
        self.meeting._thread.join(WAIT_SECS)

    def events(self) -> list[Event]:
        self.seen += self.meeting.events()
        return self.seen

    def event(self, kind: str, task: str) -> Event:
        def find() -> list[Event]:
            return [event for event in self.events() if (event["event"], event["task"]) == (kind, task)]

        return wait_for(find, f"{kind} of {task}")[0]  # type: ignore[no-any-return]


class Table:
    """Makes meetings that all end with the test."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.parties: list[Party] = []

    def __call__(
        self,
        cluster: Cluster,
        task: str,
        identity: dict[str, Any] | None = None,
        key: bytes = NO_TOKEN_KEY,
        timeout_secs: float = 60.0,
        lost_after_secs: float = 30.0,
    ) -> Party:
        job, _, index = task.partition("-")
        made = {"cluster": {job: list(hosts) for job, hosts in cluster.jobs.items()}, **(identity or {})}
        told: list[str] = []
        meeting = Meeting(cluster, Task(job, int(index)), made, key, told.append, lost_after_secs=lost_after_secs)
        party = Party(self.pool, meeting, timeout_secs)
        party.told = told
        self.parties.append(party)
        return party.start()


@pytest.fixture
def table() -> Iterator[Table]:
    before = {thread for thread in threading.enumerate() if thread.name == "control"}
    files = psutil.Process().num_fds()
    with ThreadPoolExecutor(16) as pool:
        made = Table(pool)
        try:
            yield made
        finally:
            for party in made.parties:
                party.signum = 15  # ends a join that still waits
                party.leave()
    wait_for(lambda: {t for t in threading.enumerate() if t.name == "control"} <= before, "threads end")
    wait_for(lambda: psutil.Process().num_fds() <= files, "sockets close")


def cluster_of(mode: str = "sync", **counts: int) -> Cluster:
    ports = unused_ports(sum(counts.values()))
    return Cluster(mode, {job: tuple(f"localhost:{ports.pop()}" for _ in range(n)) for job, n in counts.items()})


def all_of(table: Table, cluster: Cluster, **options: Any) -> dict[str, Party]:
    parties = {str(task): table(cluster, str(task), **options) for task in cluster.tasks}
    for party in parties.values():
        party.go()
    return parties


ASYNC = {"chief": 1, "ps": 1, "worker": 2}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("mode", "counts"), [("sync", {"worker": 3}), ("async", ASYNC)], ids=["sync", "async"])
def test_all_meet_in_any_order(table: Table, mode: str, counts: dict[str, int], order: int) -> None:
    cluster = cluster_of(mode, **counts)
    parties: list[Party] = []
    for task in cluster.tasks[::order]:
        assert not any(party.joined.done() for party in parties)
        parties.append(table(cluster, str(task)))
    for party in parties:
        party.go()
    assert not any(party.events() for party in parties)


def test_one_alone(table: Table) -> None:
    table(cluster_of(worker=1), "worker-0").go()


def test_nobody_waits_for_an_evaluator_and_it_may_come_late(table: Table) -> None:
    cluster = cluster_of(worker=1, evaluator=1)
    leader = table(cluster, "worker-0").go()
    table(cluster, "evaluator-0").go().leave()
    assert leader.event("ended", "evaluator-0")["code"] == 0


def test_a_missing_follower_is_named_to_all(table: Table) -> None:
    cluster = cluster_of(worker=3)
    leader, other = table(cluster, "worker-0", timeout_secs=3), table(cluster, "worker-1")
    for party in (leader, other):
        assert isinstance(party.error(), TaskLostError)
        text = str(party.error())
        assert f"worker-2 at {cluster.jobs['worker'][2]} (connection refused, control port " in text
        assert "worker-1 at" not in text


def test_a_missing_leader_is_named_and_told(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf2dist.control.TELL_EVERY_SECS", 0.3)
    party = table(cluster_of(worker=2), "worker-1", timeout_secs=1)
    assert isinstance(party.error(), TaskLostError)
    assert "still waiting for worker-0 at localhost:" in str(party.error())
    assert party.told[-1].startswith("waiting for worker-0 at localhost:")
    assert "connection refused" in party.told[-1]


def test_a_name_that_nobody_knows(table: Table) -> None:
    (port,) = unused_ports(1)
    cluster = Cluster("sync", {"worker": ("no-such-host.invalid:2222", f"localhost:{port}")})
    assert "name unknown" in str(table(cluster, "worker-1", timeout_secs=3).error())


def test_a_leader_that_accepts_and_says_nothing(table: Table) -> None:
    cluster = cluster_of(worker=2)
    with socket.create_server(control_address(cluster.jobs["worker"][0])):
        party = table(cluster, "worker-1", timeout_secs=6)
        assert "(no answer" in str(party.error())


def test_another_program_at_the_port(table: Table) -> None:
    cluster = cluster_of(worker=2)
    with socket.create_server(control_address(cluster.jobs["worker"][0])) as server:
        party = table(cluster, "worker-1", timeout_secs=1.5)
        with server.accept()[0] as line:
            line.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: something else\r\n\r\n")
            wait_for(lambda: "another program answers" in party.meeting._role.waiting_for)
    assert isinstance(party.error(), TaskLostError)


def test_check_ends_the_waiting_and_one_signal_ends_all(table: Table) -> None:
    cluster = cluster_of(worker=4)
    parties = [table(cluster, f"worker-{index}") for index in range(3)]
    wait_for(lambda: "worker-1" not in parties[0].meeting._role.waiting_for)
    wait_for(lambda: "worker-2" not in parties[0].meeting._role.waiting_for)
    parties[2].signum = 15
    assert [party.error().exit_code for party in parties] == [143, 143, 143]


VERSIONS = {"versions": {"keras": "3.15.1"}, "config": {"seed": 0, "train": {"steps": 5}}}
OTHER = {"versions": {"keras": "3.14.0"}, "config": {"seed": 0, "train": {"steps": 6}}}


def test_a_difference_is_shown_and_may_be_mended(table: Table) -> None:
    cluster = cluster_of(worker=2)
    leader = table(cluster, "worker-0", VERSIONS)
    wrong = table(cluster, "worker-1", OTHER)
    assert isinstance(wrong.error(), ClusterError)
    assert "train.steps: 5 at worker-0, 6 here; versions.keras: 3.15.1 at worker-0, 3.14.0 here" in str(wrong.error())
    wait_for(lambda: any("versions.keras: 3.15.1 here, 3.14.0 there" in line for line in leader.told))
    assert "was refused before: train.steps" in wait_for(
        lambda: "refused before" in leader.meeting._role.waiting_for and leader.meeting._role.waiting_for
    )
    table(cluster, "worker-1", VERSIONS).go()
    leader.go()


def test_a_refused_task_is_named_at_the_timeout(table: Table) -> None:
    cluster = cluster_of(worker=2)
    leader = table(cluster, "worker-0", VERSIONS, timeout_secs=3)
    table(cluster, "worker-1", OTHER).error()
    assert isinstance(leader.error(), TaskLostError)
    assert "versions.keras: 3.15.1 here, 3.14.0 there" in str(leader.error())


def test_both_believe_to_lead(table: Table) -> None:
    cluster = cluster_of(worker=2)
    turned = Cluster("sync", {"worker": cluster.jobs["worker"][::-1]})
    for error in [party.error() for party in (table(cluster, "worker-0"), table(turned, "worker-0"))]:
        assert isinstance(error, ClusterError)
        assert "cluster.worker: [localhost:" in str(error)


def test_a_list_with_another_leader(table: Table) -> None:
    """Host 2 believes that host 1 leads; host 1 knows better and goes on."""
    cluster = cluster_of(worker=3)
    a, b, c = cluster.jobs["worker"]
    one, zero = table(cluster, "worker-1"), table(cluster, "worker-0")
    wrong = table(Cluster("sync", {"worker": (b, a, c)}), "worker-2")
    assert isinstance(wrong.error(), ClusterError)
    assert "cluster.worker: [localhost:" in str(wrong.error())
    table(cluster, "worker-2").go()
    zero.go()
    one.go()


def test_a_list_whose_leader_never_comes_because_another_one_leads(table: Table) -> None:
    cluster = cluster_of(worker=3)
    a, b, c = cluster.jobs["worker"]
    leader = table(cluster, "worker-0")
    error = table(Cluster("sync", {"worker": (b, a, c)}), "worker-2").error()
    assert isinstance(error, ClusterError)
    assert f"worker-0 at {a}" in str(error)
    assert f"claims to lead, and here that is worker-0 at {b}: cluster.worker: [" in str(error)
    assert not leader.joined.done()


def test_sizes_differ(table: Table) -> None:
    cluster = cluster_of(worker=3)
    small = Cluster("sync", {"worker": cluster.jobs["worker"][:2]})
    table(cluster, "worker-0")
    error = table(small, "worker-1").error()
    assert isinstance(error, ClusterError)
    assert "cluster.worker" in str(error)


@pytest.mark.parametrize("running", [False, True], ids=["waiting", "running"])
def test_a_duplicate_is_refused_and_names_the_holder(table: Table, running: bool) -> None:
    cluster = cluster_of(worker=2 if running else 3)
    parties = {task: table(cluster, task) for task in ("worker-0", "worker-1")}
    wait_for(lambda: "worker-1" not in parties["worker-0"].meeting._role.waiting_for)
    duplicate = claimant(table, cluster, "worker-1")
    assert isinstance(duplicate.error(), ClusterError)
    assert f"worker 1 is already held by host {socket.gethostname()} pid {os.getpid()}" in str(duplicate.error())
    if running:
        for party in parties.values():
            assert not party.go().events()


def claimant(table: Table, cluster: Cluster, task: str) -> Party:
    """A second process that claims a task: it listens elsewhere, as another host behind the same list would."""
    with pytest.MonkeyPatch.context() as patch:
        (port,) = unused_ports(1)
        listener = socket.create_server(("localhost", port))
        listener.setblocking(False)
        patch.setattr("tf2dist.control_port.listen", lambda *args: listener)
        return table(cluster, task)


@pytest.mark.parametrize("running", [False, True], ids=["waiting", "running"])
def test_a_second_coordinator_is_refused(table: Table, running: bool) -> None:
    cluster = cluster_of("async", **ASYNC)
    tasks = cluster.tasks if running else cluster.tasks[:-1]
    parties = {str(task): table(cluster, str(task)) for task in tasks}
    wait_for(lambda: "worker-0" not in parties["chief-0"].meeting._role.waiting_for)
    wait_for(lambda: "ps-0" not in parties["chief-0"].meeting._role.waiting_for)
    second = Cluster("async", {**cluster.jobs, "chief": cluster_of(chief=1).jobs["chief"]})
    error = table(second, "chief-0").error()
    assert isinstance(error, ClusterError)
    assert f"is already held by job {parties['chief-0'].meeting._seat.job_id} of chief-0 at " in str(error)
    if not running:
        parties["worker-1"] = table(cluster, "worker-1")
    for party in parties.values():
        assert not party.go().events()


def test_a_stray_list_is_refused_by_a_running_leader(table: Table) -> None:
    cluster = cluster_of(worker=2)
    parties = all_of(table, cluster)
    stray = Cluster("sync", {"worker": (cluster.jobs["worker"][0], *cluster_of(worker=1).jobs["worker"])})
    assert isinstance(table(stray, "worker-1").error(), ClusterError)
    assert not any(party.events() for party in parties.values())


def test_a_lost_worker_may_return_in_async_and_the_others_hear_of_it(table: Table) -> None:
    cluster = cluster_of("async", **ASYNC)
    parties = all_of(table, cluster)
    for _ in range(2):
        parties["worker-1"].vanish()
        assert parties["chief-0"].event("lost", "worker-1")["why"] == "the connection was closed"
        parties["worker-1"] = table(cluster, "worker-1").go()
        parties["chief-0"].event("back", "worker-1")
        parties["chief-0"].seen.clear()
    parties["worker-1"].meeting.stop(15)  # whatever was forwarded before has come when this comes
    assert parties["ps-0"].event("stop", "worker-1")["signum"] == 15
    assert [event["event"] for event in parties["ps-0"].events()] == ["lost", "lost", "stop"]


@pytest.mark.parametrize(
    ("mode", "counts", "lost"), [("async", ASYNC, "ps-0"), ("sync", {"worker": 3}, "worker-1")], ids=["ps", "sync"]
)
def test_a_loss_that_ends_the_job_is_told_to_all(table: Table, mode: str, counts: dict[str, int], lost: str) -> None:
    cluster = cluster_of(mode, **counts)
    parties = all_of(table, cluster)
    parties.pop(lost).vanish()
    for party in parties.values():
        party.event("lost", lost)
    returned = table(cluster, lost)
    assert isinstance(returned.error(), TaskLostError)
    assert "the job runs" in str(returned.error())


def test_a_lost_leader_is_told_to_all(table: Table) -> None:
    cluster = cluster_of("async", **ASYNC)
    parties = all_of(table, cluster)
    parties.pop("chief-0").vanish()
    for party in parties.values():
        party.event("lost", "chief-0")


def test_silence_is_a_loss(table: Table) -> None:
    """A process that is frozen keeps its connections."""
    cluster = cluster_of(worker=3)
    parties = all_of(table, cluster, lost_after_secs=3)
    thaw = threading.Event()

    def freeze() -> None:
        thaw.wait(WAIT_SECS)

    parties["worker-1"].meeting._commands.put(freeze)
    try:
        for task in ("worker-0", "worker-2"):
            event = parties[task].event("lost", "worker-1")
            assert event["why"].startswith("silent for ") or task == "worker-2"
    finally:
        thaw.set()
    assert [event["task"] for event in parties["worker-2"].events()] == ["worker-1"]


def test_a_holder_that_is_silent_is_not_given_up_at_once(table: Table) -> None:
    """Its host may be gone, and this is the same task started again; or its link is cut for a moment."""
    cluster = cluster_of("async", **ASYNC)
    parties = all_of(table, cluster)
    thaw = threading.Event()

    def freeze() -> None:
        thaw.wait(WAIT_SECS)

    parties["worker-1"].meeting._commands.put(freeze)
    wait_for(lambda: _silence(parties["chief-0"], "worker-1") > 3.6)
    second = claimant(table, cluster, "worker-1")
    wait_for(lambda: "which has been silent for" in second.meeting._role.waiting_for)
    thaw.set()
    assert isinstance(second.error(), ClusterError)
    assert not any(party.events() for party in parties.values())


def _silence(leader: Party, task: str) -> float:
    members: dict[Task, Any] = leader.meeting._role._members  # type: ignore[attr-defined]
    (found,) = [member for member in members.values() if str(member.task) == task]
    return time.monotonic() - float(found.link.heard_at)


def test_a_leader_that_is_started_again_while_all_wait(table: Table) -> None:
    cluster = cluster_of(worker=3)
    first = table(cluster, "worker-0", timeout_secs=0.5)
    one = table(cluster, "worker-1")
    wait_for(lambda: "to say go" in one.meeting._role.waiting_for or "worker-2" in one.meeting._role.waiting_for)
    first.vanish()
    wait_for(lambda: "connection refused" in one.meeting._role.waiting_for)
    for party in (table(cluster, "worker-0"), table(cluster, "worker-2"), one):
        party.go()


def test_a_leader_that_gives_up_says_why(table: Table) -> None:
    cluster = cluster_of(worker=3)
    leader, one = table(cluster, "worker-0"), table(cluster, "worker-1")
    wait_for(lambda: "worker-1" not in leader.meeting._role.waiting_for)
    leader.leave(TrainingError("no more patience"))
    assert isinstance(one.error(), TaskLostError)
    assert "worker-0 at localhost:" in str(one.error())
    assert "has ended: no more patience" in str(one.error())


@pytest.mark.parametrize("source", ["worker-0", "worker-2"], ids=["leader", "follower"])
def test_stop_and_end_reach_all(table: Table, source: str) -> None:
    parties = all_of(table, cluster_of(worker=3))
    first = parties.pop(source)
    first.meeting.stop(2)
    first.meeting.ended(3, "the loss is nan")
    first.leave()
    for party in parties.values():
        assert party.event("stop", source)["signum"] == 2
        ended = party.event("ended", source)
        assert (ended["code"], ended["message"]) == (3, "the loss is nan")
        assert not [event for event in party.events() if event["event"] == "lost"]


def test_a_wrong_token(table: Table) -> None:
    cluster = cluster_of(worker=2)
    leader = table(cluster, "worker-0", key=b"a" * 32)
    for key, hint in ((b"b" * 32, "the same TF2DIST_TOKEN"), (NO_TOKEN_KEY, "this task has none")):
        error = table(cluster, "worker-1", key=key).error()
        assert isinstance(error, ClusterError)
        assert "the job token differs from the leader's" in str(error)
        assert hint in str(error)
    wait_for(lambda: any("refused a call from 127.0.0.1: the job token differs" in line for line in leader.told))
    table(cluster, "worker-1", key=b"a" * 32).go()
    leader.go()


def test_a_control_port_that_is_taken(table: Table) -> None:
    cluster = cluster_of(worker=2)
    with (
        socket.create_server(control_address(cluster.jobs["worker"][0])),
        pytest.raises(ClusterError, match=r"its control port .* is taken"),
    ):
        table(cluster, "worker-0")
    table.parties.clear()


def test_it_listens_at_its_own_address_alone(table: Table) -> None:
    cluster = cluster_of(worker=2)
    table(cluster, "worker-0")
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    port = control_address(cluster.jobs["worker"][0])[1]
    assert [c.laddr.ip for c in listening if c.laddr.port == port] == ["127.0.0.1"]


# What strangers may send.


def call(cluster: Cluster) -> socket.socket:
    return socket.create_connection(control_address(cluster.address(cluster.leader)), timeout=WAIT_SECS)


def is_closed(line: socket.socket) -> bool:
    """Whether the other side closes it; what it has said before is read."""
    with contextlib.suppress(ConnectionError):
        while line.recv(65536):
            pass
    return True


@pytest.fixture(scope="module")
def healthy() -> Iterator[tuple[Cluster, list[Party]]]:
    with ThreadPoolExecutor(16) as pool:
        made = Table(pool)
        cluster = cluster_of("async", **ASYNC)
        parties = all_of(made, cluster)
        yield cluster, list(parties.values())
        for party in made.parties:
            party.leave()


Healthy = tuple[Cluster, list[Party]]


def assert_well(healthy: Healthy) -> None:
    """Nobody was lost, and what one says still reaches all the others."""
    _, parties = healthy
    source = parties[-1]
    source.meeting.stop(10)
    for party in parties[:-1]:
        party.event("stop", "worker-1")
        assert {event["event"] for event in party.seen} == {"stop"}
        party.seen.clear()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), max_size=4))
def test_garbage(healthy: Healthy, pieces: list[bytes]) -> None:
    with call(healthy[0]) as line:
        assert len(line.recv(wire.NONCE_BYTES, socket.MSG_WAITALL)) == wire.NONCE_BYTES
        with contextlib.suppress(OSError):  # it may hang up in the middle
            for piece in pieces:
                line.sendall(piece)
            line.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(ConnectionError):
            said = line.recv(1)
        assert said == b"", "a stranger hears a nonce and nothing else"


def test_after_garbage_all_is_well(healthy: Healthy) -> None:
    with call(healthy[0]) as line:
        line.sendall(os.urandom(1 << 20)[: wire.NONCE_BYTES + wire.MAC_BYTES])
        assert is_closed(line)
    assert_well(healthy)


def member_of_sorts(cluster: Cluster) -> tuple[socket.socket, Channel]:
    """One who knows the token and then says what it likes."""
    line, channel = call(cluster), Channel(NO_TOKEN_KEY, dials=True)
    while not channel.open:
        channel.receive(line.recv(65536))
        line.sendall(channel.unsent)
        channel.unsent.clear()
    return line, channel


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("job", "index", "identity", "host", "pid", "who", "protocol", "address", "cluster", "signum", "task", "code")
MESSAGES = st.builds(
    lambda kind, values: {**values, "type": kind},
    st.sampled_from(["join", "probe", "beat", "stop", "ended", "go", "x"]),
    st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=12),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MESSAGES)
def test_senseless_messages_of_one_with_the_token(healthy: Healthy, message: dict[str, Any]) -> None:
    line, channel = member_of_sorts(healthy[0])
    with line:
        channel.send(message)
        line.sendall(channel.unsent)
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR)
        assert is_closed(line)


@pytest.mark.parametrize(
    "text",
    [b"[" * 60_000, b'{"a":' * 9_000, b"{}", b"[]", b'{"type":1}', b"\xff", b'{"type":"x","n":' + b"9" * 9000 + b"}"],
)
def test_bad_json(healthy: Healthy, text: bytes) -> None:
    line, channel = member_of_sorts(healthy[0])
    with line, pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "dumps", lambda *args, **kwargs: text.decode("latin-1"))
        patch.setattr(wire, "MAX_MESSAGE_BYTES", 1 << 20)
        channel.send({})
        patch.undo()
        line.sendall(channel.unsent)
        assert is_closed(line)
    assert_well(healthy)


def test_a_huge_length(healthy: Healthy) -> None:
    line, _ = member_of_sorts(healthy[0])
    with line:
        line.sendall(struct.pack(">I", 0xFFFFFFFF))
        assert is_closed(line)
    assert_well(healthy)


def test_a_crowd_that_says_nothing(healthy: Healthy) -> None:
    """More than may wait: the oldest must leave, and honest ones still come in; nobody stays for long."""
    cluster, parties = healthy
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(call(cluster)) for _ in range(100)]
        assert is_closed(crowd[0])
        line, _ = member_of_sorts(cluster)
        line.close()
        nonce = crowd[-1].recv(wire.NONCE_BYTES, socket.MSG_WAITALL)
        assert len(nonce) == wire.NONCE_BYTES, "the newest is served"
        with contextlib.suppress(ConnectionError):
            for _ in range(10):  # slowly, a byte at a time
                crowd[-1].sendall(b"x")
                time.sleep(0.1)
        begun = time.monotonic()
        assert is_closed(crowd[-1])
        assert time.monotonic() - begun < 30
    assert_well(healthy)
    assert all(len(party.meeting._links.all) <= 4 for party in parties)
