"""The sum of an array over all workers, through a connection between every two of them.

TensorFlow's all-reduce on CPUs passes pieces around a ring: 2 (n - 1) remote calls one after the other, each of which
wakes several threads of two processes. Here every worker sends a small array to all others at once. Of a larger array
every worker sums one part and sends the sum to all others, which takes two hops and as many bytes as a ring (a direct
reduce-scatter and all-gather; see Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in
MPICH, 2005). A part is summed in pieces: each while it is in the processor's cache and while the next one arrives.
"""

import itertools
import socket

import numpy as np

from tf2dist.training.synchronous.peers import LostWorkerError, Peers

ONE_HOP_BYTES = 128 * 1024  # up to this size, the bytes that two hops save cost less than the second hop
PIECE = 128 * 1024  # elements of a piece; those of a few workers fit into the cache of a core
# TensorFlow uses the memory of an array that begins at a multiple of this, and copies any other.
ALIGNMENT = 64


def _bytes(array: np.ndarray) -> memoryview:
    # A view: sockets read and write the memory of the array itself, without a copy.
    return array.data.cast("B")


def _aligned(size: int) -> np.ndarray:
    """A new array, float32 [size], that TensorFlow uses without a copy."""
    room = np.empty(size + ALIGNMENT // 4, np.float32)
    first = -room.ctypes.data % ALIGNMENT // 4
    return room[first : first + size]


class AllReduce:
    """Sums arrays; to be called by all workers equally often, with arrays of the same shape.

    Args:
        index: the index of this worker.
        sockets: a connection to each of the others, by their indices; they belong to this object from now on.
    """

    def __init__(self, index: int, sockets: dict[int, socket.socket]) -> None:
        self._index, self._peers = index, Peers(sockets)
        # Kept from call to call: the kernel would map and zero fresh memory.
        self._received = np.empty([len(sockets) + 1, PIECE], np.float32)

    @property
    def lost(self) -> LostWorkerError | None:
        """See `Peers`."""
        return self._peers.lost

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """The sum of all arrays, float32 of their shape, in the order of the workers, so that all get the same bits.

        Raises:
            LostWorkerError: a worker is gone.
        """
        vector, others = array.reshape(-1), self._peers.indices
        # A new array, since TensorFlow may use this one while the next call is made.
        result = _aligned(len(vector))
        # Two workers send each other the whole array either way.
        if len(others) == 1 or vector.nbytes <= ONE_HOP_BYTES:
            self._peers.send(_bytes(vector), *others)
            self._sum(vector, result)
        else:
            bounds = [len(vector) * part // (len(others) + 1) for part in range(len(others) + 2)]
            parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
            for peer in others:
                self._peers.send(_bytes(vector[parts[peer]]), peer)
            # The second hop begins with the first piece of the sum.
            self._sum(vector[parts[self._index]], result[parts[self._index]], others)
            self._peers.receive({peer: _bytes(result[parts[peer]]) for peer in others})
        self._peers.flush()
        return result.reshape(array.shape)

    def _sum(self, mine: np.ndarray, result: np.ndarray, receivers: tuple[int, ...] = ()) -> None:
        """Sums `mine` and what the others send, and sends the sum to `receivers`."""
        for begin in range(0, len(mine), PIECE):
            own, into = mine[begin : begin + PIECE], result[begin : begin + PIECE]
            summands = list(self._received[:, : len(own)])
            self._peers.receive({peer: _bytes(summands[peer]) for peer in self._peers.indices})
            # In the order of the workers, whoever came first: float sums depend on it, and all workers must get the
            # same bits.
            summands[self._index] = own
            np.add(summands[0], summands[1], out=into)
            for summand in summands[2:]:
                into += summand
            self._peers.send(_bytes(into), *receivers)

    def close(self) -> None:
        """Closes the connections to all others."""
        self._peers.close()
