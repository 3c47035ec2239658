"""What the launching process concludes from messages and ends of tasks; see `scripted`."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scripted import (
    ECHO,
    TASKS,
    EndedEarly,
    ScriptedLauncher,
    ScriptedMeeting,
    ended,
    follow,
    start_with_echo,
    warnings_of,
    write_echo,
)
from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config.schema import RunConfig
from tf2dist.errors import TaskFailure, TaskLeft, TaskLostError
from tf2dist.hosts.protocol import Back, Ended, Lost, MeetingEvent
from tf2dist.launch import failures
from tf2dist.messages import LeaderDone, PeerGone, ProgressMessage, ResultMessage, Saved


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_result_after_an_echo_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str], max_restarts: int) -> None:
    result = ResultMessage({"done": True}, task=TASKS[0])
    launcher = ScriptedLauncher(
        tmp_path, [(104.0, ended("worker-1", 138)), (104.5, result), (106.0, ended(TASKS[0], 0))]
    )
    config = RunConfig(mode="sync", max_restarts=max_restarts)
    assert follow(launcher, config, start=partial(start_with_echo, launcher, "worker-1"))["done"]
    assert "again" not in capsys.readouterr().err


def test_a_result_ends_the_wait_for_the_cause_of_an_echo(tmp_path: Path) -> None:
    """The cause is a frozen task here, whose end is never reported."""
    result = ResultMessage({"done": True}, task="chief-0")
    script = [(104.0, ended("worker-1", 138)), (104.5, result), (105.0, ended("chief-0", 0))]
    launcher = ScriptedLauncher(tmp_path, script, silent="worker-2")
    launcher.reaps = False
    config = RunConfig(mode="async")
    tasks = ["chief-0", "worker-1", "worker-2"]
    assert follow(launcher, config, tasks, start=partial(start_with_echo, launcher, "worker-1"))["done"]
    assert launcher.now < 130


PS_LOST = Lost("ps-0", "the connection was closed")
WORKER_ENDED = Ended("worker-1", 138, "ps-0: is gone (the connection was closed)")


@pytest.mark.parametrize("order", [(103.0, 103.0), (103.0, 104.0), (104.0, 103.0)])
def test_the_loss_of_a_ps_is_reported_and_not_the_worker_that_ended_because_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: tuple[float, float]
) -> None:
    """In whichever order the two ends are reported."""
    launcher = ScriptedLauncher(tmp_path, [])
    script: list[tuple[float, MeetingEvent]] = [(order[0], PS_LOST), (order[1], WORKER_ENDED)]
    meeting = ScriptedMeeting(launcher, script)
    with pytest.raises(TaskFailure, match=r"^ps-0: is gone \(the connection was closed\)") as caught:
        follow(launcher, RunConfig(mode="async"), ["worker-0"], "chief-0", meeting=meeting)
    assert caught.value.exit_code == 138
    assert "the others go on" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "task", "printed"),
    [
        ("async", "worker-0", "starting it again"),
        ("async", "ps-0", "starting all tasks again"),
        ("async", "chief-0", "starting all tasks again"),
        ("sync", "worker-1", "starting all tasks again"),
    ],
)
def test_a_task_that_ends_too_early_with_code_0_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, task: str, printed: str
) -> None:
    tasks = TASKS if mode == "sync" else ["chief-0", "ps-0", "worker-0"]
    end = EndedEarly(task, 0, 0.0)
    result = ResultMessage({"done": True}, task=tasks[0])
    script = [(103.0, end), (110.0, result), *((111.0, ended(name, 0)) for name in tasks)]
    launcher = ScriptedLauncher(tmp_path, script)
    found = follow(launcher, RunConfig(mode=mode), tasks, start=lambda name, _: launcher.tasks.update({name: 1}))
    assert found["restarts"] == 1
    expected = f"tf2dist: warning: {task} ended with exit code 0 before the end of the run; {printed}\n"
    assert capsys.readouterr().err == expected


def test_the_end_of_restarts_is_told(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(tmp_path, [(102.0, ended("worker-1", -9)), (104.0, ended("worker-1", -9))])
    config = RunConfig(mode="async", max_restarts=1)
    with pytest.raises(TaskFailure, match="worker-1: was killed by SIGKILL, after 1 restarts") as caught:
        follow(launcher, config, ["chief-0", "worker-1"], start=lambda task, _: launcher.tasks.update({task: 1}))
    assert caught.value.exit_code == 138


@pytest.mark.parametrize(("ended_at", "fails"), [(102.0, False), (105.0, False), (1000.0, True)])
def test_a_task_that_loses_its_peers_after_the_run_has_not_failed(tmp_path: Path, ended_at: float, fails: bool) -> None:
    write_echo(tmp_path, "worker-0")
    launcher = ScriptedLauncher(tmp_path, [(104.0, ended("worker-0", 138))])
    leader_is_done = Ended("chief-0", 0, "")
    meeting = ScriptedMeeting(launcher, [(ended_at, leader_is_done)])
    start = partial(start_with_echo, launcher, "worker-0")
    with pytest.raises(TaskFailure, match="worker-0") if fails else contextlib.nullcontext():
        assert follow(launcher, RunConfig(mode="async"), ["worker-0"], "chief-0", start, meeting) == {}


@pytest.mark.parametrize(("task", "fails"), [("evaluator-0", False), ("worker-0", True)])
def test_an_evaluator_may_take_long_for_the_last_checkpoint(tmp_path: Path, task: str, fails: bool) -> None:
    launcher = ScriptedLauncher(tmp_path, [(500.0, ended(task, 0))])
    meeting = ScriptedMeeting(launcher, [(102.0, Ended("chief-0", 0, ""))])
    config = RunConfig(mode="async")
    with pytest.raises(TaskLostError, match="chief-0 finished 120 s ago") if fails else contextlib.nullcontext():
        assert follow(launcher, config, [task], "chief-0", meeting=meeting) == {}
    assert launcher.sent == ([] if fails else [(task, LeaderDone())]), "the evaluator looks for the last one now"


def test_an_echo_waits_until_the_frozen_task_behind_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_echo(tmp_path, "worker-0")
    launcher = ScriptedLauncher(tmp_path, [(104.0, ended("worker-0", 138))], silent="worker-1")
    monkeypatch.setattr(launcher, "start", partial(start_with_echo, launcher, "worker-0"))
    printed = warnings_of(launcher, capsys)
    assert printed == "tf2dist: warning: worker-1 showed no sign of life for 6 s; starting all tasks again\n"


def test_an_echo_waits_until_the_task_behind_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = ScriptedLauncher(tmp_path, [(104.0, ended("worker-0", 138)), (104.7, ended("worker-1", -9))])
    monkeypatch.setattr(launcher, "start", partial(start_with_echo, launcher, "worker-0"))
    printed = warnings_of(launcher, capsys)
    assert printed == "tf2dist: warning: worker-1 was killed by SIGKILL; starting all tasks again\n"


def test_an_echo_without_a_cause_is_reported_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = ScriptedLauncher(
        tmp_path,
        [
            (102.0, Saved(7, False, task="worker-0")),
            (104.0, ended("worker-0", 138)),
        ],
    )
    monkeypatch.setattr(launcher, "start", partial(start_with_echo, launcher, "worker-0"))
    printed = warnings_of(launcher, capsys)
    assert printed == f"tf2dist: warning: worker-0 {ECHO}; starting all tasks again from the checkpoint at step 7\n"


def test_a_kill_by_the_out_of_memory_killer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "vmstat"
    events.write_text("pgfault 0\noom_kill 1\n")
    monkeypatch.setattr(failures, "_oom_counts", lambda: [tmp_path / "none", events])
    launcher = ScriptedLauncher(tmp_path, [(104.0, ended("worker-1", -9))])
    monkeypatch.setattr(launcher, "events", lambda secs: _run_out_of_memory(launcher, secs, events))
    with pytest.raises(TaskFailure, match="worker-1: was killed by SIGKILL: out of memory"):
        warnings_of(launcher, capsys, max_restarts=0)


def _run_out_of_memory(launcher: ScriptedLauncher, timeout_secs: float, events: Path) -> Iterator[Any]:
    if launcher.now > 103:
        events.write_text("pgfault 0\noom_kill 2\n")
    yield from ScriptedLauncher.events(launcher, timeout_secs)


def test_tasks_learn_which_worker_of_another_host_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A call to the lost worker may hang, so the coordinator must cut its connections to it."""
    launcher = ScriptedLauncher(
        tmp_path, [(106.0, ResultMessage({"done": True}, task="chief-0")), (107.0, ended("chief-0", 0))]
    )
    meeting = ScriptedMeeting(launcher, [(103.0, Lost("worker-1", "silent for 6 s")), (104.0, Back("worker-1"))])
    assert follow(launcher, RunConfig(mode="async"), ["chief-0"], meeting=meeting)["done"]
    assert launcher.sent == [("chief-0", PeerGone("worker-1"))]
    printed = "worker-1 is gone (silent for 6 s); the others go on, and it may come back"
    assert capsys.readouterr().err == f"tf2dist: warning: {printed}\n"


