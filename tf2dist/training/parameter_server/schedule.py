"""Schedules the calls that the coordinator gives to workers: how many are in flight, and how long it waits for them.

TensorFlow waits without limit until a lost worker is back. A stop cannot wait for that, since all workers may be lost,
and need not: all updates that were applied are on the parameter servers.
"""

import abc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf2dist.errors import TaskLostError
from tf2dist.process import heartbeat
from tf2dist.training.loop import PauseRequest, PauseRequests, WorkersAway
from tf2dist.training.parameter_server.graphs import AsyncGraphs, PsGraphs
from tf2dist.training.parameter_server.server import ParameterServer

POLL_SECS = 0.005  # between two looks at calls, which cost nothing
MIN_LOOK_SECS, MAX_LOOK_SECS = 0.05, 0.2  # between two looks at the counters
# A numbered update is applied in less time than this, unless its worker was lost before it had pushed to all ps.
SETTLE_SECS, SETTLE_POLL_SECS = 2.0, 0.05
QUIET_SECS, QUIET_STEPS = 2.0, 2.0  # without progress for so long, and for so many steps' time, workers count as lost


def longest_silence(steps_per_sec: float, num_workers: int, grace_secs: float) -> float:
    """How long workers may make no progress before a stop takes them for lost: longer than a step, if time allows.

    Args:
        steps_per_sec: of the whole cluster; 0 if not known yet.
        grace_secs: the time that the whole stop may take.
    """
    longest = grace_secs / 2  # the other half is for the checkpoint
    return min(longest, max(QUIET_SECS, QUIET_STEPS * num_workers / steps_per_sec)) if steps_per_sec else longest


def wait_for_calls(
    coordinator: Any,
    pause_request: PauseRequests,
    progress: Callable[[], Any],
    quiet_secs: float,
    outlasts_stop: bool = True,
) -> PauseRequest:
    """Waits until all calls are done; returns what was requested in the meantime.

    The wait has no limit, but after a request to stop it lasts only while the workers make progress; WorkersAway if
    they do not. The watchdog learns of all progress: over a slow network a call of many steps takes minutes.

    Args:
        progress: returns a value that changes while workers make progress.
        quiet_secs: how long this value may stay the same after a request to stop.
        outlasts_stop: if false, the wait ends `quiet_secs` after the request, even while workers make progress.
    """
    requested, seen, quiet_since = PauseRequest.NOTHING, None, math.inf
    look_at = time.monotonic() + MAX_LOOK_SECS
    # Not `coordinator.join`, which can neither be interrupted nor be given a limit.
    while not coordinator.done():
        requested, now = requested | pause_request(), time.monotonic()
        # Without a stop the launcher restarts lost workers, and a limit here would end a run that could continue.
        if PauseRequest.STOP in requested:
            quiet_since = min(quiet_since, now)
        if now >= look_at:
            before, seen, look_at = seen, progress(), now + MAX_LOOK_SECS
            if seen != before:
                heartbeat.progress()
                if outlasts_stop:
                    quiet_since = math.inf
            if now - quiet_since > quiet_secs:
                raise WorkersAway
        time.sleep(POLL_SECS)
    return requested


def counts_of(servers: Sequence[ParameterServer]) -> list[tuple[int, int]]:
    """For each ps, the updates that it has numbered and those that it has applied."""
    counts = [server.counts().numpy() for server in servers]
    return [(int(count[0]), int(count[1])) for count in counts]


def stop_servers(
    coordinator: Any, servers: Sequence[ParameterServer], ahead: int, limit: int, quiet_secs: float
) -> bool:
    """Makes all ps stop at the same update soon, while calls are in flight.

    Returns:
        Whether they have. If not, no call is in flight.

    Args:
        ahead: how many updates the ps may number while they are told one after the other.
        limit: the update at which they stop anyway.
        quiet_secs: how long they may apply none.
    """
    last = min(limit, max(numbered for numbered, _ in counts_of(servers)) + ahead)
    for server in servers:
        server.stop_at.assign(last)
    seen, since = [-1], time.monotonic()
    while (applied := [count for _, count in counts_of(servers)]) != [last] * len(servers):
        if applied != seen:
            seen, since = applied, time.monotonic()
        elif coordinator.done():
            return False
        elif time.monotonic() - since > quiet_secs:
            raise WorkersAway
        time.sleep(POLL_SECS)
    return True


