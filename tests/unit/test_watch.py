"""What the launching process concludes from what it hears, with a launcher that only plays its part."""

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tf2dist import ends, stop, watch
from tf2dist.config import RunConfig
from tf2dist.console import Console
from tf2dist.errors import FailureRecord, Interrupted, TaskFailure, TaskLostError
from tf2dist.watch import Watch

TASKS = ["worker-0", "worker-1"]
COMPLAINT = "lost another task: Error from /job:worker"


class Play:
    """A launcher whose tasks do what a script says, and the clock that goes with it.

    Args:
        script: events and the seconds at which they come.
        silent: a task that says nothing after a second.
    """

    def __init__(self, log_dir: Path, script: list[tuple[float, dict[str, Any]]], silent: str = "") -> None:
        self.log_dir, self._script, self._silent = log_dir, script, silent
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
                self.tasks.pop(event["task"], None)
            if event["event"] == "SIGTERM":  # to the launching process
                self.received.append(signal.SIGTERM)
            yield event

    def signal(self, task: str, signum: int) -> None:
        if signum == signal.SIGKILL and self.reaps:
            self._script.append((self.now, ended(task, -signum)))

    def kill_all(self) -> list[dict[str, Any]]:
        self.tasks.clear()
        return []

    def give_up(self, why: str) -> NoReturn:
        raise TaskLostError(why)


def ended(task: str, code: int) -> dict[str, Any]:
    return {"event": "exited", "task": task, "code": code, "time": 0.0}


def complain(log_dir: Path, task: str) -> None:
    FailureRecord(task, 0.0, TaskLostError.exit_code, COMPLAINT).write(log_dir)


def run(play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], max_restarts: int = 3) -> str:
    """Watches to the end; returns the warnings."""
    clock = SimpleNamespace(monotonic=lambda: play.now, time=lambda: play.now)
    monkeypatch.setattr(watch, "time", clock)
    config = RunConfig(mode="sync", watchdog_secs=10.0, max_restarts=max_restarts)
    watched = Watch(play, Console(), config, None, [], lambda: None)  # type: ignore[arg-type]
    assert watched.run(TASKS, TASKS[0], play.start)["done"]
    return capsys.readouterr().err


BEGUN = {"event": "begun", "task": TASKS[0], "step": 0}


@pytest.mark.parametrize(
    ("script", "patience", "told"),
    [
        ([], stop.START_SECS, ""),
        ([(102.0, BEGUN)], RunConfig().grace_secs, "; nothing was saved"),
        ([(102.0, BEGUN), (103.0, ended(TASKS[1], -9))], stop.START_SECS, ""),  # all begin again
        ([(105.0, BEGUN)], stop.START_SECS, "; nothing was saved"),
    ],
    ids=["before", "after", "again", "meanwhile"],
)
def test_a_stop_takes_its_time_only_if_there_is_something_to_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: list[tuple[float, dict[str, Any]]],
    patience: float,
    told: str,
) -> None:
    play = Play(tmp_path, [*script, (104.5, {"event": "SIGTERM", "task": ""})])
    for module in (watch, stop):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: play.now, time=lambda: play.now))
    watched = Watch(play, Console(), RunConfig(mode="sync"), None, play.received, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(Interrupted, match=f"^stopped by SIGTERM{told}$"):
        watched.run(TASKS, TASKS[0], lambda task, restarts: play.tasks.update({task: 1}))
    assert play.now - 104.5 == pytest.approx(patience, abs=2 * watch.POLL_SECS)


@pytest.mark.parametrize("saved_at", [103.0, 105.5])  # the leader may have heard of the stop from another host's task
@pytest.mark.parametrize(("stopping", "told"), [(False, "not saved since step 40"), (True, "saved at step 40")])
def test_a_stop_says_whether_it_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_at: float, stopping: bool, told: str
) -> None:
    saved = {"event": "saved", "task": TASKS[0], "step": 40, "stopping": stopping}
    script: list[tuple[float, dict[str, Any]]] = [(102.0, BEGUN), (saved_at, saved)]
    play = Play(tmp_path, [*script, (104.5, {"event": "SIGTERM", "task": ""}), (106.0, ended(TASKS[0], 143))])
    for module in (watch, stop):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: play.now, time=lambda: play.now))
    watched = Watch(play, Console(), RunConfig(mode="sync"), None, play.received, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(Interrupted, match=f"; {told}, where the same command with run_dir goes on"):
        watched.run(TASKS, TASKS[0], lambda task, restarts: play.tasks.update({task: 1}))


class Elsewhere:
    """A meeting that hears of the end of the leader on another host."""

    def __init__(self, play: Play, ended_at: float) -> None:
        self._play, self._ended_at = play, ended_at

    def events(self) -> list[dict[str, Any]]:
        if self._play.now < self._ended_at:
            return []
        self._ended_at = float("inf")
        return [{"event": "ended", "task": "chief-0", "code": 0, "message": ""}]


@pytest.mark.parametrize(("ended_at", "fails"), [(102.0, False), (1000.0, True)], ids=["late", "in time"])
def test_a_task_that_finds_nobody_since_the_run_is_done_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_at: float, fails: bool
) -> None:
    complain(tmp_path, "worker-0")
    play = Play(tmp_path, [(104.0, ended("worker-0", 138))])
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: play.now, time=lambda: play.now))
    meeting: Any = Elsewhere(play, ended_at)
    watched = Watch(play, Console(), RunConfig(mode="async"), meeting, [], lambda: None)  # type: ignore[arg-type]
    start = partial(_start_with_complaint, play)
    with pytest.raises(TaskFailure, match="worker-0") if fails else contextlib.nullcontext():
        assert watched.run(["worker-0"], "chief-0", start) == {}


