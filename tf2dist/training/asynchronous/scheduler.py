"""The calls that the coordinator gives to the workers: how many are in flight, and how many steps each has."""

import contextlib
import math
import os
import threading
import time
from typing import Any, NamedTuple

import tensorflow as tf

from tf2dist.cluster.spec import Cluster
from tf2dist.training.asynchronous.calls import counts_of, quiet_secs, wait_for_calls
from tf2dist.training.asynchronous.step import AsyncStep
from tf2dist.training.call_size import LOOP_SECS, CallTimer, steps_of_a_call, worthwhile_steps
from tf2dist.training.loop import PauseRequest, PauseRequests, Progress

POLL_SECS, MAX_POLL_SECS = 0.05, 0.2
TRACED_SHARE = 0.05  # each step of a long function takes about this share of the time to trace one of a single step


class Calls(NamedTuple):
    """Calls of one length.

    Attributes:
        num_steps: of each.
        function: what they execute.
        arguments: those before the limit.
    """

    num_steps: int
    function: Any
    arguments: tuple[Any, ...]


class Scheduler:
    """Keeps a few calls in flight for each worker.

    Attributes:
        calls: those that workers get.
        is_sized: whether it is known how long they should be; until then calls of one step are timed.
        steps_per_sec: the rate of the cluster, as the loop has last measured it; 0 while it is not known.

    Args:
        num_steps: the steps of a call; None to find the best number.
        grace_secs: the time that a whole stop may take.
    """

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        graphs: AsyncStep,
        cluster: Cluster,
        num_steps: int | None,
        grace_secs: float,
    ) -> None:
        self._coordinator, self._graphs = coordinator, graphs
        self._num_workers, self._grace_secs = cluster.num_workers, grace_secs
        # One that prepares a function beside many others would get few of their cores: with 32 workers on two cores it
        # takes a minute, and three seconds if all of them prepare it at once.
        self._share_cores = graphs.config.cluster.kind == "local" and cluster.num_workers > 2 * (os.cpu_count() or 1)
        self.is_sized = num_steps is not None
        self.steps_per_sec = 0.0
        self._loop: tuple[Any, tuple[Any, ...]] | None = None  # the function for any number of steps, and its source
        begun_at = time.monotonic()
        begin_with = self._in_loop if graphs.in_loop else self._calls_of
        self.calls = begin_with(self._fitting(num_steps or 1))
        self._trace_secs = time.monotonic() - begun_at
        self._first_call_secs = 0.0  # 0 while it is not known
        self._longer: Calls | None = None  # of which some are being executed for the first time
        self._num_tried = 0  # how many
        self._are_done = threading.Event()  # when they have been
        self.begin(0)

    @property
    def num_steps(self) -> int:
        """The steps of a call."""
        return self.calls.num_steps

    def begin(self, until_step: int) -> None:
        """Begins a training that ends at the global step `until_step`; every update beyond it is refused."""
        self._limit = tf.constant(until_step, tf.int64)
        self._timer = CallTimer()
        self.begin_again(0)

    def begin_again(self, applied: int) -> None:
        """Restarts the count of steps in flight; to be called when no call is.

        Then each scheduled step has been applied, or was lost with its worker and will never be.
        """
        self._steps_scheduled = 0
        self._applied_before = applied

    def all_done(self) -> bool:
        """Whether all calls are done; raises the error of a call that has failed."""
        return bool(self._coordinator.done())

    def fill(self, admitted: int, missing: int) -> None:
        """Schedules calls until enough steps are in flight.

        Args:
            admitted: the updates that a ps has begun to apply.
            missing: those that are still to be begun in this training.
        """
        if self._longer and self._are_done.is_set():
            self._spread(self._longer, missing - self._in_flight(admitted))
        # TensorFlow's queue would take any number of calls, but a pause waits for all that it was given.
        in_flight = self._in_flight(admitted)
        while in_flight < min(missing, self.window()):
            calls = self._ending(missing - in_flight)
            self._schedule(calls)
            in_flight += calls.num_steps

    def window(self) -> int:
        """The steps to keep in flight: two calls for each worker, and what the cluster does in three longest waits."""
        # With one call each, a worker would be idle while the coordinator learns that its call is done.
        steps = 2 * self.num_steps * self._num_workers + int(3 * MAX_POLL_SECS * self.steps_per_sec)
        return steps + (self._num_tried * self._longer.num_steps if self._longer else 0)

    def secs_to_next_look(self, missing: int) -> float:
        """How long to wait before the counters are read again: less near the end, to notice it soon.

        A look takes 2 ms of the cores that the coordinator may share with workers.
        """
        if not self.is_sized:
            return POLL_SECS  # while steps are timed, workers that are idle between two looks would seem slow
        return min(MAX_POLL_SECS, max(POLL_SECS, missing / (2 * self.steps_per_sec or math.inf)))

    def resize(self, progress: Progress, admitted: int, missing: int, last_step: int, request: PauseRequests) -> bool:
        """Makes the calls longer, once it is known that this saves time; returns whether it has just become known.

        Args:
            admitted: see `fill`.
            missing: the updates that are still to be applied in this training.
            last_step: the target of the run.
        """
        if self.is_sized or (secs_per_step := self._timed(progress)) is None:
            return False
        self.is_sized = True
        steps_left = last_step - progress.global_step
        if (size := self._unrolled(secs_per_step, steps_left)) > self.num_steps:
            self._grow(size, missing - self._in_flight(admitted), request)
        elif self._graphs.in_loop:
            self.calls = self._in_loop(self._looped(secs_per_step))
        return True

    def finish(self, request: PauseRequests) -> PauseRequest:
        """Waits for all calls, or raises WorkersAway; see `calls.wait_for_calls`."""
        return wait_for_calls(self._coordinator, request, lambda: counts_of(self._graphs.servers), self.quiet_secs())

    def release(self) -> None:
        """Lets no call in flight wait for others; here none does."""

    def _fitting(self, num_steps: int) -> int:
        """The number of steps that a call may have in place of this one; other algorithms override this."""
        return num_steps

    def quiet_secs(self) -> float:
        return quiet_secs(self.steps_per_sec, self._num_workers, self._grace_secs)

    def _in_flight(self, admitted: int) -> int:
        return self._steps_scheduled - (admitted - self._applied_before)

    def _ending(self, left: int) -> Calls:
        """The next calls where so many steps are `left` to schedule in this training.

        In loops they become shorter near its end. Else a worker would be idle for most of a call at the end, while
        others compute the last steps, or those beyond it, which are refused.
        """
        share = -(-left // self._num_workers)
        is_loop = self._loop is not None and self.calls.function is self._loop[0]
        return self._in_loop(share) if is_loop and share < self.num_steps else self.calls

    def _calls_of(self, num_steps: int) -> Calls:
        function = self._graphs.train_function(num_steps)
        return Calls(num_steps, function, self._graphs.feed.source(self._coordinator, num_steps))

    def _in_loop(self, num_steps: int) -> Calls:
        """As `_calls_of`, of steps in a loop, by the same function for any number."""
        self._loop = self._loop or (self._graphs.train_loop(), self._graphs.feed.source(self._coordinator, 1))
        function, source = self._loop
        return Calls(num_steps, function, (*source, tf.constant(num_steps, tf.int64)))

    def _schedule(self, calls: Calls) -> Any:
        self._steps_scheduled += calls.num_steps
        return self._coordinator.schedule(calls.function, args=(*calls.arguments, self._limit))

    def _timed(self, progress: Progress) -> float | None:
        """The seconds that a worker takes for a step in calls of one step; None until enough of them were timed."""
        secs_per_step = self._timer.secs_per_step(time.monotonic(), progress.local_steps)
        # In a later training the graphs exist already, and its first call does not show how long they take to prepare.
        self._first_call_secs = max(self._first_call_secs, self._timer.first_call_secs)
        return secs_per_step

    def _unrolled(self, secs_per_step: float, steps_left: int) -> int:
        """The best number of steps of a call that has them unrolled; 1 if it is better to leave the calls as they are.

        All workers are counted: one that is late or lost now will take part later.
        """
        if self._graphs.in_loop and secs_per_step / self._num_workers > LOOP_SECS:
            return 1
        steps = worthwhile_steps(secs_per_step, self._num_workers, self._first_call_secs, steps_left)
        # No request to stop is noticed while a function is traced.
        max_trace_secs = self._grace_secs / 2 - self._graphs.exchange_secs
        traced = max(1, int(max_trace_secs / (self._trace_secs * TRACED_SHARE)))
        return min(steps, traced, self._graphs.stragglers.max_steps)

    def _looped(self, secs_per_step: float) -> int:
        """The best number of steps of a call that has them in a loop, for which nothing is to be prepared."""
        return min(steps_of_a_call(secs_per_step), self._graphs.stragglers.max_steps)

    def _grow(self, num_steps: int, missing: int, request: PauseRequests) -> None:
        """Makes a longer function; the workers continue with short calls in the meantime."""
        # As many short calls as the workers can execute while the longer function is traced.
        trace_secs = self._graphs.exchange_secs + self._trace_secs * TRACED_SHARE * num_steps
        meanwhile = int(trace_secs * self.steps_per_sec)
        for _ in range(0, min(missing, meanwhile), self.num_steps):
            self._schedule(self.calls)
        self._begin_longer(self._calls_of(num_steps), request)

    def _begin_longer(self, longer: Calls, request: PauseRequests) -> None:
        """Goes over to longer calls, while most workers go on with short ones.

        Each worker prepares the function at its first call, for seconds if the model is deep. So there is one longer
        call, then there are four, and so on, until half of the workers may have had one.
        """
        if self._share_cores:
            self.calls = longer
        else:
            self._longer = longer
            self._try(longer, 1)

    def _spread(self, longer: Calls, missing: int) -> None:
        """Gives more workers a longer call, or all where half may have had one or where few steps are `missing`."""
        more = min(4 * self._num_tried, self._num_workers // 2)
        if self._num_tried < more and more * longer.num_steps < missing:
            self._try(longer, more)
        else:
            self.calls, self._longer = longer, None

    def _try(self, longer: Calls, count: int) -> None:
        self._num_tried = count
        self._are_done.clear()
        tried = [self._schedule(longer) for _ in range(count)]

        def wait() -> None:
            # An error reaches the coordinator as that of any call.
            with contextlib.suppress(Exception):
                for call in tried:
                    call.fetch()
            self._are_done.set()

        threading.Thread(target=wait, name="first longer calls", daemon=True).start()
