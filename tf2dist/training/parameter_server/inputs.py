"""The input of workers: batches of the arrays that each has loaded itself, or of its stream.

A worker publishes the examples of its process for the graphs that the coordinator runs in it, and a call asks for its
batches by their numbers. A tf.data pipeline of the worker's process gathers them; no iterator is in the graph of the
call, so nothing of an aborted call is left in it. The arrays are mapped from a file where the data allow it. As a
tensor in the graph, they would be copied for each worker.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.data.layout import Layout
from tf2dist.data.passes import ExampleOrder, NumberedSteps, Sharding
from tf2dist.data.pipeline import RangePipeline
from tf2dist.data.stream import Reader
from tf2dist.process.tf_internals import publish_functions

NAME = "tf2dist"
EVALUATED = ("validation", "test")
BATCHES, COUNT, EVALUATED_BATCHES = "batches", "count of batches", "evaluated batches"
ENDED_SECS = 0.05  # for which a call waits if the data of its worker have ended, and that of others have not
GATHERED_AT_ONCE = 1 << 22  # bytes; with less each batch costs more, and with more a call begins later
Batches = list[list[tf.Tensor]]  # the leaves of each batch, with mode=sync_replicas its share, too

# TensorFlow holds Python functions by weak references only, so they would vanish without this.
_published: dict[str, Any] = {}


def publish(splits: Splits, workers: Iterable[int] = (0,)) -> None:
    """Makes the examples of this process readable by `remote_ranges`, and its streams by `remote_batches`.

    Args:
        workers: the indices of the workers in this process; several only in tests.

    Raises:
        DataError: a stream cannot be made.
    """
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    train = splits.train

    pipeline = RangePipeline(train)

    def take_ranges(ranges: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
        num_examples, seed, shuffle = map(int, order)
        return pipeline.take(ranges, ExampleOrder(num_examples, seed, bool(shuffle)))

    _published[_token("train")] = take_ranges
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

        def count(worker: np.ndarray, epoch: np.ndarray, first: np.ndarray, num: np.ndarray, waits: np.ndarray) -> Any:
            found = readers[int(worker)].count(int(epoch), int(first), int(num))
            if not found and waits:
                time.sleep(ENDED_SECS)  # in which the other workers have the cores, and take the other calls
            return np.int64(found)

        _published[_token(COUNT)] = count
    if stream := splits.validation_stream:
        stream.dataset(0)
        passes: dict[int, Iterator[list[np.ndarray]]] = {}

        def next_batch(shard: np.ndarray, begins: np.ndarray) -> list[np.ndarray]:
            if begins:
                passes[int(shard)] = stream.one_pass(int(shard))
            return next(passes[int(shard)], stream.no_examples())

        _published[_token(EVALUATED_BATCHES)] = next_batch
    publish_functions(_published)


def remote_ranges(ranges: tf.Tensor, order: ExampleOrder, layout: Layout) -> list[tf.Tensor]:
    """In a graph: the leaves of a batch for each of these ranges, one batch after the other.

    Args:
        ranges: see `passes`; int64 [batches, 2].
    """
    specs = layout.batched(None)
    inputs = [ranges, tf.constant([int(one) for one in order], tf.int64)]
    taken = tf.raw_ops.PyFunc(input=inputs, token=_token("train"), Tout=[spec.dtype for spec in specs])
    sizes = ranges[:, 1] - ranges[:, 0]
    begins = tf.cumsum(sizes, exclusive=True)
    parts = [_parts(leaf, spec, begins, sizes) for leaf, spec in zip(taken, specs, strict=True)]
    return [leaf for batch in zip(*parts, strict=True) for leaf in batch]


def _parts(leaf: tf.Tensor, spec: tf.TensorSpec, begins: tf.Tensor, sizes: tf.Tensor) -> list[tf.Tensor]:
    """Parts of the first dimension. Unlike those of `tf.split`, they are no copies if they begin at 64 bytes."""
    num, rest = begins.shape[0], spec.shape.rank - 1
    begin = tf.unstack(tf.pad(begins[:, None], [[0, 0], [0, rest]]), num)
    size = tf.unstack(tf.pad(sizes[:, None], [[0, 0], [0, rest]], constant_values=-1), num)
    return [tf.ensure_shape(tf.slice(leaf, *limits), spec.shape) for limits in zip(begin, size, strict=True)]


def evaluated_examples(number: tf.Tensor, index: tf.Tensor, layout: Layout) -> list[tf.Tensor]:
    """In a graph: the leaves of the published examples with these indices, an int32 tensor of any shape.

    Args:
        number: the index of the split in `EVALUATED`, int32.
    """
    specs = layout.specs
    # The token names a function of the process in which the operation runs, so the graph can come from another one.
    types = [spec.dtype for spec in specs]
    taken = tf.raw_ops.PyFunc(input=[number, index], token=_token("evaluated"), Tout=types)
    return [tf.ensure_shape(leaf, index.shape.concatenate(spec.shape)) for leaf, spec in zip(taken, specs, strict=True)]


def remote_batches(worker: tf.Tensor, first: tf.Tensor, num: int, layout: Layout) -> list[list[tf.Tensor]]:
    """In a graph: the leaves of `num` batches of a worker's published stream, from the one with number `first` on."""
    specs = layout.batched(None)
    types = [spec.dtype for spec in specs]
    taken = iter(tf.raw_ops.PyFunc(input=[worker, first, tf.constant(num)], token=_token(BATCHES), Tout=types * num))
    return [[tf.ensure_shape(next(taken), spec.shape) for spec in specs] for _ in range(num)]


