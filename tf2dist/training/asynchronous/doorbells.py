"""Pipes by which a worker and each ps of its host tell each other that something lies in the memory that they share.

To ring is to write a byte into a pipe. That takes each end a hundredth of a millisecond, and a message of TensorFlow a
tenth or more: it passes through several threads of both.

The pipes belong to the worker, which hands out their descriptors in its file (see `shared_memory`). A ps opens them by
``/proc/PID/fd``. So when the worker is lost, or has begun another call in place of this one, the ps that waits for it
comes to the end of the pipe.
"""

import enum
import os
import select
import stat
import weakref
from collections import deque

import numpy as np

# Of a long wait. If the process is stopped in the meantime, it has waited for one of them; and after each of them
# TensorFlow learns whether the call has been cancelled, which it cannot tell a function that waits.
SLICE_SECS = 1.0


class Push(enum.IntEnum):
    """What a worker tells a ps."""

    NONE = 0  # it has nothing to push
    LAST = 1
    WITH_MORE = 2  # and waits for the answer


class OwnDoorbells:
    """The pipes of a worker of this process.

    Attributes:
        descriptors: int32 [num_ps, 2], those that each ps opens: where it reads, and where it writes.
    """

    def __init__(self, num_ps: int) -> None:
        pushes, answers = ([os.pipe() for _ in range(num_ps)] for _ in range(2))
        ends = [(push[0], answer[1]) for push, answer in zip(pushes, answers, strict=True)]
        self.descriptors = np.array(ends, np.int32)
        self._pushes, self._answers = [push[1] for push in pushes], [answer[0] for answer in answers]
        weakref.finalize(self, _close, [end for pipe in (*pushes, *answers) for end in pipe])
        self._missing: deque[int] = deque()  # the ps whose answers have not come yet
        self._num_slices = 0  # how long the first of them has been waited for

    def ring(self, push: Push) -> None:
        """Tells each ps that a push has been written."""
        for descriptor in self._pushes:
            os.write(descriptor, bytes([push]))
        if push == Push.WITH_MORE:
            self._missing.extend(range(len(self._answers)))
            self._num_slices = 0

    def wait(self, secs: float) -> bool:
        """Waits for the answer of each ps, but only for a while; returns whether all have come.

        Raises:
            TimeoutError: one did not come within `secs`, not counting those in which this process was stopped.
        """
        while self._missing:
            if not self._comes(self._answers[self._missing[0]]):
                self._num_slices += 1
                if self._num_slices * SLICE_SECS >= secs:
                    raise TimeoutError(f"ps-{self._missing[0]} has not answered for {secs:g} s")
                return False
            self._missing.popleft()
            self._num_slices = 0
        return True

    @staticmethod
    def _comes(answers: int) -> bool:
        """Whether an answer comes within a slice of time."""
        answered = select.poll()
        answered.register(answers, select.POLLIN)
        return bool(answered.poll(1000 * SLICE_SECS) and os.read(answers, 1))


class Doorbells:
    """The end of a ps.

    Args:
        pid: the process of the worker.
        descriptors: [2], see `OwnDoorbells`.

    Raises:
        OSError: the worker is gone.
    """

    def __init__(self, pid: int, descriptors: np.ndarray) -> None:
        self._pushes, self._answers = opened = [
            _open(f"/proc/{pid}/fd/{number}", flags)
            for number, flags in zip(descriptors, (os.O_RDONLY, os.O_WRONLY), strict=True)
        ]
        weakref.finalize(self, _close, opened)

    def ring(self) -> None:
        """Tells the worker that the answer has been written."""
        os.write(self._answers, b"\0")

    def wait(self) -> Push:
        """Waits for a push.

        Raises:
            EOFError: the worker is gone, or it has given up this call.
        """
        if not (rung := os.read(self._pushes, 1)):
            raise EOFError("the worker has left")
        return Push(rung[0])


def _open(path: str, flags: int) -> int:
    # Without waiting for another end: what is there may be something else, if the worker was lost.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no pipe")
    os.set_blocking(descriptor, True)
    return descriptor


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
