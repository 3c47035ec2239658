"""The messages between hosts, and the events that a meeting reports to its own process, each a class of its own.

    the dialing process     -> the accepting one     `Call`, the first message of every connection
    the accepting process   -> the dialing one       `ToJoin` or `ToProbe`
    the leader              -> a follower            `FromLeader`, once it has accepted the follower
    a follower              -> the leader            `FromFollower`, once it has been accepted
    a meeting               -> its own process       `MeetingEvent`

`messages` at the base makes bytes of them, and `connections` protects these on their way.
"""

from dataclasses import dataclass
from typing import Any

from tf2dist.cluster.spec import Task

MAX_CHARACTERS = 2000  # of a text that is sent every second, or that others show to the user
Jobs = dict[str, tuple[str, ...]]  # a cluster list: addresses by job and index

# What is nested in messages.


@dataclass(frozen=True)
class TaskAddress:
    """A task and its address "host:port", as the sender's cluster list has it."""

    task: Task
    address: str

    def __str__(self) -> str:
        return f"{self.task} at {self.address}"


@dataclass(frozen=True)
class Process:
    """A launching process.

    Attributes:
        who: random: containers on different hosts may have equal host names and pids.
    """

    host: str
    pid: int
    who: str

    def __str__(self) -> str:
        return f"host {self.host} pid {self.pid}"


@dataclass(frozen=True)
class HoldingJob:
    """The job that a task has joined: its leader, and the leader's process."""

    job_id: str
    leader: TaskAddress
    process: Process

    def __str__(self) -> str:
        return f"job {self.job_id} of {self.leader}, {self.process}"


@dataclass(frozen=True)
class Identity:
    """The facts that must be equal on every host of a job.

    Attributes:
        versions: by the name of the package.
        config: the configuration without the options that each host may choose for itself.
        plugins: the SHA-256 of each file.
        data: the size of each file in bytes; None if the host reads no data.
    """

    cluster: Jobs
    versions: dict[str, str]
    config: dict[str, Any]
    plugins: tuple[str, ...]
    data: dict[str, int] | None


@dataclass(frozen=True)
class Difference:
    """A value of `Identity` that differs between two hosts, as text."""

    name: str
    mine: str
    theirs: str


# The first message of a connection.


@dataclass(frozen=True)
class Join:
    """A process asks to hold a task.

    Attributes:
        to: the task that the message is meant for; it may reach another process by mistake.
        caller: the task that the process claims.
    """

    to: TaskAddress
    caller: TaskAddress
    process: Process
    identity: Identity

    @property
    def cluster(self) -> Jobs:
        return self.identity.cluster


@dataclass(frozen=True)
class Probe:
    """The leader asks which process is at the address of a missing task; see `Join` for the fields."""

    to: TaskAddress
    caller: TaskAddress
    process: Process
    cluster: Jobs


# The answers to the first message.


@dataclass(frozen=True)
class Accepted:
    """The process holds the task from now on, in this job."""

    held: HoldingJob


@dataclass(frozen=True)
class TryAgain:
    """Not now.

    Attributes:
        lists_differ: whether the process that answers has another cluster list.
    """

    text: str
    lists_differ: bool


@dataclass(frozen=True)
class Refused:
    """No, and another attempt is useless.

    Attributes:
        code: the exit code with which the caller should end.
        differences: as the refusing process sees them; `text` then says the same.
    """

    code: int
    text: str
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class State:
    """The process that a `Probe` has found.

    Attributes:
        leads: whether it is the leader by its own cluster list.
        held: the job that holds its task; None if none does.
    """

    process: Process
    cluster: Jobs
    leads: bool
    held: HoldingJob | None


# Between the leader and the followers that it has accepted. Those with the name of a task are events of a meeting, too.


@dataclass(frozen=True)
class Go:
    """All tasks have joined and agree."""


@dataclass(frozen=True)
class Beat:
    """A sign of life; that of the leader also says which tasks are missing, and why."""

    waiting_for: str = ""


@dataclass(frozen=True)
class Lost:
    """A task's process is gone, or sends nothing any more.

    If the task is this process's own, the process stood still for too long.
    """

    task: str
    why: str


@dataclass(frozen=True)
class Back:
    """A task that was lost has joined again; or `is_first`: one has joined for the first time."""

    task: str
    is_first: bool = False


@dataclass(frozen=True)
class Stop:
    """A task was told to stop by a signal, so all tasks should stop."""

    task: str
    signum: int


@dataclass(frozen=True)
class Ended:
    """A task has ended with this exit code and last message. Its connection will close, which is no loss.

    Attributes:
        left: whether it was told to end alone; the others go on, and it may join again.
    """

    task: str
    code: int
    message: str
    left: bool = False


# A connection accepts only the messages of one union at a time, so a message at the wrong moment is refused unread.
Call = Join | Probe
ToJoin = Accepted | TryAgain | Refused
ToProbe = State | TryAgain | Refused
FromLeader = Go | Beat | Lost | Stop | Ended
FromFollower = Beat | Stop | Ended
Wire = Call | ToJoin | ToProbe | FromLeader | FromFollower
MeetingEvent = Lost | Back | Stop | Ended
