"""Finds the tasks of this host that are frozen, silent or without progress, and kills them.

A task counts as lost when it has given no sign of life for too long; `LivenessTracker` decides that by pure logic,
without processes. Of tasks that make no progress, `Stalls` knows which function each is in, and which of them the
others are waiting for.
"""

import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tf2dist.config.schema import RunConfig
from tf2dist.errors import TaskLostError, TrainingError
from tf2dist.launch.failures import Kill
from tf2dist.launch.launcher import KILL_TIMEOUT_SECS, Launcher
from tf2dist.messages import Done, Event, LongCall, Ready, Silence, Stalled, Started
from tf2dist.process.heartbeat import STACKS_SIGNAL

SILENT_SECS = 2.5  # a task reports every second


class Clock(Protocol):
    """The functions of the module `time`; a parameter, so that a test can pass a clock of its own."""

    def monotonic(self) -> float:
        """Seconds since some moment in the past; never goes back."""

    def time(self) -> float:
        """Seconds since 1970."""

    def sleep(self, secs: float, /) -> None: ...


# Only the monitor's thread reads and writes these records, so they need no lock.
@dataclass
class TaskRecord:
    """One task of this host; a task that is started again has a new one.

    Attributes:
        heard_at: when it gave its last sign of life, in seconds of the monotonic clock. Later than now while a
            silence that it has announced lasts.
        ran_at: when its process was last seen running, not stopped.
        is_done: whether it has reported that its work is complete.
        has_exited: whether its process has ended.
        kill: given if the launching process has killed it.
    """

    heard_at: float
    ran_at: float
    is_done: bool = False
    has_exited: bool = False
    kill: Kill | None = None


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
        watched = {
            task: record for task, record in self._records.items() if not record.has_exited and record.kill is None
        }
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


Message = TypeVar("Message", bound=LongCall)

GATHER_SECS = 1.0  # tasks in the same function report that at about the same time
BLAME_SECS = 3.0  # a task may report a stall before the task that it waits for, which is in the user's code, does


class Stalls:
    """Gathers the reports of tasks that make no progress; see `heartbeat`.

    Args:
        notify: takes a line for the user.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._long_calls: dict[str, LongCall] = {}
        self._stalled: dict[str, Stalled] = {}
        self._long_calls_since = 0.0
        self._stalled_since = 0.0

    def add(self, message: LongCall, now: float) -> None:
        # The times are those of the first reports: if every report renewed them, nothing would ever be shown.
        if isinstance(message, Stalled):
            self._stalled_since = self._stalled_since if self._stalled else now
            self._stalled[message.task] = message
        else:
            self._long_calls_since = self._long_calls_since if self._long_calls else now
            self._long_calls[message.task] = message

    def forget(self, task: str) -> None:
        self._long_calls.pop(task, None)
        self._stalled.pop(task, None)

    def clear(self) -> None:
        self._long_calls.clear()
        self._stalled.clear()

    def pop_blamed(self, now: float) -> list[Stalled]:
        """Shows the user where tasks are; returns the stalled tasks that are to blame, as soon as that is clear."""
        if self._long_calls and now - self._long_calls_since > GATHER_SECS:
            self._notify_long_calls()
        # A task in the user's code does not wait for another task: it can be blamed before the others have reported.
        blamed = in_users_code(self._stalled.values())
        if not blamed and self._stalled and now - self._stalled_since > BLAME_SECS:
            blamed = list(self._stalled.values())
        if blamed:
            self._stalled.clear()
        return blamed

    def _notify_long_calls(self) -> None:
        """Shows only the tasks in the user's code, if there are any: the others may be waiting for them."""
        places: dict[str, list[LongCall]] = {}
        for message in in_users_code(self._long_calls.values()) or self._long_calls.values():
            places.setdefault(message.where, []).append(message)
        for where, messages in places.items():
            names = ", ".join(message.task for message in messages)
            secs = min(message.secs for message in messages)
            self._notify(f"{names}: in {where} for {secs} s")
        self._long_calls.clear()


def in_users_code(messages: Iterable[Message]) -> list[Message]:
    return [message for message in messages if message.is_users]


STACKS_SECS = 0.5  # for a task to write them


