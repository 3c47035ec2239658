"""Waiting for other processes: deadlines, and the lines that the user reads meanwhile."""

import time
from collections.abc import Callable

LINE_EVERY_SECS = 5.0


class Wait:
    """A wait that begins now.

    Attributes:
        deadline: the end of `timeout_secs`, in seconds of the monotonic clock.

    Args:
        notify: takes a line for the user.
        first_line_secs: the time until the first line; by default `LINE_EVERY_SECS`, the time between lines.
    """

    def __init__(
        self, timeout_secs: float, notify: Callable[[str], None], first_line_secs: float | None = None
    ) -> None:
        # The monotonic clock: the time of day may jump when a host that has just started sets its clock.
        self._start = time.monotonic()
        self._notify = notify
        self._next_line_at = self._start + (LINE_EVERY_SECS if first_line_secs is None else first_line_secs)
        self.deadline = self._start + timeout_secs

    @property
    def secs(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def notify(self, what: str) -> None:
        """Tells the user what is waited for, unless the last line is too recent."""
        now = time.monotonic()
        if now > self._next_line_at:
            self._next_line_at = now + LINE_EVERY_SECS
            self._notify(f"waiting for {what}, {now - self._start:.0f} s")


def still_waiting(secs: float, what: str) -> str:
    """The message of the error that ends a wait; `what`: what is still missing."""
    return f"after {secs:.0f} s still waiting for {what}; see startup_timeout_secs"
