"""Checkpoints in a run directory: how they are written, when one is saved, and what happens if that fails.

    checkpoints/step-0000012345/    see `snapshot`

A checkpoint is written into a folder with a temporary name, flushed to the disk, and renamed. So it is complete or
invisible, however the process ends.
"""

import contextlib
import errno
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from tf2dist.checkpoint.snapshot import (
    ARRAYS,
    Frozen,
    Snapshot,
    flush,
    folder_name,
    is_damage,
    read,
    read_arrays,
    target_of,
    unreadable,
    verify,
    write,
)
from tf2dist.errors import CheckpointError, brief_reason
from tf2dist.files import raising
from tf2dist.messages import Saved, ToLauncher

TEMPORARY = ".part-"
REPLACED = ".replaced-"  # before the name of a checkpoint while another one takes its place
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk itself, or this user's quota
Notify = Callable[[str], None]
T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run directory, oldest first.

    Args:
        folder: created when the first checkpoint is written.
        keep: how many whole ones are kept.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self._keep = folder, keep
        # Whether a checkpoint is whole, for those that have been checked: a check hashes the whole file.
        self._verified: dict[Path, bool] = {}

    def paths(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if re.fullmatch(r"step-[0-9]{10,}", path.name)]
        return sorted(paths, key=step_of)

    def path_of(self, step: int) -> Path:
        return self.folder / folder_name(step)

    def save(self, snapshot: Snapshot, notify_removed: Notify | None = None, replaces: bool = False) -> Path:
        """Writes a checkpoint, and then removes the oldest ones beyond `keep`.

        Args:
            replaces: whether to replace a checkpoint of the same step.
            notify_removed: if given, older checkpoints except for the newest whole one are removed when the disk
                is full, and it takes a line about each.
        """
        path = self.path_of(snapshot.step)
        if not replaces and self._has_same_end(path, snapshot):  # a run that had reached its end was started again
            return path
        self.make_room(lambda: self._write(path, snapshot), notify_removed)
        self._verified[path] = True
        with contextlib.suppress(OSError):  # those that cannot be checked now stay until the next time
            self._prune(path)
        return path

    def make_room(self, write: Callable[[], T], notify_removed: Notify | None) -> T:
        """Returns what `write` returns; while the disk is full, removes older checkpoints as `save` does."""
        # Each round removes one checkpoint, and ends when there is none to remove.
        while True:
            try:
                return write()
            except OSError as error:
                if notify_removed is None or error.errno not in FULL or (removed := self._drop_oldest()) is None:
                    raise
                notify_removed(f"{removed.name} was removed: the disk is full, and the new checkpoint needs its room")

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A process that had the same number before may have left a folder of this name.
        part = self.folder / f"{TEMPORARY}{os.getpid()}"
        _discard(part)
        try:
            part.mkdir(mode=0o700)
            write(part, snapshot)
            # Another one is damaged, and the run went back and has come to this step again, or it is to be replaced.
            replaced = path.with_name(f"{REPLACED}{path.name}")
            if os.path.lexists(path):
                _discard(replaced)
                path.rename(replaced)
            # The rename is atomic, and comes after the files are on the disk: nobody ever sees a part of them.
            try:
                part.rename(path)
            except OSError:
                with contextlib.suppress(OSError):  # then `clean` does it when the run is started again
                    _put_back(replaced)
                raise
            flush(self.folder)
            _discard(replaced)
        finally:
            _discard(part)

    def _drop_oldest(self) -> Path | None:
        """Removes the oldest checkpoint except for the newest whole one; None if there is no other."""
        # If the new one cannot be written even so, the newest whole one is all that the run has.
        paths = self.paths()
        newest_whole = next((path for path in reversed(paths) if self._is_whole(path)), None)
        for path in paths:
            if path != newest_whole:
                self._remove(path)
                if not path.exists():
                    return path
        return None

    def _prune(self, newest: Path) -> None:
        """Removes what is older than the last `keep` whole ones up to `newest`."""
        number = 0
        # Later steps are damaged ones that the run went back from. They stay until the run comes by and replaces them.
        for path in reversed([path for path in self.paths() if step_of(path) <= step_of(newest)]):
            if number < self._keep:
                number += self._is_whole(path)
            else:
                self._remove(path)

    def _has_same_end(self, path: Path, snapshot: Snapshot) -> bool:
        """Whether a checkpoint is whole, and says as the snapshot does where the run ends: evaluators end there."""
        with contextlib.suppress(OSError, ValueError):
            return self._is_whole(path) and target_of(path) == snapshot.facts.target_step
        return False

    def _is_whole(self, path: Path) -> bool:
        if path not in self._verified:
            try:
                verify(path)
                self._verified[path] = True
            except (OSError, ValueError) as error:
                if not is_damage(error):
                    raise
                self._verified[path] = False
        return self._verified[path]

    def _remove(self, path: Path) -> None:
        """Removes a checkpoint, or leaves it where that fails."""
        # The rename first: a process that is killed while it removes files must leave no half checkpoint.
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        with contextlib.suppress(OSError):  # a failure to tidy up must not stop a training
            path.rename(temporary)
            _discard(temporary)

    def clean(self) -> None:
        """Removes what a killed process has left, and puts back what it had not yet replaced.

        Must be called before `newest`, and while nobody else saves here.
        """
        with self._reading():
            if self.folder.is_dir():
                for path in self.folder.glob(f"{REPLACED}*"):
                    _put_back(path)
                    _discard(path)
                for path in self.folder.glob(f"{TEMPORARY}*"):
                    _discard(path)

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return raising(f"{self.folder}: cannot be read", "name another run_dir", CheckpointError)

    def newest(self, notify: Notify) -> Snapshot | None:
        """The newest whole checkpoint, or None if there are no checkpoints at all.

        One that cannot be read for another reason than damage is an error: it may be whole.

        Args:
            notify: takes a line about every damaged one.
        """
        damaged = []
        with self._reading():
            paths = self.paths()
        for path in reversed(paths):
            # Read again even if it was whole before: another process may have changed it since.
            self._verified[path] = False
            try:
                snapshot = read(path)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and not is_damage(error):
                    raise unreadable(path, error) from None
                damaged.append(f"{path}: {error}")
                notify(f"{damaged[-1]}; going back to the checkpoint before it")
            else:
                self._verified[path] = True
                return snapshot
        if damaged:
            raise CheckpointError(
                f"{self.folder}: all {len(damaged)} checkpoints are damaged ({damaged[0]}); restore one from a copy, "
                "or remove the folder to start over"
            )
        return None


