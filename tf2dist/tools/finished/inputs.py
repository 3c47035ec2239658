"""Reads image files and numpy files as inputs of a model."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tf2dist.errors import DataError, first_line

CHANNELS = (1, 3)


def read(path: Path, model: keras.Model) -> tuple[np.ndarray, list[str]]:
    """The examples in a file, float32 [n, ...], and a name for each of them.

    Raises:
        DataError: the file cannot be read, or does not fit the model.
    """
    shape = shape_of(model)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name an image or a .npy file") from None
    if path.suffix == ".npy":
        examples = _array(path, shape)
        return examples, [f"{path}[{number}]" for number in range(len(examples))] if len(examples) != 1 else [str(path)]
    return _image(path, content, shape)[None], [str(path)]


def shape_of(model: keras.Model) -> tuple[int | None, ...]:
    """The shape of one example; None for a dimension of any size.

    Raises:
        DataError: the model has several inputs, and a file has only one.
    """
    inputs = getattr(model, "inputs", None) or []
    if len(inputs) != 1:
        raise DataError(f"FILE: this model has {len(inputs)} inputs, but a file gives one; leave the files out")
    return tuple(inputs[0].shape[1:])


def _array(path: Path, shape: tuple[int | None, ...]) -> np.ndarray:
    try:
        # A pickled array could run any code when it is read.
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: is no numpy array ({first_line(str(error))}); save one with numpy.save") from None
    # Several examples or one, both also without the last dimension, as grey images often are.
    for examples in (array, array[None], array[..., None], array[None, ..., None]):
        fits = examples.ndim and tf.TensorShape(shape).is_compatible_with(examples.shape[1:])
        if fits and array.dtype.kind in "biuf":
            return np.asarray(examples, np.float32)
    dims = ["n", *("any" if size is None else str(size) for size in shape)]
    raise DataError(
        f"{path}: is {array.dtype} {list(array.shape)}, but the model takes numbers [{', '.join(dims)}]; save an "
        "array of that shape"
    )


def _image(path: Path, content: bytes, shape: tuple[int | None, ...]) -> np.ndarray:
    """The picture in the model's height, width and channels, with values from 0 to 255.

    Raises:
        DataError: the model takes no images, or the file is none.
    """
    height, width, channels = (*shape, 1) if len(shape) == 2 else shape if len(shape) == 3 else (None, None, None)
    if channels not in CHANNELS:
        raise DataError(f"{path}: the model takes {list(shape)}, not images; give a .npy file of that shape")
    try:
        image = _decoded(content, channels)
    except tf.errors.OpError:
        raise DataError(
            f"{path}: is no image that can be decoded; give a PNG, JPEG, BMP or GIF file, or a .npy file"
        ) from None
    # With antialias, since the strokes of a large drawing would otherwise fall between the pixels that are kept.
    if height is not None and width is not None and tuple(image.shape[:2]) != (height, width):
        image = tf.image.resize(image, [height, width], antialias=True)
    array: np.ndarray = tf.cast(image, tf.float32).numpy()
    return array[..., 0] if len(shape) == 2 else array


def _decoded(content: bytes, channels: int) -> tf.Tensor:
    """The picture, in grey for one channel.

    Raises:
        tf.errors.OpError: it cannot be decoded.
    """
    try:
        return tf.io.decode_image(content, channels, expand_animations=False)
    except tf.errors.InvalidArgumentError:  # TensorFlow does not decode BMP and GIF files into one channel
        return tf.image.rgb_to_grayscale(tf.io.decode_image(content, 3, expand_animations=False))
