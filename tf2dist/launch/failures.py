"""What can be said of a task's end, and which of several ends is the cause."""

import re
import signal
from pathlib import Path

from tf2dist.errors import FailureRecord, NotFiniteError, RequestError, TaskLostError, TrainingError
from tf2dist.launch.deaths import OomKills, limit, signal_name
from tf2dist.launch.launcher import Event

TAIL_LINES = 30
NO_SIGNALS = (RequestError.exit_code, NotFiniteError.exit_code)  # what no task makes of a signal that cuts a call short


class Ends:
    """Reads what the tasks of a launcher have left.

    Args:
        log_dir: where their logs and records are.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir, self._oom_kills = log_dir, OomKills()

    def failure(self, event: Event, why: str = "", worth: int = TaskLostError.exit_code) -> FailureRecord:
        """The record that the task left, or what can be said of one that could not leave any.

        Args:
            event: that it has exited; "log_start" is where the log of this start begins, in bytes.
            why: we have killed it; empty if we have not.
            worth: the exit code for that.
        """
        task, code = event["task"], event["code"]
        record = FailureRecord.read(self._log_dir, task)
        if why and not (record and record.exit_code in NO_SIGNALS):
            return FailureRecord(task, event["time"], worth, why, by_signal=True)
        if record:
            return record
        if code == 0:  # some library or the user's code has ended the process
            what = "ended with exit code 0 before the end of the run"
            return FailureRecord(task, event["time"], TaskLostError.exit_code, what, by_signal=True)
        if code > 0:
            return FailureRecord(task, event["time"], code, f"ended with exit code {code}", self._tail(event))
        what = f"was killed by {signal_name(-code)}"
        if reached := limit(code, self._tail(event)):
            return FailureRecord(task, event["time"], TrainingError.exit_code, f"{what}: {reached}", by_signal=True)
        if -code == signal.SIGKILL and self._oom_kills.has_more():
            what = f"{what}: out of memory"
        return FailureRecord(task, event["time"], TaskLostError.exit_code, what, by_signal=True)

    def _tail(self, event: Event) -> str:
        path = self._log_dir / f"{event['task']}.log"
        if not path.exists():
            return ""
        text = path.read_bytes()[event.get("log_start", 0) :].decode(errors="replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:])


def complains(failure: FailureRecord) -> bool:
    """Whether it is of another task's end."""
    return failure.exit_code == TaskLostError.exit_code and not failure.by_signal


def blames_another(task: str, message: str) -> bool:
    """Whether the last words of a task's launching process are of another task's end; see `TaskFailure`."""
    named = re.match(r"([a-z]+-\d+): ", message)
    return named is not None and named[1] != task


def rank(failure: FailureRecord) -> tuple[int, float]:
    """Puts the cause before the complaints of others about it, also if those were earlier."""
    return (0 if failure.by_signal else 2 if complains(failure) else 1, failure.time)
