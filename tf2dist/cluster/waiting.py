"""Waiting for other processes: since when, until when, and what the user reads meanwhile."""

import time
from collections.abc import Callable

LINE_EVERY_SECS = 5.0


class Wait:
    """A wait that begins now.

    Attributes:
        deadline: when it has taken `timeout_secs`, in seconds of the monotonic clock.

    Args:
        notify: takes a line for the user.
        first_line_secs: when the first line comes, if not after `LINE_EVERY_SECS`, as each of the others.
    """

    def __init__(
        self, timeout_secs: float, notify: Callable[[str], None], first_line_secs: float | None = None
    ) -> None:
        self._start = time.monotonic()
        self._notify = notify
        self._next_line_at = self._start + (LINE_EVERY_SECS if first_line_secs is None else first_line_secs)
        self.deadline = self._start + timeout_secs

    @property
    def secs(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def notify(self, what: str) -> None:
        """Says what is waited for, if the last line was long enough ago."""
        now = time.monotonic()
        if now > self._next_line_at:
            self._next_line_at = now + LINE_EVERY_SECS
            self._notify(f"waiting for {what}, {now - self._start:.0f} s")


def still_waiting(secs: float, what: str) -> str:
    """The message of the error that ends a wait; `what`: what has not come."""
    return f"after {secs:.0f} s still waiting for {what}; see startup_timeout_secs"
