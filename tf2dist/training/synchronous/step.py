"""The graph of synchronous training: on every replica the model's step, one all-reduce, and the same update.

One all-reduce a step carries everything: the gradients, the changes of the state, and the sums
for the log, packed into one vector. All replicas then apply the same update to their own copy.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Arrays
from tf2dist.data.pipeline import Sharding, batches, of_arrays
from tf2dist.errors import TaskLostError
from tf2dist.model.batch import Batch, without_padding
from tf2dist.model.packing import Packing
from tf2dist.model.step import ModelStep, step_place
from tf2dist.training.loop import PauseRequest
from tf2dist.training.synchronous.all_reduce import AllReduce
from tf2dist.training.synchronous.workers import Workers

SHARED = len(PauseRequest) + 1  # numbers that every worker shares with the others in each call


class SyncStep:
    """One worker's part in the training steps.

    Attributes:
        sharding: of the training set, among the replicas.
        applied: the updates in the whole run, int64.

    Args:
        step: of this worker's own model.
        optimizer: already built for `step.trainable`.
        all_reduce: None for TensorFlow's.
        train: the training set.
        begin_step: the updates that were applied before.
        begin_position: the steps that each replica has taken of its shard before.
    """

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        step: ModelStep,
        optimizer: keras.Optimizer,
        all_reduce: AllReduce | None,
        train: Arrays,
        sharding: Sharding,
        begin_step: int,
        begin_position: int,
    ) -> None:
        self._workers, self._strategy = workers, workers.strategy
        self._step, self._optimizer, self._all_reduce = step, optimizer, all_reduce
        self._train, self.sharding, self._begin_position = train, sharding, begin_position
        self.applied = tf.Variable(begin_step, dtype=tf.int64, trainable=False)
        self._compute = tf.function(step, autograph=False, jit_compile=True) if config.devices.xla else step
        self._packing = Packing([*step.trainable, *step.state])
        self._num_sums = 2 + step.metrics.size + SHARED
        self._iterator = iter(self._strategy.distribute_datasets_from_function(self._dataset))
        self._take_steps = tf.function(self._steps, autograph=False)

    def take(self, num_steps: int, shared: list[float]) -> np.ndarray:
        """Takes steps; returns the sums over these steps and all replicas, float64: `StepOutput.sums`, `shared`.

        Args:
            shared: SHARED numbers of this worker.

        Raises:
            TaskLostError: naming the worker whose connection has broken.
        """
        try:
            sums: np.ndarray = self._take_steps(
                self._iterator, tf.constant(num_steps), tf.constant(shared, tf.float32)
            ).numpy()
        except tf.errors.UnknownError as error:  # how an exception leaves a Python function in a graph
            if self._all_reduce and (lost := self._all_reduce.lost):
                raise TaskLostError(f"lost {self._workers.cluster.training_tasks[lost.index]}: {lost}") from error
            raise
        return sums

    def _dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """This worker's batches, for its replicas in turn."""
        take = of_arrays(self._train)
        count = context.num_replicas_in_sync // context.num_input_pipelines
        first = context.input_pipeline_id * count
        shards = [batches(take, self.sharding, first + i, self._begin_position) for i in range(count)]
        if count == 1:
            return shards[0]
        return tf.data.Dataset.choose_from_datasets(shards, tf.data.Dataset.range(count).repeat())

    def _steps(self, iterator: Any, num_steps: tf.Tensor, shared: tf.Tensor) -> tf.Tensor:
        """See `take`; returns float64 [num_sums]."""

        def step(number: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            per_replica = self._strategy.run(self._replica_step, args=(next(iterator), shared))
            reduced = self._strategy.experimental_local_results(per_replica)[0]
            return number + 1, sums + tf.cast(self._apply(reduced), tf.float64)

        start = tf.constant(0), tf.zeros([self._num_sums], tf.float64)
        return tf.while_loop(lambda number, _: number < num_steps, step, start)[1]

    def _replica_step(self, element: tuple[tf.Tensor, ...], shared: tf.Tensor) -> tf.Tensor:
        """One step of one replica; returns the sum over all replicas of what each contributes, packed."""
        trainable, state = self._step.values()
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        place = step_place(replica, self.applied.read_value())
        *leaves, weights = element
        batch = without_padding(Batch(leaves, weights))
        share = tf.reduce_sum(batch.weights)  # this replica's share of the step's examples; all shares add up to 1
        output = self._compute(trainable, state, batch.leaves, place, share)
        changes = [tf.cast(new - old, tf.float32) * share for new, old in zip(output.state, state, strict=True)]
        return self._reduced(self._packing.pack([*output.gradients, *changes], output.sums, shared))

    def _reduced(self, packed: tf.Tensor) -> tf.Tensor:
        if self._all_reduce is None:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, packed)
        return tf.ensure_shape(tf.numpy_function(self._all_reduce, [packed], tf.float32), packed.shape)

    def _apply(self, reduced: tf.Tensor) -> tf.Tensor:
        """The same update on every worker; returns the sums that came with it, float32 [num_sums]."""
        tensors, (sums,) = self._packing.unpack(reduced, self._num_sums)
        gradients, changes = tensors[: len(self._step.trainable)], tensors[len(self._step.trainable) :]
        for variable, change in zip(self._step.state, changes, strict=True):  # of the call, before the optimizer
            variable.value.assign_add(change)
        self._optimizer.apply(gradients, self._step.trainable)
        self.applied.assign_add(1)
        return sums
