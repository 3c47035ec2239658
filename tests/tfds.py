"""MNIST as tensorflow-datasets lays it out, with few examples."""

import json
import struct
from pathlib import Path

NAMES = [f"mnist-{split}.tfrecord-00000-of-00001" for split in ("train", "test")]


def write_mnist(folder: Path, examples: list[bytes], version: str = "3.0.1") -> list[Path]:
    """Writes the same examples as training set and as test set; returns the two files."""
    version_dir = folder / "mnist" / version
    version_dir.mkdir(parents=True)
    info = {"shardLengths": [str(len(examples))], "numBytes": str(sum(map(len, examples)))}
    splits = [{"name": split, **info} for split in ("train", "test")]
    (version_dir / "dataset_info.json").write_text(json.dumps({"splits": splits}))
    for name in NAMES:
        (version_dir / name).write_bytes(b"".join(map(record, examples)))
    return [version_dir / name for name in NAMES]


def record(example: bytes) -> bytes:
    """A TFRecord: the length and its checksum, the bytes and their checksum."""
    length = struct.pack("<Q", len(example))
    return length + _checksum(length) + example + _checksum(example)


def _checksum(content: bytes) -> bytes:
    """The CRC-32C checksum with the mask of the TFRecord format."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
