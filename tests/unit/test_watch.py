"""What the launching process concludes from what it hears, with a launcher that only plays its part."""

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.play import COMPLAINT, TASKS, Play, complain, ended, follow, start_with_complaint
from tf2dist import ends
from tf2dist.config import RunConfig
from tf2dist.errors import FailureRecord, TaskFailure, TaskLostError


def run(play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], max_restarts: int = 3) -> str:
    """Watches to the end; returns the warnings."""
    config = RunConfig(mode="sync", watchdog_secs=10.0, max_restarts=max_restarts)
    watched = follow(play, monkeypatch, config)
    assert watched.run(TASKS, TASKS[0], play.start)["done"]
    return capsys.readouterr().err


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_result_after_a_complaint_is_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], max_restarts: int
) -> None:
    result = {"event": "result", "task": TASKS[0], "summary": {"done": True}}
    play = Play(tmp_path, [(104.0, ended("worker-1", 138)), (104.5, result), (106.0, ended(TASKS[0], 0))])
    watched = follow(play, monkeypatch, RunConfig(mode="sync", max_restarts=max_restarts))
    assert watched.run(TASKS, TASKS[0], partial(start_with_complaint, play, "worker-1"))["done"]
    assert "again" not in capsys.readouterr().err


def test_a_result_ends_the_wait_for_the_cause_of_a_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here that of a task which is frozen, and whose end nobody tells."""
    result = {"event": "result", "task": "chief-0", "summary": {"done": True}}
    script = [(104.0, ended("worker-1", 138)), (104.5, result), (105.0, ended("chief-0", 0))]
    play = Play(tmp_path, script, silent="worker-2")
    play.reaps = False
    watched = follow(play, monkeypatch, RunConfig(mode="async"))
    tasks = ["chief-0", "worker-1", "worker-2"]
    assert watched.run(tasks, tasks[0], partial(start_with_complaint, play, "worker-1"))["done"]
    assert play.now < 130


class Elsewhere:
    """A meeting that hears of the end of the leader on another host."""

    def __init__(self, play: Play, ended_at: float) -> None:
        self._play, self._ended_at = play, ended_at

    def events(self) -> list[dict[str, Any]]:
        if self._play.now < self._ended_at:
            return []
        self._ended_at = float("inf")
        return [{"event": "ended", "task": "chief-0", "code": 0, "message": ""}]


@pytest.mark.parametrize(("ended_at", "fails"), [(102.0, False), (105.0, False), (1000.0, True)])
def test_a_task_that_finds_nobody_since_the_run_is_done_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_at: float, fails: bool
) -> None:
    complain(tmp_path, "worker-0")
    play = Play(tmp_path, [(104.0, ended("worker-0", 138))])
    watched = follow(play, monkeypatch, RunConfig(mode="async"), Elsewhere(play, ended_at))
    start = partial(start_with_complaint, play, "worker-0")
    with pytest.raises(TaskFailure, match="worker-0") if fails else contextlib.nullcontext():
        assert watched.run(["worker-0"], "chief-0", start) == {}


def test_a_complaint_waits_for_a_frozen_culprit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complain(tmp_path, "worker-0")
    play = Play(tmp_path, [(104.0, ended("worker-0", 138))], silent="worker-1")
    monkeypatch.setattr(play, "start", partial(start_with_complaint, play, "worker-0"))
    told = run(play, monkeypatch, capsys)
    assert told == "tf2dist: warning: worker-1 showed no sign of life for 6 s; starting all tasks again\n"


def test_a_complaint_waits_for_the_end_of_the_culprit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path, [(104.0, ended("worker-0", 138)), (104.7, ended("worker-1", -9))])
    monkeypatch.setattr(play, "start", partial(start_with_complaint, play, "worker-0"))
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
    monkeypatch.setattr(play, "start", partial(start_with_complaint, play, "worker-0"))
    told = run(play, monkeypatch, capsys)
    assert told == f"tf2dist: warning: worker-0 {COMPLAINT}; starting all tasks again from the checkpoint at step 7\n"


def test_a_task_that_never_shows_up_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path, [], silent="worker-1")
    play.now = 101.0
    told = run(play, monkeypatch, capsys)
    assert "worker-1 showed no sign of life for 6 s" in told


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
@pytest.mark.parametrize("runs", [False, True], ids=["frozen", "mute"])
def test_who_waits_for_a_silent_task_is_not_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asleep: bool, runs: bool
) -> None:
    """Also if the launcher was stopped when the task fell silent, and hears of the other one first."""
    play = Play(tmp_path, [(105.0, {"event": "stalled", "task": "worker-0"})], silent="worker-1", runs=runs)
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


@pytest.mark.parametrize(("code", "wins"), [(1, "showed no sign of life for 6 s"), (3, "the loss is nan")])
def test_what_a_killed_task_makes_of_the_kill_is_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, wins: str
) -> None:
    """But an error of its own is, which was on its way."""
    play = Play(tmp_path, [], silent="worker-1", runs=True)

    def leave_word(task: str, signum: int, alone: bool = False) -> None:
        FailureRecord(task, play.now, code, "the loss is nan").write(tmp_path)
        Play.signal(play, task, signum)

    monkeypatch.setattr(play, "signal", leave_word)
    with pytest.raises(TaskFailure, match=f"worker-1: {wins}"):
        run(play, monkeypatch, capsys, max_restarts=0)


@pytest.mark.parametrize("runs", [False, True], ids=["frozen", "mute"])
def test_only_a_task_that_runs_is_waited_for_to_write_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: bool
) -> None:
    """Many may be frozen at once."""
    play = Play(tmp_path, [], silent="worker-1", runs=runs)
    signals: list[tuple[int, bool]] = []

    def note(task: str, signum: int, alone: bool = False) -> None:
        signals.append((signum, alone))
        Play.signal(play, task, signum)

    monkeypatch.setattr(play, "signal", note)
    assert "worker-1 showed no sign of life for 6 s; starting all" in run(play, monkeypatch, capsys)
    assert signals == [(signal.SIGUSR1, True)] * runs + [(signal.SIGKILL, False)]


def test_a_task_that_stalls_and_ends_at_once_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [(115.0, {"event": "stalled", "task": "worker-0"}), (115.0, ended("worker-0", 138))]
    play = Play(tmp_path, script)
    monkeypatch.setattr(play, "start", partial(start_with_complaint, play, "worker-0"))
    told = run(play, monkeypatch, capsys)
    assert told == f"tf2dist: warning: worker-0 {COMPLAINT}; starting all tasks again\n"


def test_a_task_without_a_process_is_killed_once_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fork server was stopped when it was asked for one."""
    play = Play(tmp_path, [(108.0, {"event": "started", "task": "worker-1"})], silent="worker-1")
    play.reaps = False
    signals: list[tuple[float, int]] = []

    def note(task: str, signum: int, alone: bool = False) -> None:
        signals.append((play.now, signum))
        play.reaps = play.now >= 108
        Play.signal(play, task, signum)

    monkeypatch.setattr(play, "signal", note)
    assert "worker-1 showed no sign of life for 6 s; starting all" in run(play, monkeypatch, capsys)
    assert [signum for at, signum in signals if at >= 108] == [signal.SIGKILL]


def test_a_killed_task_whose_end_nobody_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path, [], silent="worker-1")
    play.reaps = False
    with pytest.raises(TaskLostError, match="worker-1 does not end"):
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
