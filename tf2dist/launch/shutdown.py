"""An orderly stop, from the launching process: the leader saves and ends, and the others with it."""

import signal

from tf2dist.errors import FailureRecord, Interrupted, NotFiniteError, RequestError, TaskFailure, TaskLeft, TfDistError
from tf2dist.hosts.meeting import Meeting
from tf2dist.launch.failures import cause_order
from tf2dist.launch.host_run import HostRun
from tf2dist.launch.launcher import Launcher
from tf2dist.launch.watchdog import Clock

OWN_FAULTS = (TfDistError.exit_code, RequestError.exit_code, NotFiniteError.exit_code)  # neither a stop nor a lost task
FOLLOW_SECS = 5.0  # in addition, on hosts without the leader
LEAVE_SECS = 2.0  # for the news that the other tasks are stopped, too
START_SECS = 2.0  # for a leader at its start: it has nothing to save, and TensorFlow swallows a SIGTERM there


class Shutdown:
    """The stop of a run, which begins with a signal to this process or to one of another host.

    Nothing else sends SIGTERM to the tasks.

    Attributes:
        saved_step: the step of the last checkpoint; None if there is none.

    Args:
        run: its configuration says how long the leader may take to save and end.
        meeting: with the launching processes of the other hosts; None if all tasks are here.
    """

    def __init__(self, run: HostRun, launcher: Launcher, meeting: Meeting | None, clock: Clock) -> None:
        self._launcher, self._meeting, self._clock = launcher, meeting, clock
        self._stop, self._may_leave = run.stop, run.may_leave
        self._grace_secs, self._notify = run.config.grace_secs, run.console.status
        self._deadline: float | None = None
        self._leave_at: float | None = None
        self._peer_signum = 0  # the signal that another host has got; 0 for none
        self._has_begun = False  # the leader trains; stays False if it is on another host
        self._has_saved = False  # since it was asked to stop
        self.saved_step: int | None = None

    @property
    def is_requested(self) -> bool:
        return bool(self._peer_signum) or (self.is_signalled and not self._is_leaving)

    @property
    def is_signalled(self) -> bool:
        """Whether this process itself has got a signal."""
        return bool(self._stop.signum)

    @property
    def _is_leaving(self) -> bool:
        return self._may_leave and self._stop.signum == signal.SIGTERM

    def leave(self, task: str) -> None:
        """Ends the task of this host alone if a signal asks for that; to be called several times a second."""
        if not self._is_leaving:
            return
        # If all tasks are told to stop, the leader needs the workers to save, and the hosts do not learn of it at once.
        if self._leave_at is None:
            self._leave_at = self._clock.monotonic() + min(LEAVE_SECS, self._grace_secs / 2)
            self._notify("leaving")
        if self._clock.monotonic() >= self._leave_at or self._stop.is_urgent:
            self._launcher.kill_all()  # before the others are told that it is gone
            raise TaskLeft(task)

    def request_from_peer(self, signum: int) -> None:
        self._peer_signum = signum

    def leader_began(self, step: int) -> None:
        """Notes that the leader begins to train, at the step of a checkpoint or at 0."""
        self._has_begun = True
        self.saved_step = step or self.saved_step

    def leader_saved(self, step: int, stopping: bool) -> None:
        """Notes a checkpoint.

        Args:
            stopping: whether the leader made it because it was asked to stop. It may know of that before this process.
        """
        self._has_saved = stopping
        self.saved_step = step

    def on_restart_of_all(self) -> None:
        self._has_begun = False

    def advance(self, tasks: list[str], leader: str) -> int:
        """Begins the stop, or goes on with it; returns the signal when it is over, 0 before.

        It is over when the leader or all tasks of this host have ended, when its time is up, or with a second signal.
        """
        if self._deadline is None:
            # Fixed once, even if the leader begins to train afterwards: it may have missed the signal.
            self._deadline = self._clock.monotonic() + self._timeout_secs(leads=leader in tasks)
            self._start()
        leader_ended = leader in tasks and leader not in self._launcher.tasks
        in_time = self._clock.monotonic() < self._deadline
        if leader_ended or not in_time or self._stop.is_urgent or not self._launcher.tasks:
            return self._stop.signum or self._peer_signum
        return 0

    def outcome(self, signum: int, leader: str, failures: list[FailureRecord]) -> TfDistError:
        """The error to be raised: a fault of the leader's own if that caused all other failures, else Interrupted."""
        if failures:
            cause = min(failures, key=cause_order)
            if cause.task == leader and cause.exit_code in OWN_FAULTS:
                return TaskFailure([cause], "while it was stopping")
        return self.interrupted(signum)

    def interrupted(self, signum: int) -> Interrupted:
        """The error that tells the user what was saved."""
        if self.saved_step is None:
            return Interrupted(signum, "; nothing was saved" if self._has_begun else "")
        saved = "saved at" if self._has_saved else "not saved since"
        return Interrupted(signum, f"; {saved} step {self.saved_step}")

    def _timeout_secs(self, leads: bool) -> float:
        """Seconds for the stop. The leader saves, so hosts without it wait longer."""
        if not leads:
            return self._grace_secs + FOLLOW_SECS
        return self._grace_secs if self._has_begun else min(self._grace_secs, START_SECS)

    def _start(self) -> None:
        self._notify("stopping")
        if self._meeting and not self._peer_signum:
            self._meeting.stop(self._stop.signum)
        for task in list(self._launcher.tasks):
            self._launcher.signal(task, signal.SIGTERM)
