"""What runs on the parameter servers: one of them decides which gradients make a step, the others follow.

A worker computes a gradient at the values of one step. It lays its parts down on the following ps, and then pushes the
rest to the deciding ps, which takes it, or drops it if the step is over. The K-th makes the step: the deciding ps
applies the mean, and tells everyone who pulls which gradients are in it. With this a worker pulls from the other ps,
which apply the mean of the same gradients before they answer. So no worker's death can leave a step half done: any
other worker, or the coordinator, brings what was decided to the ps that have not heard of it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.training.parameter_server.gate import Gate
from tf2dist.training.parameter_server.sync_replicas_counters import Counts, Tally
from tf2dist.training.parameter_server.sync_replicas_part import ModelPart
from tf2dist.training.parameter_server.sync_replicas_wire import Pulled, PullLayout, PushLayout
from tf2dist.training.parameter_server.wire import PackedCount, Parcel

BITS = tf.TensorSpec([2], tf.float32)  # of a `PackedCount`
INDEX = tf.TensorSpec([], tf.int64)
CLOSED = np.int64(0)  # a limit that every step has reached


class DecidingServer:
    """The ps that counts the steps and decides which gradients are in them.

    Attributes:
        part: of the model.
        pull_layout, push_layout: of what it exchanges with workers.
        quota: how many gradients a worker may give to one step.

    Args:
        replicas: the gradients that make a step.
        num_workers: that push.
        num_metrics: numbers that every gradient adds to the sums of the metrics.
    """

    def __init__(self, part: ModelPart, replicas: int, num_workers: int, num_metrics: int) -> None:
        self.part, self._replicas, self._num_workers = part, replicas, num_workers
        self.quota = -(-replicas // num_workers)
        self.pull_layout = PullLayout(part.variables, num_workers)
        self.push_layout = PushLayout(part.variables, 2 + num_metrics)
        with tf.device(part.device):
            self._limit = tf.Variable(CLOSED, dtype=tf.int64, trainable=False, name="limit")
            zeros = [tf.zeros(spec.shape) for spec in self.push_layout.added]
            self._total = [tf.Variable(zero, trainable=False, name="total") for zero in zeros]
            self._tally = Tally(num_workers, num_metrics)
            self._gate = Gate(num_workers)
            self._lock = tf.CriticalSection()
        pushed = self.push_layout.specs
        self.pull = part.on_device(self._pull)
        self.begin = part.on_device(self._begin, INDEX)
        self.push = part.on_device(self._push, pushed, INDEX)
        self.exchange = part.on_device(self._exchange, pushed, INDEX)
        self.pushed_by = part.on_device(self._pushed_by, INDEX)
        self.wake = part.on_device(self._wake)
        self._read = part.on_device(self._counts)
        self._set_limit = part.on_device(self._assign_limit, INDEX)

    def open(self, limit: int) -> None:
        """Takes gradients until the step is `limit`."""
        self._set_limit(tf.constant(limit, tf.int64))

    def close(self) -> Pulled:
        """Takes no gradients any more and lets nobody wait; returns what the last step was made of.

        The gradients of a step that is not complete are forgotten, and their batches computed once more.
        """
        self._set_limit(tf.constant(CLOSED))
        return self.pull_layout.unpack(self.pull())

    def counts(self) -> Counts:
        return self._tally.split(self._read().numpy())

    def restore(self, step: int, aggregated: np.ndarray, dropped: np.ndarray) -> None:
        """Goes on counting from there; to be called before any push."""
        self.part.step.assign(step)
        self._tally.restore(aggregated, dropped)

    def _pull(self) -> Parcel:
        """All variables, without waiting."""
        step = self.part.step.read_value()
        # First the step: the values contain at least what it counts. A gradient at values that contain a part of the
        # next step, too, is dropped, since that step is over before it is pushed.
        with tf.control_dependencies([step]):
            made_by = tf.cast(self._tally.made_by.read_value(), tf.float32)
            count = PackedCount.of(tf.cast(step, tf.float64))
            return self.pull_layout.pack(Pulled(self.part.values(), count, made_by))

    def _begin(self, worker: tf.Tensor) -> Parcel:
        """The pull at the beginning of a call, which may have to wait for the end of the step."""
        with tf.control_dependencies([self._tally.begin_call()]):
            waited = self._wait(worker)
        with tf.control_dependencies([waited]):
            return self._pull()

    def _exchange(self, pushed: Parcel, worker: tf.Tensor) -> Parcel:
        """A push and, in the next step, a pull."""
        with tf.control_dependencies([self._admit(pushed, worker)]):
            waited = self._wait(worker)
        with tf.control_dependencies([waited]):
            return self._pull()

    def _wait(self, worker: tf.Tensor) -> tf.Tensor:
        """Waits while the worker has given its share to the step, until that is over or the training pauses."""

        def look() -> tuple[tf.Tensor, tf.Tensor]:
            step = self.part.step.read_value()
            with tf.control_dependencies([step]):  # the tokens of this step come if it is over by now
                is_open = step < self._limit.read_value()
                is_done = self._tally.done_by(worker) == step
            return step, tf.logical_and(is_open, is_done)

        return self._gate.wait(look)

    def _push(self, pushed: Parcel, worker: tf.Tensor) -> tf.Tensor:
        """See `_admit`; returns what `pushed_by` does then."""
        with tf.control_dependencies([self._admit(pushed, worker)]):
            return self._pushed_by(worker)

    def _admit(self, pushed: Parcel, worker: tf.Tensor) -> tf.Tensor:
        """Takes a gradient, or drops it; one at a time."""
        return alone(self._lock, lambda: self._decide(pushed, worker))

    def _decide(self, pushed: Parcel, worker: tf.Tensor) -> None:
        gradient, pulled_at = self.push_layout.split(pushed)
        step = self.part.step.read_value()
        is_open = step < self._limit.read_value()
        in_time = tf.logical_and(pulled_at == step, self._tally.done_by(worker) != step)

        def take_or_drop() -> None:
            take, drop = (lambda: self._take(gradient, worker, step)), (lambda: self._tally.drop(worker))
            tf.cond(in_time, _branch(take), _branch(drop))

        # Beyond the end, and while the training pauses, nothing is counted: the batch is computed once more.
        tf.cond(is_open, _branch(take_or_drop), _branch(tf.no_op))

    def _take(self, gradient: Parcel, worker: tf.Tensor, step: tf.Tensor) -> None:
        count = self._tally.take(worker, step, self.quota)

        def keep() -> None:
            # The first one replaces the sum of the step before, which saves to set that to zero.
            pairs = list(zip(self._total, gradient, strict=True))

            def add() -> None:
                for total, one in pairs:
                    total.assign_add(one)

            def set_to() -> None:
                for total, one in pairs:
                    total.assign(one)

            tf.cond(count == 1, _branch(set_to), _branch(add))

        def complete() -> None:
            if self._replicas == 1:
                self._make_step(gradient, step)
                return
            sums = [total.read_value() + one for total, one in zip(self._total, gradient, strict=True)]
            self._make_step(sums, step)

        tf.cond(count == self._replicas, _branch(complete), _branch(keep))

    def _make_step(self, total: Parcel, step: tf.Tensor) -> None:
        """Applies the mean of the gradients whose sum is `total`, and moves on."""
        changes, sums = self.push_layout.mean(total)
        graph = tf.compat.v1.get_default_graph()
        earlier = len(graph.get_operations())
        self.part.apply(changes)
        self._tally.aggregate(sums)
        with tf.control_dependencies(graph.get_operations()[earlier:]):
            moved = self.part.step.assign_add(1)  # counted when it has been done
        with tf.control_dependencies([moved]):
            self._gate.open(step)

    def _assign_limit(self, limit: tf.Tensor) -> tf.Tensor:
        """Sets the limit, and forgets what was taken of a step that is not complete."""

        def assign() -> None:
            self._tally.discard()
            self._limit.assign(limit)

        with tf.control_dependencies([alone(self._lock, assign)]):
            self._wake()
        return limit

    def _wake(self) -> None:
        self._gate.wake()

    def _pushed_by(self, worker: tf.Tensor) -> tf.Tensor:
        """The gradients that a worker has pushed, and the step; int64 [2]."""
        return tf.stack([self._tally.pushed_by(worker), self.part.step.read_value()])

    def _counts(self) -> tf.Tensor:
        return self._tally.all(self.part.step.read_value())


class FollowingServer:
    """A ps that applies the steps that the deciding one has made.

    Attributes:
        part: of the model.
        pull_layout, push_layout: of what it exchanges with workers.
    """

    def __init__(self, part: ModelPart, num_workers: int) -> None:
        self.part = part
        self.pull_layout = PullLayout(part.variables, 0)
        self.push_layout = PushLayout(part.variables, 0)
        with tf.device(part.device):
            # The newest gradient of each worker.
            zeros = [tf.zeros([num_workers, *spec.shape]) for spec in self.push_layout.added]
            self._gradients = [tf.Variable(zero, trainable=False, name="gradients") for zero in zeros]
            self._lock = tf.CriticalSection()
        self.lay_down = part.on_device(self._lay_down, self.push_layout.specs, INDEX)
        self.follow = part.on_device(self._follow, BITS, tf.TensorSpec([num_workers], tf.float32))
        self.pull = part.on_device(self._pull)

    def restore(self, step: int) -> None:
        self.part.step.assign(step)

    def _lay_down(self, pushed: Parcel, worker: tf.Tensor) -> tf.Tensor:
        """Keeps a gradient until it is decided whether it is in the step."""
        gradient, pulled_at = self.push_layout.split(pushed)

        def keep() -> None:
            for kept, one in zip(self._gradients, gradient, strict=True):
                kept.scatter_nd_update(tf.reshape(worker, [1, 1]), one[None])

        def keep_if_in_time() -> None:
            # What comes late will be dropped, and must not replace a gradient that is needed.
            tf.cond(pulled_at == self.part.step.read_value(), _branch(keep), _branch(tf.no_op))

        return alone(self._lock, keep_if_in_time)

    def _follow(self, bits: tf.Tensor, made_by: tf.Tensor) -> Parcel:
        """All variables, at least at the step `bits`, which was made by these workers."""
        step = tf.cast(PackedCount(bits).value(), tf.int64)

        def catch_up() -> None:
            # Never more than one step behind: its next step needs gradients of workers that have pulled here.
            make_step = _branch(lambda: self._make_step(made_by))
            tf.cond(self.part.step.read_value() < step, make_step, _branch(tf.no_op))

        with tf.control_dependencies([alone(self._lock, catch_up)]):
            return self._pull()

    def _make_step(self, made_by: tf.Tensor) -> None:
        given = [tf.boolean_mask(gradients.read_value(), made_by > 0) for gradients in self._gradients]
        changes, _ = self.push_layout.mean([tf.reduce_sum(gradients, 0) for gradients in given])
        with tf.control_dependencies(self.part.apply(changes)):
            self.part.step.assign_add(1)

    def _pull(self) -> Parcel:
        step = self.part.step.read_value()
        with tf.control_dependencies([step]):
            count = PackedCount.of(tf.cast(step, tf.float64))
            return self.pull_layout.pack(Pulled(self.part.values(), count, tf.zeros([0])))


def alone(lock: tf.CriticalSection, act: Callable[[], Any]) -> tf.Tensor:
    """In a graph: does something while no one else holds the lock; what is returned is there once all of it is done."""

    def do() -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        earlier = len(graph.get_operations())
        act()
        # The lock is held until what is returned is known, whatever else is still to be done.
        with tf.control_dependencies(graph.get_operations()[earlier:]):
            return tf.constant(True)

    return lock.execute(do)


def _branch(act: Callable[[], Any]) -> Callable[[], tf.Tensor]:
    """A branch for `tf.cond`, which wants the same kind of result from both."""

    def do() -> tf.Tensor:
        act()
        return tf.constant(True)

    return do
