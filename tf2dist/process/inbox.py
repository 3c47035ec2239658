"""What the launcher tells a running task, on its standard input, a JSON object a line.

So far one thing: that another task is gone. TensorFlow notices the end of a process by its
connections; when a whole host is cut off nothing closes them, and a call to it waits for ever.
"""

import contextlib
import ipaddress
import json
import os
import socket
import stat
import sys
import threading

from tf2dist import pulse
from tf2dist.addresses import split
from tf2dist.cluster import Cluster, Task
from tf2dist.control_port import resolve

RECONNECT_SECS = 90.0  # TensorFlow calls the lost host some times more, and gRPC gives up after 20 s each time


def listen(cluster: Cluster) -> None:
    """Begins to read, in a thread of its own: the main one may be what waits."""
    threading.Thread(target=_listen, args=(cluster,), name="inbox", daemon=True).start()


def _listen(cluster: Cluster) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if message["event"] == "gone":
            address = cluster.address(Task.parse(message["task"]))
            pulse.excuse(RECONNECT_SECS)
            print(f"{message['task']} is gone: {sever(address)} connections to {address} are cut", flush=True)


def sever(address: str) -> int:
    """Shuts down this process's connections to "host:port", so that calls in flight fail; returns how many."""
    host, port = split(address)
    try:
        wanted = {(_plain(found[0]), found[1]) for _, found in resolve(host, port)}
    except OSError:
        return 0
    return sum(_shut_down(int(name), wanted) for name in os.listdir("/proc/self/fd"))


def _shut_down(number: int, wanted: set[tuple[str, int]]) -> bool:
    """Ends the connection behind a file descriptor, if it is one to a wanted peer."""
    with contextlib.suppress(OSError):  # not connected, or closed in this moment
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with socket.socket(fileno=os.dup(number)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and _peer(found) in wanted:
                    found.shutdown(socket.SHUT_RDWR)  # of the connection, whoever else holds it
                    return True
    return False


def _peer(connected: socket.socket) -> tuple[str, int]:
    host, port = connected.getpeername()[:2]
    return _plain(host), int(port)


def _plain(host: str) -> str:
    """TensorFlow reaches IPv4 addresses by IPv6 sockets, which write them as ::ffff:10.0.0.1."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
