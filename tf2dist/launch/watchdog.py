"""Finds the tasks of this host that are frozen, silent or without progress, and kills them."""

import signal
from collections.abc import Callable, Mapping

from tf2dist.config.schema import RunConfig
from tf2dist.errors import TaskLostError, TrainingError
from tf2dist.launch.launcher import KILL_TIMEOUT_SECS, Launcher
from tf2dist.launch.liveness import LivenessTracker
from tf2dist.launch.messages import Event, Ready, Started
from tf2dist.launch.run_state import Clock, Kill, TaskRecord
from tf2dist.launch.stalls import Stalls
from tf2dist.messages import Done, LongCall, Silence, Stalled
from tf2dist.process.heartbeat import STACKS_SIGNAL

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

        Raises:
            TaskLostError: a killed task does not end.
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
