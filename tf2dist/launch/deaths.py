"""What the end of a process says of its cause: signals, the kernel's count of kills, and limits of this system.

A limit is the same at the next try, so who ends at one is not worth a retry; who was killed is.
"""

import contextlib
import re
import signal
from pathlib import Path

from tf2dist.errors import TaskLostError, TfDistError, TrainingError

MEMORY_LIMIT = "no more memory may be had; raise the limit (ulimit -v, or the container's), or use fewer tasks"
THREAD_LIMIT = "no more processes or threads may be had; raise the limit (ulimit -u and -v, or the container's)"
TIME_LIMIT = "the processor time is limited; raise the limit (ulimit -t)"
# What the C and C++ libraries below TensorFlow, and Python, say before they end at a limit.
LIMITS = (
    (
        re.compile(r"bad_alloc|[Cc]annot allocate memory|MemoryError|[Oo]ut of memory|failed to map segment"),
        MEMORY_LIMIT,
    ),
    (
        re.compile(r"[Rr]esource temporarily unavailable|start new thread|pthread_create|[Tt]hread.*creat.*fail"),
        THREAD_LIMIT,
    ),
)
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
TAIL_LINES = 15


def limit(code: int, log: str) -> str:
    """The limit at which a process ended that this system would not let go on; empty if it ended otherwise.

    Args:
        code: how it ended; negative for a signal.
        log: what it has written.
    """
    if code == -signal.SIGXCPU:
        return TIME_LIMIT
    if code < 0 and code != -signal.SIGABRT:
        return ""
    tail = "\n".join(log.splitlines()[-TAIL_LINES:])
    return next((said for pattern, said in LIMITS if pattern.search(tail)), "")


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(signal.strsignal(number))


def last_word(log: str) -> str:
    """The exception in a log, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if EXCEPTION.match(line)), lines[-1] if lines else "it left no word")


class OomKills:
    """Whether the kernel has killed a process for want of memory since the last look: in this control group, or
    else on this host."""

    def __init__(self) -> None:
        self._seen = _oom_kills()

    def has_more(self) -> bool:
        before, self._seen = self._seen, _oom_kills()
        return self._seen > before


def of_fork_server(code: int | None, log: str, path: Path, oom_kills: OomKills) -> TfDistError:
    """What the user reads of the end of the process that all tasks come from.

    Args:
        code: how it ended, negative for a signal; None if it has not ended.
        log: what it has written into the file `path`.
    """
    if code is None:
        return TaskLostError(f"the fork server has closed its socket, see {path}")
    reached = limit(code, log)
    if code >= 0:
        return TrainingError(f"the fork server failed: {last_word(log)}; {reached or f'see {path}'}")
    what = f"the fork server was killed by {signal_name(-code)}"
    if reached:
        return TrainingError(f"{what}: {reached}")
    return TaskLostError(f"{what}: out of memory" if code == -signal.SIGKILL and oom_kills.has_more() else what)


def _oom_kills() -> int:
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
