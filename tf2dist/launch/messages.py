"""What a launcher and its fork server say to each other: each message a class of its own, matched by class.

    the fork server   -> its launcher       `FromServer`, a packet each
    a launcher        -> its fork server    `ToServer`, a packet each

See `tf2dist.packing` for the packets, and `tf2dist.messages` for what tasks say.
"""

from dataclasses import dataclass
from typing import Any

from tf2dist.messages import FromTask

# From the fork server.


@dataclass(frozen=True)
class Ready:
    """Tasks can be forked.

    Attributes:
        isolated: whether they have a private network.
        ports: free ports for them.
    """

    isolated: bool
    ports: tuple[int, ...]


@dataclass(frozen=True)
class Started:
    """A task has a process."""

    task: str
    pid: int


@dataclass(frozen=True)
class Exited:
    """A task's process has ended.

    Attributes:
        code: its exit code; negative for the signal that killed it.
        time: when, by `time.time()`.
    """

    task: str
    code: int
    time: float


# To the fork server.


@dataclass(frozen=True)
class Start:
    """Fork a task that calls ``target`` ("module:function") with ``(payload, to_launcher)``.

    Attributes:
        log: the file that takes its output.
        sys_path: instead of the fork server's own; None to keep that.
    """

    task: str
    target: str
    payload: Any
    log: str
    sys_path: tuple[str, ...] | None


@dataclass(frozen=True)
class Forward:
    """Hand a line, a packed `ToTask`, to a task."""

    task: str
    line: str


FromServer = Ready | Started | Exited
ToServer = Start | Forward
Event = FromTask | FromServer  # what a launcher reads: its tasks and its fork server send to one socket
