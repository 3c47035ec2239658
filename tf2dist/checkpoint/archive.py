"""The arrays of a checkpoint in a zip file, read with no more memory and time than their honest size takes.

A hash that fits says nothing of who has written them. So the file holds plain numbers, as many bytes
of them as the manifest describes, neither compressed nor twice the same bytes.
"""

import math
import os
import zipfile
from dataclasses import dataclass
from typing import IO, Any, Self

import numpy as np
from numpy.lib import format as npy

from tf2dist.checkpoint.facts import is_whole

NUMBERS = "biufc"  # numpy's kinds that hold no text and no objects
OVERHEAD_BYTES = 2048  # of an array at most, beside twice its name: numpy's header and two of the zip file's
MAX_DIMENSIONS = 64  # of numpy


@dataclass(frozen=True)
class Described:
    """What a manifest says of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, shape: Any, dtype: Any) -> Self:
        """Raises TypeError, ValueError: they are none."""
        if not isinstance(shape, list) or not all(map(is_whole, shape)) or len(shape) > MAX_DIMENSIONS:
            raise ValueError("the shape of an array is none")
        kind = np.dtype(dtype) if isinstance(dtype, str) else None
        if kind is None or kind.kind not in NUMBERS:
            raise ValueError("an array holds no numbers")
        return cls(tuple(shape), kind)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_size(size: int, described: dict[str, Described]) -> None:
    """Compares the bytes of the whole file with those of its arrays, before any of them is read.

    Raises:
        ValueError: it cannot be these arrays alone, or they do not fit into this machine.
    """
    payload = sum(array.num_bytes for array in described.values())
    more = sum(OVERHEAD_BYTES + 4 * len(name.encode(errors="replace")) for name in described)
    if not payload <= size <= payload + more + OVERHEAD_BYTES:
        raise ValueError(f"the arrays have {payload} bytes, and their file {size}")
    if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise ValueError(f"the arrays have {payload} bytes, and this machine {memory} of memory")


def check_members(archive: zipfile.ZipFile, described: dict[str, Described]) -> None:
    """Compares what the file holds with what it is to hold; only the beginning of each array is read.

    Raises:
        ValueError: they differ.
    """
    members = archive.infolist()
    if len(members) != len(described) or {one.filename for one in members} != {f"{name}.npy" for name in described}:
        raise ValueError("the file does not hold the arrays of the manifest")
    for name, array in described.items():
        member = archive.getinfo(f"{name}.npy")
        with archive.open(member) as file:
            plain = member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size
            if not plain or _header(file) != array or member.file_size != file.tell() + array.num_bytes:
                raise ValueError(f"{name} is not the array of the manifest")


def _header(file: IO[bytes]) -> Described:
    """What numpy's own header says of an array.

    Raises:
        ValueError: it says nothing.
    """
    version = npy.read_magic(file)  # type: ignore[no-untyped-call]
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError("the header of an array is of another version")
    try:
        shape, _, dtype = read(file)  # type: ignore[no-untyped-call]
    except MemoryError:  # Python's parser says so of deep brackets
        raise ValueError("the header of an array cannot be read") from None
    return Described(shape, dtype)


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array, after `check_members`.

    Raises:
        ValueError, zipfile.BadZipFile: it is damaged, or holds what no training goes on from.
    """
    with archive.open(f"{name}.npy") as file:
        array: np.ndarray = npy.read_array(file, allow_pickle=False)  # type: ignore[no-untyped-call]
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise ValueError(f"{name} is not finite")
    return array
