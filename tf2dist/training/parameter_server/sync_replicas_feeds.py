"""The input of the workers of mode=sync_replicas: that of asynchronous ones, and the share of each batch."""

from typing import Any

import tensorflow as tf

from tf2dist.data.pipeline import Sharding, batches_without_padding
from tf2dist.training.parameter_server.inputs import ArrayFeed

Batches = list[tuple[list[tf.Tensor], tf.Tensor]]  # the leaves and the share of each batch


class SharedArrayFeed(ArrayFeed):
    """Batches of the arrays that each worker has published; see `ArrayFeed`.

    The workers cut an epoch as with mode=sync: each has the same number of batches. So in its last step a worker may
    have fewer examples than the others, or one of padding, and the share says how much its gradient counts.
    """

    def shared_batches(
        self, source: tuple[Any, ...], worker: tf.Tensor, local_steps: tf.Tensor, num_steps: int
    ) -> Batches:
        """In the graph of a call: its batches, each with its share, float32 []: 1 for a full one, 0 for padding."""
        element = self.element(source, worker, local_steps, num_steps)
        leaves = batches_without_padding(element)
        return list(zip(leaves, shares(element[-1], self.sharding), strict=True))


def shares(weights: tf.Tensor, sharding: Sharding) -> list[tf.Tensor]:
    """The share of each batch from its weights, float32 [steps, batch]."""
    counts = tf.math.count_nonzero(weights, axis=1, dtype=tf.float32)
    return list(tf.unstack(counts / sharding.batch_size, weights.shape[0]))
