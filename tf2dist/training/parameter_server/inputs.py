"""The input of asynchronous workers: batches of the arrays that each has loaded, or of its stream."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.data.layout import Layout
from tf2dist.data.pipeline import Sharding, batches_without_padding, blocks
from tf2dist.training.parameter_server.examples import remote_batches, remote_examples

LocalSteps = Callable[[tf.Tensor], tf.Tensor]  # takes the index of a worker, returns its steps as the ps count them
Batches = list[list[tf.Tensor]]  # the leaves of each batch


class Feed(Protocol):
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


class ArrayFeed:
    """Batches of the arrays that each worker has published; see `Feed`.

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
        element = self.element(source, worker, local_steps, num_steps)
        return list(batches_without_padding(element))

    def element(
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


class StreamFeed:
    """Batches of the streams that each worker reads in its own process; see `Feed`.

    The number of each batch follows from the updates that were applied, so no batch is lost with an update that is
    refused.

    Args:
        layout: the structure of the data.
        offsets: see `ArrayFeed`.
    """

    def __init__(self, layout: Layout, offsets: list[int]) -> None:
        self._layout, self._offsets = layout, offsets

    def source(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, num_steps: int) -> tuple[Any, ...]:
        return ()

    def signature(self, num_steps: int) -> tuple[Any, ...]:
        return ()

    def batches(self, source: tuple[Any, ...], worker: tf.Tensor, local_steps: tf.Tensor, num_steps: int) -> Batches:
        return remote_batches(worker, _position(self._offsets, worker, local_steps), num_steps, self._layout)


def feed_of(splits: Splits, sharding: Sharding, offsets: list[int], local_steps: LocalSteps) -> Feed:
    """See `ArrayFeed`."""
    if splits.stream:
        return StreamFeed(splits.layout, offsets)
    return ArrayFeed(splits.layout, sharding, offsets, local_steps)


def _position(offsets: list[int], worker: tf.Tensor, local_steps: tf.Tensor) -> tf.Tensor:
    """The number of a worker's next batch, int64."""
    return tf.gather(tf.constant(offsets, tf.int64), worker) + tf.cast(local_steps, tf.int64)
