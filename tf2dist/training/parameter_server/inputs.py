"""The input of workers: batches of the arrays that each has loaded itself, or of its stream.

A worker publishes the examples of its process for the graphs that the coordinator runs in it. The arrays are mapped
from a file where the data allow it. As a tensor in the graph, they would be copied for each worker, and again whenever
its pipeline is rebuilt.
"""

import functools
import uuid
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.data.layout import Layout
from tf2dist.data.passes import ExampleOrder, NumberedSteps, Sharding
from tf2dist.data.pipeline import NO_AUTOGRAPH, options
from tf2dist.data.stream import Reader
from tf2dist.process.tf_internals import publish_functions

NAME = "tf2dist"
EVALUATED = ("validation", "test")
BATCHES = "batches"
ELEMENTS = 4  # of the pipeline in a call
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

    def take_ranges(ranges: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
        num_examples, seed, shuffle = map(int, order)
        rows = ExampleOrder(num_examples, seed, bool(shuffle)).rows
        return [leaf for first, last in ranges for leaf in train.take(rows(int(first), int(last)))]

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
    publish_functions(_published)


def remote_ranges(ranges: tf.Tensor, order: ExampleOrder, layout: Layout) -> list[tf.Tensor]:
    """In a graph: the leaves of a batch for each of these ranges, one batch after the other.

    Args:
        ranges: see `passes`; int64 [batches, 2].
    """
    specs = layout.batched(None) * ranges.shape[0]
    inputs = [ranges, tf.constant([int(one) for one in order], tf.int64)]
    taken = tf.raw_ops.PyFunc(input=inputs, token=_token("train"), Tout=[spec.dtype for spec in specs])
    return [tf.ensure_shape(leaf, spec.shape) for leaf, spec in zip(taken, specs, strict=True)]


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


def _token(split: str) -> str:
    return f"{NAME}.{split}"


class Input(Protocol):
    """What the coordinator puts into its graphs for the input of the workers."""

    def iterators(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, num_steps: int) -> tuple[Any, ...]:
        """The first arguments of a call of `num_steps` steps: over the pipeline of its worker, or none for a stream."""

    def signature(self, num_steps: int) -> tuple[Any, ...]:
        """The types of `iterators`."""

    def batches(self, iterators: tuple[Any, ...], worker: tf.Tensor, numbers: tf.Tensor) -> Batches:
        """In the graph of a call: the batches with these numbers, int64 [steps]."""


class ArrayInput:
    """Batches of the arrays that each worker has published; see `Input`.

    A call puts the examples that it needs into a queue, from which a pipeline on the worker makes batches: it gathers
    the next ones while the call computes.

    Args:
        layout: the structure of the data.
        sharding: how the training set is cut.
        steps: its steps by their numbers.
    """

    def __init__(self, layout: Layout, sharding: Sharding, steps: NumberedSteps) -> None:
        self._layout, self._steps, self.sharding = layout, steps, sharding
        self._queue_name = f"batches-{uuid.uuid4()}"

    def iterators(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, num_steps: int) -> tuple[Any, ...]:
        # A plain function TensorFlow would trace with AutoGraph, whose rewriting takes longer than the tracing.
        dataset = tf.function(functools.partial(self.dataset, num_steps), autograph=False)
        return (iter(coordinator.create_per_worker_dataset(dataset)),)

    def signature(self, num_steps: int) -> tuple[Any, ...]:
        size = _element_size(num_steps)
        return (tf.data.IteratorSpec((tf.TensorSpec([size, 2], tf.int64), *self._layout.batched(None) * size)),)

    def batches(self, iterators: tuple[Any, ...], worker: tf.Tensor, numbers: tf.Tensor) -> Batches:
        return self._gathered(iterators, tf.stack(self._steps.ranges(numbers), 1))

    def _gathered(self, iterators: tuple[Any, ...], ranges: tf.Tensor) -> Batches:
        """Batches of the examples in these ranges, int64 [steps, 2]."""
        (iterator,), num_steps, size = iterators, ranges.shape[0], _element_size(ranges.shape[0])
        num_elements = -(-num_steps // size)
        padded = tf.pad(ranges, [[0, num_elements * size - num_steps], [0, 0]])  # with ranges of no examples
        parts = tf.reshape(padded, [num_elements, size, 2])
        put = tf.raw_ops.QueueEnqueueManyV2(handle=self._queue(size), components=[parts])
        with tf.control_dependencies([put]):
            elements = [_first_of_call(iterator, parts[0])]
        for _ in range(1, num_elements):
            with tf.control_dependencies(elements[-1][:1]):
                elements.append(next(iterator))
        leaves = iter([leaf for _, *found in elements for leaf in found])
        return [[next(leaves) for _ in self._layout.specs] for _ in range(num_steps)]

    def dataset(self, num_steps: int) -> tf.data.Dataset:
        """Elements of several batches, after their ranges; made on each worker, over the arrays of its own process."""
        size = _element_size(num_steps)

        @NO_AUTOGRAPH
        def element(_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            (ranges,) = tf.raw_ops.QueueDequeueV2(handle=self._queue(size), component_types=[tf.int64])
            ranges = tf.ensure_shape(ranges, [size, 2])
            return ranges, *remote_ranges(ranges, self.sharding.order, self._layout)

        return tf.data.Dataset.range(np.iinfo(np.int64).max).map(element).prefetch(2).with_options(options())

    def _queue(self, size: int) -> tf.Tensor:
        """The queue of ranges on the worker in whose graph this is; its name connects the call and the pipeline."""
        return tf.raw_ops.FIFOQueueV2(component_types=[tf.int64], shapes=[[size, 2]], shared_name=self._queue_name)


def _element_size(num_steps: int) -> int:
    """The batches of an element: few enough that the next ones are gathered while the call computes with the first."""
    return -(-num_steps // ELEMENTS)


def _first_of_call(iterator: Any, ranges: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """The element that holds these ranges, after those that a call has left which was not carried out to its end."""
    found = next(iterator)

    def skip() -> tuple[tf.Tensor, ...]:
        is_other = lambda of_found, *_: tf.reduce_any(of_found != ranges)  # noqa: E731
        return tuple(tf.while_loop(is_other, lambda *_: next(iterator), found))

    return tuple(tf.cond(tf.reduce_all(found[0] == ranges), lambda: tuple(found), skip))


class SharedArrayInput(ArrayInput):
    """The input of mode=sync_replicas: to the leaves of each batch its share is added, float32 [].

    The workers cut an epoch as with mode=sync: each has the same number of batches. So in its last step a worker may
    have fewer examples than the others, or one of padding, and the share says how much its gradient counts: 1 for a
    full batch, 0 for padding.
    """

    def batches(self, iterators: tuple[Any, ...], worker: tf.Tensor, numbers: tf.Tensor) -> Batches:
        first, last = self._steps.ranges(numbers)
        begin, count = self.sharding.share(first, last, worker)
        begin = tf.minimum(begin, last - 1)  # of padding
        ranges = tf.stack([begin, begin + tf.maximum(count, 1)], 1)
        shares = tf.unstack(tf.cast(count, tf.float32) / self.sharding.batch_size, ranges.shape[0])
        return [[*leaves, share] for leaves, share in zip(self._gathered(iterators, ranges), shares, strict=True)]


class StreamInput:
    """Batches of the streams that each worker reads in its own process; see `Input`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def iterators(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, num_steps: int) -> tuple[Any, ...]:
        return ()

    def signature(self, num_steps: int) -> tuple[Any, ...]:
        return ()

    def batches(self, iterators: tuple[Any, ...], worker: tf.Tensor, numbers: tf.Tensor) -> Batches:
        return remote_batches(worker, numbers[0], numbers.shape[0], self._layout)
