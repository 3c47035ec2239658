"""The calls that the coordinator gives to the workers of mode=sync_replicas: as many to each of them.

A step may need a gradient of every worker. So no worker may lack a call while another one waits in its own for the end
of the step, and the calls end all together: when the ps stop to take gradients, nobody waits any more.
"""

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf2dist.training.asynchronous.calls import quiet_secs, wait_for_calls
from tf2dist.training.asynchronous.scheduler import MAX_POLL_SECS, POLL_SECS, TRACED_SHARE, Calls
from tf2dist.training.call_size import CallTimer, worthwhile_steps
from tf2dist.training.loop import PauseRequest, PauseRequests
from tf2dist.training.replicas.step import ReplicasStep
from tf2dist.training.replicas.tally import Counts


class Scheduler:
    """Keeps every worker supplied with calls.

    Attributes:
        calls: those that workers get.
        is_sized: whether it is known how long they should be; until then calls of one step are timed.
        steps_per_sec: the rate of global steps, as the loop has last measured it; 0 while it is not known.

    Args:
        num_steps: the steps of a call; None to find the best number.
        grace_secs: the time that a whole stop may take.
    """

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        graphs: ReplicasStep,
        num_workers: int,
        num_steps: int | None,
        grace_secs: float,
    ) -> None:
        self._coordinator, self._graphs = coordinator, graphs
        self._num_workers, self._grace_secs = num_workers, grace_secs
        self.is_sized = num_steps is not None
        self.steps_per_sec = 0.0
        began_at = time.monotonic()
        function = graphs.train_function(num_steps or 1)
        self._trace_secs = time.monotonic() - began_at
        self._first_call_secs = 0.0  # 0 while it is not known
        self._use(num_steps or 1, function)
        self._timer = CallTimer()
        self._num_scheduled = 0

    @property
    def num_steps(self) -> int:
        """The steps of a call."""
        return self.calls.num_steps

    def _use(self, num_steps: int, function: Any) -> None:
        self.calls = Calls(num_steps, function, self._graphs.feed.source(self._coordinator, num_steps))

    def begin(self, counts: Counts) -> None:
        """Begins a training; no call may be in flight."""
        self._timer = CallTimer()
        self._begin_again(counts)

    def _begin_again(self, counts: Counts) -> None:
        self._num_scheduled = counts.begun
        self._first = counts

    def check(self) -> None:
        """Raises the error of a call that has failed."""
        self._coordinator.done()

    def fill(self, counts: Counts, missing: int, is_stalled: bool) -> None:
        """Schedules calls until enough of them wait for a worker.

        Args:
            missing: the global steps that are still to be made.
            is_stalled: whether nothing has been pushed for a while.
        """
        # A call that TensorFlow repeats after its worker was lost has begun twice: then rather too many wait here.
        waiting = self._num_scheduled - counts.begun
        for _ in range(waiting, self._num_workers * self._calls_to_keep(counts, missing, is_stalled)):
            self._schedule()

    def _calls_to_keep(self, counts: Counts, missing: int, is_stalled: bool) -> int:
        """How many calls should wait for each worker."""
        pushes_per_sec = self.steps_per_sec * self._graphs.deciding.quota
        ahead = 1 + int(2 * MAX_POLL_SECS * pushes_per_sec / self.num_steps)
        # What the calls that have begun will still push. If nothing moves, this is an error of the count: the pushes of
        # a lost worker never came.
        begun, pushed = counts.begun - self._first.begun, counts.pushed.sum() - self._first.pushed.sum()
        running = 0 if is_stalled else max(0, begun * self.num_steps - int(pushed))
        left = missing * self._graphs.deciding.quota - running // self._num_workers
        return min(ahead, max(0, -(-left // self.num_steps)))

    def secs_to_next_look(self, missing: int) -> float:
        """How long to wait before the counters are read again: less near the end, to notice it soon."""
        if not self.is_sized or not self.steps_per_sec:
            return POLL_SECS
        return min(MAX_POLL_SECS, max(POLL_SECS, missing / (2 * self.steps_per_sec)))

    def worthwhile(self, counts: Counts, steps_left: int) -> int | None:
        """The best number of steps of a call; None until calls have shown how long a step and its graph take."""
        secs_per_step = self._timer.secs_per_step(time.monotonic(), tuple(map(int, counts.pushed)))
        self._first_call_secs = max(self._first_call_secs, self._timer.first_call_secs)
        if self.is_sized or secs_per_step is None:
            return None
        left = steps_left * self._graphs.deciding.quota * self._num_workers
        steps = worthwhile_steps(secs_per_step, self._num_workers, self._first_call_secs, left)
        max_trace_secs = self._grace_secs / 2  # no request to stop is noticed while a function is traced
        traceable = max(1, int(max_trace_secs / (self._trace_secs * TRACED_SHARE)))
        return min(steps, traceable, self._graphs.stragglers.max_steps)

    def trace(self, num_steps: int, missing: int) -> Callable[[Counts], None]:
        """Makes a longer function; the workers continue with short calls in the meantime.

        Returns:
            What makes the calls longer, to be called when no call is in flight.
        """
        self.is_sized = True
        if num_steps == self.num_steps:
            return self._begin_again
        secs = self._trace_secs * TRACED_SHARE * num_steps
        for _ in range(self._num_workers * min(missing, int(secs * self.steps_per_sec))):
            self._schedule()
        function = self._graphs.train_function(num_steps)

        def use(counts: Counts) -> None:
            self._use(num_steps, function)
            self._begin_again(counts)

        return use

    def finish(self, request: PauseRequests) -> PauseRequest:
        """Waits for all calls, or raises WorkersAway; see `calls.wait_for_calls`."""
        counts = self._graphs.deciding.counts
        return wait_for_calls(
            self._coordinator, request, lambda: (counts().begun, int(counts().pushed.sum())), self.quiet_secs()
        )

    def quiet_secs(self) -> float:
        return quiet_secs(self.steps_per_sec, 1, self._grace_secs)

    def _schedule(self) -> None:
        self._coordinator.schedule(self.calls.function, args=self.calls.arguments)
        self._num_scheduled += 1