def remote_count(worker: tf.Tensor, epoch: tf.Tensor, first: tf.Tensor, num: int, waits: tf.Tensor) -> tf.Tensor:
    """In a graph: how many of `num` batches a worker's published stream has in an epoch from the number `first` on.

    Args:
        waits: whether to wait a little if there are none.
    """
    inputs = [worker, epoch, first, tf.constant(num), waits]
    (count,) = tf.raw_ops.PyFunc(input=inputs, token=_token(COUNT), Tout=[tf.int64])
    return tf.ensure_shape(count, [])


def evaluated_batch(shard: tf.Tensor, begins: bool, layout: Layout) -> list[tf.Tensor]:
    """In a graph: the leaves of the next batch of a published stream to validate on; without examples at its end.

    Args:
        shard: the part of the data, int32; any worker can read it.
        begins: whether it is the first batch.
    """
    specs = layout.batched(None)
    types = [spec.dtype for spec in specs]
    taken = tf.raw_ops.PyFunc(input=[shard, tf.constant(begins)], token=_token(EVALUATED_BATCHES), Tout=types)
    return [tf.ensure_shape(leaf, spec.shape) for leaf, spec in zip(taken, specs, strict=True)]


def _token(split: str) -> str:
    return f"{NAME}.{split}"


class Input(Protocol):
    """What the coordinator puts into its graphs for the input of the workers."""

    def batches(self, worker: tf.Tensor, numbers: tf.Tensor) -> Batches:
        """In the graph of a call: the batches with these numbers, int64 [steps]."""


class ArrayInput:
    """Batches of the arrays that each worker has published; see `Input`.

    A call asks for them a few at a time, so that the next ones are gathered while it computes. They depend on nothing
    but their numbers: a call that ends early leaves nothing behind that another one could take for its own.

    Args:
        layout: the structure of the data.
        sharding: how the training set is cut.
        steps: its steps by their numbers.
    """

    def __init__(self, layout: Layout, sharding: Sharding, steps: NumberedSteps) -> None:
        self._layout, self._steps, self.sharding = layout, steps, sharding

    def batches(self, worker: tf.Tensor, numbers: tf.Tensor) -> Batches:
        return self._gathered(tf.stack(self._steps.ranges(numbers), 1))

    def _gathered(self, ranges: tf.Tensor) -> Batches:
        """Batches of the examples in these ranges, int64 [steps, 2]."""
        num_steps, specs = ranges.shape[0], self._layout.specs
        batch = self.sharding.batch_size * sum(spec.dtype.size * spec.shape.num_elements() for spec in specs)
        num = max(1, GATHERED_AT_ONCE // max(1, batch))
        leaves: list[tf.Tensor] = []
        for first in range(0, num_steps, num):
            with tf.control_dependencies(leaves[-1:]):  # in turn, or those of the first steps would come late
                leaves += remote_ranges(ranges[first : first + num], self.sharding.order, self._layout)
        following = iter(leaves)
        return [[next(following) for _ in self._layout.specs] for _ in range(num_steps)]


class SharedArrayInput(ArrayInput):
    """The input of mode=sync_replicas: to the leaves of each batch its share is added, float32 [].

    The workers cut an epoch as with mode=sync: each has the same number of batches. So in its last step a worker may
    have fewer examples than the others, or one of padding, and the share says how much its gradient counts: 1 for a
    full batch, 0 for padding.
    """

    def batches(self, worker: tf.Tensor, numbers: tf.Tensor) -> Batches:
        first, last = self._steps.ranges(numbers)
        begin, count = self.sharding.share(first, last, worker)
        begin = tf.minimum(begin, last - 1)  # of padding
        ranges = tf.stack([begin, begin + tf.maximum(count, 1)], 1)
        shares = tf.unstack(tf.cast(count, tf.float32) / self.sharding.batch_size, ranges.shape[0])
        return [[*leaves, share] for leaves, share in zip(self._gathered(ranges), shares, strict=True)]


class StreamInput:
    """Batches of the streams that each worker reads in its own process; see `Input`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def batches(self, worker: tf.Tensor, numbers: tf.Tensor) -> Batches:
        return remote_batches(worker, numbers[0], numbers.shape[0], self._layout)
