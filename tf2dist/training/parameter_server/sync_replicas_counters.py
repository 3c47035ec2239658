"""Counters of the deciding parameter server. While workers push, all but `begun` change under its lock alone."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import has_sharding, input_position
from tf2dist.data.passes import InputPosition, NumberedSteps, Sharding
from tf2dist.training.parameter_server.counters import PsOrigin

GRADIENTS_ARRAY = "replicas_gradients"  # the name in a snapshot: those of each worker, aggregated and dropped
NO_STEP = np.int64(-1)


class GradientCounts(NamedTuple):
    """Numbers that have been counted up to one moment.

    Attributes:
        step: the aggregates applied in the whole run.
        begun, refused: the calls that workers have begun, and the gradients that came while none was taken, in this
            process's life.
        sums: of the aggregates: the losses, the examples, the metrics; float64 [2 + metrics].
        pushed, aggregated, dropped: the gradients of each worker, int64 [workers]. What was pushed and is in neither
            of the others belongs to the step that is under way.
    """

    step: int
    begun: int
    refused: int
    sums: np.ndarray
    pushed: np.ndarray
    aggregated: np.ndarray
    dropped: np.ndarray


class GradientCounters:
    """The counters, on the device under which they are made.

    Attributes:
        made_by: the gradients of each worker in the last aggregate, int64 [workers].
    """

    def __init__(self, num_workers: int, num_metrics: int) -> None:
        self._num_workers, self._num_sums = num_workers, 2 + num_metrics

        def counter(*shape: int, dtype: tf.DType = tf.int64) -> tf.Variable:
            return tf.Variable(tf.zeros(shape, dtype), trainable=False)

        self._begun, self._refused = counter(), counter()
        self._sums = counter(self._num_sums, dtype=tf.float64)
        self._pushed, self._aggregated, self._dropped = (counter(num_workers) for _ in range(3))
        self._accepted, self.made_by = (counter(num_workers) for _ in range(2))
        self._done = tf.Variable(tf.fill([num_workers], NO_STEP), trainable=False)

    def begin_call(self) -> tf.Tensor:
        return self._begun.assign_add(1, read_value=False)

    def accept(self, worker: tf.Tensor, step: tf.Tensor, quota: int) -> tf.Tensor:
        """Counts a gradient of the step that is under way; returns how many there are now.

        Args:
            quota: how many a worker may give.
        """
        self._add(self._pushed, worker)
        self._add(self._accepted, worker)
        accepted = self._accepted.read_value()
        # The step and not a mark, which would have to be taken back in the same moment in which the step moves on.
        done = tf.where(tf.gather(accepted, worker) >= quota, step, NO_STEP)
        self._done.scatter_nd_update(tf.reshape(worker, [1, 1]), done[None])
        return tf.reduce_sum(accepted)

    def done_by(self, worker: tf.Tensor) -> tf.Tensor:
        """The last step to which the worker has given all that it may."""
        return tf.gather(self._done.read_value(), worker)

    def refuse(self) -> None:
        """Counts a gradient that changes nothing: a sign that its worker is there."""
        self._refused.assign_add(1, read_value=False)

    def drop(self, worker: tf.Tensor) -> None:
        self._add(self._pushed, worker)
        self._add(self._dropped, worker)

    def aggregate(self, sums: tf.Tensor) -> None:
        """Counts an aggregate of what was accepted; `sums`: its mean loss, its examples, its metrics."""
        self._sums.assign_add(tf.cast(sums, tf.float64))
        accepted = self._accepted.read_value()
        self._aggregated.assign_add(accepted)
        self.made_by.assign(accepted)
        self._accepted.assign(tf.zeros_like(accepted))

    def discard(self) -> None:
        """Forgets the gradients of the step that is under way: their batches are computed once more."""
        self._pushed.assign_sub(self._accepted.read_value())
        self._accepted.assign(tf.zeros([self._num_workers], tf.int64))
        self._done.assign(tf.fill([self._num_workers], NO_STEP))

    def clear_metrics(self) -> None:
        """Sets the sums of metrics that are not finite to 0; to be called while nobody pushes."""
        sums = self._sums.numpy()
        self._sums.assign(np.where(np.isfinite(sums), sums, 0.0))

    def pushed_by(self, worker: tf.Tensor) -> tf.Tensor:
        return tf.gather(self._pushed.read_value(), worker)

    def all(self, step: tf.Tensor) -> tf.Tensor:
        """All numbers, float64, which `split` takes apart."""
        counted = [one[None] for one in (step, self._begun.read_value(), self._refused.read_value())]
        workers = [self._pushed.read_value(), self._aggregated.read_value(), self._dropped.read_value()]
        numbers = [tf.cast(each, tf.float64) for each in (*counted, *workers)]
        return tf.concat([*numbers, self._sums.read_value()], 0)

    def split(self, values: np.ndarray) -> GradientCounts:
        limits = np.cumsum([1, 1, 1, *[self._num_workers] * 3])
        step, begun, refused, *workers, sums = np.split(values, limits)
        pushed, aggregated, dropped = (each.astype(np.int64) for each in workers)
        return GradientCounts(int(step[0]), int(begun[0]), int(refused[0]), sums, pushed, aggregated, dropped)

    def restore(self, aggregated: np.ndarray, dropped: np.ndarray) -> None:
        self._aggregated.assign(aggregated)
        self._dropped.assign(dropped)
        self._pushed.assign(aggregated + dropped)

    def _add(self, counter: tf.Variable, worker: tf.Tensor) -> None:
        counter.scatter_nd_add(tf.reshape(worker, [1, 1]), tf.ones([1], tf.int64))


@dataclass(frozen=True)
class SyncReplicasOrigin(PsOrigin):
    """Where a run of mode=sync_replicas begins.

    Attributes:
        aggregated, dropped: the gradients of each worker, int64 [workers]; 0 if the snapshot has none for as many.
    """

    aggregated: np.ndarray
    dropped: np.ndarray

    @classmethod
    def of(cls, start: Snapshot | None, sharding: Sharding) -> "SyncReplicasOrigin":
        gradients = np.zeros((2, sharding.num_shards), np.int64)
        if start and start.arrays.get(GRADIENTS_ARRAY, np.empty(0)).shape == gradients.shape:
            gradients = start.arrays[GRADIENTS_ARRAY]
        step, examples = (start.step, start.facts.examples) if start else (0, 0)
        begin = input_position(start, sharding)
        positions = [0] * sharding.num_shards
        if sharding.is_by_worker:
            if start and start.facts.input.positions and has_sharding(start, sharding):
                positions = list(start.facts.input.positions)
            else:
                positions = [NumberedSteps(sharding, InputPosition()).steps_to(begin.next)] * sharding.num_shards
            begin = InputPosition()
        offsets = np.array(positions) - gradients.sum(0)
        return cls(step, examples, begin, list(map(int, offsets)), gradients[0], gradients[1])
