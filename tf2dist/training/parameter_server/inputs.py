"""The input of workers: batches of the arrays that each has loaded itself, or of its stream.

A worker publishes the examples of its process for the graphs that the coordinator runs in it. The arrays are mapped
from a file where the data allow it. As a tensor in the graph, they would be copied for each worker, and again whenever
its pipeline is rebuilt.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.data.layout import Layout
from tf2dist.data.pipeline import Sharding, batches_without_padding, blocks
from tf2dist.data.stream import Reader
from tf2dist.process.tf_internals import publish_functions

NAME = "tf2dist"
EVALUATED = ("validation", "test")
BATCHES = "batches"
LocalSteps = Callable[[tf.Tensor], tf.Tensor]  # takes the index of a worker, returns its steps as the ps count them
Batches = list[list[tf.Tensor]]  # the leaves of each batch, with mode=sync_replicas its share, too

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


class Input(Protocol):
    """What the coordinator puts into its graphs for the input of the workers.

    A worker that was lost continues after the last of its updates that was applied.
    """

    def source(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, num_steps: int) -> tuple[Any, ...]:
        """The first arguments of a call of `num_steps` steps."""

    def signature(self, num_steps: int) -> tuple[Any, ...]:
        """The types of `source`."""

    def batches(self, source: tuple[Any, ...], worker: tf.Tensor, local_steps: tf.Tensor, num_steps: int) -> Batches:
        """In the graph of a call: the batches of its steps.

        Args:
            local_steps: the steps of the worker before this call.
        """


class ArrayInput:
    """Batches of the arrays that each worker has published; see `Input`.

    They come from an iterator, which gathers the next ones while a call computes. Where a call has run past the end of
    an epoch, its last updates were refused, and their batches belong to the next steps: then the iterator is restarted.

    Attributes:
        sharding: how the training set is cut into batches.

    Args:
        layout: the structure of the data.
        offsets: for each worker, the number of its next batch less the steps that the ps have counted for it.
        local_steps: reads the steps that the ps have counted.
    """

    def __init__(self, layout: Layout, sharding: Sharding, offsets: list[int], local_steps: LocalSteps) -> None:
        self._layout, self.sharding, self._offsets, self._local_steps = layout, sharding, offsets, local_steps
        self._pipelines: dict[int, Any] = {}  # by the number of steps in an element

    def source(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, num_steps: int) -> tuple[Any, ...]:
        # A plain function TensorFlow would trace with AutoGraph, whose rewriting takes longer than the tracing.
        dataset = tf.function(functools.partial(self._dataset, num_steps), autograph=False)
        return (iter(coordinator.create_per_worker_dataset(dataset)),)

    def signature(self, num_steps: int) -> tuple[Any, ...]:
        return (tf.data.IteratorSpec(self._element(num_steps)),)

    def _element(self, num_steps: int) -> Any:
        """The type of an element: the number of its first batch, then the leaves of the batches and their weights."""
        shape = [num_steps, self.sharding.batch_size]
        return tf.TensorSpec([], tf.int64), (*self._layout.batched(*shape), tf.TensorSpec(shape, tf.float32))

    def batches(self, source: tuple[Any, ...], worker: tf.Tensor, local_steps: tf.Tensor, num_steps: int) -> Batches:
        return list(batches_without_padding(self._next_element(source, worker, local_steps, num_steps)))

    def _next_element(
        self, source: tuple[Any, ...], worker: tf.Tensor, local_steps: tf.Tensor, num_steps: int
    ) -> tuple[tf.Tensor, ...]:
        """In the graph of a call: the leaves and the weights of its steps, `[num_steps, batch_size, ...]` each."""
        (iterator,) = source
        first_step = _position(self._offsets, worker, local_steps)
        number, block = next(iterator)

        def restart() -> Any:
            (resource,) = tf.nest.flatten(iterator, expand_composites=True)
            dataset = self._pipeline(num_steps)(worker, first_step)
            with tf.control_dependencies([tf.raw_ops.MakeIterator(dataset=dataset, iterator=resource)]):
                return next(iterator)[1]

        return tuple(tf.cond(number == first_step, lambda: block, restart))

    def _dataset(self, num_steps: int) -> tf.data.Dataset:
        """The batches of `num_steps` steps an element; runs on each worker, over the arrays of its own process."""
        # The coordinator rebuilds the pipeline on a worker that rejoins, so its position is read here, on the
        # worker, and not when the graph is made.
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        dataset = self._pipeline(num_steps)(worker, _position(self._offsets, worker, self._local_steps(worker)))
        return tf.data.experimental.from_variant(dataset, self._element(num_steps))

    def _pipeline(self, num_steps: int) -> Any:
        """``function(worker, first_step)``: a worker's dataset, as a variant tensor."""
        if num_steps not in self._pipelines:
            take = functools.partial(remote_examples, "train", layout=self._layout)

            def pipeline(worker: tf.Tensor, first_step: tf.Tensor) -> tf.Tensor:
                return tf.data.experimental.to_variant(blocks(take, self.sharding, worker, num_steps, first_step))

            # Traced once, for the first iterator and for restarted ones: it takes as long as a whole step.
            scalar = tf.TensorSpec([], tf.int64)
            function = tf.function(pipeline, autograph=False)
            self._pipelines[num_steps] = function.get_concrete_function(scalar, scalar)
        return self._pipelines[num_steps]


class SharedArrayInput(ArrayInput):
    """The input of mode=sync_replicas: to the leaves of each batch its share is added, float32 [].

    The workers cut an epoch as with mode=sync: each has the same number of batches. So in its last step a worker may
    have fewer examples than the others, or one of padding, and the share says how much its gradient counts: 1 for a
    full batch, 0 for padding.
    """

    def batches(self, source: tuple[Any, ...], worker: tf.Tensor, local_steps: tf.Tensor, num_steps: int) -> Batches:
        element = self._next_element(source, worker, local_steps, num_steps)
        counts = tf.math.count_nonzero(element[-1], axis=1, dtype=tf.float32)
        shares = tf.unstack(counts / self.sharding.batch_size, num_steps)
        return [[*leaves, share] for leaves, share in zip(batches_without_padding(element), shares, strict=True)]


class StreamInput:
    """Batches of the streams that each worker reads in its own process; see `Input`.

    The number of each batch follows from the updates that were applied, so no batch is lost with an update that is
    refused.

    Args:
        layout: the structure of the data.
        offsets: see `ArrayInput`.
    """

    def __init__(self, layout: Layout, offsets: list[int]) -> None:
        self._layout, self._offsets = layout, offsets

    def source(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, num_steps: int) -> tuple[Any, ...]:
        return ()

    def signature(self, num_steps: int) -> tuple[Any, ...]:
        return ()

    def batches(self, source: tuple[Any, ...], worker: tf.Tensor, local_steps: tf.Tensor, num_steps: int) -> Batches:
        return remote_batches(worker, _position(self._offsets, worker, local_steps), num_steps, self._layout)


def input_of(splits: Splits, sharding: Sharding, offsets: list[int], local_steps: LocalSteps) -> Input:
    """See `ArrayInput`."""
    if splits.stream:
        return StreamInput(splits.layout, offsets)
    return ArrayInput(splits.layout, sharding, offsets, local_steps)


def _position(offsets: list[int], worker: tf.Tensor, local_steps: tf.Tensor) -> tf.Tensor:
    """The number of a worker's next batch, int64."""
    return tf.gather(tf.constant(offsets, tf.int64), worker) + tf.cast(local_steps, tf.int64)
