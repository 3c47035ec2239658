"""What the launching process concludes from what it hears, with a launcher that only plays its part."""

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.play import COMPLAINT, TASKS, Play, complain, ended, follow, start_with_complaint
from tf2dist.config.schema import RunConfig
from tf2dist.errors import FailureRecord, TaskFailure, TaskLostError
from tf2dist.launch import deaths


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
    """A meeting that hears of tasks on other hosts."""

    def __init__(self, play: Play, script: list[tuple[float, dict[str, Any]]]) -> None:
        self._play, self._script = play, script

    def events(self) -> list[dict[str, Any]]:
        due = [event for at, event in self._script if at <= self._play.now]
        self._script = [(at, event) for at, event in self._script if at > self._play.now]
        return due


PS_LOST: dict[str, Any] = {"event": "lost", "task": "ps-0", "why": "the connection was closed"}
WORKER_ENDED: dict[str, Any] = {
    "event": "ended",
    "task": "worker-1",
    "code": 138,
    "message": "ps-0: is gone (the connection was closed)",
}


@pytest.mark.parametrize("order", [(103.0, 103.0), (103.0, 104.0), (104.0, 103.0)])
def test_a_worker_that_ends_since_a_ps_is_gone_is_not_the_one_that_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], order: tuple[float, float]
) -> None:
    """Whichever of the two ends is heard of first."""
    play = Play(tmp_path, [])
    script = list(zip(order, (PS_LOST, WORKER_ENDED), strict=True))
    watched = follow(play, monkeypatch, RunConfig(mode="async"), Elsewhere(play, script))
    with pytest.raises(TaskFailure, match=r"^ps-0: is gone \(the connection was closed\)") as caught:
        watched.run(["worker-0"], "chief-0", play.start)
    assert caught.value.exit_code == 138
    assert "the others go on" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "task", "told"),
    [
        ("async", "worker-0", "starting it again"),
        ("async", "ps-0", "starting all tasks again"),
        ("async", "chief-0", "starting all tasks again"),
        ("sync", "worker-1", "starting all tasks again"),
    ],
)
def test_a_task_that_ends_too_early_with_code_0_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, task: str, told: str
) -> None:
    tasks = TASKS if mode == "sync" else ["chief-0", "ps-0", "worker-0"]
    end = ended(task, 0) | {"early": True}
    result = {"event": "result", "task": tasks[0], "summary": {"done": True}}
    script = [(103.0, end), (110.0, result), *((111.0, ended(name, 0)) for name in tasks)]
    watched = follow(play := Play(tmp_path, script), monkeypatch, RunConfig(mode=mode))
    assert watched.run(tasks, tasks[0], lambda name, _: play.tasks.update({name: 1}))["restarts"] == 1
    said = f"tf2dist: warning: {task} ended with exit code 0 before the end of the run; {told}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("ended_at", "fails"), [(102.0, False), (105.0, False), (1000.0, True)])
def test_a_task_that_finds_nobody_since_the_run_is_done_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_at: float, fails: bool
) -> None:
    complain(tmp_path, "worker-0")
    play = Play(tmp_path, [(104.0, ended("worker-0", 138))])
    leader_is_done = {"event": "ended", "task": "chief-0", "code": 0, "message": ""}
    meeting = Elsewhere(play, [(ended_at, leader_is_done)])
    watched = follow(play, monkeypatch, RunConfig(mode="async"), meeting)
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
    play = Play(tmp_path, [(105.0, {"event": "stalled", "task": "worker-0", "secs": 10})], silent="worker-1", runs=runs)
    monkeypatch.setattr(play, "events", lambda secs: _sleep_once(play, secs) if asleep else Play.events(play, secs))
    told = run(play, monkeypatch, capsys)
    assert told == "tf2dist: warning: worker-1 showed no sign of life for 6 s; starting all tasks again\n"


def _sleep_once(play: Play, timeout_secs: float) -> Iterator[dict[str, Any]]:
    if 102 < play.now < 103:
        play.now += 10
    yield from Play.events(play, timeout_secs)


def stalled(task: str, where: str = "", is_users: bool = False) -> dict[str, Any]:
    return {"event": "stalled", "task": task, "secs": 605, "where": where, "is_users": is_users}


def test_who_stands_in_the_users_code_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the one that waits for it complains first."""
    waits = stalled("worker-0", "SyncLoop.train (tf2dist/training/synchronous/loop.py:9)")
    play = Play(tmp_path, [(105.0, waits), (107.0, stalled("worker-1", "load (mine.py:3)", is_users=True))])
    watched = follow(play, monkeypatch, RunConfig(mode="sync", watchdog_secs=10.0))
    with pytest.raises(TaskFailure) as caught:
        watched.run(TASKS, TASKS[0], play.start)
    assert caught.value.exit_code == 1
    said = "worker-1: made no progress for 605 s in load (mine.py:3), see the stacks in its log"
    assert str(caught.value) == said


def test_it_is_told_where_tasks_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line for all that stand there, without those that may wait for them."""

    def standing(task: str, is_users: bool) -> dict[str, Any]:
        where = "load (mine.py:3)" if is_users else "join (tf2dist/strategy.py:8)"
        return {"event": "standing", "task": task, "secs": 30, "where": where, "is_users": is_users}

    script = [
        (103.0, standing("worker-0", False)),
        (103.3, standing("worker-1", True)),
        (106.0, standing("worker-0", True)),
    ]
    script += [
        (106.5, standing("worker-1", True)),
        (110.0, {"event": "result", "task": TASKS[0], "summary": {"done": 1}}),
    ]
    script += [(111.0, ended(task, 0)) for task in TASKS]
    told = run(Play(tmp_path, script), monkeypatch, capsys)
    assert told == "worker-1: in load (mine.py:3) for 30 s\nworker-0, worker-1: in load (mine.py:3) for 30 s\n"


def test_who_makes_no_progress_alone_is_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path, [(105.0, {"event": "stalled", "task": "worker-0", "secs": 10})])
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
    script = [(115.0, {"event": "stalled", "task": "worker-0", "secs": 10}), (115.0, ended("worker-0", 138))]
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
    monkeypatch.setattr(deaths, "_oom_counts", lambda: [tmp_path / "none", events])
    play = Play(tmp_path, [(104.0, ended("worker-1", -9))])
    monkeypatch.setattr(play, "events", lambda secs: _run_out_of_memory(play, secs, events))
    with pytest.raises(TaskFailure, match="worker-1: was killed by SIGKILL: out of memory"):
        run(play, monkeypatch, capsys, max_restarts=0)


def _run_out_of_memory(play: Play, timeout_secs: float, events: Path) -> Iterator[dict[str, Any]]:
    if play.now > 103:
        events.write_text("pgfault 0\noom_kill 2\n")
    yield from Play.events(play, timeout_secs)
