"""How an orderly stop ends; see `scripted`."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scripted import (
    TASKS,
    ScriptedLauncher,
    ScriptedMeeting,
    Signalled,
    ended,
    follow,
    start_with_echo,
    write_echo,
)
from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config.schema import RunConfig, TaskConfig
from tf2dist.errors import Interrupted, TaskFailure, TaskLeft
from tf2dist.hosts.protocol import Ended, Lost, Stop
from tf2dist.launch import monitor, shutdown
from tf2dist.messages import Began, Saved

BEGUN = Began(0, task=TASKS[0])
LEAVES = RunConfig(mode="async", task=TaskConfig(on_term="leave"))
WORKER = Place(Cluster("async", {"chief": ("a:1",), "ps": ("b:1",), "worker": ("c:1", "d:1")}), Task("worker", 1))


@pytest.mark.parametrize(
    ("script", "patience", "ending"),
    [
        ([], shutdown.START_SECS, ""),
        ([(102.0, BEGUN)], RunConfig().grace_secs, "; nothing was saved"),
        ([(102.0, BEGUN), (103.0, ended(TASKS[1], -9))], shutdown.START_SECS, ""),  # all begin again
        ([(105.0, BEGUN)], shutdown.START_SECS, "; nothing was saved"),
    ],
    ids=["before", "after", "again", "meanwhile"],
)
def test_a_stop_waits_for_grace_secs_only_if_there_is_something_to_save(
    tmp_path: Path,
    script: list[tuple[float, Any]],
    patience: float,
    ending: str,
) -> None:
    launcher = ScriptedLauncher(tmp_path, [*script, (104.5, Signalled())])
    config = RunConfig(mode="sync")
    with pytest.raises(Interrupted, match=f"^stopped by SIGTERM{ending}$"):
        follow(launcher, config, start=lambda task, restarts: launcher.tasks.update({task: 1}))
    assert launcher.now - 104.5 == pytest.approx(patience, abs=2 * monitor.POLL_SECS)


def test_a_second_signal_ends_a_stop_at_once(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(tmp_path, [(102.0, BEGUN), (104.5, Signalled()), (106.0, Signalled())])
    config = RunConfig(mode="sync", grace_secs=600.0)
    with pytest.raises(Interrupted, match=r"; nothing was saved$"):
        follow(launcher, config, start=lambda task, restarts: launcher.tasks.update({task: 1}))
    assert launcher.now == pytest.approx(106.0, abs=2 * monitor.POLL_SECS)


@pytest.mark.parametrize("saved_at", [103.0, 105.5])  # the leader may have heard of the stop from another host's task
@pytest.mark.parametrize(("stopping", "printed"), [(False, "not saved since step 40"), (True, "saved at step 40")])
def test_a_stop_says_whether_it_has_saved(tmp_path: Path, saved_at: float, stopping: bool, printed: str) -> None:
    saved = Saved(40, stopping, task=TASKS[0])
    script: list[tuple[float, Any]] = [(102.0, BEGUN), (saved_at, saved)]
    launcher = ScriptedLauncher(tmp_path, [*script, (104.5, Signalled()), (106.0, ended(TASKS[0], 143))])
    config = RunConfig(mode="sync")
    with pytest.raises(Interrupted, match=f"; {printed}$"):
        follow(launcher, config, start=lambda task, restarts: launcher.tasks.update({task: 1}))


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_stop_after_an_echo_is_a_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str], max_restarts: int) -> None:
    """The stop comes while the launching process waits for the cause of the echo."""
    write_echo(tmp_path, "worker-1")
    launcher = ScriptedLauncher(tmp_path, [(104.0, ended("worker-1", 138)), (104.3, Signalled())])
    config = RunConfig(mode="sync", max_restarts=max_restarts)
    start = partial(start_with_echo, launcher, "worker-1")
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        follow(launcher, config, start=start)
    assert "again" not in capsys.readouterr().err


def test_a_stop_after_a_loss_is_a_stop(tmp_path: Path) -> None:
    """The stop comes while the launching process collects the consequences of the loss."""
    launcher = ScriptedLauncher(tmp_path, [(104.0, ended("worker-1", -9)), (104.4, Signalled())])
    with pytest.raises(Interrupted, match="stopped by SIGTERM") as caught:
        follow(launcher, RunConfig(mode="sync", max_restarts=0))
    assert caught.value.exit_code == 143


def test_a_failure_is_reported_even_if_a_stop_follows(tmp_path: Path) -> None:
    script: list[tuple[float, Any]] = [(104.0, ended("worker-1", 2))]
    launcher = ScriptedLauncher(tmp_path, [*script, (104.4, Signalled())])
    config = RunConfig(mode="sync")
    with pytest.raises(TaskFailure) as caught:
        follow(launcher, config)
    assert caught.value.exit_code == 2


def test_a_stop_after_the_own_task_is_done_is_ignored(tmp_path: Path) -> None:
    """The leader, on another host, may be writing the result at that time."""
    launcher = ScriptedLauncher(tmp_path, [(104.0, Signalled()), (105.0, ended("worker-1", 0))])
    config = RunConfig(mode="sync")
    assert follow(launcher, config, ["worker-1"], "worker-0") == {}


@pytest.mark.parametrize(("code", "fails"), [(3, True), (1, True), (143, False), (138, False)])
def test_a_failure_of_the_leader_while_it_stops_is_reported(tmp_path: Path, code: int, fails: bool) -> None:
    stop_at: tuple[float, Any] = (104.0, Signalled())
    launcher = ScriptedLauncher(tmp_path, [(103.0, BEGUN), stop_at, (105.0, ended(TASKS[0], code))])
    config = RunConfig(mode="sync")
    with pytest.raises(TaskFailure if fails else Interrupted) as caught:
        follow(launcher, config)
    assert caught.value.exit_code == (code if fails else 143)


def test_a_stop_on_another_host_gives_the_same_exit_code(tmp_path: Path) -> None:
    """Also if only the end of its task is reported, and not the stop itself."""
    launcher = ScriptedLauncher(tmp_path, [])
    meeting = ScriptedMeeting(launcher, [(103.0, Ended("worker-1", 130, "stopped by Ctrl-C"))])
    with pytest.raises(Interrupted, match=r"^stopped by Ctrl-C") as caught:
        follow(launcher, RunConfig(mode="sync"), ["worker-0"], meeting=meeting)
    assert caught.value.exit_code == 130


class StoppableMeeting(ScriptedMeeting):
    """Keeps what is told to the other hosts."""

    stops: list[int]

    def stop(self, signum: int) -> None:
        self.stops = [*getattr(self, "stops", []), signum]


@pytest.mark.parametrize("signalled_at", [104.0, 105.0])
@pytest.mark.parametrize("task", TASKS)
def test_a_process_that_stood_still_is_stopped_in_order(tmp_path: Path, task: str, signalled_at: float) -> None:
    """A scheduler wakes a suspended job to end it: the signal comes with the news that it stood still, or after it."""
    saved = Saved(40, stopping=True, task=task)
    script: list[tuple[float, Any]] = [(102.0, BEGUN), (signalled_at, Signalled()), (105.5, saved)]
    launcher = ScriptedLauncher(tmp_path, [*script, (106.0, ended(task, 143))])
    other = next(name for name in TASKS if name != task)
    meeting = StoppableMeeting(launcher, [(104.0, Lost(task, "stood still")), (104.0, Lost(other, "silent for 73 s"))])
    place = Place(Cluster("sync", {"worker": ("a:1", "a:2")}), Task.parse(task))
    with pytest.raises(Interrupted, match=r"; saved at step 40$") as caught:
        follow(launcher, RunConfig(mode="sync"), [task], TASKS[0], meeting=meeting, place=place)
    assert caught.value.exit_code == 143
    assert meeting.stops == [15]
    assert launcher.signalled == [(task, 15)]


@pytest.mark.parametrize("again", [False, True])
def test_a_worker_leaves_alone_after_a_while(tmp_path: Path, again: bool) -> None:
    """A second signal does not wait."""
    signals: list[tuple[float, Any]] = [(104.5, Signalled()), *[(105.0, Signalled())] * again]
    launcher = ScriptedLauncher(tmp_path, signals)
    meeting = StoppableMeeting(launcher, [])
    with pytest.raises(TaskLeft, match="worker-1 has left after SIGTERM; the others go on"):
        follow(launcher, LEAVES, ["worker-1"], "chief-0", meeting=meeting, place=WORKER)
    assert not launcher.tasks, "the others are told when it has ended"
    assert not hasattr(meeting, "stops")
    assert launcher.now - 104.5 == pytest.approx(0.5 if again else shutdown.LEAVE_SECS, abs=2 * monitor.POLL_SECS)


def test_a_worker_that_stood_still_leaves_alone(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(tmp_path, [(105.0, Signalled())])
    meeting = StoppableMeeting(launcher, [(104.0, Lost("worker-1", "stood still"))])
    with pytest.raises(TaskLeft):
        follow(launcher, LEAVES, ["worker-1"], "chief-0", meeting=meeting, place=WORKER)


def test_a_worker_that_would_leave_stops_with_all_others(tmp_path: Path) -> None:
    """A scheduler that ends a whole job signals its tasks one after another."""
    launcher = ScriptedLauncher(tmp_path, [(104.0, Signalled()), (107.0, ended("worker-1", 143))])
    meeting = StoppableMeeting(launcher, [(105.0, Stop("chief-0", 15))])
    with pytest.raises(Interrupted, match="stopped by SIGTERM") as caught:
        follow(launcher, LEAVES, ["worker-1"], "chief-0", meeting=meeting, place=WORKER)
    assert caught.value.exit_code == 143
    assert launcher.now > 106.5, "it serves until the leader has saved"
