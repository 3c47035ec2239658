"""Connections of strangers, who do not know the token, to a control port."""

import contextlib
import os
import socket
import threading
import time

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import ports_of_tasks
from tests.process.participants import (
    Healthy,
    Meetings,
    assert_job_runs,
    call,
    cluster_of,
    is_closed,
    peer_with_token,
    wait_for,
)
from tf2dist.cluster.addresses import control_address
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError
from tf2dist.hosts import connections
from tf2dist.hosts.identity import NO_TOKEN_KEY


def test_a_wrong_token(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    leader = enter(cluster, "worker-0", key=b"a" * 32)
    for key, hint in ((b"b" * 32, "the same TF2DIST_TOKEN"), (NO_TOKEN_KEY, "this task has none")):
        error = enter(cluster, "worker-1", key=key).error()
        assert isinstance(error, ClusterError)
        assert "the job token differs from the leader's" in str(error)
        assert hint in str(error)
    wait_for(
        lambda: any("refused a connection from 127.0.0.1: the job token differs" in line for line in leader.printed)
    )
    enter(cluster, "worker-1", key=b"a" * 32).go()
    leader.go()


@pytest.mark.parametrize("target", ["worker-1", "worker-2"])
def test_a_relayed_connection_ends_no_process(enter: Meetings, target: str) -> None:
    """A relay that does not know the token leads from the leader's address back to the process or to another one."""
    cluster, key = cluster_of(worker=3), b"a" * 32
    participants = [enter(cluster, f"worker-{index}", key=key) for index in (1, 2)]
    with Relay(
        control_address(cluster.jobs["worker"][0]), control_address(cluster.address(Task.parse(target)))
    ) as relay:
        wait_for(lambda: relay.num_calls >= 12)  # each calls four times a second
        wait_for(lambda: all("was meant for" in participant.waiting_for for participant in participants))
        assert not any(participant.joined.done() for participant in participants)
    participants.append(enter(cluster, "worker-0", key=key))
    for participant in participants:
        participant.go()


def test_a_leader_with_another_address_is_reported_at_the_timeout(enter: Meetings) -> None:
    """Another job's leader at that address would look the same and may leave, so the meeting waits."""
    cluster = cluster_of(worker=2)
    port, own = ports_of_tasks(2)
    enter(cluster, "worker-0")
    other = Cluster("sync", {"worker": (f"localhost:{port}", f"localhost:{own}")})
    with Relay(control_address(f"localhost:{port}"), control_address(cluster.jobs["worker"][0])):
        error = enter(other, "worker-1", timeout_secs=2).error()
    assert isinstance(error, ClusterError)
    assert f"was meant for worker-0 at localhost:{port}; cluster.worker: [{cluster.jobs['worker'][0]}, " in str(error)
    assert str(error).endswith("; the cluster lists differ; see startup_timeout_secs")


def test_a_control_port_that_is_taken(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    with (
        socket.create_server(control_address(cluster.jobs["worker"][0])),
        pytest.raises(ClusterError, match=r"its control port .* is taken"),
    ):
        enter(cluster, "worker-0")
    enter.participants.clear()


def test_it_listens_at_its_own_address_alone(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    enter(cluster, "worker-0")
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    port = control_address(cluster.jobs["worker"][0])[1]
    assert [c.laddr.ip for c in listening if c.laddr.port == port] == ["127.0.0.1"]


def test_a_scan_of_the_ports_is_not_reported(enter: Meetings) -> None:
    cluster = cluster_of(worker=2)
    leader = enter(cluster, "worker-0")
    with call(cluster) as line:
        assert line.recv(connections.HELLO_BYTES, socket.MSG_WAITALL)
    enter(cluster, "worker-1").go()
    leader.go()
    assert not [line for line in leader.printed if "refused a connection" in line]


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), max_size=4))
def test_garbage(healthy: Healthy, pieces: list[bytes]) -> None:
    with call(healthy[0]) as line:
        assert len(line.recv(connections.HELLO_BYTES, socket.MSG_WAITALL)) == connections.HELLO_BYTES
        with contextlib.suppress(OSError):  # the other side may close at any time
            for piece in pieces:
                line.sendall(piece)
            line.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(ConnectionError):
            said = line.recv(1)
        assert said == b"", "a stranger receives a nonce and nothing else"


def test_the_job_survives_garbage(healthy: Healthy) -> None:
    with call(healthy[0]) as line:
        line.sendall(os.urandom(connections.HELLO_BYTES + connections.MAC_BYTES))
        assert is_closed(line)
    assert_job_runs(healthy)


def test_a_crowd_of_silent_connections(healthy: Healthy) -> None:
    """Members can still connect, and no stranger stays for long, even one that sends a byte now and then."""
    cluster, participants = healthy
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(call(cluster)) for _ in range(100)]
        line, _ = peer_with_token(cluster)
        line.close()
        with contextlib.suppress(ConnectionError):
            for _ in range(10):
                crowd[-1].sendall(b"x")
                time.sleep(0.1)
        begun = time.monotonic()
        assert is_closed(crowd[0])
        assert is_closed(crowd[-1])
        assert time.monotonic() - begun < 30
    assert_job_runs(healthy)
    assert all(len(participant.meeting._links.all) <= 4 for participant in participants)