class Watchdog:
    """Keeps a record of each task of this host.

    Attributes:
        records: by the tasks' names.

    Args:
        notify: takes a line for the user.
    """

    def __init__(self, launcher: Launcher, config: RunConfig, notify: Callable[[str], None], clock: Clock) -> None:
        self._launcher, self._clock = launcher, clock
        self._watchdog_secs, self._silence_secs = config.watchdog_secs, config.silence_secs
        self.records: dict[str, TaskRecord] = {}
        self._liveness = LivenessTracker(self.records, launcher.runs, config.silence_secs)
        self._stalls = Stalls(notify)
        self._restarted_at = -float("inf")

    def started(self, task: str) -> None:
        """Notes that a task was started: its silence counts from now."""
        now = self._clock.monotonic()
        self.records[task] = TaskRecord(heard_at=now, ran_at=now)

    def restart_timers(self) -> None:
        """Excuses all tasks for a while: one of them is started again, and the others wait for it."""
        self._restarted_at = self._clock.monotonic()

    def clear(self) -> None:
        """Forgets all tasks, since they have ended."""
        self.records.clear()
        self._stalls.clear()

    def on_message(self, message: Event) -> None:
        """Handles every message of a task or about one."""
        # When an `Exited` comes here its task is no longer in `launcher.tasks`; see `exited`.
        if isinstance(message, Ready) or message.task not in self._launcher.tasks:
            return
        now = self._clock.monotonic()
        if isinstance(message, Silence):
            self._liveness.note_silence(message.task, now, message.secs)
        else:
            self._liveness.note_heartbeat(message.task, now)
        record = self.records[message.task]
        match message:
            case LongCall():
                self._stalls.add(message, now)
            case Started() if record.kill:
                self._launcher.signal(message.task, signal.SIGKILL)  # it was killed before its process was known
            case Done():
                record.is_done = True

    def exited(self, task: str) -> Kill | None:
        """Notes that a task's process has ended; returns the kill, if it was killed here."""
        self._stalls.forget(task)
        record = self.records[task]
        record.has_exited = True
        return record.kill

    @property
    def has_suspects(self) -> bool:
        """Whether a task is silent, or was killed and has not ended: it may be the cause of the others' failures."""
        return self._liveness.any_silent or self._is_killing

    @property
    def _is_killing(self) -> bool:
        return any(record.kill and not record.has_exited for record in self.records.values())

    def check(self, is_over: bool, lost_peers: Mapping[str, str]) -> None:
        """Kills the tasks that are lost or stuck; to be called several times a second.

        Args:
            is_over: whether the run has its result: then a killed task that does not end does not matter.
            lost_peers: the tasks of other hosts that are gone, and why.
        """
        self._kill_lost()
        if not is_over:
            self._give_up_on_the_unkillable()
        self._kill_stalled(is_over, lost_peers)

    def _kill_lost(self) -> None:
        for task in self._liveness.find_lost(self._clock.monotonic()):
            # Only a process that runs can write its stacks before it is killed.
            if self._launcher.runs(task):
                self._launcher.signal(task, STACKS_SIGNAL, alone=True)
                self._clock.sleep(STACKS_SECS)
            self._kill(task, f"showed no sign of life for {self._silence_secs:.0f} s", TaskLostError.exit_code)

    def _give_up_on_the_unkillable(self) -> None:
        for task, record in self.records.items():
            if record.has_exited or record.kill is None:
                continue
            if self._clock.monotonic() - record.kill.at > KILL_TIMEOUT_SECS:
                self._launcher.give_up_on(task)

    def _kill_stalled(self, is_over: bool, lost_peers: Mapping[str, str]) -> None:
        """Kills the tasks that stalled by their own fault; those spared now report again if they stay stalled."""
        now = self._clock.monotonic()
        # A report may date from a time in which a task that the others need was being started, or in which this process
        # was suspended.
        excused = now - max(self._restarted_at, self._liveness.awake_since) < self._watchdog_secs
        for message in self._stalls.pop_blamed(now):
            if not (excused or (self._is_killing and not is_over) or self._liveness.any_silent):
                # The user's own code would stall there again.
                code = (TrainingError if message.is_users else TaskLostError).exit_code
                self._kill(message.task, why_stalled(message, lost_peers), code)

    def _kill(self, task: str, why: str, exit_code: int) -> None:
        if task in self._launcher.tasks:  # it may have ended since then
            self.records[task].kill = Kill(self._clock.monotonic(), why, exit_code)
            self._launcher.signal(task, signal.SIGKILL)


def why_stalled(message: Stalled, lost_peers: Mapping[str, str]) -> str:
    """The message about a stalled task, with the tasks that are gone: a coordinator can do nothing without workers."""
    names = ", ".join(f"{task} is gone ({why})" for task, why in lost_peers.items())
    while_gone = f" while {names}" if names else ""
    where = f" in {message.where}" if message.where else ""
    return f"made no progress for {message.secs} s{where}{while_gone}, see the stacks in its log"
