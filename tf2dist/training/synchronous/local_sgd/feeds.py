"""The input of workers that take their steps without knowing the others' batches."""

from typing import Any

import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.data.pipeline import Sharding
from tf2dist.data.stream import Stream
from tf2dist.training.synchronous.feeds import ArrayFeed, Feed, Part, StreamFeed
from tf2dist.training.synchronous.workers import Workers


class OwnStreamFeed(StreamFeed):
    """Batches of the worker's own stream, of which it takes each for the same share of a step; see `StreamFeed`."""

    num_extra = 0

    def __init__(self, workers: Workers, stream: Stream, begin: int) -> None:
        super().__init__(workers, stream, begin)
        self._count = workers.count

    def part(self, element: Any) -> Part:
        leaves, _ = element
        return Part(leaves, tf.constant(1 / self._count))

    def extra(self, element: Any) -> list[tf.Tensor]:
        return []

    def take_back(self, sums: tf.Tensor) -> None:
        pass


def own_feed_of(workers: Workers, splits: Splits, sharding: Sharding, begin: int) -> Feed:
    """See `ArrayFeed` and `OwnStreamFeed`."""
    if splits.stream:
        return OwnStreamFeed(workers, splits.stream, begin)
    return ArrayFeed(workers, splits.train, sharding, begin)
