"""Checkpoints: whole or invisible, whatever ends the process, and checked before they are believed.

    checkpoints/step-0000012345/
      arrays.npz       the arrays by name; opens with numpy alone, never unpickled
      manifest.json    step, facts of the run, every array's shape and type, every file's size and hash

A checkpoint is written into a folder with another name, flushed to the disk, and renamed. It
knows nothing of the cluster that wrote it: a run goes on from it in either mode, with any number
of workers and ps.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tf2dist.errors import CheckpointError

FORMAT = 2
UNSEALED = 1  # the format before, without a hash of the manifest
ARRAYS, MANIFEST = "arrays.npz", "manifest.json"
TEMPORARY = ".part-"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Snapshot:
    """A run at one exact global step.

    Attributes:
        step: updates applied.
        arrays: by name; the model's under "model/", the optimizer's under "optimizer/", what a mode
            keeps for itself under its own name.
        facts: what JSON can hold: mode, cluster, data, examples seen, the input's position.
    """

    step: int
    arrays: dict[str, np.ndarray]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_resumed(self) -> bool:
        """Whether a run goes on from here; otherwise only its first weights come from elsewhere."""
        return bool(self.facts)

    def to_bytes(self) -> bytes:
        """For a task that cannot read the run directory."""
        with io.BytesIO() as buffer:
            np.savez(buffer, **self.arrays)  # type: ignore[arg-type]
            return json.dumps([self.step, self.facts]).encode() + b"\n" + buffer.getvalue()

    @classmethod
    def from_bytes(cls, packed: bytes) -> "Snapshot":
        head, _, body = packed.partition(b"\n")
        with io.BytesIO(body) as buffer, np.load(buffer, allow_pickle=False) as arrays:
            return cls(json.loads(head)[0], dict(arrays), json.loads(head)[1])

    def of_model(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self.arrays.items() if name.startswith("model/")}


class Checkpoints:
    """The checkpoints of one run directory, oldest first.

    Args:
        folder: made when the first is written.
        keep: how many stay.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self._keep = folder, keep
        self._damaged: set[Path] = set()  # as far as `newest` has looked

    def paths(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if re.fullmatch(r"step-\d{10,}", path.name)]
        return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))

    def save(self, snapshot: Snapshot) -> Path:
        """Writes a checkpoint and then removes those that are too many.

        Raises:
            OSError: it could not be written; all earlier ones are untouched.
        """
        path = self.folder / f"step-{snapshot.step:010}"
        if _is_whole(path):  # a run that was at its end already
            return path
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self.folder / f"{TEMPORARY}{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(mode=0o700)
            _write(part, snapshot)
            if path.exists():  # damaged, which is why the run was at an earlier step
                self._remove(path)
            part.rename(path)
            _flush(self.folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._damaged.discard(path)
        paths = self.paths()
        whole = [one for one in paths[: paths.index(path) + 1] if one not in self._damaged]
        for old in paths[: paths.index(whole[-self._keep :][0])]:
            self._remove(old)
        return path

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
            try:
                return read(path)
            except (OSError, ValueError) as error:
                damaged.append(f"{path}: {error}")
                self._damaged.add(path)
                tell(f"{damaged[-1]}; going back to the checkpoint before it")
        if damaged:
            raise CheckpointError(
                f"{self.folder}: all {len(damaged)} checkpoints are damaged ({damaged[0]}); bring one back, or "
                "remove the folder to begin anew"
            )
        return None


def _is_whole(path: Path) -> bool:
    try:
        read(path)
    except (OSError, ValueError):
        return False
    return True


def _write(folder: Path, snapshot: Snapshot) -> None:
    with open(folder / ARRAYS, "xb") as file:
        np.savez(file, **snapshot.arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": snapshot.step,
        **snapshot.facts,
        "arrays": {n: {"shape": list(a.shape), "dtype": str(a.dtype)} for n, a in snapshot.arrays.items()},
        "files": {ARRAYS: {"bytes": (folder / ARRAYS).stat().st_size, "sha256": _sha256(folder / ARRAYS)}},
    }
    with open(folder / MANIFEST, "x", encoding="utf-8") as text:
        json.dump(manifest | {"sha256": _seal(manifest)}, text, indent=1)
        text.flush()
        os.fsync(text.fileno())
    _flush(folder)


def _flush(folder: Path) -> None:
    """Makes the names in a folder last; some network file systems refuse, and need it not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(manifest: dict[str, Any]) -> str:
    """A hash of what it says, however that is laid out."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of one checkpoint.

    Raises:
        OSError, ValueError: it is not there, or not one.
    """
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.get("format") not in (UNSEALED, FORMAT):
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    if manifest["format"] != UNSEALED and manifest.pop("sha256", "") != _seal(manifest):
        raise ValueError(f"{MANIFEST} has been changed: its hash is not its own")
    return manifest


def read(path: Path) -> Snapshot:
    """Reads and checks one checkpoint.

    Raises:
        OSError, ValueError: what is wrong with it.
    """
    manifest = _read_manifest(path)
    step, files, arrays = int(manifest.pop("step")), manifest.pop("files"), manifest.pop("arrays")
    expected = files[ARRAYS]["bytes"], files[ARRAYS]["sha256"]
    found = (path / ARRAYS).stat().st_size
    if found != expected[0]:
        raise ValueError(f"{ARRAYS} has {found} bytes instead of {expected[0]}")
    if _sha256(path / ARRAYS) != expected[1]:
        raise ValueError(f"{ARRAYS} has been changed: its hash is not the manifest's")
    with np.load(path / ARRAYS, allow_pickle=False) as packed:
        return Snapshot(step, {name: packed[name] for name in arrays}, manifest)
