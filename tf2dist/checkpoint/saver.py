"""When to save, and what to do when it fails."""

import math
import time
from collections.abc import Callable

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.store import Checkpoints, Notify
from tf2dist.messages import ToLauncher

RETRY_SECS = 30.0  # after a failed attempt to save


class NoSaver:
    """The saver of all tasks but the leader: it saves nothing.

    Attributes:
        saved_step: the last step that has been saved.
    """

    saved_step: int | None = None

    def due(self) -> bool:
        """Whether it is time to save."""
        return False

    def save(self, take: Callable[[], Snapshot], stopping: bool = False) -> None:
        """Saves the snapshot that `take` returns; a failure is a warning.

        Args:
            stopping: whether the run is being stopped; then, on a full disk, older checkpoints are removed.
        """

    def retry(self, step: int, take: Callable[[], Snapshot]) -> None:
        """Tries again if `step` could not be saved; on a full disk older checkpoints are removed."""


class Saver(NoSaver):
    """Saves at the configured interval; the training goes on if that fails.

    Args:
        every_secs: None for no saving by time.
        to_launcher: is told which steps have been saved, and which could not be.
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
        # In the middle of a run the older checkpoints are worth as much as the new one, and nothing is removed.
        self._save(take, stopping, self._to_launcher.warn if stopping else None)

    def _save(self, take: Callable[[], Snapshot], stopping: bool, notify_removed: Notify | None) -> None:
        snapshot = take()
        self._due_at = self._clock() + self._every_secs
        try:
            self._checkpoints.save(snapshot, notify_removed)
        except OSError as error:  # such as a full disk, which may have room again later: no reason to stop a training
            self._due_at = self._clock() + min(self._every_secs, RETRY_SECS)
            reason = error.strerror or error
            self._to_launcher.warn(f"step {snapshot.step} could not be saved ({reason}); what was saved before stays")
        else:
            self.saved_step = snapshot.step
            self._to_launcher.saved(snapshot.step, stopping)

    def retry(self, step: int, take: Callable[[], Snapshot]) -> None:
        if self.saved_step != step:
            self._save(take, stopping=False, notify_removed=self._to_launcher.warn)
