"""The checkpoints of a run directory: complete or invisible, however the process ends.

    checkpoints/step-0000012345/    see `snapshot`

A checkpoint is written into a folder with a temporary name, flushed to the disk, and renamed.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tf2dist.checkpoint.snapshot import Snapshot, flush, folder_name, read, verify, write
from tf2dist.errors import CheckpointError

TEMPORARY = ".part-"
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

    def save(self, snapshot: Snapshot, notify_removed: Notify | None = None) -> Path:
        """Writes a checkpoint, and then removes the oldest ones beyond `keep`.

        Args:
            notify_removed: if given, older checkpoints except for the newest whole one are removed when the disk
                is full, and it takes a line about each.

        Raises:
            OSError: it could not be written; all earlier ones are untouched, apart from those of `notify_removed`.
        """
        path = self.folder / folder_name(snapshot.step)
        if self._is_whole(path):  # a run that had already reached its end was started again
            return path
        self.make_room(lambda: self._write(path, snapshot), notify_removed)
        self._verified[path] = True
        self._prune(path)
        return path

    def make_room(self, write: Callable[[], T], notify_removed: Notify | None) -> T:
        """Returns what `write` returns; while the disk is full, removes older checkpoints as `save` does.

        Raises:
            OSError: that of `write`.
        """
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
            if os.path.lexists(path):  # it is damaged, so the run went back and has come to this step again
                self._remove(path)
            # The rename is atomic, and comes after the files are on the disk: nobody ever sees a part of them.
            part.rename(path)
            flush(self.folder)
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

    def _is_whole(self, path: Path) -> bool:
        if path not in self._verified:
            with contextlib.suppress(OSError, ValueError):
                verify(path)
                self._verified[path] = True
        return self._verified.setdefault(path, False)

    def _remove(self, path: Path) -> None:
        """Removes a checkpoint, or leaves it where that fails."""
        # The rename first: a process that is killed while it removes files must leave no half checkpoint.
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        with contextlib.suppress(OSError):  # a failure to tidy up must not stop a training
            path.rename(temporary)
            _discard(temporary)

    def clean(self) -> None:
        """Removes what a killed process has left; must be called while nobody else saves here."""
        if self.folder.is_dir():
            for path in self.folder.glob(f"{TEMPORARY}*"):
                _discard(path)

    def newest(self, notify: Notify) -> Snapshot | None:
        """The newest whole checkpoint, or None if there are no checkpoints at all.

        Args:
            notify: takes a line about every damaged one.

        Raises:
            CheckpointError: all checkpoints are damaged. Starting over would look like success, and lose the run.
        """
        damaged = []
        try:
            paths = self.paths()
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read ({error.strerror}); name another run_dir") from None
        for path in reversed(paths):
            # Read again even if it was whole before: another process may have changed it since.
            self._verified[path] = False
            try:
                snapshot = read(path)
            except (OSError, ValueError) as error:
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


def _discard(path: Path) -> None:
    """Removes a folder, or a file or link of that name, as far as possible."""
    # `rmtree` refuses a link, and what a link points to must stay.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
