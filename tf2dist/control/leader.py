"""The leader's side of a meeting: who may join, who is missing, who was lost."""

import time
from dataclasses import dataclass
from typing import Any

from tf2dist.cluster.spec import Task
from tf2dist.control.channel import Message
from tf2dist.control.connections import Link, Links
from tf2dist.control.dialer import Dialer
from tf2dist.control.identity import differences, explain
from tf2dist.control.member import BEAT_EVERY_SECS, PROTOCOL, Seat, plain
from tf2dist.control.port import control_address
from tf2dist.errors import ClusterError

PROBE_EVERY_SECS = 1.0
LATE_SECS = 3.5  # a holder that has been silent for so long may be gone: ask again later


@dataclass
class Member:
    """The process that holds a task."""

    task: Task
    link: Link
    hello: Message

    def __str__(self) -> str:
        return f"host {self.hello['host']} pid {self.hello['pid']}"


@dataclass
class Probe:
    """A look at a task that is missing."""

    task: Task


class Leading:
    """See `meeting.Role`."""

    def __init__(self, seat: Seat, links: Links) -> None:
        self._seat, self._links = seat, links
        self._members: dict[Task, Member] = {}
        others = [task for task in seat.cluster.tasks if task != seat.task and task.job != "evaluator"]
        self._dialers = {task: self._dialer(task) for task in others}
        self._refused: dict[Task, str] = {}
        self._beat_at = 0.0
        self.waiting_for = ", ".join(map(seat.at, others))
        address = seat.cluster.address(seat.task)
        self.held: dict[str, Any] | None = {
            "job_id": seat.job_id,
            "leader": str(seat.task),
            "address": address,
            **seat.me,
        }

    def _dialer(self, task: Task) -> Dialer:
        address = control_address(self._seat.cluster.address(task), self._seat.port_shift)
        return Dialer(self._links, *address, PROBE_EVERY_SECS)

    def tick(self, now: float) -> None:
        for member in list(self._members.values()):
            if now - member.link.heard_at > self._seat.lost_after_secs:
                self._links.close(member.link, f"silent for {now - member.link.heard_at:.0f} s")
        if not self._seat.agreed.is_set() and not self._seat.failure:
            self._gather()
        if now - self._beat_at >= BEAT_EVERY_SECS:
            self._beat_at = now
            self.say({"type": "beat", "waiting_for": self.waiting_for[:2000]})

    def _gather(self) -> None:
        missing = [task for task in self._dialers if task not in self._members]
        if not missing:
            self.waiting_for = ""
            self._seat.agreed.set()
            self.say({"type": "go"})
            return
        for task in missing:
            self._dialers[task].tick(Probe(task))
        self.waiting_for = ", ".join(self._seat.missing(task, self._why(task)) for task in missing)

    def _why(self, task: Task) -> str:
        refused = self._refused.get(task)
        return self._dialers[task].why + (f", was refused before: {refused}" if refused else "")

    def say(self, message: Message, but: Member | None = None) -> None:
        for member in self._members.values():
            if member is not but:
                member.link.send(message)

    def on_open(self, link: Link) -> None:
        link.send(self._seat.hello("probe", link.owner.task))

    def on_join(self, link: Link, hello: Message) -> None:
        answer = self._answer(hello)
        if answer["type"] != "accepted":
            link.send(answer)
            link.finish()
            return
        task = Task(hello["job"], hello["index"])
        former = self._members.pop(task, None)
        if former:  # the same process, by a new connection
            self._links.close(former.link, "called again")
        self._refused.pop(task, None)
        self._members[task] = link.owner = Member(task, link, hello)
        link.keep()
        link.send(answer)
        if self._seat.agreed.is_set():
            self._seat.line(f"{task} is there again, {link.owner}")
            self._seat.event("back", task)
            link.send({"type": "go"})

    def _answer(self, hello: Message) -> Message:
        """Whether a process may hold the task that it claims."""
        task = Task(hello["job"], hello["index"])
        who = f"{task} on host {hello['host']} pid {hello['pid']}"
        if hello["protocol"] != PROTOCOL:
            return self._refuse(task, who, 2, f"another version of tf2dist: protocol {hello['protocol']!s:.20}")
        found = differences(self._seat.identity, hello["identity"])
        if found:
            self._refused[task] = plain(explain(found, "here", "there"))
            return self._refuse(task, who, 2, self._refused[task], found)
        if task == self._seat.task or task not in self._seat.cluster.tasks:
            return self._refuse(task, who, 2, "held by the leader itself, or not in its list")
        holder = self._members.get(task)
        if holder and holder.hello["who"] != hello["who"]:
            held = f"{task.job} {task.index} is already held by {holder}"
            late = time.monotonic() - holder.link.heard_at
            if late > LATE_SECS:
                return {"type": "wait", "text": f"{held}, which has been silent for {late:.0f} s"}
            return self._refuse(task, who, 2, held)
        may_return = task.job == "evaluator" or (task.job == "worker" and self._seat.cluster.mode == "async")
        if self._seat.agreed.is_set() and not may_return:
            return self._refuse(task, who, 138, f"the job runs, and the {task} that it began with is gone")
        return {"type": "accepted", "held": self.held}

    def _refuse(self, task: Task, who: str, code: int, why: str, found: Any = ()) -> Message:
        self._seat.line(f"{who} is refused: {why}")
        return {"type": "refused", "code": code, "text": why, "differences": list(found)[:20]}

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(link.owner, Probe):
            link.finish()
            if message["type"] == "wait":  # somebody else is there, and may leave
                self._dialers[link.owner.task].why = plain(message["text"])
            else:
                self._on_state(link.owner.task, message)
            return
        member: Member = link.owner
        match message["type"]:
            case "stop":
                signum = int(message["signum"])
                self._seat.stopped(member.task, signum)
                self.say({"type": "stop", "task": str(member.task), "signum": signum}, but=member)
            case "ended":
                self._on_ended(member, int(message["code"]), plain(message["message"]))
            case "beat":
                pass
            case other:
                raise ValueError(other)

    def _on_ended(self, member: Member, code: int, message: str) -> None:
        del self._members[member.task]
        member.link.finish()
        if self._seat.agreed.is_set():
            self._seat.event("ended", member.task, code=code, message=message)
            self.say({"type": "ended", "task": str(member.task), "code": code, "message": message})
        else:
            self._seat.line(f"{member.task} has left ({member}): {message}")

    def _on_state(self, task: Task, state: Message) -> None:
        """What a process says that listens where a missing task should be."""
        held, dialer = state["held"], self._dialers[task]
        here = f"{self._seat.at(task)} (host {state['host']} pid {state['pid']})"
        if task in self._members or self._seat.agreed.is_set():
            return
        if state["leads"]:
            lists = self._seat.compare_lists(state["cluster"])
            self._seat.fail(ClusterError(plain(f"{here} is the leader in its own list: {lists}")))
        elif held and held["job_id"] != self._seat.job_id:
            self._on_held(here, dialer, held)
        elif differences(self._seat.identity["cluster"], state["cluster"]):
            dialer.why = f"another cluster list there: {self._seat.compare_lists(state['cluster'])}"
            self._seat.line(f"{here} has another cluster list: {self._seat.compare_lists(state['cluster'])}")
        else:
            dialer.why = "is there and has not called yet"

    def _on_held(self, here: str, dialer: Dialer, held: Message) -> None:
        """By a job before this one at the same place, which will find out that it has ended; or by another one."""
        holder = f"job {held['job_id']} of {held['leader']} at {held['address']}, host {held['host']} pid {held['pid']}"
        mine = (self._seat.cluster.address(self._seat.task), self._seat.me["host"])
        if (held["address"], held["host"]) == mine:
            dialer.why = plain(f"still held by {holder}")
            return
        what = "coordinator" if self._seat.cluster.mode == "async" else "leader"
        self._seat.fail(ClusterError(plain(f"{here} is already held by {holder}; a second {what} is refused")))

    def on_closed(self, link: Link, why: str) -> None:
        if isinstance(link.owner, Probe):
            if not link.finishing:
                self._dialers[link.owner.task].why = "another job token there" if link.denied else why
        elif isinstance(link.owner, Member):
            if self._members.get(link.owner.task) is link.owner and not link.finishing:
                self._on_lost(link.owner, why)
        elif "token" in why:
            self._seat.line(f"refused a call from {link.peer}: {why}")

    def _on_lost(self, member: Member, why: str) -> None:
        del self._members[member.task]
        if not self._seat.agreed.is_set():
            self._seat.line(f"{member.task} is gone ({member}): {why}")
            return
        self._seat.event("lost", member.task, why=why)
        if member.task.job != "evaluator":
            self.say({"type": "lost", "task": str(member.task), "why": why})
