"""Follows the tasks of a launcher: shows what they tell, restarts the lost, stops all in order."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tf2dist.config import RunConfig
from tf2dist.console import Console
from tf2dist.control import Meeting
from tf2dist.errors import FailureRecord, Interrupted, TaskFailure, TaskLostError
from tf2dist.launcher import START_TIMEOUT_SECS, Event, Launcher
from tf2dist.policy import RestartPolicy, Verdict, Vitals

POLL_SECS = 0.2
ECHO_SECS = 1.0  # the record of the task that failed first may arrive after the complaints of others
CAUSE_SECS = 3.0  # the same for another host's
LEAVE_SECS = 15.0  # for the other tasks, once the leader is done
FOLLOW_SECS = 5.0  # for a stop that another host's task leads
OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")


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
        self._launcher, self._console, self._received = launcher, console, received
        self._on_begun = on_begun
        self._grace_secs, self._watchdog_secs = config.grace_secs, config.watchdog_secs
        self._silence_secs = config.silence_secs
        self._policy = RestartPolicy(config.mode, config.max_restarts, whole_cluster=meeting is None)
        self._mode, self._meeting, self._told_to_stop = config.mode, meeting, 0
        self._vitals = Vitals(config.silence_secs)
        self._failures: list[FailureRecord] = []
        self._killed: dict[str, str] = {}  # by us, and why
        self._gone: dict[str, str] = {}  # on other hosts, and why
        self._restarted_at = -float("inf")
        self._generation = 0
        self._summary: dict[str, Any] = {}
        self._saved_step: int | None = None
        self._stop_by: float | None = None
        self._leader = ""
        self._leave_by = float("inf")
        self._oom_kills = _oom_kills()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECS
        while not self._launcher.ready:
            self._step()
            if self._received:
                raise Interrupted(self._received[0])
            if time.monotonic() > deadline:
                raise TaskLostError(f"TensorFlow was not imported within {START_TIMEOUT_SECS:.0f} s")

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
            start(task, 0)
        while self._launcher.tasks:
            self._step()
            if self._received or self._told_to_stop:
                self._stop_in_order()
            elif self._failures:
                self._restart_or_fail()
            if leader not in self._launcher.tasks:
                self._leave_by = min(self._leave_by, time.monotonic() + LEAVE_SECS)
            if self._summary and time.monotonic() > self._leave_by:
                break  # the result is whole; leaving the launcher stops who does not leave
        if self._failures:
            self._restart_or_fail()
        return self._summary

    def _step(self) -> None:
        for event in self._launcher.events(POLL_SECS):
            self._on_event(event)
        for event in self._meeting.events() if self._meeting else ():
            self._on_meeting(event)
        self._kill_frozen()

    def _on_event(self, event: Event) -> None:
        task = event["task"]
        if task in self._launcher.tasks:
            self._vitals.saw(task, time.monotonic())
        match event["event"]:
            case "progress":
                self._console.progress(event)
            case "begun":
                if task == self._leader:
                    self._on_begun()
            case "message":
                self._console.status(event["text"])
            case "warning":
                self._console.warn(event["text"])
            case "saved":
                self._saved_step = event["step"]
            case "stalled" if time.monotonic() - self._restarted_at > self._watchdog_secs:
                self._kill(task, self._stalled())
            case "result":
                self._summary = {**event["summary"], "restarts": self._policy.restarts}
            case "exited":
                self._on_exit(event)

    def _on_meeting(self, event: Event) -> None:
        """What has become of a task on another host."""
        task, lost = event["task"], TaskLostError.exit_code
        was_lost = event["event"] == "lost"
        code, why = (event["code"], event["message"]) if event["event"] == "ended" else (lost, event.get("why", ""))
        if event["event"] == "stop":
            self._told_to_stop = event["signum"]
        elif event["event"] == "back":
            self._gone.pop(task, None)
        elif code == 0 or self._summary:
            pass
        elif code == lost and self._mode == "async" and task.startswith("worker-"):
            self._gone[task] = why
            self._console.warn(f"{task} is gone ({why}); the others go on, and it may come back")
            for own in self._launcher.tasks:  # the call of one may wait for another's
                self._launcher.tell(own, {"event": "gone", "task": task})
        else:
            what = f"is gone ({why})" if was_lost else why
            self._failures.append(FailureRecord(task, time.time(), code, what, by_signal=was_lost))

    def _on_exit(self, event: Event) -> None:
        task, code = event["task"], event["code"]
        self._vitals.forget(task)
        if self._summary and code != 0:
            self._console.warn(f"{task} ended with code {code} after the result was known")
        elif code != 0 or (task == self._leader and not self._summary):
            self._failures.append(self._failure(event))

    def _stalled(self) -> str:
        """What is said of a task that makes no progress; without its workers a coordinator can make none."""
        gone = ", ".join(f"{task} is gone ({why})" for task, why in self._gone.items())
        while_gone = f" while {gone}" if gone else ""
        return f"made no progress for {self._watchdog_secs:.0f} s{while_gone}, see the stacks in its log"

    def _kill_frozen(self) -> None:
        for task in self._vitals.frozen(time.monotonic()):
            self._kill(task, f"showed no sign of life for {self._silence_secs:.0f} s")

    def _kill(self, task: str, why: str) -> None:
        self._killed[task] = why
        self._vitals.forget(task)
        self._launcher.signal(task, signal.SIGKILL)

    def _failure(self, event: Event) -> FailureRecord:
        """The record that the task left, or what can be said of one that could not leave any."""
        task, code = event["task"], event["code"]
        record = FailureRecord.read(self._launcher.log_dir, task)
        if record:
            return record
        path = self._launcher.log_dir / f"{task}.log"
        tail = "\n".join(path.read_text(errors="replace").splitlines()[-30:]) if path.exists() else ""
        if code >= 0:
            return FailureRecord(task, event["time"], code or 1, f"ended with exit code {code}", tail)
        name = signal.strsignal(-code) if -code not in set(signal.Signals) else signal.Signals(-code).name
        what = self._killed.pop(task, f"was killed by {name}")
        if -code == signal.SIGKILL and _oom_kills() > self._oom_kills:
            self._oom_kills, what = _oom_kills(), f"was killed by {name}: out of memory"
        return FailureRecord(task, event["time"], TaskLostError.exit_code, what, by_signal=True)

    def _restart_or_fail(self) -> None:
        """Answers the failures since the last look.

        Raises:
            TaskFailure: they cannot be answered by a restart.
        """
        verdict = self._policy.judge(self._failures[0])
        if verdict is Verdict.FAIL:
            self._collect_echo()
            self._failures.sort(key=_rank)
            verdict = self._policy.judge(self._failures[0])
        if verdict is Verdict.FAIL:
            if any(failure.exit_code in (128 + signal.SIGTERM, 128 + signal.SIGINT) for failure in self._failures):
                raise self._interrupted(signal.SIGTERM)  # another host was told to stop
            raise self._failed()
        lost = self._failures.pop(0)
        self._restarted_at = time.monotonic()
        if verdict is Verdict.RESTART_TASK:
            self._console.warn(f"{lost.task} {lost.message}; starting it again")
            self._start(lost.task, self._generation)
        else:
            self._restart_all(lost)

    def _restart_all(self, lost: FailureRecord) -> None:
        for event in self._launcher.kill_all():
            if event["event"] == "saved":
                self._saved_step = event["step"]
        self._vitals.clear()
        self._failures.clear()
        self._killed.clear()
        self._summary = {}
        where = "step 0" if self._saved_step is None else f"the checkpoint at step {self._saved_step}"
        self._console.warn(f"{lost.task} {lost.message}; starting all tasks again from {where}")
        self._generation += 1
        for task in self._tasks:
            self._start(task, self._generation)

    def _failed(self) -> TaskFailure:
        return TaskFailure(self._failures, f"after {self._policy.restarts} restarts" if self._policy.is_used_up else "")

    def _collect_echo(self) -> None:
        """Hears the others out; on many hosts only as long as nobody has named a cause."""
        deadline = time.monotonic() + (CAUSE_SECS if self._meeting else ECHO_SECS)
        while time.monotonic() < deadline:
            if self._meeting and min(map(_rank, self._failures))[0] < 2:
                return
            if not self._meeting and not self._launcher.tasks:
                return
            self._step()

    def _stop_in_order(self) -> None:
        """Has the leader save and end, and the others with it, as long as there is time and patience."""
        now = time.monotonic()
        if self._stop_by is None:
            # The leader is the one that saves; if it is on another host, it has the shorter time.
            self._stop_by = now + self._grace_secs + (0.0 if self._leader in self._tasks else FOLLOW_SECS)
            self._console.status("stopping")
            if self._meeting and not self._told_to_stop:
                self._meeting.stop(self._received[0])
            for task in list(self._launcher.tasks):
                self._launcher.signal(task, signal.SIGTERM)
        leader_ended = self._leader in self._tasks and self._leader not in self._launcher.tasks
        if leader_ended or now > self._stop_by or len(self._received) > 1 or not self._launcher.tasks:
            raise self._interrupted((self._received or [self._told_to_stop])[0])

    def _interrupted(self, signum: int) -> Interrupted:
        if self._saved_step is None:
            return Interrupted(signum)
        return Interrupted(signum, f"; saved at step {self._saved_step}, where the same command with run_dir goes on")


def _rank(failure: FailureRecord) -> tuple[int, float]:
    """Puts the cause before the complaints of others about it, also if those were earlier."""
    complains = failure.exit_code == TaskLostError.exit_code and not failure.by_signal
    return (0 if failure.by_signal else 2 if complains else 1, failure.time)


def _oom_kills() -> int:
    """How many processes of this control group the kernel has killed for want of memory."""
    try:
        return int(dict(line.split() for line in OOM_EVENTS.read_text().splitlines())["oom_kill"])
    except (OSError, KeyError, ValueError):
        return 0
