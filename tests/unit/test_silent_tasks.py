"""What the launching process does about tasks that are silent or make no progress; see test_monitor.py."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.play import COMPLAINT, TASKS, Play, ended, follow, start_with_complaint, warnings_of
from tf2dist.config.schema import RunConfig
from tf2dist.errors import FailureRecord, TaskFailure, TaskLostError
from tf2dist.launch.messages import Started
from tf2dist.messages import Result, Stalled, Standing


def test_a_task_that_never_shows_up_is_frozen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play = Play(tmp_path, [], silent="worker-1")
    play.now = 101.0
    told = warnings_of(play, capsys)
    assert "worker-1 showed no sign of life for 6 s" in told


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
@pytest.mark.parametrize("runs", [False, True], ids=["frozen", "mute"])
def test_who_waits_for_a_silent_task_is_not_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asleep: bool, runs: bool
) -> None:
    """Also if the launcher was stopped when the task fell silent, and hears of the other one first."""
    play = Play(tmp_path, [(105.0, Stalled("worker-0", 10, "", False))], silent="worker-1", runs=runs)
    monkeypatch.setattr(play, "events", lambda secs: _sleep_once(play, secs) if asleep else Play.events(play, secs))
    told = warnings_of(play, capsys)
    assert told == "tf2dist: warning: worker-1 showed no sign of life for 6 s; starting all tasks again\n"


def _sleep_once(play: Play, timeout_secs: float) -> Iterator[Any]:
    if 102 < play.now < 103:
        play.now += 10
    yield from Play.events(play, timeout_secs)


def stalled(task: str, where: str = "", is_users: bool = False) -> Stalled:
    return Stalled(task, 605, where, is_users)


def test_who_stands_in_the_users_code_is_not_tried_again(tmp_path: Path) -> None:
    """Also if the one that waits for it complains first."""
    waits = stalled("worker-0", "SyncLoop.train (tf2dist/training/synchronous/loop.py:9)")
    play = Play(tmp_path, [(105.0, waits), (107.0, stalled("worker-1", "load (mine.py:3)", is_users=True))])
    config = RunConfig(mode="sync", watchdog_secs=10.0)
    with pytest.raises(TaskFailure) as caught:
        follow(play, config)
    assert caught.value.exit_code == 1
    said = "worker-1: made no progress for 605 s in load (mine.py:3), see the stacks in its log"
    assert str(caught.value) == said


def test_it_is_told_where_tasks_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a line for all that stand there, without those that may wait for them."""

    def standing(task: str, is_users: bool) -> Standing:
        where = "load (mine.py:3)" if is_users else "join (tf2dist/strategy.py:8)"
        return Standing(task, 30, where, is_users)

    script: list[tuple[float, Any]] = [
        (103.0, standing("worker-0", False)),
        (103.3, standing("worker-1", True)),
        (106.0, standing("worker-0", True)),
    ]
    script += [
        (106.5, standing("worker-1", True)),
        (110.0, Result(TASKS[0], {"done": 1})),
    ]
    script += [(111.0, ended(task, 0)) for task in TASKS]
    told = warnings_of(Play(tmp_path, script), capsys)
    assert told == "worker-1: in load (mine.py:3) for 30 s\nworker-0, worker-1: in load (mine.py:3) for 30 s\n"


def test_who_makes_no_progress_alone_is_stalled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play = Play(tmp_path, [(105.0, Stalled("worker-0", 10, "", False))])
    told = warnings_of(play, capsys)
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
        warnings_of(play, capsys, max_restarts=0)


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
    assert "worker-1 showed no sign of life for 6 s; starting all" in warnings_of(play, capsys)
    assert signals == [(signal.SIGUSR1, True)] * runs + [(signal.SIGKILL, False)]


def test_a_task_that_stalls_and_ends_at_once_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [(115.0, Stalled("worker-0", 10, "", False)), (115.0, ended("worker-0", 138))]
    play = Play(tmp_path, script)
    monkeypatch.setattr(play, "start", partial(start_with_complaint, play, "worker-0"))
    told = warnings_of(play, capsys)
    assert told == f"tf2dist: warning: worker-0 {COMPLAINT}; starting all tasks again\n"


def test_a_task_without_a_process_is_killed_once_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fork server was stopped when it was asked for one."""
    play = Play(tmp_path, [(108.0, Started("worker-1", 1))], silent="worker-1")
    play.reaps = False
    signals: list[tuple[float, int]] = []

    def note(task: str, signum: int, alone: bool = False) -> None:
        signals.append((play.now, signum))
        play.reaps = play.now >= 108
        Play.signal(play, task, signum)

    monkeypatch.setattr(play, "signal", note)
    assert "worker-1 showed no sign of life for 6 s; starting all" in warnings_of(play, capsys)
    assert [signum for at, signum in signals if at >= 108] == [signal.SIGKILL]


def test_a_killed_task_whose_end_nobody_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play = Play(tmp_path, [], silent="worker-1")
    play.reaps = False
    with pytest.raises(TaskLostError, match="worker-1 does not end"):
        warnings_of(play, capsys)
    assert play.now < 120
