"""The private network, and what happens where there is none."""

import fcntl
import os
import socket
from collections.abc import Callable

import pytest

from tf2dist import netns


def in_a_child(function: Callable[[], bool]) -> bool:
    """Runs a function that changes its process in one of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_private_network_has_a_working_loopback_and_nothing_else() -> None:
    def look() -> bool:
        if not netns.enter_private_network():
            return True  # not allowed here, told below
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        return [name for _, name in socket.if_nameindex()] == ["lo"]

    assert in_a_child(look)


def test_where_it_fails_half_way_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel allows user namespaces, but neither maps nor devices in them."""
    before = os.readlink("/proc/self/ns/net")
    monkeypatch.setattr(fcntl, "ioctl", lambda *args: (_ for _ in ()).throw(PermissionError("no")))
    assert not netns.enter_private_network()
    assert os.readlink("/proc/self/ns/net") == before


def test_unused_ports_are_free_and_not_for_outgoing_connections() -> None:
    ports = netns.unused_ports(64)
    assert len(set(ports)) == 64
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        assert max(ports) < max(int(file.read().split()[0]), 20_000)
    with socket.create_server(("", ports[0])):
        pass
