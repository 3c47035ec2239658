"""Why a process has ended, which of several failures is the cause of the others, and whether to start a task again.

The next attempt would end at the same limit of this system, so a process that ended at one is not worth a retry. One
that was killed is. Whether a failed task is started again, alone or with all others, is pure logic, without processes.
"""

import contextlib
import enum
import re
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tf2dist.cluster.spec import Task, can_lose
from tf2dist.errors import (
    LOST_TASK_CODES,
    FailureRecord,
    NotFiniteError,
    RequestError,
    TaskLostError,
    TfDistError,
    TrainingError,
)
from tf2dist.messages import Exited
from tf2dist.signals import name_of

MEMORY_LIMIT = "the limit on memory is reached; raise it (ulimit -v, or the container's), or use fewer tasks"
THREAD_LIMIT = "the limit on processes or threads is reached; raise it (ulimit -u and -v, or the container's)"
FILE_LIMIT = "the limit on open files is reached; raise it (ulimit -n)"
STACK_LIMIT = "the limit on the stack is reached; raise it (ulimit -s)"
SMALL_STACK = 1 << 20  # in bytes; systems begin with 8 MiB, and TensorFlow does not start with 100 KiB
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
LIMIT_LINES = 15  # further up a library may mention a limit that did no harm


def limit_reached(code: int, log: str) -> str:
    """The limit of this system that ended a process; empty if something else did.

    Args:
        code: its exit code; negative for the signal that killed it.
        log: its output.
    """
    if code == -signal.SIGXCPU:
        return TIME_LIMIT
    if code == -signal.SIGSEGV and 0 <= resource.getrlimit(resource.RLIMIT_STACK)[0] < SMALL_STACK:
        return STACK_LIMIT
    # C++ aborts when memory or a thread is refused. After any other signal the log says nothing about the cause.
    if code < 0 and code != -signal.SIGABRT:
        return ""
    # Below its reason a library in C++ lists its stack, which may have any number of lines.
    tail = "\n".join([line for line in log.splitlines() if not line.startswith(FRAME)][-LIMIT_LINES:])
    return next((text for pattern, text in LIMITS if pattern.search(tail)), "")


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
    message = f"the fork server was killed by {name_of(-code)}"
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


@dataclass(frozen=True)
class Kill:
    """A kill of a task by its launching process.

    Attributes:
        at: when, in seconds of the monotonic clock.
        why: what the user reads.
        exit_code: of the failure that this is.
    """

    at: float
    why: str
    exit_code: int = TaskLostError.exit_code


TAIL_LINES = 30  # of its log, in the record of a task that could write none
# Exit codes that neither a kill nor a call cut short by a signal produces: trust the record.
NEVER_OF_A_KILL = (RequestError.exit_code, NotFiniteError.exit_code)


class FailureReader:
    """Finds the cause of a task's end from its record, its exit code and its log.

    Args:
        log_dir: the folder of the tasks' records.
        log_of: returns what a task has written last since it was started.
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
        message = f"was killed by {name_of(-code)}"
        if reached := limit_reached(code, self._tail(task)):
            return FailureRecord(task, exited.time, TrainingError.exit_code, f"{message}: {reached}", by_signal=True)
        # The kernel's out-of-memory killer sends SIGKILL, and the process can leave no word about it.
        if -code == signal.SIGKILL and self._oom_kills.has_more():
            message = f"{message}: out of memory"
        return FailureRecord(task, exited.time, TaskLostError.exit_code, message, by_signal=True)

    def _tail(self, task: str) -> str:
        return "\n".join(self._log_of(task).splitlines()[-TAIL_LINES:])


def is_consequence(failure: FailureRecord) -> bool:
    """Whether the task failed only because it lost another one."""
    return failure.exit_code in LOST_TASK_CODES and not failure.by_signal


def blames_another(task: str, message: str) -> bool:
    """Whether the message from a task's launching process begins with another task's name, as in `TaskFailure`."""
    match = re.match(r"([a-z]+-\d+): ", message)
    return match is not None and match[1] != task


def cause_order(failure: FailureRecord) -> tuple[int, float]:
    """Sorts the cause before its consequences: survivors often report first."""
    # What was killed is not a consequence of another failure, and what `is_consequence` finds is. An error of the
    # training code stands between them: it may follow from a kill.
    return (0 if failure.by_signal else 2 if is_consequence(failure) else 1, failure.time)


class RestartDecision(enum.Enum):
    FAIL = "fail"
    RESTART_TASK = "restart task"
    RESTART_ALL = "restart all"


class RestartPolicy:
    """Decides whether a failed task is started again.

    All state of an asynchronous worker is on the ps tasks, so a worker that was killed is started again alone.
    The others need the state of any other task, so all of them start again from the last checkpoint.

    Attributes:
        restarts: how many were made so far.

    Args:
        whole_cluster: whether all tasks are this launcher's. On a cluster of many hosts a launcher cannot
            restart the tasks of the others, and leaves that to the scheduler that has started all of them.
    """

    def __init__(self, mode: str, max_restarts: int, whole_cluster: bool) -> None:
        self._mode, self._max_restarts, self._whole_cluster = mode, max_restarts, whole_cluster
        self.restarts = 0

    def decide(self, failure: FailureRecord) -> RestartDecision:
        """Decides what to do about a failure; counts the restart, if it is one."""
        # An error of the training code or of the request, or a loss that is not finite, would come back.
        if failure.exit_code not in LOST_TASK_CODES or self.restarts >= self._max_restarts:
            return RestartDecision.FAIL
        job = Task.parse(failure.task).job
        # A worker that reports the loss of another task is not lost itself: starting it again would not help.
        if job == "worker" and can_lose(self._mode, job) and failure.by_signal:
            decision = RestartDecision.RESTART_TASK
        elif self._whole_cluster:
            decision = RestartDecision.RESTART_ALL
        else:
            return RestartDecision.FAIL
        self.restarts += 1
        return decision

    @property
    def is_exhausted(self) -> bool:
        return self._max_restarts > 0 and self.restarts >= self._max_restarts
