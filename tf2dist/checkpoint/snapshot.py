"""A run at one step as two files, which are verified before they are used.

    arrays.npz       the arrays by name; opens with numpy alone, never unpickled
    manifest.json    step, facts of the run, every array's shape and type, every file's size and hash

They do not depend on the cluster that wrote them: a run can continue from them in either mode, with any
number of workers and ps.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tf2dist.checkpoint.archive import Described, check_members, check_size, read_array
from tf2dist.checkpoint.facts import Facts, is_whole
from tf2dist.errors import first_line
from tf2dist.files import open_to_read

FORMAT = 2
MAX_MANIFEST_BYTES = 1 << 24  # enough for a hundred thousand arrays; a reader allocates no more for a damaged file
UNSEALED = 1  # the previous format, without a hash of the manifest
EARLIER_ARRAY = "earlier_updates"  # the updates that the optimizer had applied before the run began; absent for none
ARRAYS, MANIFEST = "arrays.npz", "manifest.json"


@dataclass(frozen=True)
class Weights:
    """The weights of another run's model, with which a new run begins at step 0.

    Attributes:
        arrays: by name; all names begin with "model/".
    """

    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class Snapshot:
    """A run at one exact global step, from which it can continue.

    Attributes:
        step: the number of updates applied.
        arrays: by name; those of the model begin with "model/", those of the optimizer with "optimizer/", and
            a mode may have arrays of its own besides.
    """

    step: int
    arrays: dict[str, np.ndarray]
    facts: Facts

    @property
    def num_updates(self) -> int:
        """How many updates the optimizer has applied, in this run and before it."""
        return self.step + int(self.arrays.get(EARLIER_ARRAY, 0))

    def weights(self) -> Weights:
        return Weights({name: array for name, array in self.arrays.items() if name.startswith("model/")})


# A run at one exact global step that is not all fetched yet: to be called once, from any thread, while the run goes on.
Frozen = Callable[[], Snapshot]


def to_bytes(start: Snapshot | Weights) -> bytes:
    """Packs a snapshot or weights for a task that cannot read the run directory."""
    # The facts tell a snapshot from weights: only a snapshot has any.
    head = [start.step, start.facts.to_json()] if isinstance(start, Snapshot) else [0, {}]
    with io.BytesIO() as buffer:
        np.savez(buffer, **start.arrays)  # type: ignore[arg-type]
        return json.dumps(head).encode() + b"\n" + buffer.getvalue()


def from_bytes(packed: bytes) -> Snapshot | Weights:
    """Unpacks the result of `to_bytes`."""
    # JSON escapes line breaks, so the first one ends the head, whatever bytes follow.
    head, _, body = packed.partition(b"\n")
    step, facts = json.loads(head)
    with io.BytesIO(body) as buffer, np.load(buffer, allow_pickle=False) as arrays:
        return Snapshot(step, dict(arrays), Facts.of_json(facts)) if facts else Weights(dict(arrays))


def folder_name(step: int) -> str:
    # Ten digits, so that a listing by name is in the order of the steps.
    return f"step-{step:010}"


def write(folder: Path, snapshot: Snapshot) -> None:
    """Writes both files into an empty folder, and flushes them to the disk.

    Raises:
        OSError: they could not be written.
    """
    # "x" creates a file and follows no link that somebody has put in its place.
    with open(folder / ARRAYS, "xb") as file:
        np.savez(file, **snapshot.arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    # Read back instead of hashed on the way: numpy seeks in the file to complete its headers.
    with open_to_read(folder / ARRAYS) as written:
        size, sha256 = os.fstat(written.fileno()).st_size, _sha256(written)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": snapshot.step,
        **snapshot.facts.to_json(),
        "arrays": {n: {"shape": list(a.shape), "dtype": str(a.dtype)} for n, a in snapshot.arrays.items()},
        "files": {ARRAYS: {"bytes": size, "sha256": sha256}},
    }
    text = json.dumps(manifest | {"sha256": _seal(manifest)}, indent=1)
    # Better an error now than a checkpoint that no reader accepts; the JSON is ASCII, a byte for each character.
    if len(text) > MAX_MANIFEST_BYTES:
        raise OSError(errno.EFBIG, f"{MANIFEST} would have more than {MAX_MANIFEST_BYTES} bytes")
    with open(folder / MANIFEST, "x", encoding="utf-8") as sealed:
        sealed.write(text)
        sealed.flush()
        os.fsync(sealed.fileno())
    flush(folder)


def flush(folder: Path) -> None:
    """Flushes the entries of a folder to the disk, without which a new file may have no name after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems do not support it for folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: io.BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(manifest: dict[str, Any]) -> str:
    """A hash of the content of a manifest, independent of its layout."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of one checkpoint.

    Raises:
        OSError, ValueError: it cannot be read, or is invalid.
    """
    with open_to_read(path / MANIFEST) as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
    manifest = json.loads(text.decode())
    if not isinstance(manifest, dict) or manifest.get("format") not in (UNSEALED, FORMAT):
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    seal = manifest.pop("sha256", None)
    # A manifest of the previous format has no hash. One that has is checked, so that changing the format in a new
    # manifest does not switch the check off.
    if (seal is not None or manifest["format"] != UNSEALED) and seal != _seal(manifest):
        raise ValueError(f"{MANIFEST} has been changed: it does not match its hash")
    return manifest


