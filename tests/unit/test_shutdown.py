"""What an orderly stop comes to, with a launcher that only plays its part."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.play import TASKS, Elsewhere, Play, Signalled, complain, ended, follow, start_with_complaint
from tf2dist.config.schema import RunConfig
from tf2dist.control.messages import Ended
from tf2dist.errors import Interrupted, TaskFailure
from tf2dist.launch import monitor, shutdown
from tf2dist.messages import Began, Saved

BEGUN = Began(TASKS[0], 0)


@pytest.mark.parametrize(
    ("script", "patience", "told"),
    [
        ([], shutdown.START_SECS, ""),
        ([(102.0, BEGUN)], RunConfig().grace_secs, "; nothing was saved"),
        ([(102.0, BEGUN), (103.0, ended(TASKS[1], -9))], shutdown.START_SECS, ""),  # all begin again
        ([(105.0, BEGUN)], shutdown.START_SECS, "; nothing was saved"),
    ],
    ids=["before", "after", "again", "meanwhile"],
)
def test_a_stop_takes_its_time_only_if_there_is_something_to_save(
    tmp_path: Path,
    script: list[tuple[float, Any]],
    patience: float,
    told: str,
) -> None:
    play = Play(tmp_path, [*script, (104.5, Signalled())])
    config = RunConfig(mode="sync")
    with pytest.raises(Interrupted, match=f"^stopped by SIGTERM{told}$"):
        follow(play, config, start=lambda task, restarts: play.tasks.update({task: 1}))
    assert play.now - 104.5 == pytest.approx(patience, abs=2 * monitor.POLL_SECS)


@pytest.mark.parametrize("saved_at", [103.0, 105.5])  # the leader may have heard of the stop from another host's task
@pytest.mark.parametrize(("stopping", "told"), [(False, "not saved since step 40"), (True, "saved at step 40")])
def test_a_stop_says_whether_it_has_saved(tmp_path: Path, saved_at: float, stopping: bool, told: str) -> None:
    saved = Saved(TASKS[0], 40, stopping)
    script: list[tuple[float, Any]] = [(102.0, BEGUN), (saved_at, saved)]
    play = Play(tmp_path, [*script, (104.5, Signalled()), (106.0, ended(TASKS[0], 143))])
    config = RunConfig(mode="sync")
    with pytest.raises(Interrupted, match=f"; {told}, where the same command with run_dir goes on"):
        follow(play, config, start=lambda task, restarts: play.tasks.update({task: 1}))


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_stop_after_a_complaint_is_a_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], max_restarts: int
) -> None:
    """While the launching process waits for the cause it hears of other things, too."""
    complain(tmp_path, "worker-1")
    play = Play(tmp_path, [(104.0, ended("worker-1", 138)), (104.3, Signalled())])
    config = RunConfig(mode="sync", max_restarts=max_restarts)
    start = partial(start_with_complaint, play, "worker-1")
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        follow(play, config, start=start)
    assert "again" not in capsys.readouterr().err


def test_a_fault_is_told_though_a_stop_comes_after_it(tmp_path: Path) -> None:
    script: list[tuple[float, Any]] = [(104.0, ended("worker-1", 2))]
    play = Play(tmp_path, [*script, (104.4, Signalled())])
    config = RunConfig(mode="sync")
    with pytest.raises(TaskFailure) as caught:
        follow(play, config)
    assert caught.value.exit_code == 2


def test_a_stop_that_finds_the_own_task_done_is_none(tmp_path: Path) -> None:
    """The leader, on another host, may be writing the result at that time."""
    play = Play(tmp_path, [(104.0, Signalled()), (105.0, ended("worker-1", 0))])
    config = RunConfig(mode="sync")
    assert follow(play, config, ["worker-1"], "worker-0") == {}


@pytest.mark.parametrize(("code", "fails"), [(3, True), (1, True), (143, False), (138, False)])
def test_a_fault_of_the_leader_while_it_stops_is_told(tmp_path: Path, code: int, fails: bool) -> None:
    stop_at: tuple[float, Any] = (104.0, Signalled())
    play = Play(tmp_path, [(103.0, BEGUN), stop_at, (105.0, ended(TASKS[0], code))])
    config = RunConfig(mode="sync")
    with pytest.raises(TaskFailure if fails else Interrupted) as caught:
        follow(play, config)
    assert caught.value.exit_code == (code if fails else 143)


def test_a_stop_of_another_host_ends_as_that_one_does(tmp_path: Path) -> None:
    """Also if only the end of its task is heard of, and not the stop itself."""
    play = Play(tmp_path, [])
    meeting = Elsewhere(play, [(103.0, Ended("worker-1", 130, "stopped by Ctrl-C"))])
    with pytest.raises(Interrupted, match=r"^stopped by Ctrl-C") as caught:
        follow(play, RunConfig(mode="sync"), ["worker-0"], meeting=meeting)
    assert caught.value.exit_code == 130
