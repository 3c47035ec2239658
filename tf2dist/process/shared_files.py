"""Files in memory that processes of one host and one user share.

A file has no name. Another process opens it through ``/proc/PID/fd``, which the kernel allows to processes of the same
user. In another container or on another host that path leads to nothing, or to something else; so each file begins with
a header that its owner has told to the others.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator

HEADER_BYTES = mmap.PAGESIZE  # so that what follows begins at a page
# TensorFlow uses the memory of an array that begins at a multiple of this, and copies any other. A loop that reads the
# same array in each step (`carriers.Room.take_again`) needs it not to be copied.
ALIGNMENT = 64
ANY_BYTES = 1 << 40  # the size of a file that will hold arrays: only pages that have been written take memory


def create(header: bytes, size: int = ANY_BYTES) -> int:
    """The descriptor of a new file with room for `size` bytes after its header; raises OSError.

    Raises:
        AttributeError: Python's C library has no such call.
    """
    with _closed_on_error(os.memfd_create("tf2dist")) as descriptor:
        os.ftruncate(descriptor, HEADER_BYTES + size)  # fails where the size of files is limited
        os.pwrite(descriptor, header, 0)
    return descriptor


def open_of(pid: int, number: int, header: bytes, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file that is number `number` in the process `pid`; raises OSError if it is not there."""
    # Without waiting: what is there may be a pipe of a process that has nothing to do with this.
    with _closed_on_error(os.open(f"/proc/{pid}/fd/{number}", flags | os.O_NONBLOCK)) as descriptor:
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
