"""Cutting this process's own connections to a lost task."""

import socket

import pytest

from tf2dist.process.inbox import sever


@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"], ids=["ipv4", "ipv4 by ipv6"])
def test_connections_to_one_address_are_cut_and_no_others(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(("127.0.0.1", 0)) as lost, socket.create_server(("127.0.0.1", 0)) as well:
        calls = []
        for server in (lost, well):
            call = socket.socket(family, socket.SOCK_STREAM)
            call.connect((host, server.getsockname()[1]))
            calls.append((call, server.accept()[0]))
        assert sever(f"127.0.0.1:{lost.getsockname()[1]}") == 1
        assert calls[0][0].recv(1) == b"", "the one who waits for an answer learns it"
        calls[1][1].sendall(b"x")
        assert calls[1][0].recv(1) == b"x"
        for pair in calls:
            for end in pair:
                end.close()


def test_a_name_that_nobody_knows() -> None:
    assert sever("no-such-host.invalid:2222") == 0
