"""A run at one step as two files, which are checked before they are believed.

    arrays.npz       the arrays by name; opens with numpy alone, never unpickled
    manifest.json    step, facts of the run, every array's shape and type, every file's size and hash

They know nothing of the cluster that wrote them: a run goes on from them in either mode, with any
number of workers and ps.
"""

import contextlib
import hashlib
import io
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 2
UNSEALED = 1  # the format before, without a hash of the manifest
ARRAYS, MANIFEST = "arrays.npz", "manifest.json"


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


def folder_name(step: int) -> str:
    return f"step-{step:010}"


def write(folder: Path, snapshot: Snapshot) -> None:
    """Makes both files in an empty folder, and makes them last.

    Raises:
        OSError: they could not be written.
    """
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
    flush(folder)


def flush(folder: Path) -> None:
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
    seal = manifest.pop("sha256", None)
    if (seal is not None or manifest["format"] != UNSEALED) and seal != _seal(manifest):
        raise ValueError(f"{MANIFEST} has been changed: its hash is not its own")
    return manifest


def verify(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Checks everything but that the arrays can be loaded.

    Returns:
        The step and the facts, and the names of the arrays.

    Raises:
        OSError, ValueError: what is wrong with it.
    """
    manifest = _read_manifest(path)
    try:
        files, names = manifest.pop("files"), set(manifest.pop("arrays"))
        name, size, sha256 = folder_name(manifest["step"]), files[ARRAYS]["bytes"], files[ARRAYS]["sha256"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} does not say what it must ({error})") from None
    if path.name != name:
        raise ValueError(f"{MANIFEST} is of {name}")
    if (found := (path / ARRAYS).stat().st_size) != size:
        raise ValueError(f"{ARRAYS} has {found} bytes instead of {size}")
    if _sha256(path / ARRAYS) != sha256:
        raise ValueError(f"{ARRAYS} has been changed: its hash is not the manifest's")
    return manifest, names


def read(path: Path) -> Snapshot:
    """Reads and checks one checkpoint.

    Raises:
        OSError, ValueError: what is wrong with it.
    """
    facts, names = verify(path)
    with np.load(path / ARRAYS, allow_pickle=False) as arrays:
        if set(arrays) != names:
            raise ValueError(f"{ARRAYS} does not hold the arrays of {MANIFEST}")
        return Snapshot(facts.pop("step"), dict(arrays), facts)
