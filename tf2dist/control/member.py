"""What one process knows in a meeting and what it hands out: its place, its findings, lines for people."""

import os
import queue
import secrets
import socket
import threading
from dataclasses import dataclass, field

from tf2dist.cluster.parsing import canonical
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.control.identity import explain, list_differences
from tf2dist.control.messages import (
    Identity,
    Jobs,
    Join,
    MeetingEvent,
    Place,
    Probe,
    Process,
    Stop,
    Wait,
    plain,
    plainly,
)
from tf2dist.control.port import control_address
from tf2dist.errors import Interrupted, TfDistError
from tf2dist.packing import MessageError

BEAT_EVERY_SECS = 1.0
MAX_LINES = 100


def _this_process() -> Process:
    return Process(socket.gethostname(), os.getpid(), secrets.token_hex(8))


@dataclass
class Membership:
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
    process: Process = field(default_factory=_this_process)
    agreed: threading.Event = field(default_factory=threading.Event)
    failure: TfDistError | None = None
    conflict: str = ""
    lists_differ: bool = False
    lines: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    events: "queue.SimpleQueue[MeetingEvent]" = field(default_factory=queue.SimpleQueue)
    told: set[str] = field(default_factory=set)

    @property
    def leads(self) -> bool:
        return self.task == self.cluster.leader

    def line(self, text: str) -> None:
        """A line for people; the same one only once, for a lost process may call for ever."""
        if text not in self.told and len(self.told) < MAX_LINES:
            self.told.add(text)
            self.lines.put(plain(text))

    def event(self, event: MeetingEvent) -> None:
        self.events.put(plainly(event))

    def stopped(self, stop: Stop) -> None:
        """A task was told to stop, and with it all of them.

        Raises:
            MessageError: there is no such signal.
        """
        if not 1 <= stop.signum <= 64:
            raise MessageError(f"a message that makes no sense (Stop.signum: {stop.signum!s:.40})")
        if self.agreed.is_set():
            self.event(stop)
        else:
            self.failure = self.failure or Interrupted(stop.signum)

    def fail(self, kind: type[TfDistError], text: str) -> None:
        """Ends `Meeting.join` with an error, if that still waits."""
        self.failure = self.failure or kind(plain(text))

    def join(self) -> Join:
        """Who we are and what we have, for the leader."""
        return Join(self.place(self.cluster.leader), self.place(self.task), self.process, self.identity)

    def probe(self, task: Task) -> Probe:
        """The question who is at the address of a task."""
        return Probe(self.place(task), self.place(self.task), self.process, self.identity.cluster)

    def misdirected(self, call: Join | Probe) -> Wait | None:
        """The answer to a call that has been led here and was meant for another address; it ends nobody.

        A call to our address under the name of another task is none: then the two lists differ.
        """
        if canonical(call.to.address) == canonical(self.cluster.address(self.task)):
            return None
        found = list_differences(self.identity.cluster, call.cluster)
        text = f"{self.place(self.task)} answers there, and the call was meant for {call.to}"
        if found:
            text = f"{text}; {explain(found, 'there', 'here')}"
        return Wait(plain(text), lists_differ=bool(found))

    def place(self, task: Task) -> Place:
        return Place(task, self.cluster.address(task))

    def missing(self, task: Task, why: str) -> str:
        """Such as "worker-1 at host:2222 (connection refused, control port 3222)"."""
        port = control_address(self.cluster.address(task), self.port_shift)[1]
        return f"{self.place(task)} ({why}, control port {port})"

    def compare_lists(self, theirs: Jobs) -> str:
        """Where our cluster list and theirs differ."""
        found = list_differences(self.identity.cluster, theirs)
        return plain(explain(found, "here", "there")) or "the cluster lists are equal"
