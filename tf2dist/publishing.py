"""Arrays of this process for the graphs that a coordinator runs in it.

They go through ``ram://``, TensorFlow's in-memory file system, which belongs to the process: every
worker reads the arrays that it has loaded itself. What is a good part of a file on the host already
is named there and not copied: a worker then has the array once, not twice.
"""

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
            path, first = _place(array) or ("", 0)
            if not path:
                path = f"{RAM}/{name}/{field}.bytes"
                _write(path, array.tobytes())
            _write(f"{RAM}/{name}/{field}", f"{path}\n{first}\n{array.nbytes}".encode())


def _place(array: np.ndarray) -> tuple[str, int] | None:
    """The file of a mapped array and its first byte there, if the array is most of that file."""
    if not isinstance(array, np.memmap) or array.mode != "r" or not array.flags.c_contiguous:
        return None
    mapped = np.frombuffer(array._mmap, np.uint8)  # type: ignore[attr-defined]
    if array.nbytes < len(mapped) / 2 or "\n" in str(array.filename):
        return None
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # of what is mapped
    return str(array.filename), start + array.ctypes.data - mapped.ctypes.data


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