def test_a_complaint_waits_for_a_frozen_culprit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complain(tmp_path, "worker-0")
    play = Play(tmp_path, [(104.0, ended("worker-0", 138))], silent="worker-1")
    monkeypatch.setattr(play, "start", lambda task, restarts: _start_with_complaint(play, task, restarts))
    told = run(play, monkeypatch, capsys)
    assert told == "tf2dist: warning: worker-1 showed no sign of life for 6 s; starting all tasks again\n"


def test_a_complaint_waits_for_the_end_of_the_culprit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path, [(104.0, ended("worker-0", 138)), (104.7, ended("worker-1", -9))])
    monkeypatch.setattr(play, "start", lambda task, restarts: _start_with_complaint(play, task, restarts))
    told = run(play, monkeypatch, capsys)
    assert told == "tf2dist: warning: worker-1 was killed by SIGKILL; starting all tasks again\n"


def test_a_complaint_alone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(
        tmp_path,
        [
            (102.0, {"event": "saved", "task": "worker-0", "step": 7, "stopping": False}),
            (104.0, ended("worker-0", 138)),
        ],
    )
    monkeypatch.setattr(play, "start", lambda task, restarts: _start_with_complaint(play, task, restarts))
    told = run(play, monkeypatch, capsys)
    assert told == f"tf2dist: warning: worker-0 {COMPLAINT}; starting all tasks again from the checkpoint at step 7\n"


def _start_with_complaint(play: Play, task: str, restarts: int) -> None:
    Play.start(play, task, restarts)
    if task == "worker-0" and not restarts:
        complain(play.log_dir, task)


def test_a_task_that_never_shows_up_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path, [], silent="worker-1")
    play.now = 101.0
    told = run(play, monkeypatch, capsys)
    assert "worker-1 showed no sign of life for 6 s" in told


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_who_waits_for_a_frozen_task_is_not_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asleep: bool
) -> None:
    """Also if the launcher was stopped when the task froze, and hears of the other one first."""
    play = Play(tmp_path, [(105.0, {"event": "stalled", "task": "worker-0"})], silent="worker-1")
    monkeypatch.setattr(play, "events", lambda secs: _sleep_once(play, secs) if asleep else Play.events(play, secs))
    told = run(play, monkeypatch, capsys)
    assert told == "tf2dist: warning: worker-1 showed no sign of life for 6 s; starting all tasks again\n"


def _sleep_once(play: Play, timeout_secs: float) -> Iterator[dict[str, Any]]:
    if 102 < play.now < 103:
        play.now += 10
    yield from Play.events(play, timeout_secs)


def test_who_makes_no_progress_alone_is_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path, [(105.0, {"event": "stalled", "task": "worker-0"})])
    told = run(play, monkeypatch, capsys)
    assert "worker-0 made no progress for 10 s, see the stacks in its log; starting all tasks again" in told


def test_a_fork_server_that_does_not_tell_of_an_end_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path, [], silent="worker-1")
    play.reaps = False
    with pytest.raises(TaskLostError, match="does not tell of the end of worker-1, killed 10 s ago"):
        run(play, monkeypatch, capsys)
    assert play.now < 120


def test_a_kill_by_the_kernel_for_want_of_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "vmstat"
    events.write_text("pgfault 0\noom_kill 1\n")
    monkeypatch.setattr(ends, "_oom_counts", lambda: [tmp_path / "none", events])
    play = Play(tmp_path, [(104.0, ended("worker-1", -9))])
    monkeypatch.setattr(play, "events", lambda secs: _run_out_of_memory(play, secs, events))
    with pytest.raises(TaskFailure, match="worker-1: was killed by SIGKILL: out of memory"):
        run(play, monkeypatch, capsys, max_restarts=0)


def _run_out_of_memory(play: Play, timeout_secs: float, events: Path) -> Iterator[dict[str, Any]]:
    if play.now > 103:
        events.write_text("pgfault 0\noom_kill 2\n")
    yield from Play.events(play, timeout_secs)
