"""What strangers, and members gone wrong, may send to a control port."""

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import ports_of_tasks
from tests.process.parties import ASYNC, WAIT_SECS, Party, Table, all_of, cluster_of, wait_for
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.control import channel
from tf2dist.control.channel import Channel
from tf2dist.control.member import Membership
from tf2dist.control.messages import (
    Ended,
    Go,
    Held,
    Identity,
    Join,
    Lost,
    Place,
    Probe,
    Process,
    Refused,
    State,
    Stop,
    Wire,
)
from tf2dist.control.port import control_address
from tf2dist.control.token import NO_TOKEN_KEY
from tf2dist.errors import ClusterError
from tf2dist.packing import VERSION, pack


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


@pytest.mark.parametrize("target", ["worker-1", "worker-2"])
def test_a_call_that_is_passed_on_to_somebody_else_ends_nobody(table: Table, target: str) -> None:
    """Somebody on the way, who does not know the token, leads the leader's address to the caller or to another one."""
    cluster, key = cluster_of(worker=3), b"a" * 32
    parties = [table(cluster, f"worker-{index}", key=key) for index in (1, 2)]
    with Relay(
        control_address(cluster.jobs["worker"][0]), control_address(cluster.address(Task.parse(target)))
    ) as relay:
        wait_for(lambda: relay.num_calls >= 12)  # each calls four times a second
        wait_for(lambda: all("passed back to us" in p.waiting_for or "was meant for" in p.waiting_for for p in parties))
        assert not any(party.joined.done() for party in parties)
    parties.append(table(cluster, "worker-0", key=key))
    for party in parties:
        party.go()


def test_a_leader_with_another_address_is_told_at_the_timeout(table: Table) -> None:
    """Two names of one address look like another job's leader that has taken it: no reason to end at once."""
    cluster = cluster_of(worker=2)
    port, own = ports_of_tasks(2)
    table(cluster, "worker-0")
    other = Cluster("sync", {"worker": (f"localhost:{port}", f"localhost:{own}")})
    with Relay(control_address(f"localhost:{port}"), control_address(cluster.jobs["worker"][0])):
        error = table(other, "worker-1", timeout_secs=2).error()
    assert isinstance(error, ClusterError)
    assert f"was meant for worker-0 at localhost:{port}; cluster.worker: [{cluster.jobs['worker'][0]}, " in str(error)
    assert str(error).endswith("; the cluster lists differ; see startup_timeout_secs")


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


class Relay:
    """Listens at one address and passes every byte on to another one and back."""

    def __init__(self, here: tuple[str, int], there: tuple[str, int]) -> None:
        self._server, self._there = socket.create_server(here), there
        self.num_calls = 0

    def __enter__(self) -> "Relay":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                far = socket.create_connection(self._there)
                self.num_calls += 1
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


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
        party.event(Stop, "worker-1")
        assert {type(event) for event in party.seen} == {Stop}
        party.seen.clear()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), max_size=4))
def test_garbage(healthy: Healthy, pieces: list[bytes]) -> None:
    with call(healthy[0]) as line:
        assert len(line.recv(channel.NONCE_BYTES, socket.MSG_WAITALL)) == channel.NONCE_BYTES
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
        line.sendall(os.urandom(1 << 20)[: channel.NONCE_BYTES + channel.MAC_BYTES])
        assert is_closed(line)
    assert_well(healthy)


def member_of_sorts(cluster: Cluster) -> tuple[socket.socket, Channel]:
    """One who knows the token and then says what it likes."""
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


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
HERE = "here:2222"  # becomes the leader's address
TEXTS = st.text(max_size=20) | st.sampled_from(["worker-1", HERE, "\x1b[2J"])
NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.integers(0, 3)
PLACES = st.builds(Place, st.builds(Task, TEXTS | st.sampled_from(["chief", "worker"]), NUMBERS), TEXTS | st.just(HERE))
TO = PLACES | st.just(Place(Task("chief", 0), HERE))
PROCESSES = st.builds(Process, TEXTS, NUMBERS, TEXTS)
JOBS = st.dictionaries(TEXTS, st.lists(TEXTS, max_size=2).map(tuple), max_size=3)
CONFIGS = st.dictionaries(TEXTS, JSON_VALUES, max_size=3)
IDENTITIES = st.builds(Identity, JOBS, st.just({}), CONFIGS, st.just(()), st.none() | st.just({}))
HELD = st.none() | st.builds(Held, TEXTS, PLACES, PROCESSES)
MESSAGES: st.SearchStrategy[Wire] = st.one_of(
    st.builds(Join, TO, PLACES, PROCESSES, IDENTITIES),
    st.builds(Probe, TO, PLACES, PROCESSES, JOBS),
    st.builds(State, PROCESSES, JOBS, st.booleans(), HELD),
    st.builds(Refused, NUMBERS, TEXTS),
    st.builds(Stop, TEXTS, NUMBERS),
    st.builds(Ended, TEXTS, NUMBERS, TEXTS),
    st.just(Go()),
)


