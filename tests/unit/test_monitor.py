"""What the launching process concludes from what it hears, with a launcher that only plays its part."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.play import (
    COMPLAINT,
    TASKS,
    Elsewhere,
    EndedEarly,
    Play,
    complain,
    ended,
    follow,
    start_with_complaint,
    warnings_of,
)
from tf2dist.config.schema import RunConfig
from tf2dist.control.messages import Back, Ended, Lost, MeetingEvent
from tf2dist.errors import TaskFailure
from tf2dist.launch import deaths
from tf2dist.messages import PeerGone, Result, Saved


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_result_after_a_complaint_is_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], max_restarts: int
) -> None:
    result = Result(TASKS[0], {"done": True})
    play = Play(tmp_path, [(104.0, ended("worker-1", 138)), (104.5, result), (106.0, ended(TASKS[0], 0))])
    config = RunConfig(mode="sync", max_restarts=max_restarts)
    assert follow(play, config, start=partial(start_with_complaint, play, "worker-1"))["done"]
    assert "again" not in capsys.readouterr().err


def test_a_result_ends_the_wait_for_the_cause_of_a_complaint(tmp_path: Path) -> None:
    """Here that of a task which is frozen, and whose end nobody tells."""
    result = Result("chief-0", {"done": True})
    script = [(104.0, ended("worker-1", 138)), (104.5, result), (105.0, ended("chief-0", 0))]
    play = Play(tmp_path, script, silent="worker-2")
    play.reaps = False
    config = RunConfig(mode="async")
    tasks = ["chief-0", "worker-1", "worker-2"]
    assert follow(play, config, tasks, start=partial(start_with_complaint, play, "worker-1"))["done"]
    assert play.now < 130


PS_LOST = Lost("ps-0", "the connection was closed")
WORKER_ENDED = Ended("worker-1", 138, "ps-0: is gone (the connection was closed)")


@pytest.mark.parametrize("order", [(103.0, 103.0), (103.0, 104.0), (104.0, 103.0)])
def test_a_worker_that_ends_since_a_ps_is_gone_is_not_the_one_that_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: tuple[float, float]
) -> None:
    """Whichever of the two ends is heard of first."""
    play = Play(tmp_path, [])
    script: list[tuple[float, MeetingEvent]] = [(order[0], PS_LOST), (order[1], WORKER_ENDED)]
    meeting = Elsewhere(play, script)
    with pytest.raises(TaskFailure, match=r"^ps-0: is gone \(the connection was closed\)") as caught:
        follow(play, RunConfig(mode="async"), ["worker-0"], "chief-0", meeting=meeting)
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, task: str, told: str
) -> None:
    tasks = TASKS if mode == "sync" else ["chief-0", "ps-0", "worker-0"]
    end = EndedEarly(task, 0, 0.0)
    result = Result(tasks[0], {"done": True})
    script = [(103.0, end), (110.0, result), *((111.0, ended(name, 0)) for name in tasks)]
    play = Play(tmp_path, script)
    found = follow(play, RunConfig(mode=mode), tasks, start=lambda name, _: play.tasks.update({name: 1}))
    assert found["restarts"] == 1
    said = f"tf2dist: warning: {task} ended with exit code 0 before the end of the run; {told}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("ended_at", "fails"), [(102.0, False), (105.0, False), (1000.0, True)])
def test_a_task_that_finds_nobody_since_the_run_is_done_has_not_failed(
    tmp_path: Path, ended_at: float, fails: bool
) -> None:
    complain(tmp_path, "worker-0")
    play = Play(tmp_path, [(104.0, ended("worker-0", 138))])
    leader_is_done = Ended("chief-0", 0, "")
    meeting = Elsewhere(play, [(ended_at, leader_is_done)])
    start = partial(start_with_complaint, play, "worker-0")
    with pytest.raises(TaskFailure, match="worker-0") if fails else contextlib.nullcontext():
        assert follow(play, RunConfig(mode="async"), ["worker-0"], "chief-0", start, meeting) == {}


def test_a_complaint_waits_for_a_frozen_culprit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complain(tmp_path, "worker-0")
    play = Play(tmp_path, [(104.0, ended("worker-0", 138))], silent="worker-1")
    monkeypatch.setattr(play, "start", partial(start_with_complaint, play, "worker-0"))
    told = warnings_of(play, capsys)
    assert told == "tf2dist: warning: worker-1 showed no sign of life for 6 s; starting all tasks again\n"


def test_a_complaint_waits_for_the_end_of_the_culprit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path, [(104.0, ended("worker-0", 138)), (104.7, ended("worker-1", -9))])
    monkeypatch.setattr(play, "start", partial(start_with_complaint, play, "worker-0"))
    told = warnings_of(play, capsys)
    assert told == "tf2dist: warning: worker-1 was killed by SIGKILL; starting all tasks again\n"


def test_a_complaint_alone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(
        tmp_path,
        [
            (102.0, Saved("worker-0", 7, False)),
            (104.0, ended("worker-0", 138)),
        ],
    )
    monkeypatch.setattr(play, "start", partial(start_with_complaint, play, "worker-0"))
    told = warnings_of(play, capsys)
    assert told == f"tf2dist: warning: worker-0 {COMPLAINT}; starting all tasks again from the checkpoint at step 7\n"


def test_a_kill_by_the_kernel_for_want_of_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "vmstat"
    events.write_text("pgfault 0\noom_kill 1\n")
    monkeypatch.setattr(deaths, "_oom_counts", lambda: [tmp_path / "none", events])
    play = Play(tmp_path, [(104.0, ended("worker-1", -9))])
    monkeypatch.setattr(play, "events", lambda secs: _run_out_of_memory(play, secs, events))
    with pytest.raises(TaskFailure, match="worker-1: was killed by SIGKILL: out of memory"):
        warnings_of(play, capsys, max_restarts=0)


def _run_out_of_memory(play: Play, timeout_secs: float, events: Path) -> Iterator[Any]:
    if play.now > 103:
        events.write_text("pgfault 0\noom_kill 2\n")
    yield from Play.events(play, timeout_secs)


def test_the_others_are_told_which_worker_of_another_host_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call to it may hang, so the coordinator cuts its connections to it; it goes on with the others."""
    play = Play(tmp_path, [(106.0, Result("chief-0", {"done": True})), (107.0, ended("chief-0", 0))])
    meeting = Elsewhere(play, [(103.0, Lost("worker-1", "silent for 6 s")), (104.0, Back("worker-1"))])
    assert follow(play, RunConfig(mode="async"), ["chief-0"], meeting=meeting)["done"]
    assert play.sent == [("chief-0", PeerGone("worker-1"))]
    told = "worker-1 is gone (silent for 6 s); the others go on, and it may come back"
    assert capsys.readouterr().err == f"tf2dist: warning: {told}\n"
