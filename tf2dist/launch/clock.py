"""The clock as a parameter, so that a test can pass one of its own."""

from typing import Protocol


class Clock(Protocol):
    """What the module `time` offers."""

    def monotonic(self) -> float:
        """Seconds since some moment in the past; never goes back."""

    def time(self) -> float:
        """Seconds since 1970."""

    def sleep(self, secs: float, /) -> None: ...
