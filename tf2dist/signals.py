"""The signals that ask a command to end, from its first moment on. Imports nothing that takes time."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Self

REPEAT_SECS = 2.0
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def endings() -> list[signal.Signals]:
    """The signals that end this process: `nohup` starts it with SIGHUP ignored, and that stays so."""
    return [number for number in NAMES if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def name_of(number: int) -> str:
    return NAMES.get(number, f"signal {number}")  # type: ignore[call-overload, no-any-return]


def end_at_once() -> None:
    """Has each of the signals end this process, quietly, until `Signals` takes over.

    Python shows a traceback for Ctrl-C while it imports, and the kernel drops a signal to process 1,
    such as a container's command, that has no handler.
    """
    for number in endings():
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # a reader that stalls must not keep this process
            os.write(2, f"tf2dist: error: stopped by {name_of(number)}\n".encode())
    os._exit(128 + number)


class Signals:
    """Receives the signals while a `with` block lasts: the first raises KeyboardInterrupt, unless `held`.

    Attributes:
        received: the first, and those that show impatience.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first_at = 0.0
        self._is_held = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in endings()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[list[int]]:
        """Around a loop that looks at `received`: nothing is raised."""
        self._is_held = True
        try:
            yield self.received
        finally:
            self._is_held = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received and not is_impatient(self.received[0], number, now - self._first_at):
            if number == signal.SIGTERM and self.received == [signal.SIGHUP]:
                self.received[0] = number  # sent together, they may arrive in either order
            return
        self._first_at = self._first_at if self.received else now
        self.received.append(number)
        if self._is_held:
            return
        if len(self.received) > 1:
            os._exit(128 + self.received[0])  # tidying up takes too long
        raise KeyboardInterrupt


def is_impatient(first: int, number: int, secs: float) -> bool:
    """Whether a signal means that the order which the first one asked for takes too long.

    At a time limit SLURM sends SIGTERM twice within 30 ms, and systemd SIGHUP right after SIGTERM:
    machines repeat themselves at once. Who has seen that nothing happened needs longer, or
    chooses another signal.

    Args:
        secs: between the two.
    """
    return secs >= REPEAT_SECS or (first != number and signal.SIGHUP not in (first, number))
