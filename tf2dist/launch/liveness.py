"""Which tasks have given no sign of life for so long that they count as lost. Pure logic, without processes."""

from collections.abc import Callable, Mapping

from tf2dist.launch.run_state import TaskRecord

SILENT_SECS = 2.5  # a task reports every second


class LivenessTracker:
    """Tracks the signs of life of the tasks of a host.

    A task that the kernel does not let run is frozen. One that runs and is silent may be stuck in code that keeps
    Python's lock, or only be waiting there for another task.

    Attributes:
        awake_since: when the launcher itself last ran again after it had been suspended.
        any_silent: whether some task showed no sign of life at the last check; the others may wait for it.

    Args:
        records: of the tasks by their names; the caller adds and removes them.
        runs: whether the kernel lets the task of this name run.
        silence_secs: how long one may show no sign of life.
    """

    def __init__(self, records: Mapping[str, TaskRecord], runs: Callable[[str], bool], silence_secs: float) -> None:
        self._records, self._runs, self._silence_secs = records, runs, silence_secs
        self._checked_at: float | None = None
        self.awake_since = -float("inf")
        self.any_silent = False

    def note_heartbeat(self, task: str, now: float) -> None:
        """Notes a sign of life; does not end an announced silence."""
        record = self._records[task]
        record.heard_at = max(record.heard_at, now)
        record.ran_at = now

    def note_silence(self, task: str, now: float, silent_secs: float) -> None:
        """Notes that the task announces a silence; 0 seconds end it."""
        record = self._records[task]
        record.heard_at = now + silent_secs
        record.ran_at = now

    def find_lost(self, now: float) -> list[str]:
        """The tasks that have shown no sign of life for too long; to be called several times a second."""
        watched = {task: record for task, record in self._records.items() if record.is_expected_to_live}
        self._discount_own_suspension(watched, now)
        for task, record in watched.items():
            if self._runs(task):
                record.ran_at = now
        frozen = {task: record for task, record in watched.items() if record.ran_at < now}
        self.any_silent = bool(frozen) or any(now - record.heard_at > SILENT_SECS for record in watched.values())
        if frozen:
            # The others may be waiting for these, so their time starts again.
            for record in watched.values():
                record.heard_at = max(record.heard_at, now)
            return [task for task, record in frozen.items() if now - record.ran_at > self._silence_secs]
        return self._find_silent(watched, now)

    def _discount_own_suspension(self, watched: Mapping[str, TaskRecord], now: float) -> None:
        """If the launcher was suspended, does not count that time as silence."""
        # Checks come several times a second: after so long a gap this process has not run.
        checked_at, self._checked_at = self._checked_at, now
        if checked_at is None or (suspended_secs := now - checked_at) <= self._silence_secs / 2:
            return
        self.awake_since = now
        for record in watched.values():
            # Never later than now, except for an announced silence, which is later already.
            record.heard_at = max(record.heard_at, min(record.heard_at + suspended_secs, now))
            record.ran_at = max(record.ran_at, min(record.ran_at + suspended_secs, now))

    def _find_silent(self, watched: Mapping[str, TaskRecord], now: float) -> list[str]:
        """The lost task among those that run and are silent: one at a time, since the others may be waiting for it."""
        suspects = [task for task, record in watched.items() if now - record.heard_at > self._silence_secs / 2]
        # The coordinator calls all others, and cannot be blamed while one of them is silent too.
        blamed = [task for task in suspects if not task.startswith("chief-")] or suspects
        oldest = min(blamed, key=lambda task: watched[task].heard_at, default=None)
        if oldest is None or now - watched[oldest].heard_at <= self._silence_secs:
            return []
        for task in suspects:
            if task != oldest:
                watched[task].heard_at = now
        return [oldest]
