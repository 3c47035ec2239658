"""Shutting down this process's own connections to a lost task."""

import socket

import pytest

from tf2dist.process.inbox import shut_down_connections


@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"], ids=["ipv4", "ipv4 by ipv6"])
def test_only_connections_to_the_lost_address_are_shut_down(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(("127.0.0.1", 0)) as lost, socket.create_server(("127.0.0.1", 0)) as healthy:
        calls = []
        for server in (lost, healthy):
            call = socket.socket(family, socket.SOCK_STREAM)
            call.connect((host, server.getsockname()[1]))
            calls.append((call, server.accept()[0]))
        assert shut_down_connections(f"127.0.0.1:{lost.getsockname()[1]}") == 1
        assert calls[0][0].recv(1) == b"", "a call that waits for an answer fails"
        calls[1][1].sendall(b"x")
        assert calls[1][0].recv(1) == b"x"
        for pair in calls:
            for end in pair:
                end.close()


def test_an_unknown_name_has_no_connections() -> None:
    assert shut_down_connections("no-such-host.invalid:2222") == 0
