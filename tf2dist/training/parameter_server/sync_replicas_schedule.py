"""The calls that the coordinator gives to the workers of mode=sync_replicas: as many to each of them.

A step may need a gradient of every worker. So no worker may lack a call while another one waits in its own for the end
of the step, and the calls end all together: when the ps stop to take gradients, nobody waits any more.
"""

from typing import Any

import tensorflow as tf

from tf2dist.training.loop import PauseRequest, PauseRequests
from tf2dist.training.parameter_server.calls import quiet_secs, wait_for_calls
from tf2dist.training.parameter_server.schedule import MAX_POLL_SECS, POLL_SECS
from tf2dist.training.parameter_server.sync_replicas_counters import Counts
from tf2dist.training.parameter_server.sync_replicas_step import ReplicasStep


class Scheduler:
    """Keeps every worker supplied with calls, all of the same number of steps.

    Attributes:
        num_steps, function, source: as those of the asynchronous `Scheduler`.
        steps_per_sec: the rate of global steps, as the loop has last measured it; 0 while it is not known.

    Args:
        grace_secs: the time that a whole stop may take.
    """

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        graphs: ReplicasStep,
        num_workers: int,
        grace_secs: float,
    ) -> None:
        self._coordinator, self._graphs = coordinator, graphs
        self._num_workers, self._grace_secs = num_workers, grace_secs
        self.steps_per_sec = 0.0
        self.num_steps = graphs.steps_per_call
        self.function: Any = graphs.train_function(self.num_steps)
        self.source: tuple[Any, ...] = graphs.feed.source(coordinator, self.num_steps)
        self._num_scheduled = 0

    def begin(self, counts: Counts) -> None:
        """Begins a training; no call may be in flight."""
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
            self._coordinator.schedule(self.function, args=self.source)
            self._num_scheduled += 1

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
        if not self.steps_per_sec:
            return POLL_SECS
        return min(MAX_POLL_SECS, max(POLL_SECS, missing / (2 * self.steps_per_sec)))

    def finish(self, request: PauseRequests) -> PauseRequest:
        """Waits for all calls, or raises WorkersAway; see `calls.wait_for_calls`."""
        counts = self._graphs.deciding.counts
        return wait_for_calls(
            self._coordinator, request, lambda: (counts().begun, int(counts().pushed.sum())), self.quiet_secs()
        )

    def quiet_secs(self) -> float:
        return quiet_secs(self.steps_per_sec, 1, self._grace_secs)
