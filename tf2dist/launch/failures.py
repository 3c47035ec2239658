"""Why a task has ended, and which of several failures is the cause of the others."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

from tf2dist.errors import LOSSES, FailureRecord, NotFiniteError, RequestError, TaskLostError, TrainingError
from tf2dist.launch.exit_causes import OomKills, limit_reached, signal_name
from tf2dist.launch.run_state import Kill
from tf2dist.messages import Exited

TAIL_LINES = 30
# Exit codes that neither a kill nor a call cut short by a signal produces: trust the record.
NEVER_OF_A_KILL = (RequestError.exit_code, NotFiniteError.exit_code)


class FailureReader:
    """Finds the cause of a task's end from its record, its exit code and its log.

    Args:
        log_dir: the folder of the tasks' records.
        log_of: returns what a task has written since it was started.
    """

    def __init__(self, log_dir: Path, log_of: Callable[[str], str]) -> None:
        self._log_dir, self._log_of = log_dir, log_of
        self._oom_kills = OomKills()

    def read(self, exited: Exited, kill: Kill | None = None) -> FailureRecord:
        """The record that the task has written, or one made here for a task that could not write any.

        Args:
            kill: given if the launching process has killed the task.
        """
        task, code = exited.task, exited.code
        record = FailureRecord.read(self._log_dir, task)
        # A task that is being killed may still report an error, which is mostly a consequence of the kill.
        if kill and not (record and record.exit_code in NEVER_OF_A_KILL):
            return FailureRecord(task, exited.time, kill.exit_code, kill.why, by_signal=True)
        if record:
            return record
        if code == 0:  # some library or the user's code has ended the process
            message = "ended with exit code 0 before the end of the run"
            return FailureRecord(task, exited.time, TaskLostError.exit_code, message, by_signal=True)
        # A task writes a record of every Python exception. Without one the disk is full, or a library called exit().
        if code > 0:
            return FailureRecord(task, exited.time, code, f"ended with exit code {code}", self._tail(task))
        message = f"was killed by {signal_name(-code)}"
        if reached := limit_reached(code, self._tail(task)):
            return FailureRecord(task, exited.time, TrainingError.exit_code, f"{message}: {reached}", by_signal=True)
        # The kernel's out-of-memory killer sends SIGKILL, and the process can leave no word about it.
        if -code == signal.SIGKILL and self._oom_kills.has_more():
            message = f"{message}: out of memory"
        return FailureRecord(task, exited.time, TaskLostError.exit_code, message, by_signal=True)

    def _tail(self, task: str) -> str:
        return "\n".join(self._log_of(task).splitlines()[-TAIL_LINES:])


def is_secondary(failure: FailureRecord) -> bool:
    """Whether the task failed only because it lost another one."""
    return failure.exit_code in LOSSES and not failure.by_signal


def blames_another(task: str, message: str) -> bool:
    """Whether the message from a task's launching process begins with another task's name, as in `TaskFailure`."""
    match = re.match(r"([a-z]+-\d+): ", message)
    return match is not None and match[1] != task


def cause_order(failure: FailureRecord) -> tuple[int, float]:
    """Sorts the cause before its consequences: survivors often report first."""
    # What was killed is not a consequence of another failure, and a secondary failure always is. An error of the
    # training code stands between them: it may follow from a kill.
    return (0 if failure.by_signal else 2 if is_secondary(failure) else 1, failure.time)
