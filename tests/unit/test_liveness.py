"""Which tasks count as frozen or mute, without processes."""

import contextlib
import time
from typing import Any

import pytest

from tf2dist.launch.watchdog import LivenessTracker, TaskRecord
from tf2dist.messages import Silence, ToLauncher
from tf2dist.process import heartbeat


class Tasks:
    """Scripted tasks: which of them are stopped or mute, and what the tracker concludes."""

    def __init__(self, *names: str) -> None:
        self.stopped: set[str] = set()
        self.mute: set[str] = set()
        self.records = {name: TaskRecord(heard_at=0.0, ran_at=0.0) for name in names}
        self.liveness = LivenessTracker(self.records, lambda task: task not in self.stopped, silence_secs=10.0)
        self._names = names

    def lost(self, first: int, last: int) -> list[str]:
        """The lost tasks at the last of the looks, one a second; asserts that no earlier look finds any."""
        for second in range(first, last + 1):
            for task in set(self._names) - self.stopped - self.mute:
                self.liveness.note_heartbeat(task, second)
            lost = self.liveness.find_lost(second)
            assert second == last or lost == []
        return lost


def test_a_stopped_task_is_frozen() -> None:
    tasks = Tasks("worker-0", "worker-1")
    assert tasks.lost(1, 3) == []
    assert not tasks.liveness.any_silent
    tasks.stopped.add("worker-1")
    assert tasks.lost(4, 13) == []
    assert tasks.liveness.any_silent
    assert tasks.lost(14, 14) == ["worker-1"]
    tasks.records["worker-1"].has_exited = True
    tasks.stopped.clear()
    assert tasks.lost(15, 15) == []
    assert not tasks.liveness.any_silent


def test_a_task_that_was_stopped_for_a_moment_is_not_lost() -> None:
    """Not even if it was silent for a while before."""
    tasks = Tasks("worker-0")
    tasks.mute.add("worker-0")
    assert tasks.lost(1, 9) == []
    tasks.stopped.add("worker-0")
    assert tasks.lost(10, 17) == []
    tasks.stopped.clear()
    assert tasks.lost(18, 25) == []


def test_a_running_task_that_is_silent_is_lost_too() -> None:
    tasks = Tasks("worker-0", "worker-1")
    tasks.mute.add("worker-1")
    assert tasks.lost(1, 10) == []
    assert tasks.liveness.any_silent
    assert tasks.lost(11, 11) == ["worker-1"]


def test_an_announced_silence_is_no_loss() -> None:
    tasks = Tasks("worker-0")
    tasks.liveness.note_silence("worker-0", 1.0, 30.0)
    tasks.liveness.note_heartbeat("worker-0", 1.1)  # messages still come for a moment
    tasks.mute.add("worker-0")
    assert tasks.lost(2, 33) == []
    assert not tasks.liveness.any_silent
    assert tasks.lost(34, 42) == ["worker-0"]


def test_an_announced_silence_has_an_end() -> None:
    tasks = Tasks("worker-0")
    tasks.liveness.note_silence("worker-0", 1.0, 30.0)
    tasks.liveness.note_silence("worker-0", 2.0, 0.0)
    tasks.mute.add("worker-0")
    assert tasks.lost(3, 13) == ["worker-0"]


@pytest.mark.parametrize("other", ["worker-0", "chief-0"])
def test_a_task_that_waits_for_a_frozen_one_may_be_silent_too(other: str) -> None:
    tasks = Tasks("worker-1", other)
    tasks.mute.add(other)
    assert tasks.lost(1, 2) == []
    tasks.stopped.add("worker-1")
    assert tasks.lost(3, 13) == ["worker-1"], "though the other one fell silent first"
    tasks.records["worker-1"].has_exited = True
    tasks.stopped.clear()
    tasks.mute.add("worker-1")
    assert tasks.lost(14, 24) == [other], "unless it stays silent"


@pytest.mark.parametrize(("first", "second"), [("worker-0", "worker-1"), ("chief-0", "worker-1")])
def test_of_two_running_silent_tasks_one_is_blamed_first(first: str, second: str) -> None:
    """The one that fell silent first; but never the coordinator, which calls all others, before another task."""
    tasks = Tasks(first, second)
    tasks.mute.add(first)
    assert tasks.lost(1, 2) == []
    tasks.mute.add(second)
    blamed, other = (second, first) if first == "chief-0" else (first, second)
    at = 13 if first == "chief-0" else 11
    assert tasks.lost(3, at) == [blamed]
    tasks.records[blamed].has_exited = True
    assert tasks.lost(at + 1, at + 11) == [other]


def test_silence_while_the_launcher_was_stopped_does_not_count() -> None:
    tasks = Tasks("worker-0", "worker-1")
    assert tasks.lost(1, 1) == []
    tasks.stopped.add("worker-1")
    tasks.mute.add("worker-0")
    assert tasks.liveness.find_lost(1000) == [], "the launcher was suspended, not the tasks"
    assert tasks.liveness.awake_since == 1000
    assert tasks.lost(1001, 1011) == ["worker-1"]


def test_a_task_announces_its_silence_and_the_end_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[Any] = []
    monkeypatch.setattr(heartbeat, "_to_launcher", ToLauncher("worker-0", messages.append))
    monkeypatch.setattr(heartbeat, "_deadline", time.monotonic())
    monkeypatch.setattr(heartbeat, "_watchdog_secs", 10.0)
    with contextlib.suppress(KeyError), heartbeat.announce_silence(30.0):
        assert heartbeat._deadline > time.monotonic() + 35.0, "the watchdog must wait too"
        raise KeyError
    assert messages == [Silence(30.0, task="worker-0"), Silence(0.0, task="worker-0")]


@pytest.mark.parametrize("folder", [heartbeat.PACKAGE, heartbeat.STANDARD])
def test_a_file_beside_a_package_under_a_similar_name_is_the_users(folder: str) -> None:
    file = f"{folder.rstrip('/')}_mine.py"
    names: dict[str, Any] = {"current_function": heartbeat.current_function}
    exec(compile("def load():\n    return current_function()", file, "exec"), names)
    assert names["load"]() == (f"load ({file.rpartition('/')[2]}:2)", True)
