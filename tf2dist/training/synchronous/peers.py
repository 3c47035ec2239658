"""Connections between every two synchronous workers, and bytes to and from all of them at the same time.

Every worker listens on a free port of its own address and connects to the workers with lower indices. The ports, and a
secret that proves who connects, travel through TensorFlow's cluster. If one connection cannot be made, because of a
firewall for instance, none is used.
"""

import contextlib
import hmac
import select
import socket
import struct
import time
from collections import deque
from typing import NoReturn

from tf2dist.cluster.addresses import listen_at_own, resolve, split
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError, brief_reason

SECRET_BYTES = 32
CONNECT_SECS = 10.0  # for all connections of a worker
CALL_SECS = 3.0  # to connect to one address of a worker
GREETING_SECS = 1.0  # for a worker that connects to send the secret and its index
INDEX = struct.Struct(">I")
Views = dict[int, memoryview]  # by the index of the worker


class LostWorkerError(Exception):
    """The connection to the worker with this index has ended."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class Peers:
    """The connections of one worker. Every method raises LostWorkerError if a worker is gone.

    Attributes:
        indices: of the other workers.
        lost: the error that was raised, kept because TensorFlow replaces it by an exception of its own if a graph makes
            the call.

    Args:
        sockets: a connection to each of the others, by their indices; they belong to this object from now on.
    """

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self.indices = tuple(sockets)
        self.lost: LostWorkerError | None = None
        self._sockets, self._peers = sockets, {sock.fileno(): peer for peer, sock in sockets.items()}
        self._unsent: dict[int, deque[memoryview]] = {peer: deque() for peer in sockets}
        # The one whose connection ended first. Those that waited for it end theirs after that, and are not lost.
        self._first_closed: int | None = None
        self._poll = select.poll()
        for sock in sockets.values():
            self._poll.register(sock, select.POLLRDHUP)
        # If all workers sent first and received then, full buffers of the kernel could block all of them without end.
        for sock in sockets.values():
            sock.setblocking(False)

    def send(self, view: memoryview, *peers: int) -> None:
        """Queues bytes, which must not change before `flush`, and sends at once what the kernel takes."""
        for peer in peers:
            self._unsent[peer].append(view)
            self._push(peer)

    def receive(self, missing: Views) -> None:
        """Fills the views, and sends meanwhile what is queued."""
        # An empty view is filled, and receiving nothing would seem to be the end of the connection.
        missing = {peer: view for peer, view in missing.items() if view}
        ready = list(missing)  # trying first mostly saves a system call
        while missing:
            for peer in ready:
                missing[peer] = self._pull(peer, missing[peer])
                if not missing[peer]:
                    del missing[peer]
            ready = self._wait(missing) if missing else []

    def announce(self) -> None:
        """Sends all others a sign, which they expect by `meet`."""
        self.send(memoryview(b"."), *self.indices)

    def meet(self) -> None:
        """Waits for the next sign of each of the others; before it come the bytes that they have sent earlier."""
        self.receive({peer: memoryview(bytearray(1)) for peer in self.indices})

    def flush(self) -> None:
        """Sends what is queued."""
        while any(self._unsent.values()):
            self._wait({})

    def close(self) -> None:
        """Closes all connections."""
        for sock in self._sockets.values():
            sock.close()

    def _wait(self, missing: Views) -> list[int]:
        """Waits until something can be done, and sends; returns of whom of `missing` something can be received."""
        unsent = {peer for peer, views in self._unsent.items() if views}
        for peer in unsent | missing.keys():
            wanted = (select.POLLOUT if peer in unsent else 0) | (select.POLLIN if peer in missing else 0)
            self._poll.register(self._sockets[peer], wanted | select.POLLRDHUP)
        ready = [(self._peers[number], events) for number, events in self._poll.poll()]
        for peer in unsent | missing.keys():
            self._poll.register(self._sockets[peer], select.POLLRDHUP)
        for peer, events in sorted(ready, key=lambda one: one[0] in missing):
            if events & ~(select.POLLIN | select.POLLOUT):
                self._first_closed = peer if self._first_closed is None else self._first_closed
                self._poll.unregister(self._sockets[peer])  # or no other wait would wait
        # The end of a connection counts as readable and writable, so that a call is made, which raises the reason.
        for peer, events in ready:
            if peer in unsent and events & ~select.POLLIN:
                self._push(peer)
        return [peer for peer, events in ready if peer in missing and events & ~select.POLLOUT]

    def _push(self, peer: int) -> None:
        """Sends what the kernel takes."""
        unsent, sock = self._unsent[peer], self._sockets[peer]
        try:
            while unsent:
                view = unsent[0]
                count = sock.send(view)
                if count < len(view):
                    unsent[0] = view[count:]
                else:
                    unsent.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(peer, error)

    def _pull(self, peer: int, into: memoryview) -> memoryview:
        """Receives what is there; returns the part of `into` that is still to be filled."""
        try:
            count = self._sockets[peer].recv_into(into)
            if not count:
                raise ConnectionError("the connection was closed")
        except BlockingIOError:
            return into
        except OSError as error:
            self._lose(peer, error)
        return into[count:]

    def _lose(self, peer: int, error: OSError) -> NoReturn:
        first = peer if self._first_closed is None else self._first_closed
        self.lost = LostWorkerError(first, brief_reason(error))
        raise self.lost from None


class Mesh:
    """This worker's connections to the others.

    Attributes:
        port: the port on which it listens; 0 if it does not.
        why_not: why it does not listen, or could not connect; "" if it does and could.
    """

    def __init__(self, cluster: Cluster, task: Task) -> None:
        self._addresses = [cluster.address(worker) for worker in cluster.training_tasks]
        self._index = cluster.training_tasks.index(task)
        self.port, self.why_not = 0, ""
        try:
            self._listener = listen_at_own(cluster, task)
            self.port = int(self._listener.getsockname()[1])
        except ClusterError as error:
            self.why_not = str(error)

    def connect(self, ports: list[int], secret: bytes) -> dict[int, socket.socket]:
        """A connection to each other worker, by its index; none at all if one cannot be made, and `why_not` is set.

        Args:
            ports: the ports of all workers.
            secret: SECRET_BYTES that all workers know.
        """
        deadline, sockets = time.monotonic() + CONNECT_SECS, {}
        # Calls go to lower indices only, so two workers do not connect to each other twice. They need no `accept` to
        # succeed, since the kernel completes connections to a listening port, so nobody waits for anybody in a circle.
        try:
            for index in range(self._index):
                sockets[index] = self._call(index, ports[index], secret, deadline)
            while len(sockets) < len(ports) - 1:
                index, sock = self._accept(secret, deadline)
                sockets[index] = sock
        except OSError as error:
            self.why_not = f"worker {self._index} is not connected with all others: {error}"
            for sock in sockets.values():
                sock.close()
            return {}
        # Nagle's algorithm would hold back the end of a vector until the peer has acknowledged what came before.
        for sock in sockets.values():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sockets

    def _call(self, index: int, port: int, secret: bytes, deadline: float) -> socket.socket:
        error = OSError(f"worker {index} has no address")
        for family, address in resolve(split(self._addresses[index])[0], port):
            try:
                with contextlib.ExitStack() as stack:
                    # Fails for an IPv6 address where the kernel has no IPv6; then the next address is tried.
                    sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    sock.settimeout(max(0.1, min(CALL_SECS, deadline - time.monotonic())))
                    sock.connect(address)
                    sock.sendall(secret + INDEX.pack(self._index))
                    stack.pop_all()  # the socket stays open from here on
                    return sock
            except OSError as one:
                error = one
        raise error

    def _accept(self, secret: bytes, deadline: float) -> tuple[int, socket.socket]:
        """The index and the connection of the next worker that connects; anybody without the secret is turned away."""
        while (left := deadline - time.monotonic()) > 0:
            self._listener.settimeout(left)
            sock, _ = self._listener.accept()
            said = _greeting(sock, SECRET_BYTES + INDEX.size)
            # Compared in constant time: how long a comparison takes must not tell how much of a guess was right.
            if hmac.compare_digest(said[:SECRET_BYTES], secret) and len(said) == SECRET_BYTES + INDEX.size:
                sock.settimeout(None)
                return int(INDEX.unpack(said[SECRET_BYTES:])[0]), sock
            sock.close()
        raise TimeoutError("timed out")

    def close(self) -> None:
        """Stops listening."""
        if self.port:
            self._listener.close()


def _greeting(sock: socket.socket, size: int) -> bytes:
    """The first bytes from a peer, up to `size`; fewer if it is slow, since others are waiting to connect."""
    said, deadline = b"", time.monotonic() + GREETING_SECS
    with contextlib.suppress(OSError):
        while len(said) < size:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if not (part := sock.recv(size - len(said))):
                break
            said += part
    return said
