"""The sum of an array over all workers, and the arrays of all, through a connection between every two of them.

TensorFlow's all-reduce on CPUs passes pieces around a ring: 2 (n - 1) remote calls one after the other, each of which
wakes several threads of two processes. Here every worker sends a small array to all others at once. Of a larger array
every worker sums one part and sends the sum to all others, which takes two hops and as many bytes as a ring (a direct
reduce-scatter and all-gather; see Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in
MPICH, 2005). A part is summed in pieces: each while it is in the processor's cache and while the next one arrives.

With many workers a small array would be cut into messages that cost more than their bytes. They pass on what is for
others then: about log2 n messages for each hop instead of n - 1, and the summands still arrive one by one, so that the
sum has the same bits (Bruck et al.: Efficient Algorithms for All-to-All Communications in Multiport Message-Passing
Systems, 1997).

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
# From so many workers on small arrays are passed on. A message costs a worker about as much as copying `MESSAGE_BYTES`.
MANY_WORKERS = 8
MESSAGE_BYTES = 16 * 1024
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


def distances(num_workers: int) -> list[int]:
    """How far arrays are passed on, one after the other: 1, 2, 4 and so on, below the number of workers."""
    return [1 << power for power in range((num_workers - 1).bit_length())]


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
        self._most_bytes_passed_on = ONE_HOP_BYTES if memory else max(ONE_HOP_BYTES, self._count * MESSAGE_BYTES)
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
        if self._count >= MANY_WORKERS and vector.nbytes <= self._most_bytes_passed_on:
            self._passed_on(vector, result)
        elif vector.nbytes <= ONE_HOP_BYTES:
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
        row_bytes = np.array([math.prod(array.shape[1:]) * array.itemsize for array in arrays])
        lengths = np.array([len(array) for array in arrays])
        own = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
        if self._count >= MANY_WORKERS:
            all_lengths = self._gather_by_passing_on(lengths)
            sizes = [int((of_worker * row_bytes).sum()) for of_worker in all_lengths]
            messages = self._gather_by_passing_on(own, sizes)
        else:
            all_lengths, messages = self._gather_in_one_hop(lengths, row_bytes, own)
        self._peers.flush()
        ends = [np.cumsum(of_worker * row_bytes)[:-1] for of_worker in all_lengths]
        pieces = zip(*map(np.split, messages, ends), strict=True)
        return [_joined(parts, array) for parts, array in zip(pieces, arrays, strict=True)]

    def _gather_in_one_hop(
        self, lengths: np.ndarray, row_bytes: np.ndarray, own: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The lengths and the bytes of all workers."""
        all_lengths = [lengths.copy() for _ in range(self._count)]
        message = np.concatenate([lengths.view(np.uint8), own])  # each piece would cost a call of the kernel
        self._peers.send(message.data, *self._peers.indices)
        self._peers.receive({peer: _bytes(all_lengths[peer]) for peer in self._peers.indices})
        messages = [np.empty((of_worker * row_bytes).sum(), np.uint8) for of_worker in all_lengths]
        messages[self._index] = own
        self._peers.receive({peer: messages[peer].data for peer in self._peers.indices})
        return all_lengths, messages

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

    def _passed_on(self, vector: np.ndarray, result: np.ndarray) -> None:
        """Every worker sums one part, or all of what is so small that the bytes of a second hop cost more."""
        if vector.nbytes * self._count <= ONE_HOP_BYTES:
            self._add_pieces(self._gather_by_passing_on(vector), result)
            return
        parts = self._parts(len(vector))
        room = max(part.stop - part.start for part in parts)
        # Row d is the part for the worker d places further; in the end it is this one's part from d places before.
        blocks = np.zeros([self._count, room], vector.dtype)
        for worker, part in enumerate(parts):
            blocks[(worker - self._index) % self._count, : part.stop - part.start] = vector[part]
        for distance in distances(self._count):
            rows = [row for row in range(self._count) if row & distance]
            received = np.empty([len(rows), room], vector.dtype)
            self._pass_on(blocks[rows], distance, received)
            blocks[rows] = received
        own = np.empty(room, vector.dtype)
        self._add_pieces([blocks[(self._index - worker) % self._count] for worker in range(self._count)], own)
        for part, sums in zip(parts, self._gather_by_passing_on(own), strict=True):
            result[part] = sums[: part.stop - part.start]

    def _gather_by_passing_on(self, own: np.ndarray, sizes: Sequence[int] = ()) -> list[np.ndarray]:
        """The vectors of all workers, in their order; `sizes`: of each, if they differ."""
        sizes = sizes or [len(own)] * self._count
        # Each worker has them in the order that begins with itself.
        ends = [0, *itertools.accumulate([*sizes[self._index :], *sizes[: self._index]])]
        together = np.empty(ends[-1], own.dtype)
        together[: len(own)] = own
        for distance in distances(self._count):
            num = min(distance, self._count - distance)
            self._pass_on(together[: ends[num]], -distance, together[ends[distance] : ends[distance + num]])
        places = [(worker - self._index) % self._count for worker in range(self._count)]
        return [together[ends[place] : ends[place + 1]] for place in places]

    def _pass_on(self, array: np.ndarray, distance: int, into: np.ndarray) -> None:
        """Sends an array so many workers further, and receives one from as many before."""
        self._peers.send(_bytes(array.reshape(-1)), (self._index + distance) % self._count)
        self._peers.receive({(self._index - distance) % self._count: _bytes(into.reshape(-1))})

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
    cluster: Cluster, task: Task, secret: bytes, gather: Callable[[Sequence[float]], np.ndarray]
) -> AllReduce | None:
    """Connects the workers; to be called by all of them. Either all of them get an `AllReduce`, or none does.

    Args:
        secret: `peers.SECRET_BYTES`, the same for all workers.
        gather: see `Workers.gather`.

    Returns:
        None if a worker is not connected with all others, and for a worker that is alone.
    """
    num_workers = cluster.num_workers
    if num_workers == 1:
        return None
    mesh = Mesh(cluster, task)
    index = cluster.training_tasks.index(task)
    # The port is 0 for a worker that does not listen, which must call `gather` all the same, or the others would wait
    # for it.
    ports = [int(port) for (port,) in gather([mesh.port])]
    sockets = mesh.connect(ports, secret) if all(ports) else {}
    mesh.close()
    # All of them get the same numbers, so all of them decide alike.
    if gather([len(sockets) == num_workers - 1]).all():
        return AllReduce(index, sockets, open_shared_memory(index, num_workers, secret, gather))
    for sock in sockets.values():
        sock.close()
    print(mesh.why_not or "another worker is not connected with all others", flush=True)
    return None
