"""Memory that workers of the same host share, so that large arrays cross no socket.

Each worker writes into a file of its own in memory, and the others map it. The file has no name: the others open it
through ``/proc/PID/fd``, which the kernel allows to processes of the same user. In another container or on another host
that path leads to nothing, or to something else; so the file begins with a secret and with whose it is.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

HEADER_BYTES = mmap.PAGESIZE  # so that what follows begins at a page
ALIGNMENT = 64  # TensorFlow uses the memory of an array that begins at a multiple of this, and copies any other
MAX_BYTES = 1 << 40  # of the arrays in a file: only pages that have been written take memory


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


def open_shared_memory(
    index: int, num_workers: int, secret: bytes, gather: Callable[[Sequence[float]], np.ndarray]
) -> SharedMemory | None:
    """Memory that all workers share; None if they are not all on one host. To be called by all of them.

    Args:
        secret: the same for all workers.
        gather: see `Workers.gather`.
    """
    files: dict[int, int] = {}
    with contextlib.suppress(OSError, AttributeError):  # no such call in this kernel, or in Python's C library
        files[index] = _create_file(_header(index, secret))
    places = gather([os.getpid(), files.get(index, -1)])
    with contextlib.suppress(OSError):
        for worker, (pid, number) in enumerate(places):
            if worker != index:
                files[worker] = _open_file(int(pid), int(number), _header(worker, secret))
    memory = SharedMemory(index, files)
    # All of them get the same numbers, so all of them decide alike.
    if gather([len(files) == num_workers]).all():
        return memory
    memory.close()
    return None


def _header(index: int, secret: bytes) -> bytes:
    return secret + index.to_bytes(4, "big")


def _create_file(header: bytes) -> int:
    """The descriptor of a new file in memory; raises OSError, or AttributeError where Python has no such call."""
    with _closed_on_error(os.memfd_create("tf2dist")) as descriptor:
        os.ftruncate(descriptor, HEADER_BYTES + MAX_BYTES)  # fails where the size of files is limited
        os.pwrite(descriptor, header, 0)
    return descriptor


def _open_file(pid: int, number: int, header: bytes) -> int:
    """A descriptor of the file that is number `number` in the process `pid`; raises OSError if it is not there."""
    # Without waiting: what is there may be a pipe of a process that has nothing to do with this.
    with _closed_on_error(os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)) as descriptor:
        if os.pread(descriptor, len(header), 0) != header:
            raise OSError(f"process {pid} has another file there")
    return descriptor


@contextlib.contextmanager
def _closed_on_error(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    except OSError:
        os.close(descriptor)
        raise
