"""Addresses on the network: whose they are, and who answers there."""

import socket
import threading

import pytest

from tf2dist import peers
from tf2dist.cluster import Cluster, Task
from tf2dist.errors import ClusterError, TaskLostError
from tf2dist.netns import unused_ports

WORKER = Task("worker", 0)


def at(*addresses: str) -> Cluster:
    return Cluster("sync", {"worker": addresses})


def test_a_free_port_of_this_host() -> None:
    (port,) = unused_ports(1)
    for host in ("localhost", "127.0.0.1", socket.gethostname()):
        peers.check_own_address(at(f"{host}:{port}"), WORKER)


def test_a_kernel_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver may name addresses of a family of which there are no sockets."""
    (port,), no_family = unused_ports(1), (99, socket.SOCK_STREAM, 6, "", ("::1", 1))
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [no_family, *known(*args, **options)])
    peers.check_own_address(at(f"127.0.0.1:{port}"), WORKER)
    with pytest.raises(ClusterError, match="is not an address of this host"):
        peers.check_own_address(at("10.255.255.1:2222"), WORKER)


def test_an_address_of_another_host() -> None:
    with pytest.raises(ClusterError, match=r"worker 0 \(10.255.255.1:2222\): is not an address of this host"):
        peers.check_own_address(at("10.255.255.1:2222"), WORKER)


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(ClusterError, match=r"does not know the name no-such-host\.invalid"):
        peers.check_own_address(at("no-such-host.invalid:2222"), WORKER)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_port_that_is_taken(host: str) -> None:
    with socket.create_server((host, 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match="does the same task run here already"):
            peers.check_own_address(at(address), WORKER)


def test_waiting_names_the_missing_and_why() -> None:
    told: list[str] = []
    missing, there = unused_ports(2)
    with socket.create_server(("localhost", there)):
        cluster = at(f"localhost:{there}", f"localhost:{missing}", "no-such-host.invalid:1")
        with pytest.raises(TaskLostError) as caught:
            peers.wait_for_peers(cluster, cluster.tasks, 0.3, told.append)
    assert f"worker-1 at localhost:{missing} (connection refused)" in str(caught.value)
    assert "worker-2 at no-such-host.invalid:1 (name unknown)" in str(caught.value)
    assert "worker-0" not in str(caught.value)


def test_waiting_ends_when_the_last_one_comes() -> None:
    (port,) = unused_ports(1)
    servers: list[socket.socket] = []
    timer = threading.Timer(0.3, lambda: servers.append(socket.create_server(("localhost", port))))
    timer.start()
    peers.wait_for_peers(at(f"localhost:{port}"), [WORKER], 30, lambda text: None)
    assert servers
    servers[0].close()
    peers.wait_until_gone(at(f"localhost:{port}"), [WORKER], 30)
