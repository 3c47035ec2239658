"""The launcher's messages to a running task, one per line on its standard input.

`PeerGone` says that another task is lost. TensorFlow notices the end of a process when its connections close.
When a whole host is cut off nothing closes them, and a call to it waits for ever. The other messages come from
the caller of `fit` and are for the leader.
"""

import contextlib
import os
import queue
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from tf2dist.cluster.addresses import Ip, as_ipv4, ip_of, resolve, split
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.messages import HookAnswer, PauseWanted, PeerGone, ToTask, unpack
from tf2dist.process import heartbeat

RECONNECT_SECS = 90.0  # TensorFlow calls the lost host a few more times, and each time gRPC gives up after 20 s


@dataclass(frozen=True)
class Inbox:
    """The messages from the caller of `fit`; a thread fills it, and the main thread reads it.

    Attributes:
        answers: to this task's calls of hooks.
        pause_wanted: set when the caller wants a pause.
    """

    answers: "queue.SimpleQueue[HookAnswer]" = field(default_factory=queue.SimpleQueue)
    pause_wanted: threading.Event = field(default_factory=threading.Event)


def listen(cluster: Cluster) -> Inbox:
    """Reads the messages in a thread, since the main thread may wait in the call that has to be cut off.

    The thread reads from a copy of the file descriptor, and `sys.stdin` is empty from now on. A thread that waits in
    `sys.stdin` holds its lock; a process that the user's code forks closes `sys.stdin`, and would wait for that lock
    for ever.
    """
    copy = os.dup(0)
    # Code of the user's that reads standard input finds its end there, and takes no message away from the thread.
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    inbox = Inbox()
    threading.Thread(target=_listen, args=(cluster, copy, inbox), name="inbox", daemon=True).start()
    return inbox


def _listen(cluster: Cluster, pipe: int, inbox: Inbox) -> None:
    for line in _lines(pipe):
        match message := unpack(line, ToTask):
            case HookAnswer():
                inbox.answers.put(message)
            case PauseWanted():
                inbox.pause_wanted.set()
            case PeerGone(gone):
                address = cluster.address(Task.parse(gone))
                # Before the cut: the calls that it fails may be repeated at once, and the watchdog must know.
                heartbeat.extend_deadline(RECONNECT_SECS)
                print(f"{gone} is gone: {shut_down_connections(address)} connections to {address} are cut", flush=True)


def _lines(pipe: int) -> Iterator[bytes]:
    partial = b""
    # A pipe delivers bytes and not lines: one read may hold several of them, or a part of one. An empty read means
    # that the launcher has closed its end, after which no message can come.
    while block := os.read(pipe, 4096):
        *lines, partial = (partial + block).split(b"\n")
        yield from lines


def shut_down_connections(address: str) -> int:
    """Shuts down this process's connections to "host:port", so that calls in flight fail; returns how many."""
    host, port = split(address)
    try:
        peers = {(as_ipv4(ip_of(ip)), port) for _, (ip, _) in resolve(host, port)}
    except OSError:
        return 0
    # TensorFlow has no call that closes a connection, and gRPC does not expose its sockets: so all descriptors of this
    # process are searched.
    return sum(_shut_down(int(name), peers) for name in os.listdir("/proc/self/fd"))


def _shut_down(number: int, peers: set[tuple[Ip, int]]) -> bool:
    """Ends the connection behind a file descriptor, if it is one to a wanted peer."""
    with contextlib.suppress(OSError):  # not connected, or just closed
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            # Of a copy, since leaving the block closes it, and gRPC still owns the original: the number of a closed
            # descriptor could be reused for a file while gRPC goes on writing to it.
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and _peer(connection) in peers:
                    connection.shutdown(socket.SHUT_RDWR)  # acts on the connection itself, through any descriptor of it
                    return True
    return False


def _peer(connected: socket.socket) -> tuple[Ip, int]:
    """The other end of a connection; TensorFlow reaches IPv4 addresses by IPv6 sockets, as ::ffff:10.0.0.1."""
    host, port = connected.getpeername()[:2]
    return as_ipv4(ip_of(host)), int(port)
