"""The examples of this process, for the graphs that a coordinator runs in it.

A worker takes them from the arrays that it has loaded itself, which are mapped from a file where the data allow it. As
a tensor in the graph, they would be copied for each worker, and again whenever its pipeline is rebuilt.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.data.layout import Layout
from tf2dist.data.stream import Reader
from tf2dist.process.tf_internals import publish_functions

NAME = "tf2dist"
EVALUATED = ("validation", "test")
BATCHES = "batches"

# TensorFlow holds Python functions by weak references only, so they would vanish without this.
_published: dict[str, Any] = {}


def publish(splits: Splits, workers: Iterable[int] = (0,)) -> None:
    """Makes the examples of this process readable by `remote_examples`, and its streams by `remote_batches`.

    Args:
        workers: the indices of the workers in this process; several only in tests.

    Raises:
        DataError: a stream cannot be made.
    """
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    _published.update({_token(split): arrays.take for split, arrays in parts.items() if arrays is not None})
    evaluated = [parts[split] for split in EVALUATED]

    # The number of the split is an input, so that one graph serves the evaluation of every split.
    def take(number: np.ndarray, index: np.ndarray) -> list[np.ndarray]:
        arrays = evaluated[number]
        assert arrays is not None
        return arrays.take(index)

    _published[_token("evaluated")] = take
    if splits.stream:
        for index in workers:
            splits.stream.batches(index, 0)  # what is wrong with a stream is reported here, not by the first step
        readers = {index: Reader(splits.stream, index) for index in workers}
        _published[_token(BATCHES)] = lambda worker, first, num: readers[int(worker)].take(int(first), int(num))
    publish_functions(_published)


def remote_examples(split: str, index: tf.Tensor, layout: Layout) -> list[tf.Tensor]:
    """In a graph: the leaves of the published examples with these indices, an int32 tensor of any shape."""
    return _remote(split, [index], layout)


def evaluated_examples(number: tf.Tensor, index: tf.Tensor, layout: Layout) -> list[tf.Tensor]:
    """As `remote_examples`, of a split that is chosen when the graph runs.

    Args:
        number: the index of the split in `EVALUATED`, int32.
    """
    return _remote("evaluated", [number, index], layout)


def _remote(name: str, inputs: list[tf.Tensor], layout: Layout) -> list[tf.Tensor]:
    specs, index = layout.specs, inputs[-1]
    # The token names a function of the process in which the operation runs, so the graph can come from another one.
    taken = tf.raw_ops.PyFunc(input=inputs, token=_token(name), Tout=[spec.dtype for spec in specs])
    return [tf.ensure_shape(leaf, index.shape.concatenate(spec.shape)) for leaf, spec in zip(taken, specs, strict=True)]


def remote_batches(worker: tf.Tensor, first: tf.Tensor, num: int, layout: Layout) -> list[list[tf.Tensor]]:
    """In a graph: the leaves of `num` batches of a worker's published stream, from the one with number `first` on."""
    specs = layout.batched(None)
    types = [spec.dtype for spec in specs]
    taken = iter(tf.raw_ops.PyFunc(input=[worker, first, tf.constant(num)], token=_token(BATCHES), Tout=types * num))
    return [[tf.ensure_shape(next(taken), spec.shape) for spec in specs] for _ in range(num)]


def _token(split: str) -> str:
    return f"{NAME}.{split}"
