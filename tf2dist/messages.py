"""Messages between the processes of one host: each a class of its own, matched by class, and sent as one JSON object.

    a task            -> its launcher       `FromTask`, a packet each, by `ToLauncher.send`
    a launcher        -> a task             `ToTask`, a line each on the task's standard input
    the fork server   -> its launcher       `FromServer`, a packet each
    a launcher        -> its fork server    `ToServer`, a packet each

Each class is a dataclass; the object has its name as "type", and its fields. Who reads says which messages may come,
and gets one of these, with every field of its declared type, or an error that names what came instead. See
`hosts.protocol` for what hosts say.
"""

import dataclasses
import json
import os
import socket
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tf2dist.declared import TreeReader, UndeclaredError
from tf2dist.errors import TrainingError

NO_METRICS = "no metrics"  # in place of them, where there is none that is a single number

# From a task to its launcher.


@dataclass(frozen=True)
class TaskMessage:
    """A message of a task, which `ToLauncher.send` names in it."""

    task: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Started(TaskMessage):
    """The task has a process; it says so before it can start others, which would have to be ended with it."""

    pid: int


@dataclass(frozen=True)
class Alive(TaskMessage):
    """The process runs; said every second, as a sign of life and nothing else."""


@dataclass(frozen=True)
class Silence(TaskMessage):
    """The task will say nothing for `secs`, since it calls what keeps Python's lock; 0 ends that."""

    secs: float


@dataclass(frozen=True)
class LongCall(TaskMessage):
    """The main thread has been in the function `where` for `secs`; `is_users`: that is not tf2dist's own code."""

    secs: int
    where: str
    is_users: bool


@dataclass(frozen=True)
class Stalled(LongCall):
    """The same, for longer than the watchdog allows."""


@dataclass(frozen=True)
class Began(TaskMessage):
    """The training can begin, or go on, at a global step."""

    step: int


@dataclass(frozen=True)
class ProgressMessage(TaskMessage):
    """Where the training stands.

    Attributes:
        target_step: 0 if it is not known.
        metrics: over the steps since the last message, or of the epoch of `fit` so far, the loss among them.
        steps_per_sec: the mean rate of the training so far, as in summary.json; None while unknown.
    """

    step: int
    target_step: int
    metrics: dict[str, Any]
    steps_per_sec: float | None = None


@dataclass(frozen=True)
class Status(TaskMessage):
    """The present activity, shown until there is progress to show."""

    text: str


@dataclass(frozen=True)
class Note(TaskMessage):
    """A line that stays to be read, on a terminal too."""

    text: str


@dataclass(frozen=True)
class Warned(TaskMessage):
    """A warning for the user."""

    text: str


@dataclass(frozen=True)
class Saved(TaskMessage):
    """There is a checkpoint of a step; `stopping`: made since the run was asked to stop."""

    step: int
    stopping: bool


@dataclass(frozen=True)
class HookCall(TaskMessage):
    """The leader's call of what a caller of `fit` has given to be called; it waits for a `HookAnswer` of the number.

    Attributes:
        kind: "begin", "epoch", "pause", "end" or "not finite", see `training.hooks`.
        epoch: the number of the epoch, from 0.
        arrays: the file with the variables by name; "" for none.
        state: the file with the state of the callbacks; "" for none.
    """

    number: int
    kind: str
    epoch: int
    step: int
    logs: dict[str, Any]
    learning_rates: tuple[float, ...]
    arrays: str
    state: str


@dataclass(frozen=True)
class ResultMessage(TaskMessage):
    """The content of summary.json."""

    summary: dict[str, Any]


@dataclass(frozen=True)
class Done(TaskMessage):
    """The task has done all that it had to do: an exit with code 0 is no accident now."""


# From a launcher to a task.


@dataclass(frozen=True)
class PeerGone:
    """A task on another host is gone: no call to it will be answered."""

    task: str


@dataclass(frozen=True)
class LeaderDone:
    """The leader, on another host, has ended with its result: the evaluator finds the last checkpoint now, or never."""


@dataclass(frozen=True)
class HookAnswer:
    """The wish of the caller of `fit` after the `HookCall` of this number; () and "": as it is.

    Attributes:
        stop: the training ends.
        arrays: the file with those variables that are to have other values.
        state: the file with the state of the callbacks.
    """

    number: int
    stop: bool
    learning_rates: tuple[float, ...]
    arrays: str
    state: str


@dataclass(frozen=True)
class PauseWanted:
    """The caller of `fit` wants a `HookCall` soon, at one exact step."""


