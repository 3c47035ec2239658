"""Memory that workers of the same host share, so that large arrays cross no socket.

Each worker writes into a file of its own, and the others map it; see `shared_files`. The file begins with a secret and
with whose it is.
"""

import contextlib
import mmap
import os
from collections.abc import Callable

import numpy as np

from tf2dist.process.shared_files import HEADER_BYTES, create, open_of


class SharedMemory:
    """This worker's own memory, and what it sees of that of the others.

    Args:
        index: the index of this worker.
        files: the descriptors of the files by the indices of the workers; they belong to this object from now on.
    """

    def __init__(self, index: int, files: dict[int, int]) -> None:
        self._index, self._files = index, files
        self._maps: dict[int, mmap.mmap] = {}
        self._size = 0

    def arrays(self, size: int, dtype: np.dtype, first: int = 0) -> dict[int, np.ndarray]:
        """An array [size] of each worker, `first` bytes from the beginning; only one's own can be written."""
        self._map(first + size * dtype.itemsize)
        return {
            worker: np.frombuffer(mapped, dtype, size, HEADER_BYTES + first) for worker, mapped in self._maps.items()
        }

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def _map(self, size: int) -> None:
        """Maps at least so many bytes of each file."""
        if size <= self._size:
            return
        self._size = size
        for worker, descriptor in self._files.items():
            access = mmap.PROT_READ | (mmap.PROT_WRITE if worker == self._index else 0)
            self._maps[worker] = mmap.mmap(descriptor, HEADER_BYTES + size, mmap.MAP_SHARED, access)


def share(
    index: int, num_workers: int, secret: bytes, add_up: Callable[[list[float]], np.ndarray]
) -> SharedMemory | None:
    """Memory that all workers share; None if they are not all on one host. To be called by all of them.

    Args:
        secret: the same for all workers.
        add_up: sums the vectors that all workers pass to it.
    """
    files: dict[int, int] = {}
    with contextlib.suppress(OSError, AttributeError):  # no such call in this kernel, or in Python's C library
        files[index] = create(_header(index, secret))
    mine = [os.getpid(), files.get(index, -1)]
    # Each worker passes its numbers at its own index and 0 elsewhere, so the sum holds those of all.
    told = add_up([float(number) * (worker == index) for worker in range(num_workers) for number in mine])
    places = [(int(told[2 * worker]), int(told[2 * worker + 1])) for worker in range(num_workers)]
    with contextlib.suppress(OSError):
        for worker in range(num_workers):
            if worker != index:
                files[worker] = open_of(*places[worker], _header(worker, secret))
    found = SharedMemory(index, files)
    # All of them get the same sum, so all of them decide alike.
    if add_up([float(len(files) == num_workers)])[0] == num_workers:
        return found
    found.close()
    return None


def _header(index: int, secret: bytes) -> bytes:
    return secret + index.to_bytes(4, "big")
