"""What to do when a task is lost: pure logic, without processes."""

import enum
from collections.abc import Callable

from tf2dist.errors import FailureRecord, TaskLostError

SILENT_SECS = 2.5  # a task says every second that it lives


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

    Whether the kernel lets a task run tells who is frozen. One that runs and is silent may be stuck in
    code that keeps Python's lock, or only wait there for another.

    Attributes:
        awake_since: when the launcher itself last came back from being stopped.
        any_silent: whether some task showed no sign of life at the last look; the others may wait for it.

    Args:
        runs: whether the kernel lets the task of this name run.
        silence_secs: how long one may show no sign of life.
    """

    def __init__(self, runs: Callable[[str], bool], silence_secs: float) -> None:
        self._runs, self._silence_secs = runs, silence_secs
        self._heard: dict[str, float] = {}  # in the future: it has said that it will be silent until then
        self._ran: dict[str, float] = {}
        self._looked_at: float | None = None
        self.awake_since, self.any_silent = -float("inf"), False

    def saw(self, task: str, now: float, silent_secs: float | None = None) -> None:
        """Notes a word of the task: for how long it will say nothing, or one that changes nothing in that."""
        self._heard[task] = max(self._heard.get(task, now), now) if silent_secs is None else now + silent_secs
        self._ran[task] = now

    def forget(self, task: str) -> None:
        self._heard.pop(task, None)
        self._ran.pop(task, None)

    def clear(self) -> None:
        self._heard.clear()
        self._ran.clear()

    def lost(self, now: float) -> list[str]:
        """Who has shown no sign of life for too long; to be asked all the time."""
        if self._looked_at is not None and (asleep := now - self._looked_at) > self._silence_secs / 2:
            # It is the launcher that was stopped for a while; what it did not see was not missing.
            for known in (self._heard, self._ran):
                known.update({task: max(seen, min(seen + asleep, now)) for task, seen in known.items()})
            self.awake_since = now
        self._looked_at = now
        self._ran.update({task: now for task in self._ran if self._runs(task)})
        stopped = [task for task, ran in self._ran.items() if ran < now]
        self.any_silent = bool(stopped) or any(now - heard > SILENT_SECS for heard in self._heard.values())
        if stopped:
            # The others may wait for these, and have as much time once more.
            self._heard.update({task: now for task, heard in self._heard.items() if heard < now})
            return [task for task in stopped if now - self._ran[task] > self._silence_secs]
        return self._mute(now)

    def _mute(self, now: float) -> list[str]:
        """Of those that run, one at a time, since one may wait for another."""
        suspects = [task for task, heard in self._heard.items() if now - heard > self._silence_secs / 2]
        # The coordinator calls all others, and cannot be blamed while one of them is silent too.
        blamed = [task for task in suspects if not task.startswith("chief-")] or suspects
        first = min(blamed, key=lambda task: self._heard[task], default=None)
        if first is None or now - self._heard[first] <= self._silence_secs:
            return []
        self._heard.update({task: now for task in suspects if task != first})
        return [first]
