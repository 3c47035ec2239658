"""The knowledge of one process in a meeting: its task, its findings, and lines and events to pass on."""

import os
import queue
import secrets
import socket
import threading
from dataclasses import dataclass, field

from tf2dist.cluster.addresses import control_address
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.cluster.validation import canonical
from tf2dist.errors import Interrupted, TfDistError
from tf2dist.hosts.identity import explain, list_differences
from tf2dist.hosts.protocol import Identity, Jobs, Join, MeetingEvent, Probe, Process, Stop, TaskAddress, TryAgain

BEAT_EVERY_SECS = 1.0


@dataclass
class Membership:
    """The state that the meeting's thread writes and the thread of `Meeting.join` reads.

    It needs no lock: queues and the event have their own, and the reader looks only at attributes that are replaced
    as a whole.

    Attributes:
        agreed: set when the leader has said go.
        failure: why this process cannot take part; the first reason stays.
        conflict: says that a process with another cluster list claims to lead; "" if none does. A meeting that
            times out adds it to the missing tasks.
        lists_differ: whether the process that last answered at the leader's address has another cluster list.
        queued: the lines that were queued before.
    """

    cluster: Cluster
    task: Task
    identity: Identity
    has_token: bool
    lost_after_secs: float
    port_shift: int
    # Random, so that a holder can tell its own job from an earlier or later one at the same addresses.
    job_id: str = field(default_factory=lambda: secrets.token_hex(4))
    process: Process = field(default_factory=lambda: Process(socket.gethostname(), os.getpid(), secrets.token_hex(8)))
    agreed: threading.Event = field(default_factory=threading.Event)
    failure: TfDistError | None = None
    conflict: str = ""
    lists_differ: bool = False
    lines: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    events: "queue.SimpleQueue[MeetingEvent]" = field(default_factory=queue.SimpleQueue)
    queued: set[str] = field(default_factory=set)

    @property
    def leads(self) -> bool:
        return self.task == self.cluster.leader

    def notify(self, text: str) -> None:
        """Queues a line for the user, each text only once: a process that was refused may connect again and again."""
        if text not in self.queued:
            self.queued.add(text)
            self.lines.put(text)

    def stopped(self, stop: Stop) -> None:
        """Handles the news that a task was told to stop, which stops all tasks."""
        # Before the go nobody reads events yet: `Meeting.join` waits, and only a failure ends that.
        if self.agreed.is_set():
            self.events.put(stop)
        else:
            self.failure = self.failure or Interrupted(stop.signum)

    def fail(self, kind: type[TfDistError], text: str) -> None:
        """Makes `Meeting.join` raise an error, if it still waits and has no failure yet."""
        self.failure = self.failure or kind(text)

    def join(self) -> Join:
        """The message by which this task asks the leader to join."""
        return Join(self.task_address(self.cluster.leader), self.task_address(self.task), self.process, self.identity)

    def probe(self, task: Task) -> Probe:
        """The message that asks which process is at the address of a task."""
        return Probe(self.task_address(task), self.task_address(self.task), self.process, self.identity.cluster)

    def misdirected(self, call: Join | Probe) -> TryAgain | None:
        """The answer to a first message that was meant for another address but reached us; None for any other.

        The answer is to wait, so it ends neither side. A message to our address under the name of another task is
        not misdirected: there the two cluster lists differ.
        """
        # A name may have been looked up wrongly, or a proxy may lead to the wrong host. That can change.
        if canonical(call.to.address) == canonical(self.cluster.address(self.task)):
            return None
        diffs = list_differences(self.identity.cluster, call.cluster)
        text = f"{self.task_address(self.task)} answers there, and the connection was meant for {call.to}"
        if diffs:
            text = f"{text}; {explain(diffs, 'there', 'here')}"
        return TryAgain(text, lists_differ=bool(diffs))

    def task_address(self, task: Task) -> TaskAddress:
        return TaskAddress(task, self.cluster.address(task))

    def describe_missing(self, task: Task, why: str) -> str:
        """Such as "worker-1 at host:2222 (connection refused, control port 3222)"."""
        port = control_address(self.cluster.address(task), self.port_shift)[1]
        return f"{self.task_address(task)} ({why}, control port {port})"

    def compare_lists(self, theirs: Jobs) -> str:
        """Says where our cluster list and theirs differ."""
        diffs = list_differences(self.identity.cluster, theirs)
        return explain(diffs, "here", "there") or "the cluster lists are equal"
