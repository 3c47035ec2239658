"""The calls of algorithm=downpour: each is made of whole rounds, from one fetch to the next."""

from tf2dist.training.asynchronous.downpour.step import DownpourStep
from tf2dist.training.asynchronous.scheduler import Scheduler
from tf2dist.training.call_size import MAX_STEPS


class DownpourScheduler(Scheduler):
    """See `Scheduler`. Each call begins with a fetch, so a shorter one would fetch too often."""

    _graphs: DownpourStep

    def _fitting(self, num_steps: int) -> int:
        round_of = self._graphs.config.algorithm.updates_per_fetch
        return max(1, num_steps // round_of) * round_of

    def _unrolled(self, secs_per_step: float, steps_left: int) -> int:
        size = super()._unrolled(secs_per_step, steps_left)
        # Steps of several batches hide the cost of a call sooner, and a worker holds all examples of a call in memory.
        return self._fitting(min(size, MAX_STEPS // self._graphs.config.algorithm.n_push))
