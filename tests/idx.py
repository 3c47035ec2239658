"""Fashion-MNIST as its four idx files, with few images."""

import gzip
import struct
from pathlib import Path

NAMES = [f"{split}-{kind}" for split in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES


def write_fashion_mnist(folder: Path, num_train: int = 40, num_test: int = 20, suffix: str = ".gz") -> None:
    """Writes images of all classes in turn; each pixel of an image is twenty times its label."""
    folder.mkdir(parents=True, exist_ok=True)
    for (images, labels), num in zip((NAMES[:2], NAMES[2:]), (num_train, num_test), strict=True):
        classes = [number % 10 for number in range(num)]
        pixels = b"".join(bytes([20 * label]) * 28 * 28 for label in classes)
        write(folder / f"{images}{suffix}", idx(pixels, num, 28, 28))
        write(folder / f"{labels}{suffix}", idx(bytes(classes), num))


def idx(values: bytes, *sizes: int) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", 0x800 + len(sizes), *sizes) + values


def write(file: Path, content: bytes) -> None:
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