FromTask = (
    Started
    | Alive
    | Silence
    | LongCall
    | Stalled
    | Began
    | ProgressMessage
    | Status
    | Note
    | Warned
    | Saved
    | HookCall
    | ResultMessage
    | Done
)
ToTask = PeerGone | LeaderDone | HookAnswer | PauseWanted
# Repeated soon: sent without waiting, and dropped while a suspended launcher reads nothing.
DROPPABLE = Alive | ProgressMessage


class ToLauncher:
    """The way from a task to its launcher.

    Args:
        task: who speaks.
        post: brings a message on its way.
    """

    def __init__(self, task: str, post: Callable[[FromTask], None]) -> None:
        self.task, self._post = task, post

    def send(self, message: FromTask) -> None:
        """Sends a message, and puts the name of the task into it."""
        self._post(dataclasses.replace(message, task=self.task))

    # Many functions take a function of a text for the user.
    def status(self, text: str) -> None:
        self.send(Status(text))

    def note(self, text: str) -> None:
        self.send(Note(text))

    def warn(self, text: str) -> None:
        self.send(Warned(text))


def metrics_text(metrics: dict[str, Any]) -> str:
    """Metrics on one line, as in "accuracy 0.9125, loss 0.3121"; without those that give several numbers."""
    names = sorted(metrics, key=lambda name: (name != "accuracy", name != "loss"))
    return ", ".join(f"{name} {metrics[name]:.4f}" for name in names if isinstance(metrics[name], float)) or NO_METRICS


MAX_PACKET_BYTES = 1 << 17  # a packet must fit into the socket's buffer, by default 208 KiB
IN_FILE = b"in a file"  # the packet of a longer message, which is in a file in memory that comes with it


class MessageError(ValueError):
    """A message that may not come."""


def pack(message: Any) -> bytes:
    """The JSON object of a message, without line breaks."""
    fields = {"type": type(message).__name__, **dataclasses.asdict(message)}
    return json.dumps(fields, separators=(",", ":")).encode()


def unpack(data: bytes, allowed: Any) -> Any:
    """The message that `data` holds.

    Args:
        allowed: the messages that may come, a union of classes.

    Raises:
        MessageError: it is none of these, or a field is missing, unknown or of another type.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: a thousand brackets
        raise MessageError("a message that is not JSON") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        raise MessageError("a message without a type")
    if (kind := fields.pop("type")) not in (classes := _by_name(allowed)):
        raise MessageError(f"a message of unknown type ({kind:.40})")
    try:
        return TreeReader().read(classes[kind], fields, kind)
    except UndeclaredError as error:
        raise MessageError(f"a malformed message ({error})") from None


def send(sock: socket.socket, message: Any, flags: int = 0) -> None:
    """Sends a message, of any length, as one packet. Raises OSError."""
    data = pack(message)
    if len(data) <= MAX_PACKET_BYTES:
        sock.send(data, flags)
        return
    # As the result of a metric of many numbers.
    with open(os.memfd_create("message"), "wb") as file:
        file.write(data)
        file.flush()
        socket.send_fds(sock, [IN_FILE], [file.fileno()], flags)


def receive(sock: socket.socket, allowed: Any) -> Any:
    """The next message, see `unpack`; None at the end of the socket. Raises OSError."""
    packet, files, flags, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, 1)
    if flags & socket.MSG_CTRUNC:
        raise TrainingError("ulimit -n: too many files are open to receive a long message; raise it")
    for descriptor in files:
        with open(descriptor, "rb") as file:
            file.seek(0)  # the sender has written, and shares the position
            packet = file.read()
    return unpack(packet, allowed) if packet else None


@cache
def _by_name(allowed: Any) -> dict[str, Any]:
    return {kind.__name__: kind for kind in typing.get_args(allowed) or (allowed,)}


# From the fork server.


@dataclass(frozen=True)
class Ready:
    """Tasks can be forked.

    Attributes:
        pid: of the fork server.
        isolated: whether they have a private network.
        ports: free ports for them.
    """

    pid: int
    isolated: bool
    ports: tuple[int, ...]


@dataclass(frozen=True)
class ServerEnded:
    """The fork server has ended, with this exit code; negative for the signal that killed it."""

    code: int


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


FromServer = Ready | Exited
ToServer = Start | Forward
Event = FromTask | FromServer  # what a launcher tells: its tasks and its fork server send to one socket
Packet = Event | ServerEnded  # what it reads
