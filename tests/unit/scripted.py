"""A launcher that follows a script of events, for tests of the decisions of the launching process."""

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tf2dist.cluster.spec import Cluster, Place
from tf2dist.config.schema import RunConfig
from tf2dist.errors import FailureRecord, TaskLostError
from tf2dist.hosts.protocol import MeetingEvent
from tf2dist.launch.console import Console
from tf2dist.launch.host_run import HostRun
from tf2dist.launch.monitor import Monitor, Tasks
from tf2dist.messages import Alive, Done, Exited, ResultMessage
from tf2dist.signals import StopRequest

TASKS = ["worker-0", "worker-1"]
ECHO = "lost another task: Error from /job:worker"


@dataclass(frozen=True)
class Signalled:
    """In a script: the launching process gets SIGTERM."""


@dataclass(frozen=True)
class EndedEarly(Exited):
    """In a script: a task ends without having said that it is done."""


class ScriptedLauncher:
    """A launcher whose tasks follow a script, and the clock of that script.

    Args:
        script: messages and the seconds at which they come.
        silent: a task that sends nothing after the first second.
        runs: whether that task runs nevertheless.
    """

    def __init__(
        self, log_dir: Path, script: Sequence[tuple[float, Any]], silent: str = "", runs: bool = False
    ) -> None:
        self.log_dir, self._silent, self._runs = log_dir, silent, runs
        self._script = list(script)
        self.now = 100.0
        self.ready = True
        self.tasks: dict[str, int] = {}
        self.stop = StopRequest()
        self.sent: list[tuple[str, Any]] = []  # to tasks
        self.signalled: list[tuple[str, int]] = []
        self.reaps = True  # whether the end of a killed task is reported

    def start(self, task: str, restarts: int) -> None:
        (self.log_dir / f"{task}.error.json").unlink(missing_ok=True)
        self.tasks[task] = 1
        if restarts:
            self._silent = ""
            self._script += [(self.now + 1, ended(name, 0)) for name in TASKS if len(self.tasks) == len(TASKS)]
            self._script.append((self.now, ResultMessage({"done": True}, task=TASKS[0])))

    def events(self, timeout_secs: float) -> Iterator[Any]:
        self.now += timeout_secs
        assert self.now < 1000, "the wait does not end"
        for task in list(self.tasks):
            if task != self._silent or self.now < 101:
                yield Alive(task=task)
        due = [event for at, event in self._script if at <= self.now]
        self._script = [(at, event) for at, event in self._script if at > self.now]
        for event in due:
            if isinstance(event, Signalled):
                self.stop.received.append(signal.SIGTERM)
                continue
            if isinstance(event, Exited):
                if event.code == 0 and not isinstance(event, EndedEarly):
                    yield Done(task=event.task)
                self.tasks.pop(event.task, None)
            yield event

    def runs(self, task: str) -> bool:
        return self._runs or task != self._silent or self.now < 101

    def signal(self, task: str, signum: int, alone: bool = False) -> None:
        self.signalled.append((task, signum))
        if signum == signal.SIGKILL and self.reaps:
            self._script.append((self.now, ended(task, -signum)))

    def kill_all(self) -> list[Any]:
        self.tasks.clear()
        return []

    def give_up_on(self, task: str) -> NoReturn:
        raise TaskLostError(f"{task} does not end")

    def log_of(self, task: str) -> str:
        return ""

    def send_to_task(self, task: str, message: Any) -> None:
        self.sent.append((task, message))

    # The clock.

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        pass


class ScriptedMeeting:
    """A meeting whose events about tasks on other hosts follow a script."""

    def __init__(self, launcher: ScriptedLauncher, script: list[tuple[float, MeetingEvent]]) -> None:
        self._play, self._script = launcher, script

    def events(self) -> list[MeetingEvent]:
        due = [event for at, event in self._script if at <= self._play.now]
        self._script = [(at, event) for at, event in self._script if at > self._play.now]
        return due


def ended(task: str, code: int) -> Exited:
    return Exited(task, code, 0.0)


def write_echo(log_dir: Path, task: str) -> None:
    record = FailureRecord(task, 0.0, TaskLostError.exit_code, ECHO)
    record.path(log_dir, task).write_text(record.as_json())


def start_with_echo(launcher: ScriptedLauncher, who: str, task: str, restarts: int) -> None:
    ScriptedLauncher.start(launcher, task, restarts)
    if task == who and not restarts:
        write_echo(launcher.log_dir, task)


def host_run(config: RunConfig, run_dir: Path, stop: StopRequest | None = None, place: Place | None = None) -> HostRun:
    """A run of a cluster of one task, unless `place` names another one."""
    cluster = Cluster(config.mode, {"worker": ("127.0.0.1:2222",)}, is_managed=True)
    return HostRun(config, place or Place(cluster, cluster.leader), run_dir, Console(), 0.0, stop or StopRequest())


def follow(
    launcher: ScriptedLauncher,
    config: RunConfig,
    tasks: list[str] = TASKS,
    leader: str = "",
    start: Callable[[str, int], None] | None = None,
    meeting: Any = None,
    place: Place | None = None,
) -> dict[str, Any]:
    """Monitors the script to its end, by its own clock; returns the result."""
    run = host_run(config, launcher.log_dir, launcher.stop, place)
    monitor = Monitor(run, launcher, meeting, lambda: None, clock=launcher)  # type: ignore[arg-type]
    return monitor.run(Tasks(tasks, leader or tasks[0], start or launcher.start))


def warnings_of(launcher: ScriptedLauncher, capsys: pytest.CaptureFixture[str], max_restarts: int = 3) -> str:
    """Monitors a synchronous run to its result; returns the warnings."""
    assert follow(launcher, RunConfig(mode="sync", watchdog_secs=10.0, max_restarts=max_restarts))["done"]
    return capsys.readouterr().err
