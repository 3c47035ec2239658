"""Follows the tasks of a launcher: shows their messages, restarts lost tasks, and stops all of them in order."""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tf2dist.cluster.spec import Task, can_lose
from tf2dist.errors import LOST_TASK_CODES, FailureRecord, LeaderLostError, TaskFailure, TaskLeft, TaskLostError
from tf2dist.hosts import protocol
from tf2dist.hosts.meeting import Meeting
from tf2dist.launch.failures import (
    FailureReader,
    RestartDecision,
    RestartPolicy,
    blames_another,
    cause_order,
    is_consequence,
)
from tf2dist.launch.host_run import HostRun, SessionMessage
from tf2dist.launch.launcher import Launcher
from tf2dist.launch.shutdown import Shutdown
from tf2dist.launch.watchdog import Clock, Watchdog
from tf2dist.messages import (
    Began,
    Event,
    Exited,
    LeaderDone,
    Note,
    PeerGone,
    ProgressMessage,
    ResultMessage,
    Saved,
    Status,
    Warned,
)
from tf2dist.signals import STOP_SIGNALS

POLL_SECS = 0.2
SECONDARY_SECS = 1.0  # the failure that caused the others may be reported after them
CAUSE_SECS = 3.0  # the same if it is on another host
EXIT_SECS = 15.0  # for the other tasks to end, once the leader is done
FOLLOW_END_SECS = 120.0  # for a task but an evaluator to end, once its leader on another host is done
WOKEN_SECS = 2.0  # a scheduler wakes a suspended job before it sends the signal that ends it


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
class Attempt:
    """The events since all tasks were last started together.

    Attributes:
        summary: the leader's result; empty until it comes.
        exit_deadline: when the tasks that are left must have ended, in seconds of the monotonic clock.
        failures: those that no restart has answered yet, in order.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    exit_deadline: float = float("inf")
    failures: list[FailureRecord] = field(default_factory=list)


class Monitor:
    """Follows one run, from the start of its first task to the end of its last one.

    Args:
        meeting: with the launching processes of the other hosts; None if all tasks are here.
        on_begun: called when the leader has restored the run or made a new one, so that training can begin.
    """

    def __init__(
        self,
        run: HostRun,
        launcher: Launcher,
        meeting: Meeting | None,
        on_begun: Callable[[], None],
        clock: Clock = time,
    ) -> None:
        config = run.config
        self._launcher, self._console, self._meeting, self._clock = launcher, run.console, meeting, clock
        self._mode, self._on_begun, self._session = config.mode, on_begun, run.session
        self._needs_others = run.place.needs_others
        self._policy = RestartPolicy(config.mode, config.max_restarts, whole_cluster=meeting is None)
        self._shutdown = Shutdown(run, launcher, meeting, clock)
        self._watchdog = Watchdog(launcher, config, run.console.status, clock)
        self._reader = FailureReader(launcher.log_dir, launcher.log_of)
        self._attempt = Attempt()
        self._num_restarts_of_all = 0  # each start of all tasks may use other ports, see `host_tasks.on_free_ports`
        self._lost_peers: dict[str, str] = {}  # the tasks of other hosts that are gone, and why
        self._leader_is_done = False  # on another host
        self._given_up: TaskLostError | None = None  # this task, by the others, as after a suspension
        self._woken_until = 0.0
        self._began_at, self._global_step = clock.monotonic(), 0
        self._worker_events: list[dict[str, Any]] = []  # for the summary

    def run(self, tasks: Tasks) -> dict[str, Any]:
        """Starts the tasks, and follows them to the end.

        Returns:
            What the leader has sent as the result; empty if it runs elsewhere.

        Raises:
            TaskFailure: a task failed for good.
            Interrupted: by a signal; what could be saved is saved.
            TaskLeft: by a signal to this process that ends its task alone.
        """
        self._tasks = tasks
        self._start_all()
        while self._launcher.tasks or (self._attempt.failures and self._phase() is not Phase.DONE):
            self._step()
            self._answer()
            self._set_exit_deadline()
            if self._phase() is Phase.DONE and (self._shutdown.is_signalled or self._is_past_exit_deadline):
                break  # the result is complete; leaving the launcher's block kills the tasks that are left
        return self._attempt.summary

    def _phase(self) -> Phase:
        if self._attempt.summary:
            return Phase.DONE
        return Phase.STOPPING if self._shutdown.is_requested else Phase.RUNNING

    def _step(self) -> None:
        """Handles the messages of the next `POLL_SECS`, and looks for tasks that are lost or stuck."""
        # The watchdog looks last: messages that arrived while this process was suspended are signs of life.
        for event in self._launcher.events(POLL_SECS):
            self._on_event(event)
        for news in self._meeting.events() if self._meeting else ():
            self._on_meeting(news)
        self._watchdog.check(self._phase() is Phase.DONE, self._lost_peers)

    def _answer(self) -> None:
        """Goes on with the stop, or deals with new failures."""
        if self._phase() is Phase.STOPPING:
            signum = self._shutdown.advance(self._tasks.names, self._tasks.leader)
            if signum and (self._launcher.tasks or self._attempt.failures):  # otherwise all were done before it came
                raise self._shutdown.outcome(signum, self._tasks.leader, self._attempt.failures)
        elif self._phase() is Phase.RUNNING and self._given_up:
            self._shutdown.leave(self._tasks.names[0])
            if not self._shutdown.is_signalled and self._clock.monotonic() > self._woken_until:
                raise self._given_up
        elif self._phase() is Phase.RUNNING and self._attempt.failures:
            self._restart_or_fail()
        elif self._phase() is Phase.RUNNING:
            self._shutdown.leave(self._tasks.names[0])

    def _set_exit_deadline(self) -> None:
        """Sets the time by which the other tasks must end, once the leader has ended."""
        leader = self._tasks.leader
        if self._tasks.has_leader:
            if leader not in self._launcher.tasks or self._watchdog.records[leader].kill:
                self._attempt.exit_deadline = min(self._attempt.exit_deadline, self._clock.monotonic() + EXIT_SECS)
        elif self._is_past_exit_deadline:
            reason = f"{leader} finished {FOLLOW_END_SECS:.0f} s ago"
            raise TaskLostError(f"{reason}, and {self._tasks.names[0]} has not ended")

    @property
    def _is_past_exit_deadline(self) -> bool:
        return self._clock.monotonic() > self._attempt.exit_deadline

    def _on_event(self, event: Event) -> None:
        self._watchdog.on_message(event)
        if self._session and isinstance(event, SessionMessage):
            self._session.on_message(event)
        match event:
            case ProgressMessage():
                self._global_step = event.step
                self._console.progress(event)
            case Began():
                self._global_step = event.step
                self._shutdown.leader_began(event.step)
                self._console.began(event.step)
                self._on_begun()
            case Status():
                self._console.status(event.text)
            case Note():
                self._console.note(event.text)
            case Warned():
                self._console.warn(event.text)
            case Saved():
                self._shutdown.leader_saved(event.step, event.stopping)
            case ResultMessage():
                # No task knows how often tasks were started again.
                events = {"worker_events": self._worker_events} if self._worker_events else {}
                self._attempt.summary = {**event.summary, "restarts": self._policy.restarts, **events}
            case Exited():
                self._on_exit(event)

    def _on_exit(self, exited: Exited) -> None:
        task, code = exited.task, exited.code
        kill = self._watchdog.exited(task)
        has_result = self._phase() is Phase.DONE
        if has_result and code != 0:
            self._console.warn(f"{task} ended with code {code} after the result was known")
        is_too_early = task == self._tasks.leader or not self._watchdog.records[task].is_done
        if not has_result and (code != 0 or is_too_early):
            self._attempt.failures.append(self._reader.read(exited, kill))

    def _on_meeting(self, event: protocol.MeetingEvent) -> None:
        """Handles news of a task on another host."""
        match event:
            case protocol.Stop():
                self._shutdown.request_from_peer(event.signum)
            case protocol.Back():
                self._lost_peers.pop(event.task, None)
                self._add_event(event.task, "joined" if event.is_first else "back")
            case protocol.Lost(task, why) if task in self._tasks.names:
                # A stop goes on: the leader can still save.
                if self._phase() is Phase.RUNNING and self._needs_others and not self._leader_is_done:
                    self._given_up = TaskLostError(f"{task}: {why}")
                    self._woken_until = self._clock.monotonic() + WOKEN_SECS
                else:
                    self._console.warn(f"{task} {why}")
            case protocol.Lost() if self._phase() is Phase.RUNNING and self._given_up:
                pass  # to a process that stood still all others seem silent
            case protocol.Lost(task, why):
                is_leaders = task == self._tasks.leader and not self._tasks.has_leader
                code = (LeaderLostError if is_leaders else TaskLostError).exit_code
                self._on_end_elsewhere(task, code, why, was_lost=True)
            case protocol.Ended(left=True) if self._phase() is Phase.RUNNING:
                self._console.note(str(TaskLeft(event.task)))
                self._go_on_without(event.task, "left after SIGTERM", "left")
            case protocol.Ended(task, code, message):
                self._on_end_elsewhere(task, code, message, was_lost=False)

    def _on_end_elsewhere(self, task: str, code: int, why: str, was_lost: bool) -> None:
        if code == 0 and task == self._tasks.leader:
            self._leader_is_done = True
            # An evaluator evaluates the last checkpoint alone, which may take long. It ends by itself if there is none.
            if Task.parse(self._tasks.names[0]).job == "evaluator":
                self._launcher.send_to_task(self._tasks.names[0], LeaderDone())
            else:
                self._attempt.exit_deadline = self._clock.monotonic() + FOLLOW_END_SECS
        elif code == 0 or self._phase() is Phase.DONE:
            pass
        elif self._can_lose(task, code) and not blames_another(task, why):
            if not self._attempt.failures:
                self._console.warn(f"{task} is gone ({why}); the others go on, and it may come back")
            self._go_on_without(task, why, "lost")
        elif not (self._attempt.failures and blames_another(task, why)):  # a consequence of a known failure
            message_text = f"is gone ({why})" if was_lost else why
            self._attempt.failures.append(
                FailureRecord(task, self._clock.time(), code, message_text, by_signal=was_lost)
            )

    def _go_on_without(self, task: str, why: str, event: str) -> None:
        self._lost_peers[task] = why
        self._add_event(task, event)
        for local_task in self._launcher.tasks:  # any of them may wait in a call to the lost task
            self._launcher.send_to_task(local_task, PeerGone(task))

    def _add_event(self, name: str, event: str) -> None:
        """Notes for the summary what became of a worker on another host, and when."""
        task, secs = Task.parse(name), round(self._clock.monotonic() - self._began_at, 1)
        if task.job == "worker":
            what = {"secs": secs, "step": self._global_step, "worker": task.index, "event": event}
            self._worker_events.append(what)

    def _can_lose(self, task: str, code: int) -> bool:
        """Whether the others can go on without a task of another host."""
        # A worker that failed by an error of its own would fail again. An evaluator only reads checkpoints, so nothing
        # depends on it.
        job = Task.parse(task).job
        return can_lose(self._mode, job) and (job == "evaluator" or code in LOST_TASK_CODES)

    def _restart_or_fail(self) -> None:
        """Deals with the failures since the last call."""
        self._wait_for_cause()
        failures = self._attempt.failures
        if self._phase() is not Phase.RUNNING:
            return  # a stop or the result has come meanwhile
        if self._leader_is_done and all(map(is_consequence, failures)):
            failures.clear()  # the run is over: this task was started again too late to meet the others
            return
        decision = self._policy.decide(failures[0])
        if decision is RestartDecision.FAIL and not self._meeting:
            self._collect_consequences()
            is_lost = failures[0].exit_code in LOST_TASK_CODES
            if self._phase() is Phase.DONE or (self._phase() is Phase.STOPPING and is_lost):
                return
            decision = self._policy.decide(failures[0])  # now perhaps another one, since they were sorted again
        if decision is RestartDecision.FAIL:
            self._fail()
        lost = failures.pop(0)
        self._watchdog.restart_timers()
        if decision is RestartDecision.RESTART_TASK:
            self._console.warn(f"{lost.task} {lost.message}; starting it again")
            self._start(lost.task)
        else:
            self._restart_all(lost)

    def _fail(self) -> None:
        """Raises TaskFailure, or Interrupted if a signal on another host is behind it."""
        for failure in self._attempt.failures:
            if (signum := failure.exit_code - 128) in STOP_SIGNALS:  # another host has got a signal
                raise self._shutdown.interrupted(signum)
        used_up = f"after {self._policy.restarts} restarts" if self._policy.is_exhausted else ""
        raise TaskFailure(self._attempt.failures, used_up)

    def _restart_all(self, lost: FailureRecord) -> None:
        # A checkpoint may have been finished just before the kill.
        for event in self._launcher.kill_all():
            if isinstance(event, Saved):
                self._shutdown.leader_saved(event.step, stopping=False)
        self._watchdog.clear()
        self._shutdown.on_restart_of_all()
        self._attempt = Attempt()
        step = self._shutdown.saved_step
        origin = "" if step is None else f" from the checkpoint at step {step}"
        self._console.warn(f"{lost.task} {lost.message}; starting all tasks again{origin}")
        self._num_restarts_of_all += 1
        self._start_all()

    def _start_all(self) -> None:
        for task in self._tasks.names:
            self._start(task)

    def _start(self, task: str) -> None:
        self._tasks.start(task, self._num_restarts_of_all)
        self._watchdog.started(task)

    def _wait_for_cause(self) -> None:
        """Waits for the first cause: survivors often report first, and a frozen task is only found after a while."""
        deadline = self._clock.monotonic() + (CAUSE_SECS if self._meeting else SECONDARY_SECS)
        while all(map(is_consequence, self._attempt.failures)) and (self._meeting or self._launcher.tasks):
            is_late = self._clock.monotonic() > deadline and not self._watchdog.has_suspects
            if self._phase() is not Phase.RUNNING or is_late:
                break
            self._step()
        self._attempt.failures.sort(key=cause_order)

    def _collect_consequences(self) -> None:
        """Collects the consequences of the cause for the report."""
        deadline = self._clock.monotonic() + SECONDARY_SECS
        while self._launcher.tasks and self._clock.monotonic() < deadline:
            self._step()
        self._attempt.failures.sort(key=cause_order)
