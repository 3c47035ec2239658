"""A run at one step as two files: its arrays, and the facts that a run needs besides them so that it can continue.

    arrays.npz       the arrays by name; opens with numpy alone, never unpickled
    manifest.json    step, facts of the run, every array's shape and type, every file's size and hash

They do not depend on the cluster that wrote them: a run can continue from them in either mode, with any
number of workers and ps. Damage is found before they are used. The files belong to the user of the run: hashes find
what a disk or a copy has damaged, not what somebody has changed on purpose. Arrays are never unpickled, because
weights are often shared.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from tf2dist.config.schema import KerasConfig
from tf2dist.declared import TreeReader, UndeclaredError
from tf2dist.errors import CheckpointError, TaskLostError, TfDistError, brief_reason
from tf2dist.files import open_to_read

WHOLE_NUMBERS = range(2**63)  # what TensorFlow's integers hold
Count = Annotated[int, WHOLE_NUMBERS]
Size = Annotated[int, WHOLE_NUMBERS[1:]]


@dataclass(frozen=True)
class ShardingFacts:
    """How the training set was divided into batches; see `passes.Sharding`."""

    num_examples: Size
    batch_size: Size
    num_shards: Size
    seed: int
    whole_batch_loss: bool
    shuffle: bool
    replicas_to_aggregate: Size | None = None


@dataclass(frozen=True)
class InputFacts:
    """The position in the training data.

    Attributes:
        position, unseen: see `passes.InputPosition`. The position is None in checkpoints of streams, and in those of
            tf2dist before it had one.
        positions: the number of the next batch of each worker, where each has its own: that of its stream, or with
            mode=sync_replicas and backup workers that of its part of the arrays.
    """

    sharding: ShardingFacts
    position: Count | None = None
    unseen: tuple[tuple[Count, Count], ...] = ()
    positions: tuple[Count, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a run at one step, in the order of the manifest.

    Attributes:
        local_steps: the steps of each worker that are part of the global step.
        target_step: the step at which the run ends.
        examples: how many all workers have seen in the whole run.
        data: the name of the data set.
        model, optimizer: name and arguments.
        keras: Keras's settings.
    """

    mode: str
    local_steps: tuple[Count, ...]
    target_step: Count
    examples: Count
    input: InputFacts
    data: str
    model: dict[str, Any]
    optimizer: dict[str, Any]
    seed: int
    keras: KerasConfig

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Facts":
        """Reads what `to_json` of this or another version has written; unknown fields are ignored."""
        try:
            facts = TreeReader(is_open=True).read(cls, values)
            # Types alone do not show this, and a worker without a position would fail far from here.
            positions = facts.input.positions
            if len(positions) != facts.input.sharding.num_shards and (positions or facts.input.position is None):
                raise UndeclaredError("input.positions", repr(positions))
        except UndeclaredError as error:
            raise ValueError(f"does not say what it must ({error.where})") from None
        return facts

    @property
    def epochs(self) -> float:
        """Passes over the training set."""
        return self.examples / self.input.sharding.num_examples

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values = asdict(self)
        # Left out where it is that of the workers, so that all modes write the same.
        if values["input"]["sharding"]["replicas_to_aggregate"] is None:
            del values["input"]["sharding"]["replicas_to_aggregate"]
        return values


