"""The signals that ask the command to end, handled from its very start. Imports only what loads fast."""

import contextlib
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Self

REPEAT_SECS = 2.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handled_signals() -> list[signal.Signals]:
    """The signals to be handled: without SIGHUP if it was ignored when the process began, as with `nohup`."""
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def name_of(number: int) -> str:
    """The name of a signal for the user."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def reset_inherited() -> None:
    """Undoes what the program that has started this one may have set, before this one has threads.

    A blocked signal would never arrive, so that nothing could stop this process; an ignored SIGCHLD hides the exit
    codes of children.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_at_once(descriptor: int = 2) -> None:
    """Makes each of the signals end this process with one line of output, until `Signals` takes over.

    By default Python shows a traceback for Ctrl-C during imports, and process 1, such as a container's
    command, does not get a signal for which it has no handler.

    Args:
        descriptor: of the file for that line.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for clean_up in _clean_ups:
            clean_up()
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [descriptor], [], 0)[1]:  # the write must not wait for a reader that stalls
                os.write(descriptor, f"tf2dist: error: stopped by {name_of(number)}\n".encode())
        os._exit(128 + number)

    for number in handled_signals():
        signal.signal(number, end)
    reset_inherited()


@contextlib.contextmanager
def cleaned_up(clean_up: Callable[[], None]) -> Iterator[None]:
    """Calls `clean_up` at the end of the block, also where `end_at_once` ends the process before."""
    _clean_ups.append(clean_up)
    try:
        yield
    finally:
        clean_up()
        _clean_ups.remove(clean_up)


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None, prefix: str = "tf2dist-") -> Iterator[Path]:
    """A new folder, which is removed at the end of the block; see `cleaned_up`.

    Args:
        parent: None for the system's folder for temporary files.
    """
    import shutil  # most programs that handle signals have no such folder, and it takes a while
    import tempfile

    folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    with cleaned_up(functools.partial(shutil.rmtree, folder, ignore_errors=True)):
        yield folder


_clean_ups: list[Callable[[], None]] = []  # of the blocks of `cleaned_up` that this process is in


class StopRequest:
    """The request that a run should end, of a program that keeps its own handlers of signals and asks by itself.

    Attributes:
        received: the first signal, and later ones that ask to stop at once; see `is_impatient`.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first_at = 0.0

    @property
    def signum(self) -> int:
        """The signal that asks for the stop; 0 while none has come."""
        return self.received[0] if self.received else 0

    @property
    def is_urgent(self) -> bool:
        """Whether the stop shall be at once, instead of orderly."""
        return len(self.received) > 1

    def deferred(self) -> AbstractContextManager[None]:
        """For a block that looks at the request itself."""
        return contextlib.nullcontext()

    def ask(self, number: int) -> bool:
        """Asks for an orderly stop, as the signal would, or for one at once; returns whether it counts as either."""
        now = time.monotonic()
        if not self.received:
            self._first_at = now
        elif not is_impatient(self.received[0], number, now - self._first_at):
            if number == signal.SIGTERM and self.received == [signal.SIGHUP]:
                self.received[0] = number  # sent together, they may arrive in either order
            return False
        self.received.append(number)
        return True


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit, as Ctrl-C raises KeyboardInterrupt; leaves a program's own handler alone."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # Python lets only the main thread set handlers.
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Signals(StopRequest):
    """Handles the signals in a `with` block: the first raises KeyboardInterrupt, except in a block of `deferred`."""

    def __init__(self) -> None:
        super().__init__()
        self._is_deferred = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """No signal raises anything in the block."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    @contextlib.contextmanager
    def passed_on(self) -> Iterator[None]:
        """For a block that waits for other processes: each signal goes to the children of this one as well."""
        from psutil import Process  # only a parallel sweep needs it, and it takes a while

        def pass_on(number: int, frame: FrameType | None) -> None:
            self._on_signal(number, frame)
            for child in Process().children():
                with contextlib.suppress(Exception):  # it has ended meanwhile
                    child.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in handled_signals()}
        try:
            with self.deferred():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.ask(number) or self._is_deferred:
            return
        if self.is_urgent:
            os._exit(128 + self.signum)  # do not wait for the clean-up that the first signal began
        raise KeyboardInterrupt


def is_impatient(first: int, number: int, secs: float) -> bool:
    """Whether a later signal asks to stop at once, instead of the orderly stop that the first one began.

    At a time limit SLURM sends SIGTERM twice within 30 ms, and systemd sends SIGHUP right after SIGTERM:
    such repetitions by programs do not count. A person who loses patience sends a signal later,
    or chooses another one.

    Args:
        secs: the time between the two signals.
    """
    return secs >= REPEAT_SECS or (first != number and signal.SIGHUP not in (first, number))
