"""Graphs of synchronous training: on every replica the model's step, an all-reduce, and the same update.

One vector carries what is small: gradients, changes of the state, and the sums for the log. Large gradients are reduced
by themselves, each as soon as it is known; of large tables the rows are exchanged that the batches have looked up, see
`sync_rows`. All replicas then apply the same update to their own copy.

A `PhasedStep` is for a model whose `train_step` applies an update and goes on with the new values, as GANs do. Each
update is summed over the workers and applied where the step asks for it, so what follows sees the new values. What the
step leaves at its end, the state and the sums for the log, is summed as in any other step.
"""

import functools
from collections import Counter
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.data.splits import Splits
from tf2dist.errors import TaskLostError
from tf2dist.model import support
from tf2dist.model.batch_attention import Exchange, exchanging
from tf2dist.model.own_step import OwnStep, optimizers_in
from tf2dist.model.packing import Buckets, narrow_dtype
from tf2dist.model.step import Step, StepOutput, step_place
from tf2dist.tf_internals.keras import counter_of
from tf2dist.tf_internals.tensorflow import outside_strategies
from tf2dist.training.loop import PauseRequest
from tf2dist.training.stragglers import Stragglers
from tf2dist.training.synchronous.all_reduce import AllReduce
from tf2dist.training.synchronous.feeds import Feed, StreamFeed
from tf2dist.training.synchronous.sync_rows import RowExchange
from tf2dist.training.synchronous.workers import Workers

SHARED = len(PauseRequest) + 1  # how many numbers every worker shares with the others in each step


