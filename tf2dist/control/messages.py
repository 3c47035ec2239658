"""What hosts say to each other, and what a meeting tells its own process: each message a class of its own.

    a caller              -> whom it calls        `Call`, the first message of every connection
    the called            -> its caller           `ToJoin` or `ToProbe`
    the leader            -> who was accepted     `FromLeader`
    who was accepted      -> the leader           `FromFollower`
    a meeting             -> its own process      `MeetingEvent`

See `packing` for their bytes, and `channel` for how these are protected on their way.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from tf2dist.cluster.spec import Task

MAX_CHARACTERS = 2000
Jobs = dict[str, tuple[str, ...]]  # a cluster list: addresses by job and index

# What is nested in messages.


@dataclass(frozen=True)
class Place:
    """A task and its address "host:port", by somebody's cluster list."""

    task: Task
    address: str

    def __str__(self) -> str:
        return f"{self.task} at {self.address}"


@dataclass(frozen=True)
class Process:
    """A launching process; `who` is random, and differs where host names and pids are equal."""

    host: str
    pid: int
    who: str

    def __str__(self) -> str:
        return f"host {self.host} pid {self.pid}"


@dataclass(frozen=True)
class Held:
    """The job that holds a task: its leader, and that one's process."""

    job_id: str
    leader: Place
    process: Process

    def __str__(self) -> str:
        return f"job {self.job_id} of {self.leader}, {self.process}"


@dataclass(frozen=True)
class Identity:
    """What must be equal on every host of a job.

    Attributes:
        versions: by the name of the package.
        config: the configuration, as far as a host may not choose it for itself.
        plugins: a hash of each file.
        data: sizes in bytes by the name of the file; None where the host reads none.
    """

    cluster: Jobs
    versions: dict[str, str]
    config: dict[str, Any]
    plugins: tuple[str, ...]
    data: dict[str, int] | None


@dataclass(frozen=True)
class Difference:
    """A value of `Identity` that differs: as it is here, and as it is there."""

    name: str
    mine: str
    theirs: str


# The first message of a connection.


@dataclass(frozen=True)
class Join:
    """A process wants to hold a task.

    Attributes:
        to: whom the call is meant for.
        caller: the task that is claimed.
    """

    to: Place
    caller: Place
    process: Process
    identity: Identity

    @property
    def cluster(self) -> Jobs:
        return self.identity.cluster


@dataclass(frozen=True)
class Probe:
    """The leader looks who is at the address of a task that is missing; the fields are those of `Join`."""

    to: Place
    caller: Place
    process: Process
    cluster: Jobs


# The answers to it.


@dataclass(frozen=True)
class Accepted:
    """The process holds the task from now on, in this job."""

    held: Held


@dataclass(frozen=True)
class Wait:
    """Not now: call again. `lists_differ`: the cluster list of who answers is another one."""

    text: str
    lists_differ: bool


@dataclass(frozen=True)
class Refused:
    """Never.

    Attributes:
        code: the exit code that this is worth.
        differences: from the side of who refuses; then `text` says the same.
    """

    code: int
    text: str
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class State:
    """Who has been found by a `Probe`; `leads`: by its own list. `held`: by which job, if by any."""

    process: Process
    cluster: Jobs
    leads: bool
    held: Held | None


# Between the leader and those whom it has accepted. Some are events of a meeting too, and name the task they concern.


@dataclass(frozen=True)
class Go:
    """All are there, and agree."""


@dataclass(frozen=True)
class Beat:
    """A sign of life; from the leader also who is missing, and why."""

    waiting_for: str = ""


@dataclass(frozen=True)
class Lost:
    """A task's process is gone, or says nothing any more."""

    task: str
    why: str


@dataclass(frozen=True)
class Back:
    """A task that was lost is there again."""

    task: str


@dataclass(frozen=True)
class Stop:
    """A task was told to stop by a signal, and so should all."""

    task: str
    signum: int


@dataclass(frozen=True)
class Ended:
    """A task has ended, with its exit code and its last words; its connection closes, and that is no loss."""

    task: str
    code: int
    message: str


Call = Join | Probe
ToJoin = Accepted | Wait | Refused
ToProbe = State | Wait | Refused
FromLeader = Go | Beat | Lost | Stop | Ended
FromFollower = Beat | Stop | Ended
Wire = Call | ToJoin | ToProbe | FromLeader | FromFollower
MeetingEvent = Lost | Back | Stop | Ended
AnEvent = TypeVar("AnEvent", bound=MeetingEvent)


def plain(text: str) -> str:
    """What another host says, fit for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_CHARACTERS])


def plainly(event: AnEvent) -> AnEvent:
    """The event with all its texts fit for a terminal."""
    texts: dict[str, Any] = {name: plain(value) for name, value in vars(event).items() if isinstance(value, str)}
    return dataclasses.replace(event, **texts)
