"""The input of a synchronous worker: batches of arrays that all workers cut in the same way, or of its own stream."""

import threading
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Arrays
from tf2dist.data.passes import InputPosition, Sharding
from tf2dist.data.pipeline import batches, of_arrays
from tf2dist.data.stream import Reader, Stream
from tf2dist.errors import ConfigError
from tf2dist.process import heartbeat
from tf2dist.training.synchronous.workers import Workers

LOOK_SECS = 1.0  # how often a worker that waits for its first batch reports to the watchdog


class Feed(ABC):
    """The input of one worker; what has a body here is for an input whose batches never end.

    Attributes:
        iterators: over the pipeline, or none for a stream; the last arguments of the function that takes the steps.
        num_extra: how many numbers are summed over all replicas with each step.
    """

    iterators: tuple[Any, ...] = ()
    num_extra = 0

    @property
    def num_ended(self) -> int:
        """How many workers have no batch for the next step of the epoch; steps are taken while it is 0."""
        return 0

    def prepare(self, step: int) -> None:
        """On all workers, before steps are taken; `step`: see `next`."""
        return

    def begin_pass(self, step: int) -> None:
        """Begins the next pass over the data at this step; only for data that ends an epoch."""
        raise NotImplementedError

    def position(self, step: int) -> int:
        """The number of the batch of a stream for this step."""
        raise NotImplementedError

    @abstractmethod
    def next(self, iterators: tuple[Any, ...], step: tf.Tensor) -> Any:
        """In the graph: what `slice` and `extra` need.

        Args:
            step: how many steps this process has taken.
        """

    @abstractmethod
    def slice(self, element: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """On a replica: the examples that it contributes to a step.

        Returns:
            The leaves of its batch, [n, ...] each; and the share of the step's examples that the batch has. All shares
            add up to 1; that of a batch of padding is 0.
        """

    def extra(self, element: Any) -> list[tf.Tensor]:
        """On a replica: the numbers to sum, float32 [num_extra] in a list; an empty list for none."""
        return []

    def note_sums(self, sums: tf.Tensor) -> tf.Tensor:
        """On every worker: takes the sums of the extra numbers over all replicas; returns whether a step can follow."""
        return tf.constant(True)


class ArrayFeed(Feed):
    """Batches of the arrays that all workers have loaded; see `Feed`.

    Args:
        train: the training set.
        sharding: of the training set, among the replicas.
        begin: the position of the input.
    """

    def __init__(self, workers: Workers, train: Arrays, sharding: Sharding, begin: InputPosition) -> None:
        self._train, self._sharding, self._begin = train, sharding, begin
        if workers.num_replicas > workers.count or tf.config.get_visible_devices("GPU"):
            # This dataset brings batches to the GPUs ahead of their steps. For a CPU it would only cost: 50 ms at the
            # start, and a quarter of a millisecond in each step.
            dataset: Any = workers.strategy.distribute_datasets_from_function(self._of_context)
        else:
            dataset = self._dataset(workers.index, 1)
        self.iterators = (iter(dataset),)

    def next(self, iterators: tuple[Any, ...], step: tf.Tensor) -> Any:
        return next(iterators[0])

    def slice(self, element: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        *leaves, weights = element
        # Without the padding that gives all batches one shape: some layers look at the whole batch, and in Keras, too,
        # the last one of an epoch is shorter. If all is padding, one example of weight 0 stays, since the mean of none
        # would be NaN, in moving averages for good.
        count = tf.maximum(tf.math.count_nonzero(weights, dtype=tf.int32), 1)
        return [leaf[:count] for leaf in leaves], tf.reduce_sum(weights)

    def _of_context(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        count = context.num_replicas_in_sync // context.num_input_pipelines
        return self._dataset(context.input_pipeline_id * count, count)

    def _dataset(self, first: int, count: int) -> tf.data.Dataset:
        """This worker's batches, for its `count` replicas in turn, of which the first is number `first` of all."""
        # TensorFlow takes an element for each local replica, so the shards of the replicas are interleaved.
        gather = of_arrays(self._train)
        shards = [batches(gather, self._sharding, first + i, self._begin) for i in range(count)]
        if count == 1:
            return shards[0]
        return tf.data.Dataset.choose_from_datasets(shards, tf.data.Dataset.range(count).repeat())


class StreamFeed(Feed):
    """Batches of the worker's own stream; see `Feed`.

    The workers' batches in a step may be of different sizes. So that each worker knows its share when it computes, the
    sizes of the next batches are summed with every step, and with them the workers whose data have ended.

    Args:
        begin: the number of the first batch.
    """

    num_extra = 2

    def __init__(self, workers: Workers, stream: Stream, begin: int) -> None:
        if workers.num_replicas > workers.count:
            raise ConfigError(
                "data: the GPUs of a synchronous worker cannot share its stream; use a worker for each GPU"
            )
        self._layout, self._begin, self._workers = stream.layout, begin, workers
        self._reader, self._pass = Reader(stream, workers.index), 0
        # Of the next step: its examples, and the workers without a batch.
        self._totals = tf.Variable(tf.zeros([2]), trainable=False)
        self._is_prepared = False

    @property
    def num_ended(self) -> int:
        return int(self._totals[1]) if self._is_prepared else 0

    def prepare(self, step: int) -> None:
        # No step has carried the sizes of the first batches.
        if not self._is_prepared:
            self._totals.assign(self._workers.add_up(self._next(self.position(step))))
            self._is_prepared = True

    def begin_pass(self, step: int) -> None:
        self._begin, self._pass, self._is_prepared = -step, self._pass + 1, False

    def position(self, step: int) -> int:
        return self._begin + step

    def next(self, iterators: tuple[Any, ...], step: tf.Tensor) -> Any:
        specs = self._layout.batched(None)
        types = [*(spec.dtype for spec in specs), tf.float32]
        *leaves, following = tf.numpy_function(self._take, [step], types)
        # A Python function returns tensors without a shape, and models need one.
        return [tf.ensure_shape(leaf, spec.shape) for leaf, spec in zip(leaves, specs, strict=True)], following

    def slice(self, element: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        leaves, _ = element
        return leaves, tf.cast(tf.shape(leaves[0])[0], tf.float32) / self._totals[0]

    def extra(self, element: Any) -> list[tf.Tensor]:
        return [tf.reshape(element[1], [2])]

    def note_sums(self, sums: tf.Tensor) -> tf.Tensor:
        self._totals.assign(sums)
        return sums[1] == 0

    def _take(self, step: int) -> list[Any]:
        number = self.position(int(step))
        return [*self._reader.read_batches(number, 1), self._summed(self._reader.size(self._pass, number + 1))]

    def _next(self, number: int) -> np.ndarray:
        """Numbers that this worker adds to `_totals` for a batch, which may take long to read on a resume."""
        # In a thread, so that the watchdog hears of this worker while the stream skips to its position.
        sizes: list[int] = []
        thread = threading.Thread(target=lambda: sizes.append(self._reader.size(self._pass, number)), daemon=True)
        thread.start()
        while thread.is_alive():
            heartbeat.progress(heartbeat.START_SECS)
            thread.join(LOOK_SECS)
        return self._summed(sizes[0])

    @staticmethod
    def _summed(size: int) -> np.ndarray:
        """A size that `Reader.size` has returned, and whether it says that the data have ended."""
        return np.array([max(size, 0), size < 0], np.float32)