class SyncStep:
    """One worker's part in the training steps.

    Attributes:
        applied: the updates applied in the whole run, int64.
        stragglers: the delays that are simulated, and the recording of the steps' times.
        workers, step, optimizer, feed: see below.
        num_sums: how many numbers `run_steps` returns.

    Args:
        step: the step of this worker's own model.
        optimizer: already built for `step.trainable`.
        all_reduce: our own all-reduce; None for TensorFlow's.
        feed: the input of this worker.
        begin_step: the updates that were applied before.
    """

    make_stream_feed: type[StreamFeed] = StreamFeed

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        step: Step,
        optimizer: keras.Optimizer,
        all_reduce: AllReduce | None,
        feed: Feed,
        begin_step: int,
    ) -> None:
        self.workers, self._strategy, self._all_reduce = workers, workers.strategy, all_reduce
        self.step, self.optimizer, self.feed, self._begin_step = step, optimizer, feed, begin_step
        self.stragglers = Stragglers(config)
        self.applied = tf.Variable(begin_step, dtype=tf.int64, trainable=False)
        self._compute = tf.function(step, autograph=False, jit_compile=True) if config.devices.xla else step
        self.num_sums = 2 + step.metrics.size + SHARED
        self.prepare_graph(config)

    def prepare_graph(self, config: RunConfig) -> None:
        """Makes what `run_steps` needs."""
        self._num_weights = int(self.step.weighs_losses)
        variables = [*self.applied_at_end, *self.step.state]
        num_more = self.num_sums + self._num_weights + self.feed.num_extra
        narrow = narrow_dtype(config.cluster.transfer_dtype)
        self._buckets = Buckets(variables, num_more, tf.float32, narrow)
        self._rows = None
        if self.step.tables:
            batch_size = self.workers.batch_size_per_replica(config.train.batch_size_per_worker)
            is_fixed = gathers_one_length(self.workers, self._all_reduce)
            lengths = self.step.lookups.num_lookups(batch_size) if is_fixed else []
            self._rows = RowExchange(self.step, self.optimizer, narrow, lengths)
        self._run_steps = tf.function(self._steps, autograph=False)

    @property
    def applied_at_end(self) -> list[keras.Variable]:
        """The variables that are updated when all workers have taken the step, without tables."""
        return [variable for variable in self.step.trainable if not self.step.lookups.is_table(variable)]

    @staticmethod
    def check(
        model_name: str, config: RunConfig, workers: Workers, splits: Splits, step: Step, optimizer: keras.Optimizer
    ) -> None:
        """Refuses what this algorithm cannot train, beyond what no synchronous training can."""

    def run_steps(self, at_once: int, left: int, shared: list[float]) -> np.ndarray:
        """Runs steps; returns the sums over these steps and all replicas, float64: `StepOutput.sums`, then `shared`.

        All replicas have the same variables before and afterwards.

        Args:
            at_once: how many steps one call of TensorFlow should take.
            left: how many steps may be taken.
            shared: SHARED numbers of this worker; every replica adds them in every step.
        """
        return self.call(self._run_steps, tf.constant(min(at_once, left)), tf.constant(shared, tf.float32))

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays for a snapshot, by name, that an algorithm keeps beside the variables of model and optimizer."""
        return {}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores what is found of `arrays` in a snapshot, which may come from another mode or algorithm."""

    def facts(self) -> dict[str, Any]:
        """For the summary of the run."""
        return {}

    # What the graphs of other algorithms use, too.

    def call(self, function: Any, *arguments: tf.Tensor) -> np.ndarray:
        """Calls a function of the graph, with the input as its last arguments, and names a worker that was lost."""
        try:
            sums: np.ndarray = function(*arguments, *self.feed.iterators).numpy()
        # What a Python function in a graph raises arrives as this error, so the cause is looked up where it arose.
        except tf.errors.UnknownError as error:
            if self._all_reduce and (lost := self._all_reduce.lost):
                raise TaskLostError(f"lost {self.workers.cluster.training_tasks[lost.index]}: {lost}") from error
            raise
        return sums

    def next_element(self, iterators: tuple[Any, ...]) -> Any:
        """In the graph: the next element of the input."""
        return self.feed.next(iterators, self.applied.read_value() - self._begin_step)

    def on_replicas(self, function: Any, *arguments: Any) -> Any:
        """In the graph: what `function` returns on the first replica of this worker; it runs on all of them."""
        per_replica = self._strategy.run(function, args=arguments)
        return self._strategy.experimental_local_results(per_replica)[0]

    def computed(self, element: Any) -> tuple[StepOutput, list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """On a replica: what its batch gives, the ids of its rows, the state before that, and its share in the step."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        applied = self.applied.read_value()
        place = step_place(replica, applied)
        leaves, share = self.feed.slice(element)
        leaves = self.stragglers.delayed(leaves, self.workers.index, applied, 1)
        with tf.device("CPU:0"):
            lookups = self.step.lookups.look_up(leaves)
        trainable, state = self.step.values(lookups.ids)
        with exchanging(self._exchange(replica, share)):
            output = self._compute(trainable, state, leaves, place, share, lookups.positions)
        return self.stragglers.computed(output, self.workers.index), lookups.ids, state, share

    def _exchange(self, replica: tf.Tensor, share: tf.Tensor) -> Exchange | None:
        """The exchange that `tf2dist.gather` needs on a replica; None if there is no other one."""
        if self.workers.num_replicas == 1:
            return None
        return Exchange(
            add_up=self._added_up,
            replica=tf.cast(replica, tf.int32),
            num_replicas=self.workers.num_replicas,
            share=share,
            weighs_later=isinstance(self.step, OwnStep),
        )

    def _added_up(self, tensor: tf.Tensor) -> tf.Tensor:
        """On a replica: the sum of what `tf2dist.gather` adds up."""
        return self.reduced([tensor])[0]

    def reduced(self, buckets: list[tf.Tensor]) -> list[tf.Tensor]:
        """On a replica: the sums over all of them, of the same shapes and types of floats."""
        if self._all_reduce is None:
            add_up = functools.partial(
                tf.distribute.get_replica_context().all_reduce,
                tf.distribute.ReduceOp.SUM,
                options=self.workers.communication,
            )
            if any(bucket.dtype != buckets[0].dtype for bucket in buckets):  # TensorFlow would concatenate them
                return [add_up(bucket) for bucket in buckets]
            return list(add_up(buckets))
        # `numpy_function` is stateful, so TensorFlow neither merges nor reorders calls that pair with other workers'.
        # Backpropagation computes the gradients of the last layers first; the first bucket needs those of all layers.
        sums = [tf.numpy_function(self._all_reduce, [bucket], bucket.dtype) for bucket in reversed(buckets)]
        return [tf.ensure_shape(one, bucket.shape) for one, bucket in zip(reversed(sums), buckets, strict=True)]

    def exchanged(self, buckets: list[tf.Tensor], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """On a replica: the sums of the buckets, and each of the tensors with those of all replicas.

        Args:
            tensors: joined along the first axis in the order of the replicas. Other axes are the same on all replicas.
        """
        if self.workers.num_replicas == 1:
            return [*self.reduced(buckets), *tensors]
        if self._all_reduce is None:  # with NCCL it gathers no int32
            gather = functools.partial(
                tf.distribute.get_replica_context().all_gather, axis=0, options=self.workers.communication
            )
            bits = [tf.bitcast(one, tf.float32) if one.dtype == tf.int32 else one for one in tensors]
            gathered = [tf.bitcast(gather(one), tensor.dtype) for one, tensor in zip(bits, tensors, strict=True)]
            return [*self.reduced(buckets), *gathered]
        # One hop for all that is small.
        first, *large = buckets
        sums, sent = self.reduced(large), [first, *tensors]
        total, *gathered = tf.numpy_function(self._all_reduce.sum_and_gather, sent, [one.dtype for one in sent])
        gathered = [tf.ensure_shape(one, [None, *own.shape[1:]]) for one, own in zip(gathered, tensors, strict=True)]
        return [tf.ensure_shape(total, first.shape), *sums, *gathered]

    # Plain training.

    def _steps(self, num_steps: tf.Tensor, shared: tf.Tensor, *iterators: Any) -> tf.Tensor:
        """The graph of `run_steps`; returns float64 [num_sums]."""

        def step(number: tf.Tensor, sums: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            # After the all-reduce the replicas of a worker hold the same sum.
            reduced = self.on_replicas(self._replica_step, self.next_element(iterators), shared)
            of_step, goes_on = self._apply(reduced)
            # A float32 sum over many steps would lose examples beyond 2^24.
            return number + 1, sums + tf.cast(of_step, tf.float64), goes_on

        start = tf.constant(0), tf.zeros([self.num_sums], tf.float64), tf.constant(True)
        return tf.while_loop(lambda number, _, goes_on: (number < num_steps) & goes_on, step, start)[1]

    def _replica_step(self, element: Any, shared: tf.Tensor) -> list[tf.Tensor]:
        """One step of one replica; returns the sums of what all replicas contribute, and the gradients of rows."""
        output, ids, state, share = self.computed(element)
        # Changes rather than values: their weighted sum over the replicas is the mean, which is added to the old value.
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        changes = [
            contributed_change(v, self._decay(v), new, old, share, replica)
            for v, new, old in zip(self.step.state, output.state, state, strict=True)
        ]
        weights = [output.weight[None]] if self.step.weighs_losses else []
        vectors = output.sums, shared, *weights, *self.feed.extra(element)
        if not self._rows:
            return self.reduced(self._buckets.pack([*output.gradients, *changes], *vectors))
        pairs = list(zip(self.step.trainable, output.gradients, strict=True))
        gradients = [gradient for variable, gradient in pairs if not self.step.lookups.is_table(variable)]
        of_rows = [gradient for variable, gradient in pairs if self.step.lookups.is_table(variable)]
        return self.exchanged(
            self._buckets.pack([*gradients, *changes], *vectors), self._rows.pack(ids, of_rows, share)
        )

    def _decay(self, variable: keras.Variable) -> float:
        return self.step.trace.decays.get(id(variable), 1.0)

    def _apply(self, reduced: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """The same update on every worker.

        Returns:
            The sums that came with it, float32 [num_sums], and whether another step can follow.
        """
        sizes = self.num_sums, self._num_weights, self.feed.num_extra
        num_buckets = len(self._buckets.specs)
        tensors, (sums, weight, extra) = self._buckets.unpack(reduced[:num_buckets], *sizes)
        goes_on = self.feed.note_sums(extra)
        trained = self.applied_at_end
        gradients, changes = tensors[: len(trained)], tensors[len(trained) :]
        ids, of_rows = self._rows.add_up(reduced[num_buckets:]) if self._rows else ([], [])
        gradients += of_rows
        if self.step.weighs_losses:
            gradients, sums = self._divided(gradients, sums, weight[0])
        # In the order of plain Keras: the call of the model changes its state, and the optimizer comes after it. Some
        # variables, as those of spectral normalization, are changed by both.
        for variable, change in zip(self.step.state, changes, strict=True):
            apply_change(variable, self._decay(variable), change)
        if self._rows:
            self._rows.apply(trained, gradients, ids)
        else:
            self.optimizer.apply(gradients, trained)
        self.applied.assign_add(1)
        return sums, goes_on

    def _divided(
        self, gradients: list[tf.Tensor], sums: tf.Tensor, weight: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The gradients and sums of a step whose parts were multiplied by their weights; `weight`: the sum of these."""
        factor = tf.math.reciprocal_no_nan(weight)  # a step of which a mask leaves nothing changes nothing
        loss, count = sums[0] * factor, sums[1]
        # Each worker has added up its own loss for each of its examples.
        places = [[0], [2 + self.step.metrics.place_of_loss]]
        sums = tf.tensor_scatter_nd_update(sums, places, [loss, loss * count])
        return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients], sums


