"""Memory that a ps and the workers of its host share, so that large tensors cross no socket.

A tensor in a message is copied three times: into the socket, out of it, and from the message into a new tensor. Here
the sender copies it once into a file of the worker, and the receiver computes with the memory of that file itself.

Both ends run functions that their processes publish. A worker's call begins with a ticket, by which each ps finds the
worker's file, and which travels in place of the tensors. A place in the file is written again only when what it held
has been used: by the worker with the gradients that it has computed from it, by the ps with what it has made of these.

That holds within a call, and calls of a worker follow one another. But TensorFlow may give up a call that still runs on
the worker or on a ps. So a call that begins before another one has ended gets a new file, and whatever the other one
still reads or writes is not its own. A process that takes the place of a lost worker has a new file, too.
"""

import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf2dist.process.shared_files import HEADER_BYTES, create, open_of
from tf2dist.process.tf_internals import publish_functions
from tf2dist.training.asynchronous.doorbells import Doorbells, OwnDoorbells, Push

BEGIN, END, PUT, TAKE, EXCHANGE, ANSWER, AWAIT_PUSH, AWAIT_ANSWERS = (
    f"tf2dist.shared_memory.{name}"
    for name in ("begin", "end", "put", "take", "exchange", "answer", "await_push", "await_answers")
)
NUMBER_BYTES = 8  # of the header; the descriptors of the doorbells follow it


class Ticket(NamedTuple):
    """Names the file that a worker uses in a call.

    It travels as int64 [4].

    Attributes:
        worker: its index.
        pid: its process.
        descriptor: of the file in that process.
        number: with which the file begins; nobody can guess it.
    """

    worker: int
    pid: int
    descriptor: int
    number: int

    @property
    def header(self) -> bytes:
        return _header(self.number)


