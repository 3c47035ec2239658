"""Reads idx files, plain or compressed by gzip: a magic number, the size of each dimension, and unsigned bytes."""

import gzip
import math
import struct
import zlib
from pathlib import Path

from tf2dist.errors import DataError, brief_reason
from tf2dist.files import open_to_read

UNSIGNED_BYTES = 0x800  # the magic number is this plus the number of dimensions


def read(name: str, file: Path, num_dimensions: int) -> tuple[tuple[int, ...], bytes]:
    """The sizes of the dimensions, and all values.

    Args:
        name: of the data set, for messages.

    Raises:
        DataError: the file cannot be read, or is no whole idx file of bytes with so many dimensions.
    """
    sizes, values = _parts(name, file, num_dimensions, -1)
    if len(values) != math.prod(sizes):
        shown = " x ".join(map(str, sizes))
        raise damaged(name, file, f"has {len(values):,} values, and its header says {shown}")
    return sizes, values


def read_sizes(name: str, file: Path, num_dimensions: int) -> tuple[int, ...]:
    """The sizes alone; raises as `read` does, but does not look at the values."""
    return _parts(name, file, num_dimensions, 0)[0]


def _parts(name: str, file: Path, num_dimensions: int, num_values: int) -> tuple[tuple[int, ...], bytes]:
    """The sizes and so many of the values, with -1 all of them."""
    header = struct.Struct(f">{1 + num_dimensions}I")
    try:
        with open_to_read(file) as stored, gzip.open(stored) if file.suffix == ".gz" else stored as opened:
            # At the end of the file gzip compares its checksum, too.
            head, values = opened.read(header.size), opened.read(num_values)
    except OSError as error:
        raise damaged(name, file, f"cannot be read: {brief_reason(error)}") from None
    except (EOFError, zlib.error) as error:
        raise damaged(name, file, f"is damaged: {brief_reason(error)}") from None
    if len(head) < header.size:
        raise damaged(name, file, f"has {len(head)} of at least {header.size} bytes")
    magic, *sizes = header.unpack(head)
    if magic != UNSIGNED_BYTES + num_dimensions:
        raise damaged(name, file, f"begins with 0x{magic:08x} instead of 0x{UNSIGNED_BYTES + num_dimensions:08x}")
    return tuple(sizes), values


def damaged(name: str, file: Path, why: str) -> DataError:
    return DataError(f"data ({name}): {file} {why}; put a whole one there")