@st.composite
def packed(draw: st.DrawFn) -> bytes:
    """A message whose fields are of the right types, or one that was damaged after that."""
    data = pack(draw(MESSAGES))
    fields = json.loads(data)
    if draw(st.booleans()):
        fields[draw(st.sampled_from([*fields, "x"]))] = draw(JSON_VALUES)
        data = json.dumps(fields).encode()
    return data


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packed())
def test_senseless_messages_of_one_with_the_token(healthy: Healthy, message: bytes) -> None:
    cluster = healthy[0]
    line, channel = member_of_sorts(cluster)
    with line:
        channel.send(message.replace(HERE.encode(), cluster.address(cluster.leader).encode()))
        line.sendall(channel.unsent)
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR)
        assert is_closed(line)


def test_after_senseless_messages_all_is_well(healthy: Healthy) -> None:
    assert_well(healthy)


@pytest.mark.parametrize(
    "message",
    [
        b"[" * 60_000,
        b'{"a":' * 9_000,
        b"{}",
        b"[]",
        b'{"type":1}',
        b"\xff",
        b'{"type":"x","n":' + b"9" * 9000 + b"}",
        b"",
    ],
)
def test_what_is_no_message(healthy: Healthy, message: bytes) -> None:
    line, channel = member_of_sorts(healthy[0])
    with line:
        channel.send(message)
        line.sendall(channel.unsent)
        assert is_closed(line)
    assert_well(healthy)


def test_a_member_gone_wrong_is_lost_and_no_text_of_it_reaches_a_terminal_whole(table: Table) -> None:
    cluster = cluster_of("async", **ASYNC)
    parties = [table(cluster, str(task)) for task in cluster.tasks[:-1]]
    for message, why in (
        (pack(Stop("", 99)), "a message that makes no sense (Stop.signum: 99)"),
        (pack(Go()), "a message of unknown type (Go)"),
        (pack(Escape()), "a message of unknown type (?[2J)"),
        (other_version(Stop("", 15)), f"another version of tf2dist: protocol 99, here {VERSION}"),
        (pack(Ended("", 3, "\x1b[2J\u202e")), ""),
    ):
        line, channel = member_of_sorts(cluster)
        with line:
            worker = Membership(cluster, Task("worker", 1), Identity(cluster.jobs, {}, {}, (), {}), False, 30.0, 1000)
            channel.send(pack(worker.join()))
            line.sendall(channel.unsent)
            parties[0].go()
            channel.unsent.clear()
            channel.send(message)
            line.sendall(channel.unsent)
            for party in parties:
                if why:
                    assert party.event(Lost, "worker-1").why == why
                else:
                    assert party.event(Ended, "worker-1").message == "?[2J?"
                party.seen.clear()


@pytest.mark.parametrize("target", [0, 1], ids=["leader", "follower"])
def test_an_answer_that_is_none_is_told_without_its_control_characters(table: Table, target: int) -> None:
    """Target is whom somebody with the token plays."""
    cluster = cluster_of(worker=2)
    with socket.create_server(control_address(cluster.jobs["worker"][target])) as server:
        server.settimeout(WAIT_SECS)
        party = table(cluster, f"worker-{1 - target}")
        line, channel = server.accept()[0], Channel(NO_TOKEN_KEY, dials=False)
        with line:
            shake_hands(line, channel)
            channel.send(pack(Escape()))
            line.sendall(channel.unsent)
            wait_for(lambda: "a message of unknown type (?[2J), control port" in party.waiting_for)


def other_version(message: Wire) -> bytes:
    return json.dumps(json.loads(pack(message)) | {"version": 99}).encode()


@dataclass(frozen=True)
class Escape:
    """A message whose name is no name."""


Escape.__name__ = "\x1b[2J"


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
        nonce = crowd[-1].recv(channel.NONCE_BYTES, socket.MSG_WAITALL)
        assert len(nonce) == channel.NONCE_BYTES, "the newest is served"
        with contextlib.suppress(ConnectionError):
            for _ in range(10):  # slowly, a byte at a time
                crowd[-1].sendall(b"x")
                time.sleep(0.1)
        begun = time.monotonic()
        assert is_closed(crowd[-1])
        assert time.monotonic() - begun < 30
    assert_well(healthy)
    assert all(len(party.meeting._links.all) <= 4 for party in parties)
