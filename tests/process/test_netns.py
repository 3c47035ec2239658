"""The private network, free ports, and systems that offer no private network."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tf2dist import linux
from tf2dist.hosts.connections import Dialer


def in_a_child(function: Callable[[], bool]) -> bool:
    """Runs a function that changes its process in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_private_network_has_a_working_loopback_and_nothing_else() -> None:
    def look() -> bool:
        if not linux.enter_private_network():
            return True  # not allowed here, told below
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        return [name for _, name in socket.if_nameindex()] == ["lo"]

    assert in_a_child(look)


def test_a_failure_half_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels allow user namespaces, but neither maps nor devices in them."""
    before = os.readlink("/proc/self/ns/net")
    monkeypatch.setattr(fcntl, "ioctl", lambda *args: (_ for _ in ()).throw(PermissionError("no")))
    assert not linux.enter_private_network()
    assert os.readlink("/proc/self/ns/net") == before


def test_unused_ports_are_free_and_not_for_outgoing_connections() -> None:
    ports = linux.unused_ports(64)
    assert len(set(ports)) == 64
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        assert max(ports) < max(int(file.read().split()[0]), 20_000)
    with socket.create_server(("", ports[0])):
        pass


class NoIpv6(socket.socket):
    """Behaves like a kernel without IPv6."""

    def __init__(self, family: int = socket.AF_INET, *args: Any, **kwargs: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *args, **kwargs)


def test_a_kernel_without_ipv6_has_ports_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        monkeypatch.setattr(socket, "socket", NoIpv6)
        assert len(linux.unused_ports(8)) == 8
        assert not linux.is_free(server.getsockname()[1])


def test_an_address_that_the_kernel_cannot_reach_is_retried() -> None:
    def dial(*args: Any) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    dialer = Dialer(SimpleNamespace(dial=dial), "localhost", 1, every_secs=0.01)  # type: ignore[arg-type]
    deadline = time.monotonic() + 30
    while "not supported" not in dialer.why:
        assert time.monotonic() < deadline, dialer.why
        dialer.tick(None)
