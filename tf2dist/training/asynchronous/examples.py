"""Examples of this process for the graphs that a coordinator runs in it.

A worker takes them from the arrays that it has loaded itself, which are mapped from a file where the
data allow it: as a tensor each worker would have a copy of its own, and another one whenever its
pipeline is made anew.
"""

from typing import Any

import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.data.layout import Layout
from tf2dist.process.tf_internals import publish_functions

NAME = "tf2dist"

_published: dict[str, Any] = {}  # TensorFlow holds its Python functions by weak references


def publish(splits: Splits) -> None:
    """Makes the examples of this process readable for `remote_examples`."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    _published.update({_token(split): arrays.take for split, arrays in parts.items() if arrays is not None})
    publish_functions(_published)


def remote_examples(split: str, index: tf.Tensor, layout: Layout) -> list[tf.Tensor]:
    """In a graph: the leaves of the published examples of `index`, an int32 tensor of any shape."""
    specs = layout.specs
    taken = tf.raw_ops.PyFunc(input=[index], token=_token(split), Tout=[spec.dtype for spec in specs])
    return [tf.ensure_shape(leaf, index.shape.concatenate(spec.shape)) for leaf, spec in zip(taken, specs, strict=True)]


def _token(split: str) -> str:
    return f"{NAME}.{split}"
