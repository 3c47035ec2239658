"""The calls that the coordinator gives to the workers of mode=sync_replicas: as many to each of them.

A step may need a gradient of every worker. So no worker may lack a call while another one waits in its own for the end
of the step, and the calls end all together: when the ps stop to take gradients, nobody waits any more.
"""

from typing import Any

import tensorflow as tf

from tf2dist.cluster.spec import Cluster
from tf2dist.training.parameter_server.calls import quiet_secs
from tf2dist.training.parameter_server.schedule import MAX_POLL_SECS, Scheduler
from tf2dist.training.parameter_server.sync_replicas_counters import GradientCounts
from tf2dist.training.parameter_server.sync_replicas_step import SyncReplicasStep


class SyncReplicasScheduler(Scheduler):
    """See `Scheduler`; `steps_per_sec` is the rate of global steps."""

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        graphs: SyncReplicasStep,
        cluster: Cluster,
        grace_secs: float,
    ) -> None:
        super().__init__(coordinator, graphs, cluster, grace_secs)
        self._deciding = graphs.deciding
        self._num_scheduled = 0

    def begin(self, counts: GradientCounts) -> None:
        """Begins a training; no call may be in flight."""
        self._num_scheduled = counts.begun
        self._first = counts

    def fill(self, counts: GradientCounts, missing: int, is_stalled: bool) -> None:
        """Schedules calls until enough of them wait for a worker.

        Args:
            missing: the global steps that are still to be made.
            is_stalled: whether nothing has been pushed for a while.
        """
        # A call that TensorFlow repeats after its worker was lost has begun twice: then rather too many wait here.
        waiting = self._num_scheduled - counts.begun
        for _ in range(waiting, self.num_workers * self._calls_to_keep(counts, missing, is_stalled)):
            self.schedule_call()
            self._num_scheduled += 1

    def _calls_to_keep(self, counts: GradientCounts, missing: int, is_stalled: bool) -> int:
        """How many calls should wait for each worker."""
        pushes_per_sec = self.steps_per_sec * self._deciding.quota
        ahead = 1 + int(2 * MAX_POLL_SECS * pushes_per_sec / self.num_steps)
        # What the calls that have begun will still push. If nothing moves, this is an error of the count: the pushes of
        # a lost worker never came.
        begun, pushed = counts.begun - self._first.begun, counts.pushed.sum() - self._first.pushed.sum()
        running = 0 if is_stalled else max(0, begun * self.num_steps - int(pushed))
        left = missing * self._deciding.quota - running // self.num_workers
        return min(ahead, max(0, -(-left // self.num_steps)))

    def release(self) -> None:
        self._deciding.close()

    def _counted(self) -> Any:
        counts = self._deciding.counts()
        return counts.begun, int(counts.pushed.sum())

    def quiet_secs(self) -> float:
        # All workers take part in a step.
        return quiet_secs(self.steps_per_sec, 1, self.grace_secs)
