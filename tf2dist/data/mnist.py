"""Reads MNIST from the TFRecord files of tensorflow-datasets, and caches the decoded arrays for later runs."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf2dist.data import location
from tf2dist.data.arrays import Arrays
from tf2dist.data.pipeline import NO_AUTOGRAPH
from tf2dist.errors import first_line
from tf2dist.files import expand
from tf2dist.tf_constants import NODES

ARRAYS = ("images.npy", "labels.npy")  # in a folder of the cache


def decoded(path: Path) -> Arrays:
    """The images and labels of a TFRecord file: decoded once for each user, then mapped from a cache.

    Decoding 60,000 PNG images would take a second in every worker. Without a cache that can be written, it does.
    """
    try:
        folder = _cache_folder(path)
    except OSError as error:
        raise location.damaged(path, f"cannot be read: {error.strerror}") from None
    if folder is None:
        return _decode(path)
    with contextlib.suppress(OSError, ValueError, EOFError):  # missing or incomplete
        return _mapped(folder)
    is_broken = os.path.exists(folder)
    arrays = _decode(path)
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


def _cache_folder(source: Path) -> Path | None:
    """The folder for the decoded arrays of a file, which each user has for himself; None without a home directory.

    Raises:
        OSError: the file does not exist, or may not be read.
    """
    root = expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if root is None:
        return None
    # A file that was replaced gets another folder; hashing its content would take longer than the cache saves.
    status = source.stat()
    key = hashlib.sha256(f"{source.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    return root / "tf2dist" / f"{source.name.split('.')[0]}-{key}"


def _mapped(folder: Path) -> Arrays:
    """The arrays in a folder of the cache.

    Raises:
        OSError, ValueError, EOFError: they are missing or incomplete.
    """
    # Mapped, so that all tasks of a host share one copy in the kernel's page cache.
    return Arrays(*(np.load(folder / name, mmap_mode="r") for name in ARRAYS))


def _decode(path: Path) -> Arrays:
    """The images and labels of a TFRecord file of tensorflow-datasets."""
    expected = location.num_examples(path)
    try:
        arrays = _decode_records(path)
    except tf.errors.OpError as error:
        reason = NODES.sub("", first_line(str(error)))
        raise location.damaged(path, f"is damaged ({type(error).__name__}: {reason[:100]})") from None
    if len(arrays) != expected:
        raise location.damaged(path, f"has {len(arrays):,} of {expected:,} examples")
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