def close_servers(servers: Sequence[ParameterServer], limit: int) -> None:
    """Makes all ps refuse further updates while calls are in flight, even from a worker that comes back.

    Args:
        limit: the global step beyond which the ps refuse updates anyway.
    """
    # A ps applies an update some time after it has numbered it; a snapshot in between would hold half of it.
    numbered = [min(server.refuse_all(), limit, int(server.stop_at)) for server in servers]
    give_up_at = time.monotonic() + SETTLE_SECS
    while True:
        applied = [count for _, count in counts_of(servers)]
        if applied == numbered or time.monotonic() > give_up_at:
            break
        time.sleep(SETTLE_POLL_SECS)
    # The last push has reached only some of the ps, and no worker is left to bring it to the others.
    if len(set(applied)) > 1:
        raise TaskLostError(f"all workers are lost, and the ps have applied {applied} updates: this cannot be saved")


STOP_SECS = 0.2  # all ps are told where to stop in less time than this


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
        return min(MAX_LOOK_SECS, max(MIN_LOOK_SECS, missing / (2 * self.steps_per_sec or math.inf)))

    def finish(self, request: PauseRequests) -> PauseRequest:
        """Waits for all calls, or raises WorkersAway; see `wait_for_calls`."""
        return wait_for_calls(self._coordinator, request, self._sign_of_progress, self.quiet_secs())

    @abc.abstractmethod
    def _sign_of_progress(self) -> Any:
        """A value on the ps that changes while workers make progress."""

    @abc.abstractmethod
    def quiet_secs(self) -> float:
        """How long workers may make no progress before a stop takes them for lost."""


class AsyncScheduler(Scheduler):
    """A scheduler of as many steps as the workers can take, whichever of them takes them."""

    graphs: AsyncGraphs

    def begin(self, until_step: int) -> None:
        """Begins a training that ends at the global step `until_step`; every update beyond it is refused.

        No call may be in flight.
        """
        self._limit = tf.constant(until_step, tf.int64)
        self.begin_again(0)

    def begin_again(self, applied: int) -> None:
        """Restarts the count of steps in flight; to be called when no call is.

        Then each scheduled step has been applied, or was lost with its worker and will never be.
        """
        self._steps_scheduled = 0
        self._applied_before = applied

    def fill(self, numbered: int, missing: int) -> None:
        """Schedules calls until enough steps are in flight.

        Args:
            numbered: the updates that a ps has numbered.
            missing: those that are still to be begun in this training.
        """
        # TensorFlow's queue would take any number of calls, but a pause waits for all that it was given.
        in_flight = self._steps_scheduled - (numbered - self._applied_before)
        for _ in range(in_flight, min(missing, self.window()), self.num_steps):
            self.schedule_call(self._limit)
            self._steps_scheduled += self.num_steps

    def window(self) -> int:
        """The steps to keep in flight: two calls for each worker, and what the cluster does in three longest waits."""
        # With one call each, a worker would be idle while the coordinator learns that its call is done.
        return 2 * self.num_steps * self.num_workers + int(3 * MAX_LOOK_SECS * self.steps_per_sec)

    def stop_early(self) -> bool:
        """Ends the training after a few more steps, though calls are in flight; see `stop_servers`."""
        ahead = self.num_workers + int(STOP_SECS * self.steps_per_sec)
        return stop_servers(self._coordinator, self.graphs.servers, ahead, int(self._limit), self.quiet_secs())

    def _sign_of_progress(self) -> Any:
        return counts_of(self.graphs.servers)

    def quiet_secs(self) -> float:
        return longest_silence(self.steps_per_sec, self.num_workers, self.grace_secs)
