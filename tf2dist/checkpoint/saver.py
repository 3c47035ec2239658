"""When to save, and what to do when it fails."""

import math
import time
from collections.abc import Callable

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.store import Checkpoints, Tell
from tf2dist.messages import ToLauncher

RETRY_SECS = 30.0  # after an attempt to save that failed


class NoSaver:
    """What the tasks save that are not the leader: nothing.

    Attributes:
        saved_step: the last that has been saved.
    """

    saved_step: int | None = None

    def due(self) -> bool:
        """Whether it is time to save."""
        return False

    def save(self, take: Callable[[], Snapshot], stopping: bool = False) -> None:
        """Saves what `take` gives, as far as the disk allows.

        Args:
            stopping: since the run was asked to stop: on a full disk older ones make room for it.
        """

    def insist(self, step: int, take: Callable[[], Snapshot]) -> None:
        """Tries once more if `step` could not be saved: on a full disk older ones make room for it."""


class Saver(NoSaver):
    """Saves at the times asked for, and goes on if it cannot.

    Args:
        every_secs: None for never by time.
        to_launcher: learns what has been saved, and what could not be.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        every_secs: float | None,
        to_launcher: ToLauncher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints, self._to_launcher, self._clock = checkpoints, to_launcher, clock
        self._every_secs = math.inf if every_secs is None else every_secs
        self._due_at = clock() + self._every_secs

    def due(self) -> bool:
        return self._clock() >= self._due_at

    def save(self, take: Callable[[], Snapshot], stopping: bool = False) -> None:
        self._save(take, stopping, self._to_launcher.warn if stopping else None)

    def _save(self, take: Callable[[], Snapshot], stopping: bool, tell_room: Tell | None) -> None:
        snapshot = take()
        self._due_at = self._clock() + self._every_secs
        try:
            self._checkpoints.save(snapshot, tell_room)
        except OSError as error:  # a full disk: what was saved before stays, and may have company later
            self._due_at = self._clock() + min(self._every_secs, RETRY_SECS)
            reason = error.strerror or error
            self._to_launcher.warn(f"step {snapshot.step} could not be saved ({reason}); what was saved before stays")
        else:
            self.saved_step = snapshot.step
            self._to_launcher.saved(snapshot.step, stopping)

    def insist(self, step: int, take: Callable[[], Snapshot]) -> None:
        if self.saved_step != step:
            self._save(take, stopping=False, tell_room=self._to_launcher.warn)
