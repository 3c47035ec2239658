"""What to do when a task is lost: pure logic, without processes."""

import enum
from collections.abc import Callable

from tf2dist.errors import FailureRecord, TaskLostError


class Verdict(enum.Enum):
    FAIL = "fail"
    RESTART_TASK = "restart task"
    RESTART_ALL = "restart all"


class RestartPolicy:
    """Judges the ends of tasks.

    An asynchronous worker that was killed held nothing that is not on a ps, so it is started again
    alone. Any other task takes with it what the others need, so all begin again from the last checkpoint.

    Attributes:
        restarts: made so far.

    Args:
        whole_cluster: whether all tasks are this launcher's; one task of a cluster of many hosts
            cannot restart the others, and leaves that to who has started them all.
    """

    def __init__(self, mode: str, max_restarts: int, whole_cluster: bool) -> None:
        self._mode, self._max_restarts, self._whole_cluster = mode, max_restarts, whole_cluster
        self.restarts = 0

    def judge(self, failure: FailureRecord) -> Verdict:
        """What the end of one task asks for; a restart counts."""
        if failure.exit_code != TaskLostError.exit_code or self.restarts >= self._max_restarts:
            return Verdict.FAIL
        if self._mode == "async" and failure.task.startswith("worker-") and failure.by_signal:
            verdict = Verdict.RESTART_TASK
        elif self._whole_cluster:
            verdict = Verdict.RESTART_ALL
        else:
            return Verdict.FAIL
        self.restarts += 1
        return verdict

    @property
    def is_used_up(self) -> bool:
        return self._max_restarts > 0 and self.restarts >= self._max_restarts


class Vitals:
    """Which tasks show no sign of life for so long that they must be taken for lost.

    A task that is silent need not be frozen: what waits for another task in TensorFlow's code may keep
    Python's lock, and then no thread of it can say anything. Whether the kernel lets it run tells the two apart.

    Attributes:
        awake_since: when the launcher itself last came back from being stopped.
        any_stopped: whether some task did not run at the last look; the others may wait for it.

    Args:
        runs: whether the kernel lets the task of this name run.
        frozen_secs: how long one may be stopped.
        mute_secs: how long one that runs may say nothing.
    """

    def __init__(self, runs: Callable[[str], bool], frozen_secs: float, mute_secs: float) -> None:
        self._runs, self._frozen_secs, self._mute_secs = runs, frozen_secs, mute_secs
        self._heard: dict[str, float] = {}
        self._ran: dict[str, float] = {}
        self._looked_at: float | None = None
        self.awake_since, self.any_stopped = -float("inf"), False

    def saw(self, task: str, now: float) -> None:
        self._heard[task] = self._ran[task] = now

    def forget(self, task: str) -> None:
        self._heard.pop(task, None)
        self._ran.pop(task, None)

    def clear(self) -> None:
        self._heard.clear()
        self._ran.clear()

    def lost(self, now: float) -> dict[str, float]:
        """Who must be taken for lost, and the seconds that it has shown no sign of life; to be asked all the time."""
        if self._looked_at is not None and (asleep := now - self._looked_at) > self._frozen_secs / 2:
            # It is the launcher that was stopped for a while; what it did not see was not missing.
            for known in (self._heard, self._ran):
                known.update({task: min(seen + asleep, now) for task, seen in known.items()})
            self.awake_since = now
        self._looked_at = now
        self._ran.update({task: now for task in self._ran if self._runs(task)})
        self.any_stopped = any(ran < now for ran in self._ran.values())
        frozen = {task: self._frozen_secs for task, ran in self._ran.items() if now - ran > self._frozen_secs}
        mute = {task: self._mute_secs for task, heard in self._heard.items() if now - heard > self._mute_secs}
        return mute | frozen
