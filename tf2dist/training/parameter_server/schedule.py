"""The calls that the coordinator gives to workers, and how many of them are in flight."""

import abc
import math
from typing import Any

import tensorflow as tf

from tf2dist.training.loop import PauseRequest, PauseRequests
from tf2dist.training.parameter_server.calls import counts_of, cut, quiet_secs, wait_for_calls
from tf2dist.training.parameter_server.graphs import AsyncGraphs, PsGraphs

POLL_SECS, MAX_POLL_SECS = 0.05, 0.2
CUT_SECS = 0.2  # all ps are told where to stop in less time than this


class Scheduler(abc.ABC):
    """Keeps a few calls in flight for each worker, all of the same number of steps.

    Attributes:
        graphs: of the run.
        num_steps: of a call.
        function: what a call executes.
        steps_per_sec: the rate of the cluster, as the loop has last measured it; 0 while it is not known.

    Args:
        num_workers: of the cluster.
        grace_secs: the time that a whole stop may take.
    """

    graphs: PsGraphs

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        graphs: PsGraphs,
        num_workers: int,
        grace_secs: float,
    ) -> None:
        self._coordinator, self.graphs = coordinator, graphs
        self.num_workers, self.grace_secs = num_workers, grace_secs
        self.num_steps = graphs.steps_per_call
        self.function: Any = graphs.train_function(self.num_steps)
        self.steps_per_sec = 0.0

    def schedule_call(self, *limit: tf.Tensor) -> None:
        self._coordinator.schedule(self.function, args=limit)

    def all_done(self) -> bool:
        """Whether all calls are done; raises the error of a call that has failed."""
        return bool(self._coordinator.done())

    def secs_to_next_look(self, missing: int) -> float:
        """How long to wait before the counters are read again: less near the end, to notice it soon.

        A look takes 2 ms of the cores that the coordinator may share with workers.
        """
        return min(MAX_POLL_SECS, max(POLL_SECS, missing / (2 * self.steps_per_sec or math.inf)))

    def finish(self, request: PauseRequests) -> PauseRequest:
        """Waits for all calls, or raises WorkersAway; see `calls.wait_for_calls`."""
        return wait_for_calls(self._coordinator, request, self._counted, self.quiet_secs())

    @abc.abstractmethod
    def _counted(self) -> Any:
        """What changes on the ps while workers make progress."""

    @abc.abstractmethod
    def quiet_secs(self) -> float:
        """See `calls.quiet_secs`."""


class AsyncScheduler(Scheduler):
    """See `Scheduler`: as many steps are in flight as the workers can take, whichever of them takes them."""

    graphs: AsyncGraphs

    def begin(self, until_step: int) -> None:
        """Begins a training that ends at the global step `until_step`; every update beyond it is refused."""
        self._limit = tf.constant(until_step, tf.int64)
        self.begin_again(0)

    def begin_again(self, applied: int) -> None:
        """Restarts the count of steps in flight; to be called when no call is.

        Then each scheduled step has been applied, or was lost with its worker and will never be.
        """
        self._steps_scheduled = 0
        self._applied_before = applied

    def fill(self, admitted: int, missing: int) -> None:
        """Schedules calls until enough steps are in flight.

        Args:
            admitted: the updates that a ps has begun to apply.
            missing: those that are still to be begun in this training.
        """
        # TensorFlow's queue would take any number of calls, but a pause waits for all that it was given.
        in_flight = self._steps_scheduled - (admitted - self._applied_before)
        for _ in range(in_flight, min(missing, self.window()), self.num_steps):
            self.schedule_call(self._limit)
            self._steps_scheduled += self.num_steps

    def window(self) -> int:
        """The steps to keep in flight: two calls for each worker, and what the cluster does in three longest waits."""
        # With one call each, a worker would be idle while the coordinator learns that its call is done.
        return 2 * self.num_steps * self.num_workers + int(3 * MAX_POLL_SECS * self.steps_per_sec)

    def cut(self) -> bool:
        """Ends the training after a few more steps, though calls are in flight; see `calls.cut`."""
        ahead = self.num_workers + int(CUT_SECS * self.steps_per_sec)
        return cut(self._coordinator, self.graphs.servers, ahead, int(self._limit), self.quiet_secs())

    def _counted(self) -> Any:
        return counts_of(self.graphs.servers)

    def quiet_secs(self) -> float:
        return quiet_secs(self.steps_per_sec, self.num_workers, self.grace_secs)
