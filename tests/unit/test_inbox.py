"""What a task does about its launcher's words, such as shutting down its own connections to a lost task."""

import os
import socket
import time

import pytest

from tf2dist.cluster.spec import Cluster
from tf2dist.messages import LeaderDone, pack
from tf2dist.process import inbox
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


def test_an_evaluator_hears_that_the_leader_is_done() -> None:
    read_end, write_end = os.pipe()
    standard_input = os.dup(0)
    try:
        os.dup2(read_end, 0)
        inbox.listen(Cluster("sync", {"worker": ("a:1",)}))
        assert not inbox.leader_is_done()
        os.write(write_end, pack(LeaderDone()) + b"\n")
        deadline = time.monotonic() + 10
        while not inbox.leader_is_done() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert inbox.leader_is_done()
    finally:
        os.dup2(standard_input, 0)
        for descriptor in (read_end, write_end, standard_input):
            os.close(descriptor)
        inbox._leader_is_done.clear()
