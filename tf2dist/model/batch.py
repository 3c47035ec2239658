"""The batches of steps, without the padding that gives all of them one shape."""

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


def batches_without_padding(element: tuple[tf.Tensor, ...], num_steps: int) -> list[list[tf.Tensor]]:
    """The leaves of the batches of several steps, from leaves and weights `[num_steps, batch_size, ...]`.

    One operation cuts a leaf for all steps: operations of each step would be optimized one by one when a worker first
    calls a long function, and a small model takes 3,000 steps a second, of which each operation costs a microsecond.
    """
    *leaves, weights = element
    counts = tf.maximum(tf.math.count_nonzero(weights, axis=1, dtype=tf.int32), 1)
    # The examples of each batch and then its padding, in turn.
    sizes = tf.reshape(tf.stack([counts, weights.shape[1] - counts], axis=1), [-1])
    cut = [tf.split(tf.reshape(leaf, [-1, *leaf.shape[2:]]), sizes)[::2] for leaf in leaves]
    return [list(batch) for batch in zip(*cut, strict=True)]
