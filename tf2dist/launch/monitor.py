"""Follows the tasks of a launcher: shows what they tell, restarts the lost, stops all in order."""

import signal
import time
from collections.abc import Callable
from typing import Any

from tf2dist.config.schema import RunConfig
from tf2dist.control import messages as control
from tf2dist.control.meeting import Meeting
from tf2dist.errors import FailureRecord, TaskFailure, TaskLostError, TrainingError
from tf2dist.launch.console import Console
from tf2dist.launch.failures import Ends, blames_another, complains, rank
from tf2dist.launch.launcher import KILL_TIMEOUT_SECS, Event, Launcher
from tf2dist.launch.restarts import RestartPolicy, Verdict, Vitals
from tf2dist.launch.shutdown import Stop
from tf2dist.launch.stalls import Stalls
from tf2dist.process.heartbeat import STACKS_SIGNAL
from tf2dist.signals import NAMES

POLL_SECS = 0.2
STACKS_SECS = 0.5  # for a task to write them
ECHO_SECS = 1.0  # the record of the task that failed first may arrive after the complaints of others
CAUSE_SECS = 3.0  # the same for another host's
LEAVE_SECS = 15.0  # for the other tasks, once the leader is done
FOLLOW_END_SECS = 120.0  # for a task whose leader, on another host, is done


