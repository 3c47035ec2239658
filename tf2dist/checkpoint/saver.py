"""When to save, and what to do when it fails."""

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from tf2dist.checkpoint.snapshot import Frozen
from tf2dist.checkpoint.store import Checkpoints, Notify
from tf2dist.messages import ToLauncher

RETRY_SECS = 30.0  # after a failed attempt to save


class NoSaver:
    """The saver of all tasks but the leader: it saves nothing. At the end of a `with` block, nothing is half written.

    Attributes:
        saved_step: the last step that has been saved.
    """

    saved_step: int | None = None

    def due(self) -> bool:
        """Whether it is time to save."""
        return False

    def save(self, freeze: Callable[[], Frozen], stopping: bool = False) -> None:
        """Saves what `freeze` returns; a failure is a warning.

        Args:
            stopping: whether the run is being stopped; then, on a full disk, older checkpoints are removed.
        """

    def retry(self, step: int, freeze: Callable[[], Frozen]) -> None:
        """Tries again if `step` could not be saved; on a full disk older checkpoints are removed."""

    def wait(self) -> None:
        """Waits until what was to be saved has been written, or could not be."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error that ends the training is reported, and not its consequence in the writing thread.
        with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
            self.wait()


class Saver(NoSaver):
    """Saves at the configured interval; the training goes on meanwhile, and if that fails.

    Training pauses while the state is frozen, and not while the snapshot is fetched and written. There is one
    snapshot at a time, so that it takes the memory of one: the next one waits for it, and none is due by time as long
    as it is written.

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
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def due(self) -> bool:
        return self._clock() >= self._due_at and (self._writing is None or self._writing.done())

    def save(self, freeze: Callable[[], Frozen], stopping: bool = False) -> None:
        self.wait()
        # In the middle of a run the older checkpoints are worth as much as the new one, and nothing is removed.
        frozen = self._frozen(freeze, self._to_launcher.warn if stopping else None)
        if frozen and stopping:
            self._write(frozen, stopping, self._to_launcher.warn)
        elif frozen:
            self._writing = self._thread.submit(self._write, frozen, stopping, None)

    def retry(self, step: int, freeze: Callable[[], Frozen]) -> None:
        self.wait()
        if self.saved_step != step and (frozen := self._frozen(freeze, self._to_launcher.warn)):
            self._write(frozen, False, self._to_launcher.warn)

    def _frozen(self, freeze: Callable[[], Frozen], notify_removed: Notify | None) -> Frozen | None:
        """What `freeze` returns, or None: large tables are frozen in files, for which there may be no room."""
        # An attempt that is still to fail sets an earlier time.
        self._due_at = self._clock() + self._every_secs
        try:
            return self._checkpoints.make_room(freeze, notify_removed)
        except OSError as error:
            self._failed("the run", error)
            return None

    def wait(self) -> None:
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, frozen: Frozen, stopping: bool, notify_removed: Notify | None) -> None:
        snapshot = frozen()
        try:
            self._checkpoints.save(snapshot, notify_removed)
        except OSError as error:
            self._failed(f"step {snapshot.step}", error)
        else:
            self.saved_step = snapshot.step
            self._to_launcher.saved(snapshot.step, stopping)

    def _failed(self, what: str, error: OSError) -> None:
        # Such as a full disk, which may have room again later: no reason to stop a training.
        self._due_at = self._clock() + min(self._every_secs, RETRY_SECS)
        reason = error.strerror or error
        self._to_launcher.warn(f"{what} could not be saved ({reason}); what was saved before stays")
