"""A stream that never waits for its reader: a pager, a terminal after Ctrl-S, a log collector that hangs."""

import contextlib
import io
import os
import select
import time
from collections.abc import Iterator
from typing import TextIO

CHUNK_BYTES = 4096  # a pipe that is ready accepts this many without blocking
MAX_PENDING_BYTES = 1 << 16


class Unblocked(io.TextIOBase):
    """Writes what the stream accepts, keeps up to `MAX_PENDING_BYTES` for later, and drops the rest.

    Other processes may share the descriptor, so it is not made non-blocking; `select` is asked before each write.
    A write to a terminal can block even then, so a terminal is opened a second time, for writes that do not.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pending = b""
        try:
            self._number: int | None = stream.fileno()
        except (OSError, AttributeError):  # not a file: it accepts everything at once
            self._number = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Raises OSError if nobody can read any more."""
        if self._number is None:
            return self._stream.write(text)
        if len(self._pending) < MAX_PENDING_BYTES:
            self._pending += text.encode(self.encoding, "backslashreplace")
        self._write_pending(0.0)
        return len(text)

    def flush(self) -> None:
        if self._number is None:
            self._stream.flush()

    def drain(self, secs: float) -> None:
        """Gives the reader `secs` to take what is pending."""
        deadline = time.monotonic() + secs
        while self._pending and (left := deadline - time.monotonic()) > 0:
            self._write_pending(left)

    def _write_pending(self, wait_secs: float) -> None:
        assert self._number is not None
        with _never_waiting(self._number) as number:
            while self._pending and select.select([], [number], [], wait_secs)[1]:
                try:
                    written = os.write(number, self._pending[:CHUNK_BYTES])
                except BlockingIOError:
                    return
                except OSError:
                    self._pending = b""
                    raise
                # What the reader takes at once is written at once; only for the first bytes may it take its time.
                self._pending = self._pending[written:]
                wait_secs = 0.0


@contextlib.contextmanager
def _never_waiting(number: int) -> Iterator[int]:
    """A descriptor for writes that do not block: a new one for a terminal, since the flag of the old one is shared."""
    terminal = -1
    with contextlib.suppress(OSError):  # not a terminal, or one of another namespace, which has no name here
        terminal = os.open(os.ttyname(number), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield number if terminal < 0 else terminal
    finally:
        if terminal >= 0:
            os.close(terminal)
