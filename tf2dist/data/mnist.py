"""Reads images from TFRecord files of tensorflow-datasets or idx files, and caches the arrays for later runs."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf2dist.data import idx, image_files
from tf2dist.data.arrays import Arrays
from tf2dist.data.image_files import Files
from tf2dist.data.pipeline import NO_AUTOGRAPH
from tf2dist.errors import DataError, first_line
from tf2dist.files import expand
from tf2dist.tf_constants import NODES

ARRAYS = ("images.npy", "labels.npy")  # in a folder of the cache


def decoded(name: str, files: Files) -> Arrays:
    """The images and labels of a split: decoded once for each user, then mapped from a cache.

    Args:
        name: of the data set, for messages.

    Decoding 60,000 PNG images would take a second in every worker. Without a cache that can be written, it does.
    """
    try:
        folder = _cache_folder(files)
    except OSError as error:
        raise DataError(f"data ({name}): {error.filename} cannot be read: {error.strerror}; put it back") from None
    if folder is None:
        return _decode(name, files)
    with contextlib.suppress(OSError, ValueError, EOFError):  # missing or incomplete
        return _mapped(folder)
    is_broken = os.path.exists(folder)
    arrays = _decode(name, files)
    # Complete in a folder beside it, then renamed: other tasks see all of the arrays or none. A full disk is no error.
    with contextlib.suppress(OSError, ValueError, EOFError):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            for name, array in zip(ARRAYS, arrays.leaves, strict=True):
                with open(made / name, "wb") as file:
                    np.save(file, array)
                    # Or a file may have its length and not its content after a loss of power, which nothing notices.
                    file.flush()
                    os.fsync(file.fileno())
            # A rename replaces no folder that has files in it, so the broken one is moved into the one that is removed.
            if is_broken:
                folder.rename(Path(temporary, "broken"))
            with contextlib.suppress(OSError):  # another task was faster, and its files may be mapped already
                made.rename(folder)
        return _mapped(folder)
    return arrays


def _cache_folder(files: Files) -> Path | None:
    """The folder for the decoded arrays of a split, which each user has for himself; None without a home directory.

    Raises:
        OSError: a file does not exist, or may not be read.
    """
    root = expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if root is None:
        return None
    # A file that was replaced gets another folder; hashing its content would take longer than the cache saves.
    each = [f"{file.resolve()} {status.st_size} {status.st_mtime_ns}" for file in files for status in [file.stat()]]
    key = hashlib.sha256("\n".join(each).encode()).hexdigest()[:16]
    return root / "tf2dist" / f"{files[0].name.split('.')[0]}-{key}"


def _mapped(folder: Path) -> Arrays:
    """The arrays in a folder of the cache.

    Raises:
        OSError, ValueError, EOFError: they are missing or incomplete.
    """
    # Mapped, so that all tasks of a host share one copy in the kernel's page cache.
    return Arrays(*(np.load(folder / name, mmap_mode="r") for name in ARRAYS))


def _decode(name: str, files: Files) -> Arrays:
    """The images and labels of a TFRecord file of tensorflow-datasets, or of two idx files."""
    if len(files) == 1:
        return _decode_checked(*files)
    (shape, pixels), (_, labels) = idx.read(name, files[0], 3), idx.read(name, files[1], 1)
    return Arrays(np.frombuffer(pixels, np.uint8).reshape(*shape, 1), np.frombuffer(labels, np.uint8))


def _decode_checked(path: Path) -> Arrays:
    expected = image_files.num_examples(path)
    try:
        arrays = _decode_records(path)
    except tf.errors.OpError as error:
        reason = NODES.sub("", first_line(str(error)))
        raise image_files.damaged(path, f"is damaged ({type(error).__name__}: {reason[:100]})") from None
    if len(arrays) != expected:
        raise image_files.damaged(path, f"has {len(arrays):,} of {expected:,} examples")
    return arrays


def _decode_records(path: Path) -> Arrays:
    """Decodes whole blocks of records: four times as fast as `tfds.load`, which also has to import more."""
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    @NO_AUTOGRAPH
    def decode(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        examples = tf.io.parse_example(records, features)
        image = tf.TensorSpec([28, 28, 1], tf.uint8)
        images = tf.map_fn(lambda png: tf.io.decode_png(png, 1), examples["image"], fn_output_signature=image)
        return images, tf.cast(examples["label"], tf.uint8)

    with tf.device("CPU:0"):
        records = tf.data.TFRecordDataset(str(path), buffer_size=1 << 20).batch(2000)
        # An empty file must give empty arrays: the message about it says how many examples there are.
        none = np.empty([0, 28, 28, 1], np.uint8), np.empty([0], np.uint8)
        blocks = [none, *records.map(decode, num_parallel_calls=2).as_numpy_iterator()]
    return Arrays(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
