"""What can be said of a task's end, and which of several ends is the cause."""

import contextlib
import signal
from pathlib import Path

from tf2dist.errors import FailureRecord, NotFiniteError, RequestError, TaskLostError
from tf2dist.launcher import Event

TAIL_LINES = 30
NO_SIGNALS = (RequestError.exit_code, NotFiniteError.exit_code)  # what no task makes of a signal that cuts a call short


class Ends:
    """Reads what the tasks of a launcher have left.

    Args:
        log_dir: where their logs and records are.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir, self._oom_kills = log_dir, _oom_kills()

    def failure(self, event: Event, why: str) -> FailureRecord:
        """The record that the task left, or what can be said of one that could not leave any.

        Args:
            event: that it has exited.
            why: we have killed it; empty if we have not.
        """
        task, code = event["task"], event["code"]
        record = FailureRecord.read(self._log_dir, task)
        if why and not (record and record.exit_code in NO_SIGNALS):
            return FailureRecord(task, event["time"], TaskLostError.exit_code, why, by_signal=True)
        if record:
            return record
        if code >= 0:
            return FailureRecord(task, event["time"], code or 1, f"ended with exit code {code}", self._tail(task))
        name = signal.strsignal(-code) if -code not in set(signal.Signals) else signal.Signals(-code).name
        what = f"was killed by {name}"
        if -code == signal.SIGKILL and _oom_kills() > self._oom_kills:
            self._oom_kills, what = _oom_kills(), f"was killed by {name}: out of memory"
        return FailureRecord(task, event["time"], TaskLostError.exit_code, what, by_signal=True)

    def _tail(self, task: str) -> str:
        path = self._log_dir / f"{task}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-TAIL_LINES:]) if path.exists() else ""


def complains(failure: FailureRecord) -> bool:
    """Whether it is of another task's end."""
    return failure.exit_code == TaskLostError.exit_code and not failure.by_signal


def rank(failure: FailureRecord) -> tuple[int, float]:
    """Puts the cause before the complaints of others about it, also if those were earlier."""
    return (0 if failure.by_signal else 2 if complains(failure) else 1, failure.time)


def _oom_kills() -> int:
    """How many processes the kernel has killed for want of memory: in this control group, or else on this host."""
    for path in _oom_counts():
        with contextlib.suppress(OSError, KeyError, ValueError):
            return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])
    return 0


def _oom_counts() -> list[Path]:
    """The files that may tell it, those that know best first."""
    groups: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        groups = [line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")]
    return [*(Path("/sys/fs/cgroup", group, "memory.events") for group in groups), Path("/proc/vmstat")]
