"""Connections between every two synchronous workers, for `all_reduce`.

Every worker listens on a free port of its own address and connects to the workers with lower indices. The ports, and a
secret that proves who connects, travel through TensorFlow's cluster. If one connection cannot be made, because of a
firewall for instance, none is used.
"""

import contextlib
import hmac
import socket
import struct
import time
from collections.abc import Callable

import numpy as np

from tf2dist.cluster.addresses import listen_at_own, resolve, split
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ClusterError
from tf2dist.training.synchronous.all_reduce import AllReduce
from tf2dist.training.synchronous.shared_memory import open_shared_memory

SECRET_BYTES = 32
CONNECT_SECS = 10.0  # for all connections of a worker
CALL_SECS = 3.0  # to connect to one address of a worker
GREETING_SECS = 1.0  # for a worker that connects to send the secret and its index
INDEX = struct.Struct(">I")


def join(cluster: Cluster, task: Task, secret: bytes, add_up: Callable[[list[float]], np.ndarray]) -> AllReduce | None:
    """Connects the workers; to be called by all of them. Either all of them get an `AllReduce`, or none does.

    Args:
        secret: SECRET_BYTES, the same for all workers.
        add_up: sums the vectors that all workers pass to it.

    Returns:
        None if a worker is not connected with all others, and for a worker that is alone.
    """
    num_workers = cluster.num_workers
    if num_workers == 1:
        return None
    mesh = Mesh(cluster, task)
    index = cluster.training_tasks.index(task)
    # Each worker passes its port at its own index and 0 elsewhere, so the sum holds all ports; 0 for one that does not
    # listen, which must call `add_up` all the same, or the others would wait for it.
    ports = [int(port) for port in add_up([float(mesh.port) * (other == index) for other in range(num_workers)])]
    sockets = mesh.connect(ports, secret) if all(ports) else {}
    mesh.close()
    # All of them get the same sum, so all of them decide alike.
    connected = add_up([float(len(sockets) == num_workers - 1)])[0]
    if connected == num_workers:
        return AllReduce(index, sockets, open_shared_memory(index, num_workers, secret, add_up))
    for sock in sockets.values():
        sock.close()
    print(mesh.why_not or "another worker is not connected with all others", flush=True)
    return None


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
