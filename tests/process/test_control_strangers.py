"""What strangers, who do not know the token, may do at a control port."""

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
from tests.process.parties import (
    Healthy,
    Table,
    assert_well,
    call,
    cluster_of,
    is_closed,
    member_of_sorts,
    wait_for,
)
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.control import channel
from tf2dist.control.port import control_address
from tf2dist.control.token import NO_TOKEN_KEY
from tf2dist.errors import ClusterError


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