def test_the_summary_tells_which_worker_was_there_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that leaves is told as such, and nothing but its return follows from it."""
    script = [
        (102.0, ProgressMessage(40, 100, {"loss": 1.0}, task="chief-0")),
        (104.0, ProgressMessage(60, 100, {"loss": 1.0}, task="chief-0")),
        (106.0, ResultMessage({"done": True}, task="chief-0")),
        (107.0, ended("chief-0", 0)),
    ]
    launcher = ScriptedLauncher(tmp_path, script)
    left = Ended("worker-1", 143, str(TaskLeft("worker-1")), left=True)
    news: list[tuple[float, MeetingEvent]] = [(103.0, left), (105.0, Back("worker-1")), (105.5, Lost("worker-0", ""))]
    summary = follow(launcher, RunConfig(mode="async"), ["chief-0"], meeting=ScriptedMeeting(launcher, news))
    assert summary["worker_events"] == [
        {"secs": pytest.approx(3.0, abs=0.3), "step": 40, "worker": 1, "event": "left"},
        {"secs": pytest.approx(5.0, abs=0.3), "step": 60, "worker": 1, "event": "back"},
        {"secs": pytest.approx(5.5, abs=0.3), "step": 60, "worker": 0, "event": "lost"},
    ]
    assert launcher.sent == [("chief-0", PeerGone("worker-1")), ("chief-0", PeerGone("worker-0"))]
    told = "worker-1 has left after SIGTERM; the others go on, and it may come back\n"
    assert told in capsys.readouterr().err


STOOD_STILL = "stood still for 31 s, longer than the others wait for it"
ASYNC = Cluster("async", {"chief": ("a:1",), "evaluator": ("a:2",), "ps": ("a:3",), "worker": ("a:4", "a:5")})


@pytest.mark.parametrize("task", ["chief-0", "worker-1", "evaluator-0"])
def test_a_process_that_stood_still_blames_itself(tmp_path: Path, task: str) -> None:
    launcher = ScriptedLauncher(tmp_path, [])
    meeting = ScriptedMeeting(launcher, [(103.0, Lost(task, STOOD_STILL)), (103.0, Lost("ps-0", "silent for 31 s"))])
    place = Place(ASYNC, Task.parse(task))
    with pytest.raises(TaskLostError, match=f"^{task}: {STOOD_STILL}$") as caught:
        follow(launcher, RunConfig(mode="async"), [task], "chief-0", meeting=meeting, place=place)
    assert caught.value.exit_code == 138


def test_a_leader_that_stood_still_goes_on_without_an_evaluator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [(106.0, ResultMessage({"done": True}, task="worker-0")), (107.0, ended("worker-0", 0))]
    launcher = ScriptedLauncher(tmp_path, script)
    silent = Lost("evaluator-0", "silent for 31 s")
    meeting = ScriptedMeeting(launcher, [(103.0, Lost("worker-0", STOOD_STILL)), (103.0, silent)])
    place = Place(Cluster("sync", {"evaluator": ("a:1",), "worker": ("a:2",)}), Task("worker", 0))
    assert follow(launcher, RunConfig(mode="sync"), ["worker-0"], meeting=meeting, place=place)["done"]
    own, other = capsys.readouterr().err.splitlines()
    assert own == f"tf2dist: warning: worker-0 {STOOD_STILL}"
    assert other.startswith("tf2dist: warning: evaluator-0 is gone (silent for 31 s); the others go on")


@pytest.mark.parametrize(("task", "fails"), [("evaluator-0", False), ("worker-1", True)])
def test_an_error_of_its_own_is_the_end_of_a_worker_elsewhere_alone(tmp_path: Path, task: str, fails: bool) -> None:
    """It would fail again. Of an evaluator, which only reads checkpoints, the others are independent."""
    script = [(106.0, ResultMessage({"done": True}, task="chief-0")), (107.0, ended("chief-0", 0))]
    launcher = ScriptedLauncher(tmp_path, script)
    meeting = ScriptedMeeting(launcher, [(103.0, Ended(task, 1, "ValueError: bad"))])
    place = Place(ASYNC, Task("chief", 0))
    with pytest.raises(TaskFailure, match=r"^worker-1: ValueError: bad") if fails else contextlib.nullcontext():
        assert follow(launcher, RunConfig(mode="async"), ["chief-0"], meeting=meeting, place=place)["done"]


def test_an_evaluator_that_stood_still_goes_on_after_the_leader(tmp_path: Path) -> None:
    """It reads the last checkpoint, and needs nobody for that."""
    launcher = ScriptedLauncher(tmp_path, [(106.0, ended("evaluator-0", 0))])
    news: list[tuple[float, MeetingEvent]] = [(102.0, Ended("chief-0", 0, "")), (103.0, Lost("evaluator-0", "late"))]
    meeting, place = ScriptedMeeting(launcher, news), Place(ASYNC, Task("evaluator", 0))
    config = RunConfig(mode="async")
    assert follow(launcher, config, ["evaluator-0"], "chief-0", meeting=meeting, place=place) == {}
    assert launcher.now > 106.0


@pytest.mark.parametrize("task", ["chief-0", "ps-0"])
def test_a_lost_leader_has_an_exit_code_of_its_own(tmp_path: Path, task: str) -> None:
    launcher = ScriptedLauncher(tmp_path, [])
    meeting = ScriptedMeeting(launcher, [(103.0, Lost(task, "silent for 6 s"))])
    with pytest.raises(TaskFailure, match=f"^{task}: is gone") as caught:
        follow(launcher, RunConfig(mode="async"), ["worker-0"], "chief-0", meeting=meeting)
    assert caught.value.exit_code == (139 if task == "chief-0" else 138)
