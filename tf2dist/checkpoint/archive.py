"""The arrays of a checkpoint in a zip file, read with no more memory and time than their declared size takes.

A hash that fits says nothing about who has written the file. So it may hold plain numbers only, exactly as many
bytes as the manifest describes, neither compressed nor shared between two members.
"""

import math
import os
import zipfile
from dataclasses import dataclass
from typing import IO, Any, Self

import numpy as np
from numpy.lib import format as npy

from tf2dist.checkpoint.facts import is_whole

NUMBERS = "biufc"  # numpy's kinds without text and without objects, which are pickled
OVERHEAD_BYTES = 2048  # of one array at most, besides its name: numpy's header and two of the zip file
MAX_DIMENSIONS = 64  # numpy's own limit


@dataclass(frozen=True)
class Described:
    """What a manifest says of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, shape: Any, dtype: Any) -> Self:
        """Raises TypeError or ValueError for an invalid shape or type."""
        if not isinstance(shape, list) or not all(map(is_whole, shape)) or len(shape) > MAX_DIMENSIONS:
            raise ValueError("the shape of an array is invalid")
        kind = np.dtype(dtype) if isinstance(dtype, str) else None
        if kind is None or kind.kind not in NUMBERS:
            raise ValueError("an array does not hold numbers")
        return cls(tuple(shape), kind)

    @property
    def num_bytes(self) -> int:
        # Python's integers do not overflow, as numpy's product would for an absurd shape.
        return math.prod(self.shape) * self.dtype.itemsize


def check_size(size: int, described: dict[str, Described]) -> None:
    """Compares the bytes of the whole file with those of its arrays, before any of them is read.

    Raises:
        ValueError: it cannot hold exactly these arrays, or they do not fit into the memory of this machine.
    """
    payload = sum(array.num_bytes for array in described.values())
    # A zip file holds each name twice, before the member and in the directory at its end.
    more = sum(OVERHEAD_BYTES + 4 * len(name.encode(errors="replace")) for name in described)
    if not payload <= size <= payload + more + OVERHEAD_BYTES:
        raise ValueError(f"the arrays have {payload} bytes, and their file {size}")
    if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise ValueError(f"the arrays have {payload} bytes, and this machine {memory} of memory")


def check_members(archive: zipfile.ZipFile, described: dict[str, Described]) -> None:
    """Compares the members of the file with those of the manifest; only the header of each array is read.

    Raises:
        ValueError: they differ.
    """
    # The number as well as the set: a zip file may have two members of one name, of which readers take different ones.
    members = archive.infolist()
    if len(members) != len(described) or {one.filename for one in members} != {f"{name}.npy" for name in described}:
        raise ValueError("the file does not hold the arrays of the manifest")
    for name, array in described.items():
        member = archive.getinfo(f"{name}.npy")
        with archive.open(member) as file:
            # A compressed member of a few bytes may unpack to any size.
            plain = member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size
            if not plain or _header(file) != array or member.file_size != file.tell() + array.num_bytes:
                raise ValueError(f"{name} is not the array of the manifest")


def _header(file: IO[bytes]) -> Described:
    """The shape and type in numpy's own header.

    Raises:
        ValueError: it cannot be read.
    """
    # Without `npy.read_array`, which would allocate the whole array before it could be compared.
    version = npy.read_magic(file)  # type: ignore[no-untyped-call]
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError("the header of an array is of another version")
    try:
        shape, _, dtype = read(file)  # type: ignore[no-untyped-call]
    except MemoryError:  # Python's parser raises it for deeply nested brackets
        raise ValueError("the header of an array cannot be read") from None
    return Described(shape, dtype)


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array, after `check_members`.

    Raises:
        ValueError, zipfile.BadZipFile: it is damaged, or not finite.
    """
    with archive.open(f"{name}.npy") as file:
        array: np.ndarray = npy.read_array(file, allow_pickle=False)  # type: ignore[no-untyped-call]
    # A training that continues from NaN can only fail, so the checkpoint before is better.
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise ValueError(f"{name} is not finite")
    return array
