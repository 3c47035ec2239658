"""The batches of steps, without the padding that gives all of them one shape."""

from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf


class Batch(NamedTuple):
    """A worker's batch.

    Attributes:
        leaves: [n, ...] each, see `Layout`.
        weights: float32 [n], 0 for padding. Those of all batches of one step add up to 1.
    """

    leaves: list[tf.Tensor]
    weights: tf.Tensor


def without_padding(batch: Batch) -> Batch:
    """The batch without its padding, because some layers look at the whole batch; one example if all is padding.

    In Keras, too, the last batch of an epoch is shorter. XLA must not compile this: it needs fixed shapes.
    """
    # The mean of no examples would be NaN, in moving averages for good; one of weight 0 only costs time.
    count = tf.maximum(tf.math.count_nonzero(batch.weights, dtype=tf.int32), 1)
    return Batch([leaf[:count] for leaf in batch.leaves], batch.weights[:count])


def batches_without_padding(element: tuple[tf.Tensor, ...], num_steps: int) -> Iterator[list[tf.Tensor]]:
    """The leaves of the batches of several steps, from leaves and weights `[num_steps, batch_size, ...]`.

    As much as possible is computed for all steps at once: a small model takes 3,000 steps a second, and each
    operation of a step costs about a microsecond.
    """
    *leaves, weights = element
    counts = tf.maximum(tf.math.count_nonzero(weights, axis=1, dtype=tf.int32), 1)
    ends = tf.unstack(tf.stack([tf.range(1, num_steps + 1), counts], axis=1), num_steps)
    for number in range(num_steps):
        # One operation for what leaf[number, :count] would take several: pack its limits, and slice.
        yield [tf.strided_slice(leaf, [number, 0], ends[number], [1, 1], shrink_axis_mask=0b01) for leaf in leaves]
