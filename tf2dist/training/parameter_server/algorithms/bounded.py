"""algorithm=bounded: stale synchronous parallel, in which no worker is far ahead of the slowest.

Q. Ho, J. Cipar, H. Cui, S. Lee, J. K. Kim, P. B. Gibbons, G. A. Gibson, G. Ganger, E. Xing: More Effective Distributed
ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013. A worker that has taken `algorithm.bound` more steps
than the slowest waits on the first ps before it pulls. So what it pulls has every update of the others that is at least
as old: those of all their steps but the last `algorithm.bound` before its own.
"""

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.cluster.reachability import PROBE_SECS, ask_all, why_unreachable
from tf2dist.cluster.spec import Task
from tf2dist.cluster.waiting import Wait
from tf2dist.training.loop import PauseRequest, PauseRequests
from tf2dist.training.parameter_server.algorithms.plain import Algorithm
from tf2dist.training.parameter_server.counters import Counters, Counts
from tf2dist.training.parameter_server.gate import Gate
from tf2dist.training.parameter_server.schedule import AsyncScheduler
from tf2dist.training.parameter_server.server import ParameterServer, PartSpec
from tf2dist.training.parameter_server.step import AsyncStep, Call
from tf2dist.training.parameter_server.wire import PackedCount, Parcel

INDEX = tf.TensorSpec([], tf.int64)
GIVE_UP = np.float64(-1)  # in place of the count of updates, for a worker that has to give up the rest of its call
AWAY = np.float64(np.inf)  # the clock of a worker that nobody waits for
# The slowest worker has not moved for so long, and another one waits: is it still there?
STALLED_SECS = 0.5


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


