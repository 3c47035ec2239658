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
    # Not `array.data`: Python's buffers have no code for bfloat16.
    return array.view(np.uint8).data


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """A new array [size] that TensorFlow uses without a copy."""
    room = np.empty(size + ALIGNMENT // dtype.itemsize, dtype)
    first = -room.ctypes.data % ALIGNMENT // dtype.itemsize
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
        self._widened = np.empty([2, PIECE], np.float32)

    @property
    def lost(self) -> LostWorkerError | None:
        """See `Peers`."""
        return self._peers.lost

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """The sum of all arrays, of their shape and type, in the order of the workers, so that all get the same bits.

        Args:
            array: float32, or narrower floats, whose sum is rounded once.

        Raises:
            LostWorkerError: a worker is gone.
        """
        vector, others = array.reshape(-1), self._peers.indices
        # A new array, since TensorFlow may use this one while the next call is made.
        result = _aligned(len(vector), vector.dtype)
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
            summands = [room.view(own.dtype)[: len(own)] for room in self._received]
            self._peers.receive({peer: _bytes(summands[peer]) for peer in self._peers.indices})
            # In the order of the workers, whoever came first: float sums depend on it, and all workers must get the
            # same bits.
            summands[self._index] = own
            self._add(summands, into)
            self._peers.send(_bytes(into), *receivers)

    def _add(self, summands: list[np.ndarray], into: np.ndarray) -> None:
        first, second, *others = summands
        if into.dtype == np.float32:
            np.add(first, second, out=into)
            for summand in others:
                into += summand
            return
        # numpy computes with narrow floats one by one, and would round each partial sum.
        total, wide = self._widened[:, : len(into)]
        np.copyto(total, first)
        for summand in (second, *others):
            np.copyto(wide, summand)
            total += wide
        np.copyto(into, total, casting="unsafe")

    def close(self) -> None:
        """Closes the connections to all others."""
        self._peers.close()
