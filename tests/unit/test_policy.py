"""What the end of a task asks for, and who counts as frozen: without processes."""

import contextlib
import time
from typing import Any

import pytest

from tf2dist.errors import FailureRecord
from tf2dist.launch.failures import rank
from tf2dist.launch.restarts import RestartPolicy, Verdict, Vitals
from tf2dist.process import heartbeat

LOST = 138


def failure(task: str, exit_code: int = LOST) -> FailureRecord:
    return FailureRecord(task, 0.0, exit_code, "was killed by SIGKILL", by_signal=exit_code == LOST)


@pytest.mark.parametrize(
    ("mode", "task", "whole_cluster", "expected"),
    [
        ("async", "worker-1", True, Verdict.RESTART_TASK),
        ("async", "worker-1", False, Verdict.RESTART_TASK),
        ("async", "ps-0", True, Verdict.RESTART_ALL),
        ("async", "chief-0", True, Verdict.RESTART_ALL),
        ("async", "ps-0", False, Verdict.FAIL),
        ("async", "chief-0", False, Verdict.FAIL),
        ("sync", "worker-0", True, Verdict.RESTART_ALL),
        ("sync", "worker-1", True, Verdict.RESTART_ALL),
        ("sync", "worker-1", False, Verdict.FAIL),
        ("sync", "chief-0", False, Verdict.FAIL),
    ],
)
def test_the_loss_of_a_task(mode: str, task: str, whole_cluster: bool, expected: Verdict) -> None:
    policy = RestartPolicy(mode, max_restarts=3, whole_cluster=whole_cluster)
    assert policy.judge(failure(task)) is expected
    assert policy.restarts == int(expected is not Verdict.FAIL)


@pytest.mark.parametrize("exit_code", [1, 2, 3, 130, 143])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_would_happen_again_is_not_tried_again(mode: str, exit_code: int) -> None:
    policy = RestartPolicy(mode, max_restarts=3, whole_cluster=True)
    for task in ("worker-0", "ps-0", "chief-0"):
        assert policy.judge(failure(task, exit_code)) is Verdict.FAIL
    assert policy.restarts == 0


def test_a_worker_that_has_lost_the_others_is_not_the_lost_one() -> None:
    complaint = FailureRecord("worker-0", 0.0, LOST, "chief-0 is gone")
    assert RestartPolicy("async", 3, whole_cluster=False).judge(complaint) is Verdict.FAIL
    assert RestartPolicy("async", 3, whole_cluster=True).judge(complaint) is Verdict.RESTART_ALL
    named = [complaint, failure("ps-0"), FailureRecord("chief-0", 1.0, 3, "the loss is nan")]
    assert [record.task for record in sorted(named, key=rank)] == ["ps-0", "chief-0", "worker-0"]


def test_restarts_are_limited() -> None:
    policy = RestartPolicy("async", max_restarts=2, whole_cluster=True)
    verdicts = [policy.judge(failure(task)) for task in ("worker-0", "ps-0", "worker-1", "chief-0")]
    assert verdicts == [Verdict.RESTART_TASK, Verdict.RESTART_ALL, Verdict.FAIL, Verdict.FAIL]
    assert policy.is_used_up
    assert RestartPolicy("sync", 0, True).judge(failure("worker-0")) is Verdict.FAIL


class Tasks:
    """Whether each runs, what is heard of it, and what is concluded."""

    def __init__(self, *names: str) -> None:
        self.stopped: set[str] = set()
        self.mute: set[str] = set()
        self.vitals = Vitals(lambda task: task not in self.stopped, silence_secs=10.0)
        for name in names:
            self.vitals.saw(name, 0.0)
        self._names = names

    def lost(self, first: int, last: int) -> list[str]:
        """At the last of the looks that are made every second; at none of the others."""
        for second in range(first, last + 1):
            for task in set(self._names) - self.stopped - self.mute:
                self.vitals.saw(task, second)
            lost = self.vitals.lost(second)
            assert second == last or lost == []
        return lost


