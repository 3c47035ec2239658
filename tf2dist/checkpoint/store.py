"""The checkpoints of a run directory: whole or invisible, whatever ends the process.

    checkpoints/step-0000012345/    see `snapshot`

A checkpoint is written into a folder with another name, flushed to the disk, and renamed.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tf2dist.errors import CheckpointError
from tf2dist.snapshot import Snapshot, flush, folder_name, read, verify, write

TEMPORARY = ".part-"
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
        paths = [path for path in self.folder.iterdir() if re.fullmatch(r"step-\d{10,}", path.name)]
        return sorted(paths, key=_step)

    def save(self, snapshot: Snapshot) -> Path:
        """Writes a checkpoint and then removes those that are too many.

        Raises:
            OSError: it could not be written; all earlier ones are untouched.
        """
        path = self.folder / folder_name(snapshot.step)
        if self._is_whole(path):  # a run that was at its end already
            return path
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self.folder / f"{TEMPORARY}{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(mode=0o700)
            write(part, snapshot)
            if path.exists():  # damaged, which is why the run was at an earlier step
                self._remove(path)
            part.rename(path)
            flush(self.folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._known[path] = True
        self._prune(path)
        return path

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
            shutil.rmtree(gone)

    def clean(self) -> None:
        """Removes what a killed process has left; to be called while nobody else saves here."""
        if self.folder.is_dir():
            for path in self.folder.glob(f"{TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)

    def newest(self, tell: Tell) -> Snapshot | None:
        """The newest whole checkpoint; tells of every damaged one. None if there is none at all.

        Raises:
            CheckpointError: there are some, and all are damaged.
        """
        damaged = []
        for path in reversed(self.paths()):
            self._known[path] = False
            try:
                snapshot = read(path)
            except (OSError, ValueError) as error:
                damaged.append(f"{path}: {error}")
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
