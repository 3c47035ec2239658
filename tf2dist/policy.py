"""What to do when a task is lost: pure logic, without processes."""

import enum

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
    """When each task last showed that it lives, and which of them must be taken for frozen.

    Attributes:
        awake_since: when the launcher itself last came back from being stopped.

    Args:
        frozen_secs: of silence.
    """

    def __init__(self, frozen_secs: float) -> None:
        self._frozen_secs = frozen_secs
        self._seen: dict[str, float] = {}
        self._looked_at: float | None = None
        self.awake_since = -float("inf")

    def saw(self, task: str, now: float) -> None:
        self._seen[task] = now

    def forget(self, task: str) -> None:
        self._seen.pop(task, None)

    def clear(self) -> None:
        self._seen.clear()

    def silent(self, now: float, secs: float) -> list[str]:
        """The tasks of which nothing was heard for `secs`."""
        return [task for task, seen in self._seen.items() if now - seen > secs]

    def frozen(self, now: float) -> list[str]:
        """Who has been silent for too long, one at a time; to be asked every second or so.

        The others that are silent may wait for that one in TensorFlow's code, where a process can say
        nothing; they have as much time once more.
        """
        if self._looked_at is not None and (asleep := now - self._looked_at) > self._frozen_secs / 2:
            # It is the launcher that was stopped for a while; what it did not hear is no silence.
            self._seen = {task: min(seen + asleep, now) for task, seen in self._seen.items()}
            self.awake_since = now
        self._looked_at = now
        suspects = self.silent(now, self._frozen_secs / 2)
        # The coordinator calls all others, and cannot be blamed while one of them is silent too.
        blamed = [task for task in suspects if not task.startswith("chief-")] or suspects
        first = min(blamed, key=lambda task: self._seen[task], default=None)
        if first is None or now - self._seen[first] <= self._frozen_secs:
            return []
        self._seen.update({task: now for task in suspects if task != first})
        return [first]
