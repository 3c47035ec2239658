"""Why a process has ended: a signal, the kernel's out-of-memory killer, or a limit of this system.

The next attempt would end at the same limit, so a process that ended at one is not worth a retry. One that was
killed is.
"""

import contextlib
import re
import signal
from pathlib import Path

from tf2dist.errors import TaskLostError, TfDistError, TrainingError

MEMORY_LIMIT = "the limit on memory is reached; raise it (ulimit -v, or the container's), or use fewer tasks"
THREAD_LIMIT = "the limit on processes or threads is reached; raise it (ulimit -u and -v, or the container's)"
FILE_LIMIT = "the limit on open files is reached; raise it (ulimit -n)"
TIME_LIMIT = "the limit on processor time is reached; raise it (ulimit -t)"
# What Python, and the C and C++ libraries below TensorFlow, print when the system refuses memory or a thread.
LIMITS = (
    (
        re.compile(r"bad_alloc|[Cc]annot allocate memory|MemoryError|[Oo]ut of memory|failed to map segment"),
        MEMORY_LIMIT,
    ),
    (
        re.compile(r"[Rr]esource temporarily unavailable|start new thread|pthread_create|[Tt]hread.*creat.*fail"),
        THREAD_LIMIT,
    ),
    (re.compile(r"[Tt]oo many open files"), FILE_LIMIT),
)
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
FRAME = "    @ "
TAIL_LINES = 15  # further up a library may mention a limit that did no harm


def limit_reached(code: int, log: str) -> str:
    """The limit of this system that ended a process; empty if something else did.

    Args:
        code: its exit code; negative for the signal that killed it.
        log: its output.
    """
    if code == -signal.SIGXCPU:
        return TIME_LIMIT
    # C++ aborts when memory or a thread is refused. After any other signal the log says nothing about the cause.
    if code < 0 and code != -signal.SIGABRT:
        return ""
    # Below its reason a library in C++ lists its stack, which may have any number of lines.
    tail = "\n".join([line for line in log.splitlines() if not line.startswith(FRAME)][-TAIL_LINES:])
    return next((text for pattern, text in LIMITS if pattern.search(tail)), "")


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(signal.strsignal(number))


def error_line(log: str) -> str:
    """The last line of a log that names an exception, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if EXCEPTION.match(line)), lines[-1] if lines else "it printed nothing"
    )


class OomKills:
    """Whether the kernel has killed a process to free memory since the last call, in this control group or, if there
    is no count of that, on this host."""

    def __init__(self) -> None:
        # The kernel's count never goes back, so what happened before this run is subtracted.
        self._last_count = _oom_kills()

    def has_more(self) -> bool:
        previous, self._last_count = self._last_count, _oom_kills()
        return self._last_count > previous


def fork_server_error(code: int | None, log: str, path: Path, oom_kills: OomKills) -> TfDistError:
    """The error that the user reads when the fork server has ended.

    Args:
        code: its exit code, negative for the signal that killed it; None if it has not ended, 0 if it is not known.
        log: its output.
        path: of the file that holds the output.
    """
    # Python takes 0 for the code of a process whose end is hidden, since the program that calls `fit` ignores SIGCHLD.
    if not code:
        return TaskLostError(f"the fork server has closed its socket, see {path}")
    reached = limit_reached(code, log)
    if code > 0:
        return TrainingError(f"the fork server failed: {error_line(log)}; {reached or f'see {path}'}")
    message = f"the fork server was killed by {signal_name(-code)}"
    if reached:
        return TrainingError(f"{message}: {reached}")
    return TaskLostError(f"{message}: out of memory" if code == -signal.SIGKILL and oom_kills.has_more() else message)


def _oom_kills() -> int:
    # A file, or the line in it, is missing under old kernels, in some containers and with control groups of version 1.
    for path in _oom_counts():
        with contextlib.suppress(OSError, KeyError, ValueError):
            return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])
    return 0


def _oom_counts() -> list[Path]:
    """The files that may hold the kernel's count, the most specific first."""
    # Only control groups of version 2 have memory.events; their line in this file begins with "0::".
    groups: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        groups = [line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")]
    # The last one counts for the whole host, so it may take the death of another program for one of ours.
    return [*(Path("/sys/fs/cgroup", group, "memory.events") for group in groups), Path("/proc/vmstat")]
