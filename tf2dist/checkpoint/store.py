"""The checkpoints of a run directory: whole or invisible, whatever ends the process.

    checkpoints/step-0000012345/    see `snapshot`

A checkpoint is written into a folder with another name, flushed to the disk, and renamed.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tf2dist.checkpoint.snapshot import Snapshot, flush, folder_name, read, verify, write
from tf2dist.errors import CheckpointError

TEMPORARY = ".part-"
FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_REASON_CHARS = 500  # it may quote a name out of a damaged file
Tell = Callable[[str], None]


class Checkpoints:
    """The checkpoints of one run directory, oldest first.

    Args:
        folder: made when the first is written.
        keep: how many stay.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self._keep = folder, keep
        self._known: dict[Path, bool] = {}  # whether it is whole, as far as it has been looked at

    def paths(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if re.fullmatch(r"step-[0-9]{10,}", path.name)]
        return sorted(paths, key=_step)

    def save(self, snapshot: Snapshot, tell_room: Tell | None = None) -> Path:
        """Writes a checkpoint and then removes those that are too many.

        Args:
            tell_room: for a checkpoint that is worth more than older ones: those make room for it on a
                full disk, except for the newest whole one, and a line is told of each.

        Raises:
            OSError: it could not be written; all earlier ones that nobody was told of are untouched.
        """
        path = self.folder / folder_name(snapshot.step)
        if self._is_whole(path):  # a run that was at its end already
            return path
        while True:
            try:
                self._write(path, snapshot)
                break
            except OSError as error:
                if tell_room is None or error.errno not in FULL or (gone := self._drop_oldest()) is None:
                    raise
                tell_room(f"{gone.name} was removed: the disk is full, and step {snapshot.step} needs its room")
        self._known[path] = True
        self._prune(path)
        return path

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self.folder / f"{TEMPORARY}{os.getpid()}"
        _discard(part)
        try:
            part.mkdir(mode=0o700)
            write(part, snapshot)
            if os.path.lexists(path):  # damaged, which is why the run was at an earlier step
                self._remove(path)
            part.rename(path)
            flush(self.folder)
        finally:
            _discard(part)

    def _drop_oldest(self) -> Path | None:
        """Removes the oldest checkpoint but never the newest whole one; None if there is no other."""
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
        for path in reversed([one for one in self.paths() if _step(one) <= _step(newest)]):
            if number < self._keep:
                number += self._is_whole(path)
            else:
                self._remove(path)

    def _is_whole(self, path: Path) -> bool:
        if path not in self._known:
            with contextlib.suppress(OSError, ValueError):
                verify(path)
                self._known[path] = True
        return self._known.setdefault(path, False)

    def _remove(self, path: Path) -> None:
        """Out of sight first: what is half removed must not look like a checkpoint."""
        gone = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        with contextlib.suppress(OSError):  # tidying up is no reason to stop a training
            path.rename(gone)
            _discard(gone)

    def clean(self) -> None:
        """Removes what a killed process has left; to be called while nobody else saves here."""
        if self.folder.is_dir():
            for path in self.folder.glob(f"{TEMPORARY}*"):
                _discard(path)

    def newest(self, tell: Tell) -> Snapshot | None:
        """The newest whole checkpoint; tells of every damaged one. None if there is none at all.

        Raises:
            CheckpointError: there are some, and all are damaged.
        """
        damaged = []
        try:
            paths = self.paths()
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read ({error.strerror}); name another run_dir") from None
        for path in reversed(paths):
            self._known[path] = False
            try:
                snapshot = read(path)
            except (OSError, ValueError) as error:
                damaged.append(f"{path}: {str(error)[:MAX_REASON_CHARS]}")
                tell(f"{damaged[-1]}; going back to the checkpoint before it")
            else:
                self._known[path] = True
                return snapshot
        if damaged:
            raise CheckpointError(
                f"{self.folder}: all {len(damaged)} checkpoints are damaged ({damaged[0]}); bring one back, or "
                "remove the folder to begin anew"
            )
        return None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _discard(path: Path) -> None:
    """Removes a folder, or whatever else has its name, as far as that goes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