class UngatedServer(ParameterServer):
    """A ps at which nobody waits. A push with the limit 0 is not even admitted; see `BoundedStep`."""

    def _admit(self, pushed: Parcel, indices: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
        admit = super()._admit
        return tf.cond(limit > 0, lambda: admit(pushed, indices, limit), lambda: tf.constant(False))


class GatedServer(UngatedServer):
    """The ps at which workers wait for the slowest; its pulls have `GIVE_UP` for a worker that must not go on.

    Attributes:
        begin: ``begin(worker)``, the pull before the first step of a call.
        open, close, wake: see `Clocks`.
        retire: ``retire(worker)``; see `Clocks`.
        clock_state: see `Clocks.state`.

    Args:
        bound: see `Clocks`.
    """

    def __init__(self, part: PartSpec, algorithm: Algorithm, bound: int) -> None:
        super().__init__(part, algorithm)
        with tf.device(self.device):
            self._clocks = clocks = Clocks(self.counters, part.num_workers, bound)
        self.open, self.close = self.on_device(clocks.open), self.on_device(clocks.close)
        self.wake, self.retire = self.on_device(clocks.wake), self.on_device(clocks.retire, INDEX)
        self.clock_state = self.on_device(clocks.state)

    def restore(self, counts: Counts) -> None:
        super().restore(counts)
        self._clocks.restore(counts.steps)

    def _trace(self, *signature: Any) -> None:
        self.begin = self.on_device(self._begin, INDEX)
        self.push = self.on_device(self._push_and_move, *signature, INDEX)
        self.exchange = self.on_device_later(self._exchange_at_gate, *signature, INDEX)

    def _begin(self, worker: tf.Tensor) -> Parcel:
        may_go_on = self._clocks.wait(worker)
        with tf.control_dependencies([may_go_on]):
            applied = self.counters.applied()
            count = PackedCount.of(tf.where(may_go_on, applied, GIVE_UP))
        with tf.control_dependencies([count.bits]):
            values = [storage.read() for storage in self.stored]
        return self.stored_layout.pack(values, count)

    def _push_and_move(self, pushed: Parcel, indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([self._admit_and_move(pushed, indices, limit, worker)]):
            return self.counters.after(indices)

    def _exchange_at_gate(self, pushed: Parcel, indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> Parcel:
        with tf.control_dependencies([self._admit_and_move(pushed, indices, limit, worker)]):
            return self._begin(worker)

    def _admit_and_move(self, pushed: Parcel, indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([self._admit(pushed, indices, limit)]):
            return self._clocks.moved(worker)


class BoundedStep(AsyncStep):
    """See `AsyncStep`.

    The first ps hears of a step last and lets a worker begin the next one first: what the clocks count is on all ps.

    Attributes:
        gated: the first ps.
        bound: how many steps a worker may be ahead of the slowest.
    """

    def _make_servers(self, parts: list[PartSpec]) -> None:
        first, *others = parts
        self.bound = self.config.algorithm.bound
        self.gated = GatedServer(first, self.algorithm, self.bound)
        self._ungated: Sequence[UngatedServer] = [UngatedServer(part, self.algorithm) for part in others]
        self.servers = [self.gated, *self._ungated]

    def _pull(self, call: Call) -> list[Parcel]:
        return self._after_first(call, self.gated.begin(call.worker))

    def _exchange(self, call: Call, pushes: list[Parcel], number: int) -> list[Parcel]:
        with tf.control_dependencies(self._push_to_others(call, pushes)):
            return self._after_first(call, self.gated.exchange(pushes[0], call.indices, call.limit, call.worker))

    def _push(self, call: Call, pushes: list[Parcel]) -> tf.Tensor:
        with tf.control_dependencies(self._push_to_others(call, pushes)):
            return self.gated.push(pushes[0], call.indices, call.limit, call.worker)

    def _push_to_others(self, call: Call, pushes: list[Parcel]) -> list[tf.Tensor]:
        pairs = zip(self._ungated, pushes[1:], strict=True)
        return [server.push(push, call.indices, call.limit) for server, push in pairs]

    def _after_first(self, call: Call, first: Parcel) -> list[Parcel]:
        """What all ps give, after that of the first one has come.

        The limit of the call becomes 0 from the step on that the worker must not take. All ps leave out the same steps
        with it, and all steps to the end of the call: a later one would be counted in the place of the first, whose
        batch is still to be trained on.
        """
        with tf.control_dependencies(first):
            pulled = [first, *(server.pull() for server in self._ungated)]
        count = self.gated.pull_layout.unpack(first).applied
        with tf.device("CPU:0"):
            call.limit = tf.where(count.value() < 0, tf.zeros_like(call.limit), call.limit)
        return pulled

    def facts(self) -> dict[str, Any]:
        """The largest lead that a worker had over the slowest since the run was started, in steps."""
        *_, lead = self.gated.clock_state().numpy()
        return {"bound": self.bound, "lead": {"max": int(lead)}}


class BoundedScheduler(AsyncScheduler):
    """See `AsyncScheduler`. The gate of the ps is open only while every worker has a call, or can get one."""

    graphs: BoundedStep
    _is_open = False
    _slowest, _looked_at = -math.inf, 0.0

    def begin(self, until_step: int) -> None:
        self._until_step = until_step
        super().begin(until_step)

    def fill(self, admitted: int, missing: int) -> None:
        # Every further update is refused. Some were lost after they had been admitted, so the clocks stop: the
        # calls have to end before the rest of the training can begin again.
        if admitted >= self._until_step:
            self.release()
            return
        if not self._is_open:
            self.graphs.gated.open()
            self._is_open, self._slowest = True, -math.inf
        self._watch()
        # So many calls that each worker has one, even if the slowest has to take all steps that are missing: another
        # may wait for it with a call that it has taken.
        super().fill(admitted, missing + (self.num_workers - 1) * self.num_steps)

    def cut(self) -> bool:
        # Each worker gives up the rest of its call at the gate, which is no later.
        return False

    def finish(self, request: PauseRequests) -> PauseRequest:
        self.release()
        return super().finish(request)

    def release(self) -> None:
        self.graphs.gated.close()
        self._is_open = False

    def _watch(self) -> None:
        """Looks for the slowest worker, if others wait for it and it does not move."""
        clocks, now = self.graphs.gated.clock_state().numpy()[:-1], time.monotonic()
        slowest, living = clocks.min(), np.isfinite(clocks)
        if slowest != self._slowest:
            self._slowest, self._looked_at = slowest, now
            self._wait = Wait(math.inf, functools.partial(print, flush=True))
        if now - self._looked_at < STALLED_SECS or clocks[living].max(initial=0) < slowest + self.graphs.bound:
            return
        self._looked_at = now
        # The call of a lost worker may have taken the token of another one.
        self.graphs.gated.wake()

        late = [Task("worker", int(index)) for index in np.flatnonzero(clocks == slowest)]
        self._wait.notify(", ".join(map(str, late)))
        answers = ask_all(self._why_gone, late, PROBE_SECS)
        gone = {task: why for task in late if (why := answers.get(task, "no answer"))}
        # If nobody is left, nobody waits.
        if len(gone) == living.sum():
            return
        for task, why in gone.items():
            print(f"{task} cannot be reached ({why}): the other workers no longer wait for it", flush=True)
            self.graphs.gated.retire(tf.constant(task.index, tf.int64))

    def _why_gone(self, task: Task) -> str:
        return why_unreachable(self.cluster.address(task))


class Bounded(Algorithm):
    """See `Algorithm`: it changes when a worker pulls, not what a ps does."""

    graphs, scheduler = BoundedStep, BoundedScheduler
