"""The links of the tests' hosts, when they are limited."""

import sys
from subprocess import PIPE

import pytest

from tests.bench import bandwidth
from tests.hosts import hosts

RECEIVE = """
import socket, time
server = socket.create_server(("", 9000))
print("ready", flush=True)
connection, _ = server.accept()
connection.recv(2 ** 20)  # from here on, so that the start of a process is not timed
begin, received = time.monotonic(), 0
while more := len(connection.recv(2 ** 20)):
    received += more
print(received / (time.monotonic() - begin), flush=True)
"""
SEND = """
import socket
with socket.create_connection(("10.77.0.1", 9000)) as connection:
    connection.sendall(bytes({size}))
"""


@pytest.mark.parametrize("mbit", bandwidth.MBIT)
def test_a_limited_link_gives_tcp_most_of_its_rate_and_no_more(mbit: int) -> None:
    rate = mbit * 125_000
    with hosts(2) as made:
        made.limit(rate, **bandwidth.BUCKET)
        receiver = made[0].popen([sys.executable, "-c", RECEIVE], stdout=PIPE)
        assert receiver.stdout
        assert receiver.stdout.readline() == "ready\n"
        before = made[0].received_and_sent()[0]
        made[1].popen([sys.executable, "-c", SEND.format(size=rate)])
        got = float(receiver.stdout.readline())
        assert made[0].received_and_sent()[0] - before == pytest.approx(rate, rel=0.02), "counted without headers"
    assert 0.7 * rate < got < rate  # a busy machine may not fill a gigabit
