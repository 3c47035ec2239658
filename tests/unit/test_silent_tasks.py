"""What the launching process does about tasks that are silent or make no progress; see test_monitor.py."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scripted import ECHO, TASKS, ScriptedLauncher, ended, follow, start_with_echo, warnings_of
from tf2dist.config.schema import RunConfig
from tf2dist.errors import FailureRecord, TaskFailure, TaskLostError
from tf2dist.messages import LongCall, ResultMessage, Stalled, Started


def test_a_task_that_is_silent_from_its_start_is_frozen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = ScriptedLauncher(tmp_path, [], silent="worker-1")
    launcher.now = 101.0
    printed = warnings_of(launcher, capsys)
    assert "worker-1 showed no sign of life for 6 s" in printed


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
@pytest.mark.parametrize("runs", [False, True], ids=["frozen", "mute"])
def test_a_task_that_waits_for_a_silent_one_is_not_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asleep: bool, runs: bool
) -> None:
    """Also if the launcher was stopped when the task fell silent, and first gets the other task's report."""
    launcher = ScriptedLauncher(
        tmp_path, [(105.0, Stalled(10, "", False, task="worker-0"))], silent="worker-1", runs=runs
    )
    monkeypatch.setattr(
        launcher,
        "events",
        lambda secs: _sleep_once(launcher, secs) if asleep else ScriptedLauncher.events(launcher, secs),
    )
    printed = warnings_of(launcher, capsys)
    assert printed == "tf2dist: warning: worker-1 showed no sign of life for 6 s; starting all tasks again\n"


def _sleep_once(launcher: ScriptedLauncher, timeout_secs: float) -> Iterator[Any]:
    if 102 < launcher.now < 103:
        launcher.now += 10
    yield from ScriptedLauncher.events(launcher, timeout_secs)


def stalled(task: str, where: str = "", is_users: bool = False) -> Stalled:
    return Stalled(605, where, is_users, task=task)


def test_a_task_stuck_in_the_users_code_is_not_restarted(tmp_path: Path) -> None:
    """Also if the task that waits for it reports first."""
    waits = stalled("worker-0", "SyncLoop.train (tf2dist/training/synchronous/sync_loop.py:9)")
    launcher = ScriptedLauncher(
        tmp_path, [(105.0, waits), (107.0, stalled("worker-1", "load (mine.py:3)", is_users=True))]
    )
    config = RunConfig(mode="sync", watchdog_secs=10.0)
    with pytest.raises(TaskFailure) as caught:
        follow(launcher, config)
    assert caught.value.exit_code == 1
    expected = "worker-1: made no progress for 605 s in load (mine.py:3), see the stacks in its log"
    assert str(caught.value) == expected


def test_the_user_sees_which_functions_tasks_are_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for all tasks in a function, without the tasks that may be waiting for them."""

    def long_call(task: str, is_users: bool) -> LongCall:
        where = "load (mine.py:3)" if is_users else "join (tf2dist/strategy.py:8)"
        return LongCall(30, where, is_users, task=task)

    script: list[tuple[float, Any]] = [
        (103.0, long_call("worker-0", False)),
        (103.3, long_call("worker-1", True)),
        (106.0, long_call("worker-0", True)),
    ]
    script += [
        (106.5, long_call("worker-1", True)),
        (110.0, ResultMessage({"done": 1}, task=TASKS[0])),
    ]
    script += [(111.0, ended(task, 0)) for task in TASKS]
    printed = warnings_of(ScriptedLauncher(tmp_path, script), capsys)
    assert printed == "worker-1: in load (mine.py:3) for 30 s\nworker-0, worker-1: in load (mine.py:3) for 30 s\n"


def test_a_single_task_without_progress_is_stalled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = ScriptedLauncher(tmp_path, [(105.0, Stalled(10, "", False, task="worker-0"))])
    printed = warnings_of(launcher, capsys)
    assert "worker-0 made no progress for 10 s, see the stacks in its log; starting all tasks again" in printed


@pytest.mark.parametrize(("code", "wins"), [(1, "showed no sign of life for 6 s"), (3, "the loss is nan")])
def test_an_error_that_follows_from_the_kill_is_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, wins: str
) -> None:
    """But an error of the task itself is, which was on its way when the kill came."""
    launcher = ScriptedLauncher(tmp_path, [], silent="worker-1", runs=True)

    def write_record(task: str, signum: int, alone: bool = False) -> None:
        record = FailureRecord(task, launcher.now, code, "the loss is nan")
        record.path(tmp_path, record.task).write_text(record.as_json())
        ScriptedLauncher.signal(launcher, task, signum)

    monkeypatch.setattr(launcher, "signal", write_record)
    with pytest.raises(TaskFailure, match=f"worker-1: {wins}"):
        warnings_of(launcher, capsys, max_restarts=0)


@pytest.mark.parametrize("runs", [False, True], ids=["frozen", "mute"])
def test_only_a_running_task_gets_time_to_write_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: bool
) -> None:
    """Many may be frozen at once."""
    launcher = ScriptedLauncher(tmp_path, [], silent="worker-1", runs=runs)
    signals: list[tuple[int, bool]] = []

    def note(task: str, signum: int, alone: bool = False) -> None:
        signals.append((signum, alone))
        ScriptedLauncher.signal(launcher, task, signum)

    monkeypatch.setattr(launcher, "signal", note)
    assert "worker-1 showed no sign of life for 6 s; starting all" in warnings_of(launcher, capsys)
    assert signals == [(signal.SIGUSR1, True)] * runs + [(signal.SIGKILL, False)]


def test_a_stalled_task_that_ends_at_once_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [(115.0, Stalled(10, "", False, task="worker-0")), (115.0, ended("worker-0", 138))]
    launcher = ScriptedLauncher(tmp_path, script)
    monkeypatch.setattr(launcher, "start", partial(start_with_echo, launcher, "worker-0"))
    printed = warnings_of(launcher, capsys)
    assert printed == f"tf2dist: warning: worker-0 {ECHO}; starting all tasks again\n"


def test_a_task_is_killed_as_soon_as_its_process_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fork server was stopped when it was asked for one."""
    launcher = ScriptedLauncher(tmp_path, [(108.0, Started(1, task="worker-1"))], silent="worker-1")
    launcher.reaps = False
    signals: list[tuple[float, int]] = []

    def note(task: str, signum: int, alone: bool = False) -> None:
        signals.append((launcher.now, signum))
        launcher.reaps = launcher.now >= 108
        ScriptedLauncher.signal(launcher, task, signum)

    monkeypatch.setattr(launcher, "signal", note)
    assert "worker-1 showed no sign of life for 6 s; starting all" in warnings_of(launcher, capsys)
    assert [signum for at, signum in signals if at >= 108] == [signal.SIGKILL]


def test_a_killed_task_whose_end_is_never_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = ScriptedLauncher(tmp_path, [], silent="worker-1")
    launcher.reaps = False
    with pytest.raises(TaskLostError, match="worker-1 does not end"):
        warnings_of(launcher, capsys)
    assert launcher.now < 120
