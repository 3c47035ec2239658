"""The sum of a vector over all workers, through a connection between every two of them.

TensorFlow's all-reduce on CPUs passes pieces around a ring: 2 (n - 1) remote calls one after the other, each of which
wakes several threads of two processes. Here every worker sends a small vector to all others at once. Of a larger vector
every worker sums one part and sends the sum to all others, which takes two hops and as many bytes as a ring (a direct
reduce-scatter and all-gather; see Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in
MPICH, 2005).
"""

import itertools
import select
import socket

import numpy as np

ONE_HOP_BYTES = 128 * 1024  # up to this size, the bytes that two hops save cost less than the second hop
Parts = dict[int, memoryview]  # by the index of the worker


def _bytes(array: np.ndarray) -> memoryview:
    # A view: sockets read and write the memory of the array itself, without a copy.
    return array.data.cast("B")


class LostWorkerError(Exception):
    """The connection to a worker has ended.

    Attributes:
        index: the index of that worker.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class AllReduce:
    """Sums vectors; to be called by all workers equally often, with vectors of the same size.

    Attributes:
        lost: the error of a call, kept because TensorFlow replaces it by an exception of its own if a graph makes the
            call.

    Args:
        index: the index of this worker.
        sockets: a connection to each of the others, by their indices; they belong to this object from now on.
    """

    def __init__(self, index: int, sockets: dict[int, socket.socket]) -> None:
        self.lost: LostWorkerError | None = None
        self._index, self._sockets = index, sockets
        self._buffer = np.empty([0, 0], np.float32)
        # A blocking send would wait for a peer that is itself waiting to send; see `_swap`.
        for sock in sockets.values():
            sock.setblocking(False)

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """The sum of all vectors, float32 [n], in the order of the workers, so that all get the same bits.

        Raises:
            LostWorkerError: a worker is gone.
        """
        num_workers = len(self._sockets) + 1
        # Two workers send each other the whole vector either way.
        if num_workers == 2 or vector.nbytes <= ONE_HOP_BYTES:
            return self._sum_over_workers(vector, dict.fromkeys(self._sockets, _bytes(vector)))

        # The first hop: each worker sums its part of all vectors.
        bounds = [len(vector) * part // num_workers for part in range(num_workers + 1)]
        parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        sends = {peer: _bytes(vector[parts[peer]]) for peer in self._sockets}
        result = np.empty_like(vector)
        result[parts[self._index]] = self._sum_over_workers(vector[parts[self._index]], sends)

        # The second hop: each worker sends the sum of its part to all others.
        mine = _bytes(result[parts[self._index]])
        sums = {peer: _bytes(result[parts[peer]]) for peer in self._sockets}
        self._swap(dict.fromkeys(self._sockets, mine), sums)
        return result

    def _sum_over_workers(self, mine: np.ndarray, sends: Parts) -> np.ndarray:
        """Sends each worker its part, and sums `mine` and what the others have sent."""
        # The buffer is kept from step to step: fresh memory of this size would be mapped and zeroed by the kernel.
        if self._buffer.shape[1] != len(mine):
            self._buffer = np.empty([len(self._sockets) + 1, len(mine)], np.float32)
        self._swap(sends, {peer: _bytes(self._buffer[peer]) for peer in self._sockets})
        self._buffer[self._index] = mine
        # In the order of the workers, whoever came first: float sums depend on it, and all workers must get the same
        # bits. The result is a new array, since TensorFlow may use it while the next call fills the buffer.
        result: np.ndarray = self._buffer[0] + self._buffer[1]
        for received in self._buffer[2:]:
            result += received
        return result

    def _swap(self, unsent: Parts, missing: Parts) -> None:
        """Sends `unsent` and fills `missing` at the same time.

        If all workers sent first, full buffers of the kernel could block all of them without end.
        """
        poll, peers = select.poll(), {sock.fileno(): peer for peer, sock in self._sockets.items()}
        # The first round tries to send at once, which mostly succeeds and saves a system call.
        ready = [(number, select.POLLOUT) for number in peers]
        while True:
            for number, events in ready:
                peer = peers[number]
                # POLLERR and POLLHUP pass both tests, so that a call is made, which raises the reason.
                try:
                    if unsent[peer] and events & ~select.POLLIN:
                        unsent[peer] = unsent[peer][self._sockets[peer].send(unsent[peer]) :]
                    if missing[peer] and events & ~select.POLLOUT:
                        missing[peer] = missing[peer][self._receive(peer, missing[peer]) :]
                except BlockingIOError:
                    pass
                except OSError as error:
                    self.lost = LostWorkerError(peer, error.strerror or str(error))
                    raise self.lost from None
                if wanted := (select.POLLOUT if unsent[peer] else 0) | (select.POLLIN if missing[peer] else 0):
                    poll.register(number, wanted)
                else:
                    poll.unregister(number)
                    del peers[number]
            if not peers:
                return
            ready = poll.poll()

    def _receive(self, peer: int, into: memoryview) -> int:
        count = self._sockets[peer].recv_into(into)
        if not count:
            raise ConnectionError("the connection was closed")
        return count

    def close(self) -> None:
        """Closes the connections to all others."""
        for sock in self._sockets.values():
            sock.close()
