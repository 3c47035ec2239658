"""What the parts of the launching process share: the state of a run and of its tasks, the clock, and the caller."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tf2dist.errors import FailureRecord, TaskLostError
from tf2dist.messages import HookAnswer, HookCall, PauseWanted, ProgressMessage

CallerMessage = HookCall | ProgressMessage
Send = Callable[[HookAnswer | PauseWanted], None]


class Phase(enum.Enum):
    """The phase of a run, which decides what a failure means."""

    RUNNING = "running"  # from the first start on; what has failed may be started again
    STOPPING = "stopping"  # a signal has come, to this process or to another host's
    DONE = "done"  # the result has come; a failure does not matter any more


@dataclass(frozen=True)
class Tasks:
    """The tasks to run.

    Attributes:
        names: of the tasks of this host.
        leader: the task that saves and makes the result; it may be on another host.
        start: starts a task, by its name and the number of restarts of all tasks so far.
        may_leave: whether SIGTERM to this process ends its task alone, and not the whole job.
    """

    names: list[str]
    leader: str
    start: Callable[[str, int], None]
    may_leave: bool = False

    @property
    def has_leader(self) -> bool:
        return self.leader in self.names


@dataclass
class Attempt:
    """What has happened since all tasks were last started together.

    Attributes:
        summary: the leader's result; empty until it comes.
        exit_deadline: when the tasks that are left must have ended, in seconds of the monotonic clock.
        failures: those that no restart has answered yet, in order.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    exit_deadline: float = float("inf")
    failures: list[FailureRecord] = field(default_factory=list)


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

    @property
    def is_expected_to_live(self) -> bool:
        return not self.has_exited and self.kill is None


class Clock(Protocol):
    """What the module `time` offers; a parameter, so that a test can pass a clock of its own."""

    def monotonic(self) -> float:
        """Seconds since some moment in the past; never goes back."""

    def time(self) -> float:
        """Seconds since 1970."""

    def sleep(self, secs: float, /) -> None: ...


# Only a protocol stands here: `fit` itself imports TensorFlow, and this room must not.
class Caller(Protocol):
    """A call of `fit`: what its tasks need, and where the leader's messages go.

    Attributes:
        job: the folder with the data and the model, on this host.
        identity: what must be equal on every host, in a form that people can read.
        sys_path: where the tasks find the caller's modules.
    """

    job: Path
    identity: dict[str, Any]
    sys_path: list[str]

    def connect(self, send: Send) -> None:
        """Takes the function that sends a message to the leader, from any thread."""

    def on_message(self, message: CallerMessage) -> None:
        """Takes a message of the leader; must not wait."""
