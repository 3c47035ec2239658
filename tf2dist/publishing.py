"""Arrays of this process for the graphs that a coordinator runs in it.

They go through ``ram://``, TensorFlow's in-memory file system, which belongs to the process: every
worker reads the arrays that it has loaded itself. Images to train on that are mapped from a file on
the host are named there and not copied: a worker then has them once, not twice. What is read again
and again until the end, for the evaluation, is copied, since a file may be gone by then.
"""

import contextlib
import mmap

import numpy as np
import tensorflow as tf

from tf2dist.data import Arrays, Splits

RAM = "ram://tf2dist"


def publish(splits: Splits) -> None:
    """Makes the arrays readable for `remote_array`."""
    parts: dict[str, Arrays] = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    for name, arrays in parts.items():
        for field, array in (("images", arrays.images), ("labels", arrays.labels)):
            path, first = (_place(array) if name == "train" else None) or ("", 0)
            if not path:
                path = f"{RAM}/{name}/{field}.bytes"
                _write(path, array.tobytes())
            _write(f"{RAM}/{name}/{field}", f"{path}\n{first}\n{array.nbytes}".encode())


def _place(array: np.ndarray) -> tuple[str, int] | None:
    """The file of a mapped array and its first byte there, if the array is most of that file."""
    if not isinstance(array, np.memmap) or not array.filename or not array.flags.c_contiguous:
        return None
    path, mapped = str(array.filename), np.frombuffer(array._mmap, np.uint8)  # type: ignore[attr-defined]
    if array.nbytes < len(mapped) / 2 or "\n" in path:
        return None
    # What is mapped begins at a page; the file of that name may be another one by now.
    first = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + array.ctypes.data - mapped.ctypes.data
    with contextlib.suppress(OSError, ValueError):
        if np.array_equal(np.memmap(path, np.uint8, "r", first, array.nbytes), np.frombuffer(array, np.uint8)):
            return path, first
    return None


def _write(path: str, content: bytes) -> None:
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(content)


def remote_array(split: str, field: str, shape: tuple[int, ...], dtype: tf.DType = tf.uint8) -> tf.Tensor:
    """In a graph: the published array, `shape` without the first dimension."""
    # Behind the name stands nothing, taken from the time: of a constant name TensorFlow would make a constant array,
    # which the graph keeps as another copy.
    nothing = tf.strings.substr(tf.as_string(tf.timestamp()), 0, 0)
    place = tf.strings.split(tf.io.read_file(f"{RAM}/{split}/{field}" + nothing), "\n")
    first, size = tf.unstack(tf.strings.to_number(place[1:], tf.int64), 2)
    content = tf.strings.substr(tf.io.read_file(place[0]), first, size)
    return tf.reshape(tf.io.decode_raw(content, dtype), [-1, *shape])
