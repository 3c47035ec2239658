"""The state of a run, as its launching process sees it."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tf2dist.errors import FailureRecord


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
    """

    names: list[str]
    leader: str
    start: Callable[[str, int], None]

    @property
    def has_leader(self) -> bool:
        return self.leader in self.names


@dataclass
class Life:
    """What has happened since all tasks were last started together.

    Attributes:
        summary: the leader's result; empty until it comes.
        leave_by: when the tasks that are left must have ended, in seconds of the monotonic clock.
        failures: those that no restart has answered yet, in order.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    leave_by: float = float("inf")
    failures: list[FailureRecord] = field(default_factory=list)
