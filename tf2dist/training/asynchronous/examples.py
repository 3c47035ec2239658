"""Examples of this process for the graphs that a coordinator runs in it.

A worker takes them from the arrays that it has loaded itself, which are mapped from a file where the
data allow it: as a tensor each worker would have a copy of its own, and another one whenever its
pipeline is made anew.
"""

from typing import Any

import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.process.tf_internals import publish_functions

NAME = "tf2dist"

_published: dict[str, Any] = {}  # TensorFlow holds its Python functions by weak references


def publish(splits: Splits) -> None:
    """Makes the examples of this process readable for `remote_examples`."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    _published.update({_token(split): arrays.take for split, arrays in parts.items()})
    publish_functions(_published)


def remote_examples(split: str, index: tf.Tensor, image_shape: tuple[int, ...]) -> tuple[tf.Tensor, tf.Tensor]:
    """In a graph: the published examples of `index`, an int32 tensor of any shape.

    Returns:
        images, uint8 [*index.shape, *image_shape], and labels, int32 [*index.shape].
    """
    images, labels = tf.raw_ops.PyFunc(input=[index], token=_token(split), Tout=[tf.uint8, tf.int32])
    return tf.ensure_shape(images, index.shape.concatenate(image_shape)), tf.ensure_shape(labels, index.shape)


def _token(split: str) -> str:
    return f"{NAME}.{split}"
