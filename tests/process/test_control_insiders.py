"""Messages of faulty processes that know the token."""

import contextlib
import json
import socket
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.process.participants import (
    ASYNC,
    WAIT_SECS,
    Healthy,
    Meetings,
    assert_job_runs,
    cluster_of,
    is_closed,
    peer_with_token,
    shake_hands,
    wait_for,
)
from tf2dist.cluster.addresses import control_address
from tf2dist.cluster.spec import Task
from tf2dist.hosts.connections import Channel
from tf2dist.hosts.identity import NO_TOKEN_KEY
from tf2dist.hosts.member import Membership
from tf2dist.hosts.protocol import (
    Ended,
    Go,
    HoldingJob,
    Identity,
    Join,
    Lost,
    Probe,
    Process,
    Refused,
    State,
    Stop,
    TaskAddress,
    Wire,
)
from tf2dist.messages import pack

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
HERE = "here:2222"  # becomes the leader's address
TEXTS = st.text(max_size=20) | st.sampled_from(["worker-1", HERE, "\x1b[2J"])
NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.integers(0, 3)
PLACES = st.builds(
    TaskAddress, st.builds(Task, TEXTS | st.sampled_from(["chief", "worker"]), NUMBERS), TEXTS | st.just(HERE)
)
TO = PLACES | st.just(TaskAddress(Task("chief", 0), HERE))
PROCESSES = st.builds(Process, TEXTS, NUMBERS, TEXTS)
JOBS = st.dictionaries(TEXTS, st.lists(TEXTS, max_size=2).map(tuple), max_size=3)
CONFIGS = st.dictionaries(TEXTS, JSON_VALUES, max_size=3)
IDENTITIES = st.builds(Identity, JOBS, st.just({}), CONFIGS, st.just(()), st.none() | st.just({}))
HELD = st.none() | st.builds(HoldingJob, TEXTS, PLACES, PROCESSES)
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
def test_malformed_messages_of_a_peer_with_the_token(healthy: Healthy, message: bytes) -> None:
    cluster = healthy[0]
    line, channel = peer_with_token(cluster)
    with line:
        channel.send(message.replace(HERE.encode(), cluster.address(cluster.leader).encode()))
        line.sendall(channel.unsent)
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR)
        assert is_closed(line)


def test_the_job_survives_malformed_messages(healthy: Healthy) -> None:
    assert_job_runs(healthy)


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
def test_bytes_that_are_no_message(healthy: Healthy, message: bytes) -> None:
    line, channel = peer_with_token(healthy[0])
    with line:
        channel.send(message)
        line.sendall(channel.unsent)
        assert is_closed(line)
    assert_job_runs(healthy)


def test_a_faulty_member_is_lost(enter: Meetings) -> None:
    cluster = cluster_of("async", **ASYNC)
    participants = [enter(cluster, str(task)) for task in cluster.tasks[:-1]]
    for message, why in (
        (pack(Go()), "a message of unknown type (Go)"),
        (pack(Ended("", 3, "")).replace(b"3", b"true"), "a malformed message (Ended.code: True)"),
    ):
        line, channel = peer_with_token(cluster)
        with line:
            worker = Membership(cluster, Task("worker", 1), Identity(cluster.jobs, {}, {}, (), {}), False, 30.0, 1000)
            channel.send(pack(worker.join()))
            line.sendall(channel.unsent)
            participants[0].go()
            channel.unsent.clear()
            channel.send(message)
            line.sendall(channel.unsent)
            for participant in participants:
                assert participant.event(Lost, "worker-1").why == why
                participant.seen.clear()


@pytest.mark.parametrize("target", [0, 1], ids=["leader", "follower"])
def test_an_invalid_answer_is_shown(enter: Meetings, target: int) -> None:
    """Somebody with the token takes the place of the target."""
    cluster = cluster_of(worker=2)
    with socket.create_server(control_address(cluster.jobs["worker"][target])) as server:
        server.settimeout(WAIT_SECS)
        participant = enter(cluster, f"worker-{1 - target}")
        line, channel = server.accept()[0], Channel(NO_TOKEN_KEY, dials=False)
        with line:
            shake_hands(line, channel)
            channel.send(pack(Go()))
            line.sendall(channel.unsent)
            wait_for(lambda: "a message of unknown type (Go), control port" in participant.waiting_for)


def test_a_huge_length(healthy: Healthy) -> None:
    line, _ = peer_with_token(healthy[0])
    with line:
        line.sendall(struct.pack(">I", 0xFFFFFFFF))
        assert is_closed(line)
    assert_job_runs(healthy)
