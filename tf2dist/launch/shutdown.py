"""An orderly stop, from the launching process: the leader saves and ends, and the others with it."""

import signal
import time
from collections.abc import Callable

from tf2dist.control.meeting import Meeting
from tf2dist.errors import FailureRecord, Interrupted, NotFiniteError, RequestError, TaskFailure, TfDistError
from tf2dist.launch.failures import rank
from tf2dist.launch.launcher import Launcher

OWN_FAULTS = (TfDistError.exit_code, RequestError.exit_code, NotFiniteError.exit_code)  # neither a stop nor a loss
FOLLOW_SECS = 5.0  # for a stop that another host's task leads
START_SECS = 2.0  # for a leader at its start: it has nothing to save, and TensorFlow swallows a SIGTERM there


class Stop:
    """Begins when this process has got a signal, or another host's task has.

    Attributes:
        told: the signal that another host's task has got; 0 for none.
        has_begun: whether the leader has begun to train; not known if it is on another host.
        has_saved: whether the leader has saved because it was asked; it may have been before we hear of that.

    Args:
        meeting: with the launching processes of the other hosts; None if all tasks are here.
        received: the signals that this process has got, in order; they appear while it runs.
        grace_secs: how long the leader may take to save and end.
        tell: takes a line for the user.
    """

    def __init__(
        self,
        launcher: Launcher,
        meeting: Meeting | None,
        received: list[int],
        grace_secs: float,
        tell: Callable[[str], None],
    ) -> None:
        self._launcher, self._meeting, self._received = launcher, meeting, received
        self._grace_secs, self._tell = grace_secs, tell
        self._until: float | None = None
        self.told, self.has_begun, self.has_saved = 0, False, False

    @property
    def is_asked(self) -> bool:
        return bool(self._received or self.told)

    def go_on(self, tasks: list[str], leader: str) -> int:
        """Takes the stop as far as it can go now; returns the signal when it is over, 0 before.

        It is over when the leader has ended, or all tasks of this host, or the time, or with a second
        signal the patience.
        """
        if self._until is None:
            # Now and for all: a leader that begins later may have missed the signal.
            self._until = time.monotonic() + self._patience(leads=leader in tasks)
            self._begin()
        leader_ended = leader in tasks and leader not in self._launcher.tasks
        in_time = time.monotonic() < self._until
        if leader_ended or not in_time or len(self._received) > 1 or not self._launcher.tasks:
            return (self._received or [self.told])[0]
        return 0

    def outcome(self, signum: int, saved_step: int | None, leader: str, failures: list[FailureRecord]) -> TfDistError:
        """What the stop has come to: also a fault of the leader's own, if that was the first of all failures."""
        if failures:
            cause = min(failures, key=rank)
            if cause.task == leader and cause.exit_code in OWN_FAULTS:
                return TaskFailure([cause], "while it was stopping")
        return self.interrupted(signum, saved_step)

    def interrupted(self, signum: int, saved_step: int | None) -> Interrupted:
        """What the user is told at the end; `saved_step`: of the last checkpoint, whenever that was."""
        if saved_step is None:
            return Interrupted(signum, "; nothing was saved" if self.has_begun else "")
        saved = "saved at" if self.has_saved else "not saved since"
        return Interrupted(signum, f"; {saved} step {saved_step}, where the same command with run_dir goes on")

    def _patience(self, leads: bool) -> float:
        """Seconds from the signal; the leader is the one that saves, and has the shorter time."""
        if not leads:
            return self._grace_secs + FOLLOW_SECS
        return self._grace_secs if self.has_begun else min(self._grace_secs, START_SECS)

    def _begin(self) -> None:
        self._tell("stopping")
        if self._meeting and not self.told:
            self._meeting.stop(self._received[0])
        for task in list(self._launcher.tasks):
            self._launcher.signal(task, signal.SIGTERM)
