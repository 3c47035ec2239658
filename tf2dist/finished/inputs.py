"""Files as a model takes them: images and arrays of numpy."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tf2dist.errors import DataError, first_line

CHANNELS = (1, 3)


def read(path: Path, model: keras.Model) -> tuple[np.ndarray, list[str]]:
    """The examples in a file, float32 [n, ...], and what to call each of them.

    Raises:
        DataError: they cannot be read, or are not what the model takes.
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
    """Of one example.

    Raises:
        DataError: the model takes several inputs, which no single file gives.
    """
    inputs = getattr(model, "inputs", None) or []
    if len(inputs) != 1:
        raise DataError(f"FILE: this model has {len(inputs)} inputs, and a file gives one; leave the files out")
    return tuple(inputs[0].shape[1:])


def _array(path: Path, shape: tuple[int | None, ...]) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: is no array of numpy ({first_line(str(error))}); save it with numpy.save") from None
    for examples in (array, array[None], array[..., None], array[None, ..., None]):
        fits = examples.ndim and tf.TensorShape(shape).is_compatible_with(examples.shape[1:])
        if fits and array.dtype.kind in "biuf":
            return np.asarray(examples, np.float32)
    wanted = ["n", *("any" if size is None else str(size) for size in shape)]
    raise DataError(f"{path}: is {array.dtype} {list(array.shape)}, and the model takes numbers [{', '.join(wanted)}]")


def _image(path: Path, content: bytes, shape: tuple[int | None, ...]) -> np.ndarray:
    """The picture in the model's height, width and channels, from 0 to 255."""
    height, width, channels = (*shape, 1) if len(shape) == 2 else shape if len(shape) == 3 else (None, None, None)
    if channels not in CHANNELS:
        raise DataError(f"{path}: the model takes {list(shape)}, which is no image; give a .npy file of that shape")
    try:
        image = _decoded(content, channels)
    except tf.errors.OpError:
        raise DataError(
            f"{path}: is no image that can be read; give a PNG, JPEG, BMP or GIF file, or a .npy file"
        ) from None
    if height is not None and width is not None and tuple(image.shape[:2]) != (height, width):
        image = tf.image.resize(image, [height, width], antialias=True)
    found: np.ndarray = tf.cast(image, tf.float32).numpy()
    return found[..., 0] if len(shape) == 2 else found


def _decoded(content: bytes, channels: int) -> tf.Tensor:
    """The picture, grey for one channel; raises tf.errors.OpError."""
    try:
        return tf.io.decode_image(content, channels, expand_animations=False)
    except tf.errors.InvalidArgumentError:  # BMP and GIF are not decoded into grey
        return tf.image.rgb_to_grayscale(tf.io.decode_image(content, 3, expand_animations=False))
