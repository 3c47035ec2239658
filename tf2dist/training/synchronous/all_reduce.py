"""The sum of an array over all workers, and the arrays of all, through a connection between every two of them.

TensorFlow's all-reduce on CPUs passes pieces around a ring: 2 (n - 1) remote calls one after the other, each of which
wakes several threads of two processes. Here every worker sends a small array to all others at once. Of a larger array
every worker sums one part and sends the sum to all others, which takes two hops and as many bytes as a ring (a direct
reduce-scatter and all-gather; see Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in
MPICH, 2005). A part is summed in pieces: each while it is in the processor's cache and while the next one arrives.

Workers of one host do the same in memory that they share, which halves what is copied: what goes through a socket is
copied by the sender and by the receiver.
"""

import itertools
import math
import socket
from collections.abc import Callable, Sequence

import numpy as np

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.training.synchronous.peers import LostWorkerError, Mesh, Peers
from tf2dist.training.synchronous.shared_memory import ALIGNMENT, SharedMemory, open_shared_memory

ONE_HOP_BYTES = 128 * 1024  # up to this size, the bytes that two hops save cost less than the second hop
PIECE = 128 * 1024  # elements of a piece; those of a few workers fit into the cache of a core


def _bytes(array: np.ndarray) -> memoryview:
    # A view: sockets read and write the memory of the array itself, without a copy. A view of bytes, because Python's
    # buffers have no code for bfloat16.
    return array.view(np.uint8).data


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """A new array [size] that TensorFlow uses without a copy."""
    room = np.empty(size + ALIGNMENT // dtype.itemsize, dtype)
    first = -room.ctypes.data % ALIGNMENT // dtype.itemsize
    return room[first : first + size]


def _joined(parts: Sequence[np.ndarray], like: np.ndarray) -> np.ndarray:
    """The bytes of some rows as an array of them, with the type and the columns of another one."""
    values = [part.view(like.dtype) for part in parts]
    result = _aligned(sum(map(len, values)), like.dtype)
    np.concatenate(values, out=result)
    return result.reshape(-1, *like.shape[1:])


class AllReduce:
    """Sums arrays; to be called by all workers equally often, with arrays of the same shape.

    Args:
        index: the index of this worker.
        sockets: a connection to each of the others, by their indices; they belong to this object from now on.
        memory: that the workers share if they are on one host; it belongs to this object, too.
    """

    def __init__(self, index: int, sockets: dict[int, socket.socket], memory: SharedMemory | None = None) -> None:
        self._index, self._peers, self._memory = index, Peers(sockets), memory
        self._count = len(sockets) + 1
        self._is_read = True  # whether the others have read what this worker wrote into the shared memory
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
        """
        vector = array.reshape(-1)
        # A new array, since TensorFlow may use this one while the next call is made.
        result = _aligned(len(vector), vector.dtype)
        self._wait_for_readers()
        if vector.nbytes <= ONE_HOP_BYTES:
            self._in_one_hop(vector, result)
        elif self._memory:
            self._in_memory(self._memory, vector, result)
        elif self._count == 2:  # they send each other the whole array either way
            self._in_one_hop(vector, result)
        else:
            self._in_two_hops(vector, result)
        self._peers.flush()
        return result.reshape(array.shape)

    def sum_and_gather(self, vector: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        """The sum of the vectors of all workers, in one hop with what `gather` returns of the arrays.

        Args:
            vector: float32 [n], the same n on all workers.
        """
        vectors, *gathered = self.gather(vector[np.newaxis], *arrays)
        total = _aligned(len(vector), vector.dtype)
        self._add(list(vectors), total)
        return [total, *gathered]

    def gather(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Each of the arrays with those of the others, along the first axis in the order of the workers.

        Args:
            arrays: all workers pass equally many, of the same types, and of shapes that differ in the first axis alone.
        """
        self._wait_for_readers()
        lengths = np.array([[len(array) for array in arrays]] * self._count)
        own = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
        message = np.concatenate([lengths[0].view(np.uint8), own])  # each piece would cost a call of the kernel
        self._peers.send(message.data, *self._peers.indices)
        self._peers.receive({peer: _bytes(lengths[peer]) for peer in self._peers.indices})
        row_bytes = [math.prod(array.shape[1:]) * array.itemsize for array in arrays]
        ends = np.cumsum(lengths * row_bytes, axis=1)
        messages = [np.empty(end, np.uint8) for end in ends[:, -1]]
        messages[self._index] = own
        self._peers.receive({peer: messages[peer].data for peer in self._peers.indices})
        self._peers.flush()
        pieces = zip(*map(np.split, messages, ends[:, :-1]), strict=True)
        return [_joined(parts, array) for parts, array in zip(pieces, arrays, strict=True)]

    def _wait_for_readers(self) -> None:
        """Waits until the others have read what this worker wrote into the shared memory."""
        if not self._is_read:
            self._peers.meet()
            self._is_read = True

    def _in_one_hop(self, vector: np.ndarray, result: np.ndarray) -> None:
        self._peers.send(_bytes(vector), *self._peers.indices)
        self._sum(vector, result)

    def _in_two_hops(self, vector: np.ndarray, result: np.ndarray) -> None:
        parts = self._parts(len(vector))
        for peer in self._peers.indices:
            self._peers.send(_bytes(vector[parts[peer]]), peer)
        # The second hop begins with the first piece of the sum.
        self._sum(vector[parts[self._index]], result[parts[self._index]], self._peers.indices)
        self._peers.receive({peer: _bytes(result[parts[peer]]) for peer in self._peers.indices})

    def _in_memory(self, memory: SharedMemory, vector: np.ndarray, result: np.ndarray) -> None:
        """Every worker writes its array; two then read each other's, and more sum a part each and read the sums."""
        arrays = memory.arrays(len(vector), vector.dtype)
        np.copyto(arrays[self._index], vector)
        self._meet()
        if self._count == 2:
            self._add_pieces([arrays[worker] for worker in range(2)], result)
        else:
            parts = self._parts(len(vector))
            sums = memory.arrays(len(vector), vector.dtype, first=-(-vector.nbytes // ALIGNMENT) * ALIGNMENT)
            own = parts[self._index]
            self._add_pieces([arrays[worker][own] for worker in range(self._count)], sums[self._index][own])
            self._meet()
            for worker, part in enumerate(parts):
                np.copyto(result[part], sums[worker][part])
        # Nothing may be written before the others have announced this, too: the array of the next call may be larger,
        # and lie where others still read this one's sums. That call waits for them; most likely they are done by then.
        self._peers.announce()
        self._is_read = False

    def _meet(self) -> None:
        """Waits until all others have come as far as this worker."""
        self._peers.announce()
        self._peers.meet()

    def _parts(self, size: int) -> list[slice]:
        """The part of an array that each worker sums."""
        bounds = [size * part // self._count for part in range(self._count + 1)]
        return [slice(*pair) for pair in itertools.pairwise(bounds)]

    def _add_pieces(self, summands: list[np.ndarray], into: np.ndarray) -> None:
        for begin in range(0, len(into), PIECE):
            piece = slice(begin, begin + PIECE)
            self._add([summand[piece] for summand in summands], into[piece])

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
        if self._memory:
            self._memory.close()


def connect(
    cluster: Cluster, task: Task, secret: bytes, add_up: Callable[[list[float]], np.ndarray]
) -> AllReduce | None:
    """Connects the workers; to be called by all of them. Either all of them get an `AllReduce`, or none does.

    Args:
        secret: `peers.SECRET_BYTES`, the same for all workers.
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