def gathers_one_length(workers: Workers, all_reduce: AllReduce | None) -> bool:
    """Whether what replicas gather must have the same shape on all of them and in all steps, as TensorFlow demands."""
    return all_reduce is None and workers.num_replicas > 1


def contributed_change(
    variable: keras.Variable, decay: float, new: tf.Tensor, old: tf.Tensor, share: tf.Tensor, replica: tf.Tensor
) -> tf.Tensor:
    """A replica's term in the change of a variable, float32, by the variable's `aggregation` in Keras.

    none, mean            the mean of the changes, weighted by the workers' shares of the examples
    sum                   the sum of what the workers add
    only_first_replica    the change on the first replica

    Args:
        decay: the constant factor of the old value in the new one, see `recurrence`.
        share: of the replica's batch in the step; 0 if it is padding.
    """
    if variable.aggregation == "sum":
        term = new - tf.cast(decay, new.dtype) * old if decay else new
        return tf.where(share > 0, tf.cast(term, tf.float32), 0.0)
    change = tf.cast(new - old, tf.float32)
    if variable.aggregation == "only_first_replica":
        return tf.where(replica == 0, change, 0.0)
    return change * share


def apply_change(variable: keras.Variable, decay: float, total: tf.Tensor) -> None:
    """Changes a variable by the sum of what all replicas contribute."""
    value = variable.value
    if variable.aggregation == "sum" and decay != 1:
        value.assign(tf.cast(decay, value.dtype) * value + total if decay else total)
    else:
        value.assign_add(total)