def _described(manifest: dict[str, Any]) -> tuple[dict[str, Described], int, str]:
    """The shapes and types of the arrays in a manifest, and the size and the hash of their file.

    Raises:
        ValueError: the manifest lacks something that a run needs.
    """
    try:
        files, arrays = manifest["files"], manifest["arrays"]
        size, sha256 = files[ARRAYS]["bytes"], files[ARRAYS]["sha256"]
        described = {name: Described.of(array["shape"], array["dtype"]) for name, array in arrays.items()}
        if not is_whole(manifest["step"]):
            raise KeyError("step")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} does not say what it must ({error})") from None
    return described, size, sha256


def _facts(manifest: dict[str, Any]) -> Facts:
    """The facts of the run in a manifest.

    Raises:
        ValueError: the manifest lacks something that a run needs.
    """
    try:
        return Facts.of_json(manifest)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} {error}") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, Facts, list[str], zipfile.ZipFile]]:
    """Checks everything of one checkpoint except for the values of the arrays, and keeps the file open.

    Yields:
        The step, the facts, the names of the arrays, and the file with them.
    """
    manifest = _read_manifest(path)
    described, size, sha256 = _described(manifest)
    step, facts = manifest["step"], _facts(manifest)
    # A folder that was renamed or copied would pass every other check, and change the order of the checkpoints.
    if path.name != folder_name(step):
        raise ValueError(f"{MANIFEST} is of {folder_name(step)}")
    # One descriptor from the check to the reading, so that the file cannot be exchanged in between.
    with open_to_read(path / ARRAYS) as file:
        if (found := os.fstat(file.fileno()).st_size) != size:
            raise ValueError(f"{ARRAYS} has {found} bytes instead of {size}")
        check_size(size, described)
        if _sha256(file) != sha256:
            raise ValueError(f"{ARRAYS} has been changed: it does not match the hash in the manifest")
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            check_members(archive, described)
            yield step, facts, list(described), archive


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Turns every error of a reader that meets unexpected bytes into a ValueError.

    A hash detects accidents only: whoever changes an array can change the hash as well. zipfile, json
    and numpy then raise errors of a dozen types, RecursionError among them.
    """
    try:
        yield
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {first_line(str(error))}") from error


def verify(path: Path) -> None:
    """Checks everything except for the values of the arrays, which only their hash covers.

    Raises:
        OSError, ValueError: says what is wrong with it.
    """
    with _damage(), _opened(path):
        pass


def read(path: Path) -> Snapshot:
    """Reads and checks one checkpoint.

    Raises:
        OSError, ValueError: says what is wrong with it.
    """
    with _damage(), _opened(path) as (step, facts, names, archive):
        return Snapshot(step, {name: read_array(archive, name) for name in names}, facts)
