"""Parameter servers of mode=sync_replicas: one of them decides which gradients make a step, the others follow.

A worker computes a gradient at the values of one step. It leaves its parts at the following ps, and then pushes the
rest to the deciding ps, which takes it, or drops it if the step is over. The K-th makes the step: the deciding ps
applies the mean, and tells everyone who pulls which gradients are in it. With this a worker pulls from the other ps,
which apply the mean of the same gradients before they answer. So no worker's death can leave a step half done: any
other worker, or the coordinator, brings what was decided to the ps that have not heard of it.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.model.tables import apply_rows
from tf2dist.training.parameter_server.rows import KeptRows
from tf2dist.training.parameter_server.server import ModelPart, PartSpec, operations_made
from tf2dist.training.parameter_server.storage import Storage
from tf2dist.training.parameter_server.sync_replicas_counters import GradientCounters, GradientCounts
from tf2dist.training.parameter_server.wire import (
    GradientLayout,
    PackedCount,
    Pulled,
    PullLayout,
    RowGradient,
    WireTensors,
)

BITS = tf.TensorSpec([2], tf.float32)  # of a `PackedCount`
INDEX = tf.TensorSpec([], tf.int64)
CLOSED = np.int64(0)  # a limit that every step has reached
Look = Callable[[], tuple[tf.Tensor, tf.Tensor]]  # the step, and whether a worker has to wait in it


class StepBarrier:
    """Wakes the workers that wait for the end of a step; to be made under the device of the ps.

    A waiting worker takes a token from a queue, which costs no thread and no time, and then looks again. Tokens say
    no more than "look": one too many does no harm. Should one be missing, because the call of a lost worker has taken
    it, `wake` gives more; the coordinator calls it whenever the step makes no progress.

    Args:
        num_workers: that may wait at once.
    """

    def __init__(self, num_workers: int) -> None:
        # Two, used in turn: the tokens of a step would otherwise be taken by workers that are a step further.
        # Not `tf.queue.FIFOQueue`, whose Python object destroys the queue when it is collected, and crashes the process
        # if the cluster is gone by then. These stay as long as the ps, and are some bytes.
        self._queues = [
            tf.raw_ops.FIFOQueueV2(component_types=[tf.int32], shapes=[[]], shared_name=f"barrier-{uuid.uuid4()}")
            for _ in range(2)
        ]
        self._num_tokens = 2 * num_workers  # calls of lost workers may wait here, too

    def wait(self, look: Look) -> tf.Tensor:
        """In a graph: returns the step once `look` finds that there is nothing to wait for."""

        def wait_and_look(step: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            token = self._of_step(step, self._dequeue)
            with tf.control_dependencies([token]):
                return look()

        # The queue is that of the step which the look has seen: its tokens come after the step has moved on.
        return tf.while_loop(lambda _, must_wait: must_wait, wait_and_look, look())[0]

    def open(self, step: tf.Tensor) -> tf.Tensor:
        """In a graph: wakes the workers that wait in `step`, which is over."""
        return self._of_step(step, self._fill)

    def wake(self) -> None:
        """In a graph: makes all waiting workers look again."""
        for queue in self._queues:
            self._fill(queue)

    def _dequeue(self, queue: tf.Tensor) -> tf.Tensor:
        (token,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int32])
        return token

    def _fill(self, queue: tf.Tensor) -> tf.Tensor:
        # Tokens that nobody takes would otherwise become more with every step.
        missing = tf.maximum(0, self._num_tokens - tf.raw_ops.QueueSizeV2(handle=queue))
        filled = tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[tf.zeros(missing[None], tf.int32)])
        with tf.control_dependencies([filled]):
            return tf.constant(0)

    def _of_step(self, step: tf.Tensor, act: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        even, odd = self._queues
        return tf.cond(step % 2 == 0, lambda: act(even), lambda: act(odd))


class AggregatingServer(ModelPart):
    """A ps that applies means of gradients, the one that decides or another.

    Attributes:
        step: the aggregates applied in the whole run, int64.
        push_layout: of the gradients that workers send.

    Args:
        num_places: for gradients of rows, see `KeptRows`.
        num_lookups: of a batch in each table of the ps.
    """

    push_layout: GradientLayout

    def __init__(self, spec: PartSpec, num_places: int, num_lookups: Sequence[int]) -> None:
        super().__init__(spec)
        with tf.device(spec.device):
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            self._lock = tf.CriticalSection()
            tables = zip(self.tables, num_lookups, strict=True)
            self._kept_rows = [KeptRows(table, num_places, number) for table, number in tables]
        self.stored, self._stored_layout = [Storage(one) for one in self.variables], self.pull_layout
        self.pull_exactly = self.on_device(self.pulled)

    def _applied(self) -> PackedCount:
        # A gradient at values that contain a part of the next step, too, is dropped, since that step is over before it
        # is pushed.
        return PackedCount.of(tf.cast(self.step.read_value(), tf.float64))

    def _apply(self, changes: list[tf.Tensor], rows: list[RowGradient]) -> None:
        """In a graph: applies the mean changes of all variables."""
        self.update_number.set_current(self.step.read_value() + self.earlier_updates)
        # In the order of plain Keras: the call of the model changes its state, and the optimizer comes after it.
        for variable, change in zip(self.state, changes[len(self.whole) :], strict=True):
            variable.value.assign_add(change)
        if self.whole:
            self.optimizer.apply(changes[: len(self.whole)], self.whole)
        for table, (ids, gradient) in zip(self.tables, rows, strict=True):
            apply_rows(self.optimizer_of[id(table)], gradient, table, ids)


class DecidingServer(AggregatingServer):
    """The ps that counts the steps and decides which gradients are in them; it tells who pulls which made the last.

    Attributes:
        replicas: the gradients that make a step, at most.
        quota: how many of them a worker may give.

    Args:
        num_lookups: see `AggregatingServer`.
    """

    def __init__(self, spec: PartSpec, replicas: int, num_lookups: Sequence[int] = ()) -> None:
        self.pull_layout = PullLayout(spec.variables, spec.tables, spec.num_workers)
        self.exact_layout = PullLayout(spec.variables, num_workers=spec.num_workers)
        self.push_layout = GradientLayout(spec.variables, 2 + spec.num_metrics, spec.tables)
        self.replicas = replicas
        self.quota = -(-replicas // spec.num_workers)
        with tf.device(spec.device):
            self._limit = tf.Variable(CLOSED, dtype=tf.int64, trainable=False, name="limit")
            zeros = [tf.zeros(one.shape) for one in self.push_layout.added]
            self._total = [tf.Variable(zero, trainable=False, name="total") for zero in zeros]
            self.counters = GradientCounters(spec.num_workers, spec.num_metrics)
            self._barrier = StepBarrier(spec.num_workers)
        super().__init__(spec, replicas, num_lookups)
        pushed, request = self.push_layout.specs, self.pull_layout.rows.request_types
        self.begin = self.on_device(self._begin, INDEX, *request)
        self.push = self.on_device(self._push, pushed, INDEX)
        self.exchange = self.on_device(self._exchange, pushed, INDEX, *request)
        self.pushed_by = self.on_device(self._pushed_by, INDEX)
        self.wake = self.on_device(self._barrier.wake)
        self._read = self.on_device(self._counts)
        self._set_limit = self.on_device(self._assign_limit, INDEX)

    def open(self, limit: int) -> None:
        """Takes gradients until the step is `limit`."""
        self._set_limit(tf.constant(limit, tf.int64))

    def close(self) -> Pulled:
        """Takes no gradients any more and lets nobody wait; returns what the last step was made of.

        The gradients of a step that is not complete are forgotten, and their batches computed once more.
        """
        self._set_limit(tf.constant(CLOSED))
        return self.exact_layout.unpack(self.pull_exactly())

    def was_open(self, pulled: WireTensors) -> tf.Tensor:
        """On a worker: whether the ps took gradients when this was pulled."""
        is_open = self.pull_layout.unpack(pulled).open
        assert is_open is not None
        return is_open[0] > 0

    def counts(self) -> GradientCounts:
        return self.counters.split(self._read().numpy())

    def restore(self, step: int, aggregated: np.ndarray, dropped: np.ndarray) -> None:
        """Goes on counting from there; to be called before any push."""
        self.step.assign(step)
        self.counters.restore(aggregated, dropped)

    def _reported(self) -> list[tf.Tensor]:
        is_open = self.step.read_value() < self._limit.read_value()
        return [tf.cast(self.counters.made_by.read_value(), tf.float32), tf.cast(is_open, tf.float32)[None]]

    def _begin(self, worker: tf.Tensor, *request: tf.Tensor) -> WireTensors:
        """The pull at the beginning of a call, which may have to wait for the end of the step."""
        with tf.control_dependencies([self.counters.begin_call()]):
            waited = self._wait(worker)
        with tf.control_dependencies([waited]):
            return self.pulled(*request)

    def _exchange(self, pushed: WireTensors, worker: tf.Tensor, *request: tf.Tensor) -> WireTensors:
        """A push and, in the next step, a pull."""
        with tf.control_dependencies([self._admit(pushed, worker)]):
            waited = self._wait(worker)
        with tf.control_dependencies([waited]):
            return self.pulled(*request)

    def _wait(self, worker: tf.Tensor) -> tf.Tensor:
        """Waits while the worker has given its share to the step, until that is over or the training pauses."""

        def look() -> tuple[tf.Tensor, tf.Tensor]:
            step = self.step.read_value()
            with tf.control_dependencies([step]):  # the tokens of this step come if it is over by now
                is_open = step < self._limit.read_value()
                is_done = self.counters.done_by(worker) == step
            return step, tf.logical_and(is_open, is_done)

        return self._barrier.wait(look)

    def _push(self, pushed: WireTensors, worker: tf.Tensor) -> tf.Tensor:
        """A push as `_admit` has it; returns what `pushed_by` does then."""
        with tf.control_dependencies([self._admit(pushed, worker)]):
            return self._pushed_by(worker)

    def _admit(self, pushed: WireTensors, worker: tf.Tensor) -> tf.Tensor:
        """Takes a gradient, or drops it; one at a time."""
        return locked(self._lock, lambda: self._decide(pushed, worker))

    def _decide(self, pushed: WireTensors, worker: tf.Tensor) -> None:
        gradient, pulled_at, rows = self.push_layout.unpack(pushed)
        step = self.step.read_value()
        is_open = step < self._limit.read_value()
        in_time = tf.logical_and(pulled_at == step, self.counters.done_by(worker) != step)

        def accept_or_drop() -> None:
            accept, drop = (lambda: self._accept(gradient, rows, worker, step)), (lambda: self.counters.drop(worker))
            tf.cond(in_time, _branch(accept), _branch(drop))

        # Beyond the end, and while the training pauses, it does not count: the batch is computed once more.
        tf.cond(is_open, _branch(accept_or_drop), _branch(self.counters.refuse))

    def _accept(self, gradient: WireTensors, rows: list[RowGradient], worker: tf.Tensor, step: tf.Tensor) -> None:
        """Takes a gradient, and makes the step if it is complete with this one."""
        count = self.counters.accept(worker, step, self.quota)
        complete = _branch(lambda: self._complete(gradient, rows, count, step))
        tf.cond(self.is_complete(count), complete, _branch(lambda: self._add_to_step(gradient, rows, count)))

    def is_complete(self, count: tf.Tensor) -> tf.Tensor:
        """Whether so many gradients make the step; a single one only if `replicas` is 1."""
        return count == self.replicas

    def _add_to_step(self, gradient: WireTensors, rows: list[RowGradient], count: tf.Tensor) -> None:
        """Keeps a gradient for the step, as number `count` of it."""
        pairs = list(zip(self._total, gradient, strict=True))

        def add() -> None:
            for total, one in pairs:
                total.assign_add(one)

        def set_to() -> None:
            for total, one in pairs:
                total.assign(one)

        # The first one replaces the sum of the step before, which saves to set that to zero.
        tf.cond(count == 1, _branch(set_to), _branch(add))
        for kept, own in zip(self._kept_rows, rows, strict=True):
            kept.keep(count - 1, *own)

    def _complete(self, gradient: WireTensors, rows: list[RowGradient], count: tf.Tensor, step: tf.Tensor) -> None:
        """Makes the step of the last gradient and of those that were kept."""
        if self.replicas == 1:
            self._make_step(gradient, rows, step)
            return
        sums = [total.read_value() + one for total, one in zip(self._total, gradient, strict=True)]
        before = tf.range(self.replicas, dtype=tf.int64) < count - 1
        rows_of_all = [kept.sum_of(before, own) for kept, own in zip(self._kept_rows, rows, strict=True)]
        self._make_step(sums, rows_of_all, step)

    def _make_step(self, total: WireTensors, rows: list[RowGradient], step: tf.Tensor) -> None:
        """Applies the mean of the gradients whose sums are `total` and `rows`, and moves on."""
        changes, sums, factor = self.push_layout.mean(total)
        with operations_made() as made:
            self._apply(changes, [(ids, own * factor) for ids, own in rows])
            self.counters.aggregate(sums)
        with tf.control_dependencies(made):
            moved = self.step.assign_add(1)  # counted when it has been done
        with tf.control_dependencies([moved]):
            self._barrier.open(step)

    def _assign_limit(self, limit: tf.Tensor) -> tf.Tensor:
        """Sets the limit, and forgets what was taken of a step that is not complete."""

        def assign() -> None:
            self.counters.discard()
            self._limit.assign(limit)

        with tf.control_dependencies([locked(self._lock, assign)]):
            self._barrier.wake()
        return limit

    def _pushed_by(self, worker: tf.Tensor) -> tf.Tensor:
        """The gradients that a worker has pushed, and the step; int64 [2]."""
        return tf.stack([self.counters.pushed_by(worker), self.step.read_value()])

    def _counts(self) -> tf.Tensor:
        return self.counters.all(self.step.read_value())


class FollowingServer(AggregatingServer):
    """A ps that applies the steps that the deciding one has made; `num_lookups`: see `AggregatingServer`."""

    def __init__(self, spec: PartSpec, num_lookups: Sequence[int] = ()) -> None:
        self.pull_layout = PullLayout(spec.variables, spec.tables)
        self.exact_layout = PullLayout(spec.variables)
        self.push_layout = GradientLayout(spec.variables, 0, spec.tables)
        with tf.device(spec.device):
            # The newest gradient of each worker.
            zeros = [tf.zeros([spec.num_workers, *one.shape]) for one in self.push_layout.added]
            self._gradients = [tf.Variable(zero, trainable=False, name="gradients") for zero in zeros]
        super().__init__(spec, spec.num_workers, num_lookups)
        made_by = tf.TensorSpec([spec.num_workers], tf.float32)
        self.keep = self.on_device(self._keep, self.push_layout.specs, INDEX)
        self.follow = self.on_device(self._follow, BITS, made_by, *self.pull_layout.rows.request_types)

    def restore(self, step: int) -> None:
        self.step.assign(step)

    def _keep(self, pushed: WireTensors, worker: tf.Tensor) -> tf.Tensor:
        """Keeps a gradient until it is decided whether it is in the step."""
        gradient, pulled_at, rows = self.push_layout.unpack(pushed)

        def keep() -> None:
            for kept, one in zip(self._gradients, gradient, strict=True):
                kept.scatter_nd_update(tf.reshape(worker, [1, 1]), one[None])
            for kept_rows, own in zip(self._kept_rows, rows, strict=True):
                kept_rows.keep(worker, *own)

        def keep_if_in_time() -> None:
            # What comes late will be dropped, and must not replace a gradient that is needed.
            tf.cond(pulled_at == self.step.read_value(), _branch(keep), _branch(tf.no_op))

        return locked(self._lock, keep_if_in_time)

    def _follow(self, bits: tf.Tensor, made_by: tf.Tensor, *request: tf.Tensor) -> WireTensors:
        """All variables, at least at the step `bits`, which was made by these workers."""
        step = tf.cast(PackedCount(bits).value(), tf.int64)

        def catch_up() -> None:
            # Never more than one step behind: its next step needs gradients of workers that have pulled here.
            make_step = _branch(lambda: self._make_step(made_by))
            tf.cond(self.step.read_value() < step, make_step, _branch(tf.no_op))

        with tf.control_dependencies([locked(self._lock, catch_up)]):
            return self.pulled(*request)

    def _make_step(self, made_by: tf.Tensor) -> None:
        given = [tf.boolean_mask(gradients.read_value(), made_by > 0) for gradients in self._gradients]
        changes, _, factor = self.push_layout.mean([tf.reduce_sum(gradients, 0) for gradients in given])
        rows = [kept.sum_of(made_by > 0) for kept in self._kept_rows]
        with operations_made() as made:
            self._apply(changes, [(ids, own * factor) for ids, own in rows])
        with tf.control_dependencies(made):
            self.step.assign_add(1)


def locked(lock: tf.CriticalSection, act: Callable[[], Any]) -> tf.Tensor:
    """In a graph: does something while no one else holds the lock; what is returned is there once all of it is done."""

    def do() -> tf.Tensor:
        with operations_made() as made:
            act()
        # The lock is held until what is returned is known, whatever else is still to be done.
        with tf.control_dependencies(made):
            return tf.constant(True)

    return lock.execute(do)


def _branch(act: Callable[[], Any]) -> Callable[[], tf.Tensor]:
    """A branch for `tf.cond`, which wants the same kind of result from both."""

    def do() -> tf.Tensor:
        act()
        return tf.constant(True)

    return do