class PhasedStep(SyncStep):
    """One worker's part in such steps."""

    step: OwnStep

    @staticmethod
    def check(
        model_name: str, config: RunConfig, workers: Workers, splits: Splits, step: Step, optimizer: keras.Optimizer
    ) -> None:
        if config.devices.xla:
            support.check_step(support.XLA, model_name, step)
        support.check_step(support.SYNC_IN_PHASES, model_name, step)

    def prepare_graph(self, config: RunConfig) -> None:
        super().prepare_graph(config)
        narrow = narrow_dtype(config.cluster.transfer_dtype)
        self._of_updates = [Buckets(group.variables, 0, tf.float32, narrow) for group in self.step.groups]
        self._optimizers = optimizers_in(self.optimizer, self.step.groups)
        # What a snapshot tells is the number of steps, in each of which an optimizer may be applied more than once.
        for inner, times in Counter(self._optimizers).items():
            counter_of(inner).assign(times * counter_of(inner))
        self._compute = functools.partial(self.step, apply=self._apply_update)

    @property
    def applied_at_end(self) -> list[keras.Variable]:
        return []

    def _apply(self, reduced: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        if self.optimizer not in self._optimizers:  # a MultiOptimizer counts the steps
            counter_of(self.optimizer).assign_add(1)
        return super()._apply(reduced)

    def _apply_update(self, number: int, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """On a replica: applies an update of the step, of which this is what the replica contributes."""
        sums = self.reduced(self._of_updates[number].pack(gradients))
        variables = self.step.groups[number].variables

        def apply(strategy: tf.distribute.Strategy, *per_replica: Any) -> None:
            # After the all-reduce the replicas of a worker hold the same sum.
            local = [strategy.experimental_local_results(one)[0] for one in per_replica]
            with outside_strategies():
                self._optimizers[number].apply(self._of_updates[number].unpack(local)[0], variables)

        # Once for all replicas of this worker.
        tf.distribute.get_replica_context().merge_call(apply, args=tuple(sums))
        return [variable.value.read_value() for variable in variables]
