"""What one process knows in a meeting and what it hands out: its place, its findings, lines for people."""

import os
import queue
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from tf2dist.cluster.spec import Cluster, Task, canonical
from tf2dist.control.channel import Message
from tf2dist.control.identity import Identity, differences, explain
from tf2dist.control.port import control_address
from tf2dist.errors import Interrupted, TfDistError

PROTOCOL = 2  # 2: a call says whom it is meant for
BEAT_EVERY_SECS = 1.0
MAX_LINES = 100
MAX_CHARACTERS = 2000


@dataclass
class Seat:
    """Shared by the meeting's thread, which writes, and the caller's, which reads.

    Attributes:
        agreed: set when the leader has said go.
        failure: why this process cannot take part.
        conflict: that a process with another cluster list claims to lead; told after who is missing.
        lists_differ: whether the process that last answered for the leader has another cluster list.
    """

    cluster: Cluster
    task: Task
    identity: Identity
    has_token: bool
    lost_after_secs: float
    port_shift: int
    job_id: str = field(default_factory=lambda: secrets.token_hex(4))
    me: dict[str, Any] = field(
        default_factory=lambda: {"host": socket.gethostname(), "pid": os.getpid(), "who": secrets.token_hex(8)}
    )
    agreed: threading.Event = field(default_factory=threading.Event)
    failure: TfDistError | None = None
    conflict: str = ""
    lists_differ: bool = False
    lines: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    events: "queue.SimpleQueue[dict[str, Any]]" = field(default_factory=queue.SimpleQueue)
    told: set[str] = field(default_factory=set)

    @property
    def leads(self) -> bool:
        return self.task == self.cluster.leader

    def line(self, text: str) -> None:
        """A line for people; the same one only once, for a lost process may call for ever."""
        if text not in self.told and len(self.told) < MAX_LINES:
            self.told.add(text)
            self.lines.put(plain(text))

    def event(self, kind: str, task: Task | str, **values: Any) -> None:
        self.events.put({"event": kind, "task": str(task), **values})

    def stopped(self, task: Task | str, signum: int) -> None:
        """A task was told to stop, and with it all of them.

        Raises:
            ValueError: there is no such signal.
        """
        if not 1 <= signum <= 64:
            raise ValueError(signum)
        if self.agreed.is_set():
            self.event("stop", task, signum=signum)
        else:
            self.fail(Interrupted(signum))

    def fail(self, error: TfDistError) -> None:
        """Ends `Meeting.join` with the error, if that still waits."""
        self.failure = self.failure or error

    def hello(self, kind: str, to: Task) -> Message:
        """Who we are: to "join", or only to "probe" who is there; and whom this is meant for."""
        return {
            "type": kind,
            "protocol": PROTOCOL,
            "to": [str(to), self.cluster.address(to)],
            "job": self.task.job,
            "index": self.task.index,
            "address": self.cluster.address(self.task),
            **self.me,
            **({"identity": self.identity} if kind == "join" else {"cluster": self.identity["cluster"]}),
        }

    def misdirected(self, hello: Message) -> Message | None:
        """The answer to a call that has been led here and was meant for another address; it ends nobody.

        A call to our address under the name of another task is none: then the two lists differ.
        """
        if hello["protocol"] != PROTOCOL:  # which is refused for that
            return None
        name, address = hello["to"]
        if canonical(address) == canonical(self.cluster.address(self.task)):
            return None
        theirs = hello["identity"]["cluster"] if hello["type"] == "join" else hello["cluster"]
        found = differences(self.identity["cluster"], theirs, "cluster")
        text = f"{self.at(self.task)} answers there, and the call was meant for {name} at {address}"
        if found:
            text = f"{text}; {explain(found, 'there', 'here')}"
        return {"type": "wait", "text": plain(text), "lists_differ": bool(found)}

    def at(self, task: Task) -> str:
        return f"{task} at {self.cluster.address(task)}"

    def missing(self, task: Task, why: str) -> str:
        """Such as "worker-1 at host:2222 (connection refused, control port 3222)"."""
        port = control_address(self.cluster.address(task), self.port_shift)[1]
        return f"{self.at(task)} ({why}, control port {port})"

    def compare_lists(self, theirs: Any) -> str:
        """Where our cluster list and theirs differ."""
        found = differences(self.identity["cluster"], theirs, "cluster")
        return plain(explain(found, "here", "there")) or "the cluster lists are equal"


def plain(text: str) -> str:
    """What another host says, fit for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_CHARACTERS])
