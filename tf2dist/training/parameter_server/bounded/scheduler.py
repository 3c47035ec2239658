"""The calls of algorithm=bounded, in which workers wait for each other, and for nobody who is gone."""

import functools
import math
import time

import numpy as np
import tensorflow as tf

from tf2dist.cluster.reachability import PROBE_SECS, ask_all, why_unreachable
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.cluster.waiting import Wait
from tf2dist.training.loop import PauseRequest, PauseRequests
from tf2dist.training.parameter_server.bounded.step import BoundedStep
from tf2dist.training.parameter_server.schedule import Scheduler

# The slowest worker has not moved for so long, and another one waits: is it still there?
STALLED_SECS = 0.5


class BoundedScheduler(Scheduler):
    """See `Scheduler`. The gate of the ps is open only while every worker has a call, or can get one."""

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        graphs: BoundedStep,
        cluster: Cluster,
        grace_secs: float,
    ) -> None:
        self._gated, self._cluster, self._bound = graphs.gated, cluster, graphs.bound
        self._is_open = False
        self._slowest, self._looked_at = -math.inf, 0.0
        super().__init__(coordinator, graphs, cluster, grace_secs)

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
            self._gated.open()
            self._is_open, self._slowest = True, -math.inf
        self._watch()
        # So many calls that each worker has one, even if the slowest has to take all steps that are missing: another
        # may wait for it with a call that it has taken.
        super().fill(admitted, missing + (self._cluster.num_workers - 1) * self.num_steps)

    def cut(self) -> bool:
        # Each worker gives up the rest of its call at the gate, which is no later.
        return False

    def finish(self, request: PauseRequests) -> PauseRequest:
        self.release()
        return super().finish(request)

    def release(self) -> None:
        self._gated.close()
        self._is_open = False

    def _watch(self) -> None:
        """Looks for the slowest worker, if others wait for it and it does not move."""
        clocks, now = self._gated.clock_state().numpy()[:-1], time.monotonic()
        slowest, living = clocks.min(), np.isfinite(clocks)
        if slowest != self._slowest:
            self._slowest, self._looked_at = slowest, now
            self._wait = Wait(math.inf, functools.partial(print, flush=True))
        if now - self._looked_at < STALLED_SECS or clocks[living].max(initial=0) < slowest + self._bound:
            return
        self._looked_at = now
        # The call of a lost worker may have taken the token of another one.
        self._gated.wake()

        late = [Task("worker", int(index)) for index in np.flatnonzero(clocks == slowest)]
        self._wait.notify(", ".join(map(str, late)))
        answers = ask_all(self._why_gone, late, PROBE_SECS)
        gone = {task: why for task in late if (why := answers.get(task, "no answer"))}
        # If nobody is left, nobody waits.
        if len(gone) == living.sum():
            return
        for task, why in gone.items():
            print(f"{task} cannot be reached ({why}): the other workers no longer wait for it", flush=True)
            self._gated.retire(tf.constant(task.index, tf.int64))

    def _why_gone(self, task: Task) -> str:
        return why_unreachable(self._cluster.address(task))