def _header(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


class File:
    """A file that this process has mapped.

    Args:
        descriptor: of the file; it still belongs to the caller.
    """

    def __init__(self, ticket: Ticket, descriptor: int) -> None:
        self.ticket, self._mapped = ticket, mmap.mmap(descriptor, 0)
        self._arrays: dict[bytes, list[np.ndarray]] = {}
        self._doorbells: dict[int, Doorbells] = {}

    def doorbells(self, ps: int) -> Doorbells:
        """Those of a ps of this process; raises OSError if the worker is gone or has given up the call."""
        if ps not in self._doorbells:
            found = Doorbells(self.ticket.pid, self._descriptors(ps + 1)[ps])
            # The worker closes the file before its pipes. While it is there, the numbers are not yet those of others.
            os.close(open_of(self.ticket.pid, self.ticket.descriptor, self.ticket.header))
            self._doorbells[ps] = found
        return self._doorbells[ps]

    def _descriptors(self, num_ps: int) -> np.ndarray:
        """See `OwnDoorbells`: int32 [num_ps, 2]."""
        return np.frombuffer(self._mapped, np.int32, 2 * num_ps, NUMBER_BYTES).reshape(num_ps, 2)

    def arrays(self, places: np.ndarray) -> list[np.ndarray]:
        """The arrays [size] at places; they stay valid when the file is closed.

        Args:
            places: [n, 3], for each the first byte, the number of elements, and TensorFlow's number of their type.
        """
        key = places.tobytes()
        if (found := self._arrays.get(key)) is None:
            # TensorFlow may reuse the memory of a tensor that it has read last, so the arrays can be written.
            found = self._arrays[key] = [
                np.frombuffer(self._mapped, tf.as_dtype(dtype).as_numpy_dtype, size, HEADER_BYTES + first)
                for first, size, dtype in places.tolist()
            ]
        return found

    def bytes_between(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """The bytes of the file from the beginning of an array in it to the end of another one."""
        begin = first.ctypes.data - np.frombuffer(self._mapped, np.uint8).ctypes.data
        return np.frombuffer(self._mapped, np.uint8, last.ctypes.data + last.nbytes - first.ctypes.data, begin)


class OwnFile(File):
    """A new file of a worker of this process, with room for `size` bytes.

    Attributes:
        own_doorbells: those of the worker.
        in_use: whether a call has begun that has not ended.
    """

    def __init__(self, worker: int, size: int, num_ps: int) -> None:
        number = secrets.randbits(62)
        descriptor = create(_header(number), size)
        weakref.finalize(self, os.close, descriptor)
        super().__init__(Ticket(worker, os.getpid(), descriptor, number), descriptor)
        self.size, self.in_use = size, False
        self.own_doorbells = OwnDoorbells(num_ps)
        self._descriptors(num_ps)[:] = self.own_doorbells.descriptors


class Files:
    """The files of the workers of this process, and those that a ps of this process has opened."""

    def __init__(self) -> None:
        self._own: dict[int, OwnFile] = {}
        self._opened: dict[int, File] = {}
        self._lock = threading.Lock()  # of the two: functions in graphs run in threads of TensorFlow

    def begin(self, worker: np.ndarray, size: np.ndarray, num_ps: np.ndarray) -> np.ndarray:
        """Begins a call of a worker, whose file needs room for `size` bytes; returns its ticket."""
        with self._lock:
            own = self._own.get(int(worker))
            if own is None or own.in_use or own.size != size:
                own = self._own[int(worker)] = OwnFile(int(worker), int(size), int(num_ps))
            own.in_use = True
            return np.array(own.ticket)

    def end(self, ticket: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """Ends the call of this ticket, of which nothing reads or writes any more."""
        with self._lock:
            own = self._own_of(_ticket(ticket))
            if own is None:
                raise ValueError("another call of this worker has begun before this one has ended")
            own.in_use = False
        return ticket

    def put(self, ticket: np.ndarray, places: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
        """Copies arrays to places in the file of the ticket, which is returned for what must come later."""
        self._write(self._file(ticket), places, arrays)
        return ticket

    def take(self, ticket: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
        """The arrays at places in the file of the ticket, without a copy."""
        return self._file(ticket).arrays(places)

    # Where the steps of a call are executed in a loop, a worker pushes and a ps answers until there are no `more`.

    def await_answers(self, ticket: np.ndarray, secs: np.ndarray) -> np.ndarray:
        """On a worker: waits for an answer of each ps; see `OwnDoorbells.wait`."""
        return np.array(self._own_file(ticket).own_doorbells.wait(float(secs)))

    def exchange(
        self, ticket: np.ndarray, more: np.ndarray, secs: np.ndarray, places: np.ndarray, *arrays: np.ndarray
    ) -> np.ndarray:
        """On a worker: as `put`, tells each ps, and as `await_answers` if there are `more` to come."""
        own = self._own_file(ticket)
        self._write(own, places, arrays)
        own.own_doorbells.ring(Push.WITH_MORE if more else Push.LAST)
        return np.array(not more or own.own_doorbells.wait(float(secs)))

    def answer(
        self, ticket: np.ndarray, ps: np.ndarray, more: np.ndarray, places: np.ndarray, *arrays: np.ndarray
    ) -> np.ndarray:
        """On a ps: as `put`, and tells the worker, if there are `more` to come."""
        if more:
            file = self._file(ticket)
            self._write(file, places, arrays)
            file.doorbells(int(ps)).ring()
        return ticket

    def await_push(self, ticket: np.ndarray, ps: np.ndarray, more: np.ndarray) -> np.ndarray:
        """On a ps: waits for a push, if there are `more` to come; returns a `Push`."""
        return np.array(self._file(ticket).doorbells(int(ps)).wait() if more else Push.NONE)

    @staticmethod
    def _write(file: File, places: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        targets = file.arrays(places)
        whole = file.bytes_between(targets[0], targets[-1])
        # What lies there already, as a state that has not changed, would be overwritten before it is copied.
        safe = [array.copy() if np.may_share_memory(array, whole) else array for array in arrays]
        for target, array in zip(targets, safe, strict=True):
            np.copyto(target, array.reshape(-1))

    def _file(self, numbers: np.ndarray) -> File:
        ticket = _ticket(numbers)
        with self._lock:
            if own := self._own_of(ticket):
                return own
            found = self._opened.get(ticket.worker)
            if found is None or found.ticket != ticket:
                descriptor = open_of(ticket.pid, ticket.descriptor, ticket.header, os.O_RDWR)
                try:
                    found = self._opened[ticket.worker] = File(ticket, descriptor)
                finally:
                    os.close(descriptor)  # the map has one of its own
            return found

    def _own_file(self, numbers: np.ndarray) -> OwnFile:
        with self._lock:
            own = self._own_of(_ticket(numbers))
        if own is None:
            raise ValueError("another call of this worker has begun before this one has ended")
        return own

    def _own_of(self, ticket: Ticket) -> OwnFile | None:
        """The file of this ticket, if it is that of a worker of this process and no other call has another one."""
        own = self._own.get(ticket.worker)
        return own if own is not None and own.ticket == ticket else None


def _ticket(numbers: np.ndarray) -> Ticket:
    return Ticket(*map(int, numbers))


# TensorFlow holds Python functions by weak references only, so they would vanish without this.
_files = Files()
_published: dict[str, Any] = {
    BEGIN: _files.begin,
    END: _files.end,
    PUT: _files.put,
    TAKE: _files.take,
    EXCHANGE: _files.exchange,
    ANSWER: _files.answer,
    AWAIT_PUSH: _files.await_push,
    AWAIT_ANSWERS: _files.await_answers,
}


def publish() -> None:
    """Makes the functions callable by the graphs that run in this process, as a ps or a worker."""
    publish_functions(_published)


def works_here() -> bool:
    """Whether processes like this one can share memory of any size."""
    header = secrets.token_bytes(8)
    try:
        descriptor = create(header)
    except (OSError, AttributeError):  # no such call in this kernel or in Python's C library, or a limit of files
        return False
    try:
        os.close(open_of(os.getpid(), descriptor, header, os.O_RDWR))
    except OSError:  # no /proc, or one that does not show this process
        return False
    finally:
        os.close(descriptor)
    return True