def test_a_stopped_task_is_frozen() -> None:
    tasks = Tasks("worker-0", "worker-1")
    assert tasks.lost(1, 3) == []
    assert not tasks.vitals.any_silent
    tasks.stopped.add("worker-1")
    assert tasks.lost(4, 13) == []
    assert tasks.vitals.any_silent
    assert tasks.lost(14, 14) == ["worker-1"]
    tasks.vitals.forget("worker-1")
    tasks.stopped.clear()
    assert tasks.lost(15, 15) == []
    assert not tasks.vitals.any_silent


def test_a_task_that_was_stopped_for_a_moment_is_not() -> None:
    """Nor one that has said nothing for a while before."""
    tasks = Tasks("worker-0")
    tasks.mute.add("worker-0")
    assert tasks.lost(1, 9) == []
    tasks.stopped.add("worker-0")
    assert tasks.lost(10, 17) == []
    tasks.stopped.clear()
    assert tasks.lost(18, 25) == []


def test_a_task_that_runs_and_says_nothing_is_lost_too() -> None:
    tasks = Tasks("worker-0", "worker-1")
    tasks.mute.add("worker-1")
    assert tasks.lost(1, 10) == []
    assert tasks.vitals.any_silent
    assert tasks.lost(11, 11) == ["worker-1"]


def test_a_silence_that_was_announced_is_none() -> None:
    tasks = Tasks("worker-0")
    tasks.vitals.saw("worker-0", 1.0, silent_secs=30.0)
    tasks.vitals.saw("worker-0", 1.1)  # it goes on for a moment
    tasks.mute.add("worker-0")
    assert tasks.lost(2, 33) == []
    assert not tasks.vitals.any_silent
    assert tasks.lost(34, 42) == ["worker-0"]


def test_an_announced_silence_has_an_end() -> None:
    tasks = Tasks("worker-0")
    tasks.vitals.saw("worker-0", 1.0, silent_secs=30.0)
    tasks.vitals.saw("worker-0", 2.0, silent_secs=0.0)
    tasks.mute.add("worker-0")
    assert tasks.lost(3, 13) == ["worker-0"]


@pytest.mark.parametrize("other", ["worker-0", "chief-0"])
def test_who_waits_for_a_frozen_task_may_be_silent_too(other: str) -> None:
    tasks = Tasks("worker-1", other)
    tasks.mute.add(other)
    assert tasks.lost(1, 2) == []
    tasks.stopped.add("worker-1")
    assert tasks.lost(3, 13) == ["worker-1"], "though the other one fell silent first"
    tasks.vitals.forget("worker-1")
    tasks.stopped.clear()
    tasks.mute.add("worker-1")
    assert tasks.lost(14, 24) == [other], "unless it stays silent"


@pytest.mark.parametrize(("first", "second"), [("worker-0", "worker-1"), ("chief-0", "worker-1")])
def test_of_two_that_run_and_are_silent_one_is_to_blame(first: str, second: str) -> None:
    """The one that fell silent first, or any but the coordinator, which calls all others."""
    tasks = Tasks(first, second)
    tasks.mute.add(first)
    assert tasks.lost(1, 2) == []
    tasks.mute.add(second)
    blamed, other = (second, first) if first == "chief-0" else (first, second)
    at = 13 if first == "chief-0" else 11
    assert tasks.lost(3, at) == [blamed]
    tasks.vitals.forget(blamed)
    assert tasks.lost(at + 1, at + 11) == [other]


def test_a_launcher_that_was_stopped_has_seen_nothing() -> None:
    tasks = Tasks("worker-0", "worker-1")
    assert tasks.lost(1, 1) == []
    tasks.stopped.add("worker-1")
    tasks.mute.add("worker-0")
    assert tasks.vitals.lost(1000) == [], "it was the launcher that slept"
    assert tasks.vitals.awake_since == 1000
    assert tasks.lost(1001, 1011) == ["worker-1"]


def test_a_task_announces_its_silence_and_the_end_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(heartbeat, "_send", told.append)
    monkeypatch.setattr(heartbeat, "_deadline", time.monotonic())
    monkeypatch.setattr(heartbeat, "_watchdog_secs", 10.0)
    with contextlib.suppress(KeyError), heartbeat.mute(30.0):
        assert heartbeat._deadline > time.monotonic() + 35.0, "it need not make progress either"
        raise KeyError
    assert told == [{"event": "mute", "silent_secs": 30.0}, {"event": "mute", "silent_secs": 0.0}]
