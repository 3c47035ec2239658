"""Whether a failed task is started again, alone or with all others. Pure logic, without processes."""

import enum

from tf2dist.cluster.spec import Task, can_lose
from tf2dist.errors import LOSSES, FailureRecord


class RestartDecision(enum.Enum):
    FAIL = "fail"
    RESTART_TASK = "restart task"
    RESTART_ALL = "restart all"


class RestartPolicy:
    """Decides whether a failed task is started again.

    All state of an asynchronous worker is on the ps tasks, so a worker that was killed is started again alone.
    The others need the state of any other task, so all of them start again from the last checkpoint.

    Attributes:
        restarts: how many were made so far.

    Args:
        whole_cluster: whether all tasks are this launcher's. On a cluster of many hosts a launcher cannot
            restart the tasks of the others, and leaves that to the scheduler that has started all of them.
    """

    def __init__(self, mode: str, max_restarts: int, whole_cluster: bool) -> None:
        self._mode, self._max_restarts, self._whole_cluster = mode, max_restarts, whole_cluster
        self.restarts = 0

    def decide(self, failure: FailureRecord) -> RestartDecision:
        """What to do about a failure; counts the restart, if it is one."""
        # An error of the training code or of the request, or a loss that is not finite, would come back.
        if failure.exit_code not in LOSSES or self.restarts >= self._max_restarts:
            return RestartDecision.FAIL
        job = Task.parse(failure.task).job
        # A worker that reports the loss of another task is not lost itself: starting it again would not help.
        if job == "worker" and can_lose(self._mode, job) and failure.by_signal:
            decision = RestartDecision.RESTART_TASK
        elif self._whole_cluster:
            decision = RestartDecision.RESTART_ALL
        else:
            return RestartDecision.FAIL
        self.restarts += 1
        return decision

    @property
    def is_exhausted(self) -> bool:
        return self._max_restarts > 0 and self.restarts >= self._max_restarts
