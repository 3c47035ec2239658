"""What the launching process knows of one of its tasks, from its start to its end."""

from dataclasses import dataclass

from tf2dist.errors import TaskLostError


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