class Watch:
    """One run, from the first task's start to the last one's end.

    Args:
        meeting: with the launching processes of the other hosts; None if all tasks are here.
        on_begun: called when the leader knows that the run can begin, or go on.
        received: the signals that this process has got, in order; they appear while it runs.
    """

    def __init__(
        self,
        launcher: Launcher,
        console: Console,
        config: RunConfig,
        meeting: Meeting | None,
        received: list[int],
        on_begun: Callable[[], None],
    ) -> None:
        self._launcher, self._console, self._received, self._on_begun = launcher, console, received, on_begun
        self._watchdog_secs, self._silence_secs = config.watchdog_secs, config.silence_secs
        self._policy = RestartPolicy(config.mode, config.max_restarts, whole_cluster=meeting is None)
        self._mode, self._meeting = config.mode, meeting
        self._stop = Stop(launcher, meeting, received, config.grace_secs, console.status)
        self._vitals = Vitals(launcher.runs, config.silence_secs)
        self._failures: list[FailureRecord] = []
        self._killed: dict[str, tuple[str, int]] = {}  # by us: why, and the exit code that this is worth
        self._killed_at: dict[str, float] = {}
        self._stalls = Stalls(console.status)
        self._done: set[str] = set()  # those that have done all that they had to do
        self._gone: dict[str, str] = {}  # on other hosts, and why
        self._restarted_at, self._generation = -float("inf"), 0
        self._summary: dict[str, Any] = {}
        self._saved_step: int | None = None
        self._leader = ""
        self._leave_by, self._is_over = float("inf"), False  # over: the leader is done, on another host
        self._ends = Ends(launcher.log_dir)

    def run(self, tasks: list[str], leader: str, start: Callable[[str, int], None]) -> dict[str, Any]:
        """Starts the tasks, and follows them to the end.

        Args:
            start: starts the task of this name; told how often all have been restarted.

        Returns:
            What the leader has sent as the result; empty if it runs elsewhere.

        Raises:
            TaskFailure: a task failed for good.
            Interrupted: by a signal; what could be saved is saved.
        """
        self._leader, self._tasks, self._start = leader, tasks, start
        for task in tasks:
            self._start_task(task)
        while self._launcher.tasks or (self._failures and not self._summary):
            self._step()
            if self._stop.is_asked and not self._summary:
                signum = self._stop.go_on(tasks, leader)
                if signum and (self._launcher.tasks or self._failures):  # otherwise all were done before it came
                    raise self._stop.outcome(signum, self._saved_step, leader, self._failures)
            elif self._failures and not self._summary:
                self._restart_or_fail()
            if leader in tasks and (leader not in self._launcher.tasks or leader in self._killed_at):
                self._leave_by = min(self._leave_by, time.monotonic() + LEAVE_SECS)
            if self._summary and (self._received or time.monotonic() > self._leave_by):
                break  # the result is whole; leaving the launcher stops who does not leave
            if leader not in tasks and time.monotonic() > self._leave_by:
                raise TaskLostError(f"{leader} was done {FOLLOW_END_SECS:.0f} s ago, and {tasks[0]} does not end")
        return self._summary

    def _step(self) -> None:
        for event in self._launcher.events(POLL_SECS):
            self._on_event(event)
        for heard in self._meeting.events() if self._meeting else ():
            self._on_meeting(heard)
        self._kill_frozen()
        self._kill_stalled()

    def _on_event(self, event: Event) -> None:
        task = event["task"]
        if task in self._launcher.tasks:
            self._vitals.saw(task, time.monotonic(), event.get("silent_secs"))
        match event["event"]:
            case "started" if task in self._killed_at:
                self._launcher.signal(task, signal.SIGKILL)  # it had no process then
            case "progress":
                self._console.progress(event)
            case "begun":
                self._saved_step, self._stop.has_begun = event["step"] or self._saved_step, True
                self._on_begun()
            case "message":
                self._console.status(event["text"])
            case "note":
                self._console.note(event["text"])
            case "warning":
                self._console.warn(event["text"])
            case "saved":
                self._saved_step, self._stop.has_saved = event["step"], event["stopping"]
            case "standing" | "stalled" if task in self._launcher.tasks:
                self._stalls.heard(event, time.monotonic())
            case "result":
                self._summary = {**event["summary"], "restarts": self._policy.restarts}
            case "done":
                self._done.add(task)
            case "exited":
                self._on_exit(event)

    def _on_meeting(self, event: control.MeetingEvent) -> None:
        """What has become of a task on another host."""
        match event:
            case control.Stop():
                self._stop.told = event.signum
            case control.Back():
                self._gone.pop(event.task, None)
            case control.Lost(task, why):
                self._on_end_elsewhere(task, TaskLostError.exit_code, why, was_lost=True)
            case control.Ended(task, code, message):
                self._on_end_elsewhere(task, code, message, was_lost=False)

    def _on_end_elsewhere(self, task: str, code: int, why: str, was_lost: bool) -> None:
        if code == 0 and task == self._leader:
            self._is_over, self._leave_by = True, time.monotonic() + FOLLOW_END_SECS
        elif code == 0 or self._summary:
            pass
        elif self._may_be_missed(task, code) and not blames_another(task, why):
            self._go_on_without(task, why)
        elif not (self._failures and blames_another(task, why)):  # an echo of what is known
            what = f"is gone ({why})" if was_lost else why
            self._failures.append(FailureRecord(task, time.time(), code, what, by_signal=was_lost))

    def _go_on_without(self, task: str, why: str) -> None:
        self._gone[task] = why
        if not self._failures:
            self._console.warn(f"{task} is gone ({why}); the others go on, and it may come back")
        for own in self._launcher.tasks:  # the call of one may wait for another's
            self._launcher.tell(own, {"event": "gone", "task": task})

    def _may_be_missed(self, task: str, code: int) -> bool:
        """Whether the others can go on without a task of another host."""
        is_worker = self._mode == "async" and task.startswith("worker-")
        return task.startswith("evaluator-") or (is_worker and code == TaskLostError.exit_code)

    def _on_exit(self, event: Event) -> None:
        task, code = event["task"], event["code"]
        self._vitals.forget(task)
        self._stalls.forget(task)
        self._killed_at.pop(task, None)
        if self._summary and code != 0:
            self._console.warn(f"{task} ended with code {code} after the result was known")
        elif code != 0 or (not self._summary and (task == self._leader or task not in self._done)):
            self._failures.append(self._ends.failure(event, *self._killed.pop(task, ("", TaskLostError.exit_code))))

    def _why_stalled(self, event: Event) -> str:
        """What is said of a task that makes no progress; without its workers a coordinator can make none."""
        gone = ", ".join(f"{task} is gone ({why})" for task, why in self._gone.items())
        while_gone = f" while {gone}" if gone else ""
        where = f" in {event['where']}" if event.get("where") else ""
        return f"made no progress for {event['secs']} s{where}{while_gone}, see the stacks in its log"

    def _kill_frozen(self) -> None:
        for task in self._vitals.lost(time.monotonic()):
            if self._launcher.runs(task):
                self._launcher.signal(task, STACKS_SIGNAL, alone=True)
                time.sleep(STACKS_SECS)
            self._kill(task, f"showed no sign of life for {self._silence_secs:.0f} s")
        for task, killed_at in self._killed_at.items():
            if time.monotonic() - killed_at > KILL_TIMEOUT_SECS and not self._summary:
                self._launcher.give_up_on(task)

    def _kill_stalled(self) -> None:
        """Kills who made no progress by its own fault; it says so again as long as it makes none."""
        now = time.monotonic()
        excused = now - max(self._restarted_at, self._vitals.awake_since) < self._watchdog_secs
        for event in self._stalls.look(now):
            if not (excused or (self._killed_at and not self._summary) or self._vitals.any_silent):
                # The user's own code would stand there again.
                code = (TrainingError if event.get("is_users") else TaskLostError).exit_code
                self._kill(event["task"], self._why_stalled(event), code)

    def _kill(self, task: str, why: str, code: int = TaskLostError.exit_code) -> None:
        if task in self._launcher.tasks:  # it may have ended since then
            self._killed[task], self._killed_at[task] = (why, code), time.monotonic()
            self._vitals.forget(task)
            self._launcher.signal(task, signal.SIGKILL)

    def _restart_or_fail(self) -> None:
        """Answers the failures since the last look.

        Raises:
            TaskFailure: no restart helps.
        """
        self._await_cause()
        if self._summary or self._stop.is_asked:
            return  # since then
        if self._is_over and all(map(complains, self._failures)):
            self._failures.clear()  # the others are not lost but done: it was started again too late
            return
        verdict = self._policy.judge(self._failures[0])
        if verdict is Verdict.FAIL and not self._meeting:
            self._collect_echo()
            if self._summary or (self._stop.is_asked and complains(self._failures[0])):
                return
            verdict = self._policy.judge(self._failures[0])
        if verdict is Verdict.FAIL:
            if any(failure.exit_code - 128 in NAMES for failure in self._failures):
                raise self._stop.interrupted(signal.SIGTERM, self._saved_step)  # another host was told to stop
            used_up = f"after {self._policy.restarts} restarts" if self._policy.is_used_up else ""
            raise TaskFailure(self._failures, used_up)
        lost, self._restarted_at = self._failures.pop(0), time.monotonic()
        if verdict is Verdict.RESTART_TASK:
            self._console.warn(f"{lost.task} {lost.message}; starting it again")
            self._start_task(lost.task)
        else:
            self._restart_all(lost)

    def _restart_all(self, lost: FailureRecord) -> None:
        saved = [event["step"] for event in self._launcher.kill_all() if event["event"] == "saved"]
        self._saved_step = max(saved, default=self._saved_step)
        for known in (self._vitals, self._failures, self._killed, self._stalls):
            known.clear()
        self._summary, self._leave_by, self._stop.has_begun = {}, float("inf"), False
        where = "" if self._saved_step is None else f" from the checkpoint at step {self._saved_step}"
        self._console.warn(f"{lost.task} {lost.message}; starting all tasks again{where}")
        self._generation += 1
        for task in self._tasks:
            self._start_task(task)

    def _start_task(self, task: str) -> None:
        self._start(task, self._generation)
        self._done.discard(task)
        self._killed_at.pop(task, None)
        self._vitals.saw(task, time.monotonic())  # not yet, but soon

    def _await_cause(self) -> None:
        """A task may complain before it is known what has become of the other: of one that is silent, soon."""
        deadline = time.monotonic() + (CAUSE_SECS if self._meeting else ECHO_SECS)
        while all(map(complains, self._failures)) and (self._meeting or self._launcher.tasks):
            suspects = self._killed_at or self._vitals.any_silent
            if self._summary or self._stop.is_asked or (time.monotonic() > deadline and not suspects):
                break
            self._step()
        self._failures.sort(key=rank)

    def _collect_echo(self) -> None:
        """Hears the others out."""
        deadline = time.monotonic() + ECHO_SECS
        while self._launcher.tasks and time.monotonic() < deadline:
            self._step()
        self._failures.sort(key=rank)