FORMAT = 2
VARIABLES = "model/", "optimizer/"  # the names of variables begin with these; what a mode or `fit` saves, does not
EARLIER_ARRAY = "earlier_updates"  # the updates that the optimizer had applied before the run began; absent for none
ARRAYS, MANIFEST = "arrays.npz", "manifest.json"
PIECE_BYTES = 16 << 20  # what is read of an array at once


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
            a mode may have arrays of its own besides. Large ones may be mapped from a file, and cannot be written to.
    """

    step: int
    arrays: dict[str, np.ndarray]
    facts: Facts

    @property
    def num_updates(self) -> int:
        """How many updates the optimizer has applied, in this run and before it."""
        return self.step + int(self.arrays.get(EARLIER_ARRAY, 0))

    def without_variables(self) -> "Snapshot":
        """The same without the arrays of the model and of the optimizer, and without the files that they lie in."""
        return replace(self, arrays={name: a for name, a in self.arrays.items() if not name.startswith(VARIABLES)})

    def weights(self) -> Weights:
        return Weights({name: array for name, array in self.arrays.items() if name.startswith("model/")})


# A run at one exact global step that is not all fetched yet: to be called once, from any thread, while the run goes on.
Frozen = Callable[[], Snapshot]


def pack(head: Any, arrays: dict[str, np.ndarray]) -> bytes:
    """A value of JSON and arrays by name, for another task; reading them can run no code, as unpickling could."""
    with io.BytesIO() as buffer:
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        return json.dumps(head).encode() + b"\n" + buffer.getvalue()


def unpack(packed: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    """Reverses `pack`."""
    # JSON escapes line breaks, so the first one ends the head, whatever bytes follow.
    head, _, body = packed.partition(b"\n")
    with io.BytesIO(body) as buffer, np.load(buffer, allow_pickle=False) as arrays:
        return json.loads(head), dict(arrays)


def describe(start: Snapshot | Weights | None) -> Any:
    """A value of JSON that says, for a task that gets the arrays beside it, of what they are."""
    # The facts tell a snapshot from weights: only a snapshot has any.
    if isinstance(start, Snapshot):
        return [start.step, start.facts.to_json()]
    return [0, {}] if start else None


def of_description(description: Any, arrays: dict[str, np.ndarray]) -> Snapshot | Weights | None:
    """Reverses `describe`."""
    if description is None:
        return None
    step, facts = description
    return Snapshot(step, arrays, Facts.of_json(facts)) if facts else Weights(arrays)


def in_file(pieces: Iterable[np.ndarray], shape: tuple[int, ...], folder: str | None = None) -> np.ndarray:
    """An array of pieces, in C order, that is mapped from a file without a name, which ends with the array.

    Args:
        folder: for the file; None for that of temporary files.
    """
    # Written and then mapped: on a full disk a write into a mapping would end the process.
    with tempfile.TemporaryFile(dir=folder) as file:
        for piece in pieces:
            file.write(piece.data)
        file.flush()
        return np.memmap(file, piece.dtype, "r", shape=shape)


def is_finite(array: np.ndarray, or_infinite: bool = False) -> bool:
    """Whether all numbers of an array of any type are finite, or not NaN; only a piece of it is in memory at once."""
    if array.dtype.kind not in "fc":
        return True
    flat, at_once = array.ravel(order="K"), PIECE_BYTES // array.itemsize
    pieces = (flat[first : first + at_once] for first in range(0, flat.size, at_once))
    return not any(np.isnan(piece).any() if or_infinite else not np.isfinite(piece).all() for piece in pieces)


def have_same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have the same shape, type and bits; only a piece of them is compared at once."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other)]
    pieces = (slice(first, first + PIECE_BYTES) for first in range(0, bits[0].size, PIECE_BYTES))
    return all(np.array_equal(bits[0][piece], bits[1][piece]) for piece in pieces)


def folder_name(step: int) -> str:
    # Ten digits, so that a listing by name is in the order of the steps.
    return f"step-{step:010}"


def write(folder: Path, snapshot: Snapshot) -> None:
    """Writes both files into an empty folder, and flushes them to the disk."""
    with open(folder / ARRAYS, "wb") as file:
        np.savez(file, **snapshot.arrays)  # type: ignore[arg-type]
        file.flush()
        # Read back instead of hashed on the way: numpy seeks in the file to complete its headers. This thread flushes
        # it meanwhile, since `Saver.wait` tells a slow disk from one that hangs by the processor time of this thread.
        with ThreadPoolExecutor(1) as thread, open_to_read(folder / ARRAYS) as written:
            hashed = thread.submit(_sha256, written)
            os.fsync(file.fileno())
            size, sha256 = os.fstat(written.fileno()).st_size, hashed.result()
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": snapshot.step,
        **snapshot.facts.to_json(),
        "arrays": {n: {"shape": list(a.shape), "dtype": str(a.dtype)} for n, a in snapshot.arrays.items()},
        "files": {ARRAYS: {"bytes": size, "sha256": sha256}},
    }
    with open(folder / MANIFEST, "w", encoding="utf-8") as sealed:
        sealed.write(json.dumps(manifest | {"sha256": _seal(manifest)}, indent=1))
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
    """The manifest of one checkpoint."""
    with open_to_read(path / MANIFEST) as file:
        manifest = json.loads(file.read().decode())
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    if manifest.pop("sha256", None) != _seal(manifest):
        raise ValueError(f"{MANIFEST} has been changed: it does not match its hash")
    return manifest


def _facts(manifest: dict[str, Any]) -> Facts:
    """The facts of the run in a manifest."""
    try:
        return Facts.of_json(manifest)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} {error}") from None


def is_damage(error: OSError | ValueError) -> bool:
    """Whether an error while a checkpoint is read says that it is damaged.

    Others say nothing about it, such as too many open files, or a network file system that does not answer.
    """
    # A part that is missing, or is no regular file.
    missing = (FileNotFoundError, NotADirectoryError)
    # The HDF5 library's errors about the content of a file have no number.
    return isinstance(error, (ValueError, *missing)) or error.errno in (errno.EINVAL, errno.ELOOP, None)


def unreadable(
    path: Path, error: OSError, way_out: str = "try again, and if that does not help, move it away"
) -> TfDistError:
    """The error for the user, if that is no damage."""
    # Asking again does not change a permission.
    kind = CheckpointError if isinstance(error, PermissionError) else TaskLostError
    return kind(f"{path}: cannot be read ({brief_reason(error)}); {way_out}")


def target_of(path: Path) -> int:
    """The step at which the run was to end when it saved a checkpoint."""
    return _facts(_read_manifest(path)).target_step


def verify(path: Path) -> dict[str, Any]:
    """Checks both files of a checkpoint by their sizes and hashes; returns the manifest."""
    manifest = _read_manifest(path)
    try:
        size, sha256 = manifest["files"][ARRAYS]["bytes"], manifest["files"][ARRAYS]["sha256"]
        name = folder_name(manifest["step"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} does not say what it must ({error})") from None
    # A folder that was renamed or copied would pass every other check, and change the order of the checkpoints.
    if path.name != name:
        raise ValueError(f"{MANIFEST} is of {name}")
    with open_to_read(path / ARRAYS) as file:
        if (actual := os.fstat(file.fileno()).st_size) != size:
            raise ValueError(f"{ARRAYS} has {actual} bytes instead of {size}")
        if _sha256(file) != sha256:
            raise ValueError(f"{ARRAYS} has been changed: it does not match the hash in the manifest")
    return manifest


def read(path: Path) -> Snapshot:
    """Reads and checks one checkpoint; its large arrays are mapped from the file."""
    manifest = verify(path)
    facts, arrays = _facts(manifest), read_arrays(path / ARRAYS)
    if arrays.keys() != set(manifest.get("arrays", [])):
        raise ValueError(f"{ARRAYS} does not hold the arrays of the manifest")
    for name, array in arrays.items():
        # A training that continues from NaN can only fail, so the checkpoint before is better. The sum of a metric is
        # NaN where the metric is, as in Keras.
        if name.startswith(VARIABLES) and not is_finite(array, or_infinite=True):
            raise ValueError(f"{name} is not finite")
    return Snapshot(manifest["step"], arrays, facts)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of numpy by name; large ones are mapped from it, and pickled ones are refused."""
    with np.load(path, allow_pickle=False) as archive:
        entries = {info.filename.removesuffix(".npy"): info for info in archive.zip.infolist()}
        arrays = {name: _mapped(path, entries[name]) for name in archive.files}
        return {name: archive[name] if array is None else array for name, array in arrays.items()}


def _mapped(path: Path, entry: zipfile.ZipInfo) -> np.ndarray | None:
    """The array of an entry, which stays in the file; None if it is small, or cannot be mapped."""
    if entry.file_size <= PIECE_BYTES or entry.compress_type != zipfile.ZIP_STORED:
        return None
    with open_to_read(path) as file:
        # The entry's header in the file may be longer than the one in the directory at its end.
        file.seek(entry.header_offset)
        name_size, extra_size = struct.unpack("<26x2H", file.read(30))
        file.seek(name_size + extra_size, os.SEEK_CUR)
        if np.lib.format.read_magic(file) != (1, 0):
            return None
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if dtype.hasobject:
            return None
        return np.memmap(file, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")
