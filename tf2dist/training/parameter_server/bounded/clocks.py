"""How many steps the workers have taken, as the first ps counts them, and who has to wait for the slowest."""

import numpy as np
import tensorflow as tf

from tf2dist.training.parameter_server.counters import Counters
from tf2dist.training.parameter_server.gate import Gate

AWAY = np.float64(np.inf)  # the clock of a worker that nobody waits for


class Clocks:
    """The clocks of all workers, and the gate before the step of one that is too far ahead.

    A clock is the number of steps that the counters have for the worker, and a shift. So the atomic operation that
    counts an update also moves the clock. The shift makes all clocks equal when a process starts, and lets a worker
    that was lost begin at the clock of the slowest; that of a worker that is away is infinite, so nobody waits for it.

    To be made under the device of the ps.

    Args:
        counters: of this ps.
        num_workers: that take steps.
        bound: how many steps a worker may be ahead of the slowest, once it has taken its step.
    """

    def __init__(self, counters: Counters, num_workers: int, bound: int) -> None:
        self._counters, self._num_workers, self._bound = counters, num_workers, bound
        self._shifts = tf.Variable(tf.zeros([num_workers], tf.float64), trainable=False, name="clock_shifts")
        self._max_lead = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="max_lead")
        self._is_closed = tf.Variable(False, trainable=False, name="is_closed")
        self._gate = Gate(num_workers)
        # One look at a time: two workers that come back at once would each set its clock by that of the other.
        self._lock = tf.CriticalSection()

    def restore(self, steps: np.ndarray) -> None:
        """Makes all clocks 0; `steps`: of each worker, as the counters have them."""
        self._shifts.assign(-steps.astype(np.float64))

    def wait(self, worker: tf.Tensor) -> tf.Tensor:
        """In a graph: waits until a worker may take its next step.

        Returns:
            Whether it may; otherwise the gate was closed, and the worker has to give up the rest of its call.
        """
        return self._gate.wait(lambda: self._look(worker)) >= 0

    def _look(self, worker: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The clock of the slowest, or -1 for a worker that has to give up, and whether the worker has to wait."""
        slowest, must_wait = tf.unstack(self._lock.execute(lambda: self._decide(worker)))
        return slowest, must_wait > 0

    def _decide(self, worker: tf.Tensor) -> tf.Tensor:
        """What `_look` returns, int64 [2]."""
        # All clocks at one moment. Others may move on meanwhile, which makes the lead no larger.
        steps, shifts = self._counters.steps(), self._shifts.read_value()
        is_own = self._is_own(worker)
        slowest = tf.reduce_min(tf.where(is_own, AWAY, steps + shifts))  # of the others

        # A worker that was away comes back with this step.
        own_steps, shift = tf.gather(steps, worker), tf.gather(shifts, worker)
        of_slowest = tf.where(tf.math.is_inf(slowest), tf.zeros([], tf.float64), slowest - own_steps)
        shift = tf.where(tf.math.is_inf(shift), of_slowest, shift)
        came_back = self._shifts.assign(tf.where(is_own, shift, shifts))

        lead = tf.maximum(own_steps + shift + 1 - slowest, 0)  # of the worker, once it has taken this step
        is_ahead, is_closed = lead > self._bound, self._is_closed.read_value()
        allowed = tf.where(is_ahead, tf.zeros_like(lead), lead)
        noted = self._max_lead.assign(tf.maximum(self._max_lead.read_value(), allowed))
        # The lock is held until what is returned is known.
        with tf.control_dependencies([came_back, noted]):
            seen = tf.where(tf.math.is_inf(slowest), tf.zeros_like(slowest), slowest)
            seen = tf.where(tf.logical_and(is_ahead, is_closed), -tf.ones_like(seen), seen)
            must_wait = tf.logical_and(is_ahead, tf.logical_not(is_closed))
            return tf.stack([tf.cast(seen, tf.int64), tf.cast(must_wait, tf.int64)])

    def moved(self, worker: tf.Tensor) -> tf.Tensor:
        """In a graph, after an update of this worker was counted: wakes those who wait, if it was the last slowest."""
        clocks = self._counters.steps() + self._shifts.read_value()
        slowest = tf.reduce_min(clocks)
        # If it was, all others are at least as far as it is now, whoever has moved at the same time.
        was_slowest = tf.gather(clocks, worker) == slowest
        before = tf.cast(slowest, tf.int64) - 1
        return tf.cond(was_slowest, lambda: self._gate.open(before), lambda: tf.constant(0))

    def open(self) -> None:
        """In a graph: lets workers wait from now on."""
        self._is_closed.assign(False)

    def close(self) -> None:
        """In a graph: lets nobody wait; a worker that would have to gives up the rest of its call."""
        with tf.control_dependencies([self._is_closed.assign(True)]):
            self._gate.wake()

    def wake(self) -> None:
        """In a graph: makes all that wait look again."""
        self._gate.wake()

    def retire(self, worker: tf.Tensor) -> None:
        """In a graph: lets nobody wait for this worker until its next step."""

        def forget() -> tf.Tensor:
            shifts = tf.where(self._is_own(worker), AWAY, self._shifts.read_value())
            with tf.control_dependencies([self._shifts.assign(shifts)]):
                return tf.constant(True)

        with tf.control_dependencies([self._lock.execute(forget)]):
            self._gate.wake()

    def state(self) -> tf.Tensor:
        """In a graph: the clock of each worker, infinite for one that is away, and the largest lead; float64."""
        clocks = self._counters.steps() + self._shifts.read_value()
        return tf.concat([clocks, self._max_lead.read_value()[None]], 0)

    def _is_own(self, worker: tf.Tensor) -> tf.Tensor:
        return tf.range(self._num_workers, dtype=tf.int64) == worker