def step_of(path: Path) -> int:
    """The step of a checkpoint, as its name says."""
    return int(path.name.removeprefix("step-"))


def _put_back(replaced: Path) -> None:
    """Gives a checkpoint its name back, unless another one has taken its place."""
    path = replaced.with_name(replaced.name.removeprefix(REPLACED))
    if os.path.lexists(replaced) and not os.path.lexists(path):
        replaced.rename(path)


def _discard(path: Path) -> None:
    """Removes a folder, or a file or link of that name, as far as possible."""
    # `rmtree` refuses a link, and what a link points to must stay.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


RETRY_SECS = 30.0  # after a failed attempt to save
WAIT_SECS = 1.0  # between two looks at the thread that writes


class NoSaver:
    """The saver of all tasks but the leader: it saves nothing. At the end of a `with` block, nothing is half written.

    Attributes:
        saved_step: the last step that has been saved.
    """

    saved_step: int | None = None

    def due(self) -> bool:
        """Whether it is time to save."""
        return False

    def save(self, freeze: Callable[[], Frozen], stopping: bool = False, replaces: bool = False) -> None:
        """Saves what `freeze` returns; a failure is a warning.

        Args:
            stopping: whether the run is being stopped; then, on a full disk, older checkpoints are removed.
            replaces: whether to replace a checkpoint of the same step.
        """

    def retry(self, step: int, freeze: Callable[[], Frozen]) -> None:
        """Tries again if `step` could not be saved; on a full disk older checkpoints are removed."""

    def saved_arrays(self, step: int) -> dict[str, np.ndarray] | None:
        """The arrays that were saved at a step, large ones mapped from their file; None if they were not."""
        return None

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
        progress: called again and again during a wait for a disk that is slow, but not for one that hangs.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        every_secs: float | None,
        to_launcher: ToLauncher,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoints, self._to_launcher, self._clock, self._progress = checkpoints, to_launcher, clock, progress
        self._every_secs = math.inf if every_secs is None else every_secs
        self._due_at = clock() + self._every_secs
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._used_clock: int | None = None  # of the thread's processor time; None before its first work
        self._writing: Future[None] | None = None
        self._replaces = False  # whether a checkpoint of the step that comes next is to be replaced

    def due(self) -> bool:
        return self._clock() >= self._due_at and (self._writing is None or self._writing.done())

    def save(self, freeze: Callable[[], Frozen], stopping: bool = False, replaces: bool = False) -> None:
        self.wait()
        if replaces:  # until that is done, nothing is saved of this step
            self.saved_step, self._replaces = None, True
        # In the middle of a run the older checkpoints are worth as much as the new one, and nothing is removed.
        self._begin(freeze, stopping, self._to_launcher.warn if stopping else None)
        if stopping:
            self.wait()

    def retry(self, step: int, freeze: Callable[[], Frozen]) -> None:
        self.wait()
        if self.saved_step != step:
            self._begin(freeze, False, self._to_launcher.warn)
            self.wait()

    def _begin(self, freeze: Callable[[], Frozen], stopping: bool, notify_removed: Notify | None) -> None:
        # An attempt that is still to fail sets an earlier time.
        self._due_at = self._clock() + self._every_secs
        try:
            frozen = self._checkpoints.make_room(freeze, notify_removed)
        except OSError as error:  # large tables are frozen in files, for which there may be no room
            self._failed("the run", error)
        else:
            self._writing = self._thread.submit(self._write, frozen, stopping, notify_removed)

    def saved_arrays(self, step: int) -> dict[str, np.ndarray] | None:
        self.wait()
        return read_arrays(self._checkpoints.path_of(step) / ARRAYS) if self.saved_step == step else None

    def wait(self) -> None:
        if not self._writing:
            return
        writing, self._writing = self._writing, None
        used_before = 0.0
        while not futures.wait([writing], WAIT_SECS).done:
            # A thread that waits for a disk that hangs uses no processor time; each piece that is written takes some.
            if self._used_clock is not None and (used := time.clock_gettime(self._used_clock)) > used_before:
                used_before = used
                self._progress()
        writing.result()

    def _write(self, frozen: Frozen, stopping: bool, notify_removed: Notify | None) -> None:
        self._used_clock = time.pthread_getcpuclockid(threading.get_ident())
        snapshot = frozen()
        try:
            self._checkpoints.save(snapshot, notify_removed, self._replaces)
        except OSError as error:
            self._failed(f"step {snapshot.step}", error)
        else:
            self.saved_step, self._replaces = snapshot.step, False
            self._to_launcher.send(Saved(snapshot.step, stopping))

    def _failed(self, what: str, error: OSError) -> None:
        # Such as a full disk, which may have room again later: no reason to stop a training.
        self._due_at = self._clock() + min(self._every_secs, RETRY_SECS)
        self._to_launcher.warn(f"{what} could not be saved ({brief_reason(error)}); what was saved before stays")
