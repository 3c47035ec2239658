"""A launcher that only plays its part, by a script of events, for what the launching process concludes."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tf2dist.config.schema import RunConfig
from tf2dist.errors import FailureRecord, TaskLostError
from tf2dist.launch import monitor, shutdown
from tf2dist.launch.console import Console
from tf2dist.launch.monitor import Watch

TASKS = ["worker-0", "worker-1"]
COMPLAINT = "lost another task: Error from /job:worker"


class Play:
    """A launcher whose tasks do what a script says, and the clock that goes with it.

    Args:
        script: events and the seconds at which they come.
        silent: a task that says nothing after a second.
        runs: whether that one runs all the same.
    """

    def __init__(
        self, log_dir: Path, script: list[tuple[float, dict[str, Any]]], silent: str = "", runs: bool = False
    ) -> None:
        self.log_dir, self._script, self._silent, self._runs = log_dir, script, silent, runs
        self.now, self.ready = 100.0, True
        self.tasks: dict[str, int] = {}
        self.received: list[int] = []
        self.reaps = True  # tells of the end of a task that was killed

    def start(self, task: str, restarts: int) -> None:
        (self.log_dir / f"{task}.error.json").unlink(missing_ok=True)
        self.tasks[task] = 1
        if restarts:
            self._silent = ""
            self._script += [(self.now + 1, ended(name, 0)) for name in TASKS if len(self.tasks) == len(TASKS)]
            self._script.append((self.now, {"event": "result", "task": TASKS[0], "summary": {"done": True}}))

    def events(self, timeout_secs: float) -> Iterator[dict[str, Any]]:
        self.now += timeout_secs
        assert self.now < 1000, "it waits for ever"
        for task in list(self.tasks):
            if task != self._silent or self.now < 101:
                yield {"event": "alive", "task": task}
        due = [event for at, event in self._script if at <= self.now]
        self._script = [(at, event) for at, event in self._script if at > self.now]
        for event in due:
            if event["event"] == "exited":
                if event["code"] == 0 and not event.get("early"):
                    yield {"event": "done", "task": event["task"]}
                self.tasks.pop(event["task"], None)
            if event["event"] == "SIGTERM":  # to the launching process
                self.received.append(signal.SIGTERM)
            yield event

    def runs(self, task: str) -> bool:
        return self._runs or task != self._silent or self.now < 101

    def signal(self, task: str, signum: int, alone: bool = False) -> None:
        if signum == signal.SIGKILL and self.reaps:
            self._script.append((self.now, ended(task, -signum)))

    def kill_all(self) -> list[dict[str, Any]]:
        self.tasks.clear()
        return []

    def give_up_on(self, task: str) -> NoReturn:
        raise TaskLostError(f"{task} does not end")


def ended(task: str, code: int) -> dict[str, Any]:
    return {"event": "exited", "task": task, "code": code, "time": 0.0}


def complain(log_dir: Path, task: str) -> None:
    FailureRecord(task, 0.0, TaskLostError.exit_code, COMPLAINT).write(log_dir)


def start_with_complaint(play: Play, who: str, task: str, restarts: int) -> None:
    Play.start(play, task, restarts)
    if task == who and not restarts:
        complain(play.log_dir, task)


def follow(play: Play, monkeypatch: pytest.MonkeyPatch, config: RunConfig, meeting: Any = None) -> Watch:
    """Watches it, by its clock."""
    clock = SimpleNamespace(monotonic=lambda: play.now, time=lambda: play.now, sleep=lambda secs: None)
    for module in (monitor, shutdown):
        monkeypatch.setattr(module, "time", clock)
    return Watch(play, Console(), config, meeting, play.received, lambda: None)  # type: ignore[arg-type]


def run(play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], max_restarts: int = 3) -> str:
    """Watches to the end; returns the warnings."""
    config = RunConfig(mode="sync", watchdog_secs=10.0, max_restarts=max_restarts)
    watched = follow(play, monkeypatch, config)
    assert watched.run(TASKS, TASKS[0], play.start)["done"]
    return capsys.readouterr().err
