"""What the end of a task asks for, and who counts as frozen: without processes."""

import pytest

from tf2dist.ends import rank
from tf2dist.errors import FailureRecord
from tf2dist.policy import RestartPolicy, Verdict, Vitals

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
    """Whether each runs, and what is concluded from it."""

    def __init__(self, *names: str) -> None:
        self.stopped: set[str] = set()
        self.vitals = Vitals(lambda task: task not in self.stopped, frozen_secs=10.0, mute_secs=30.0)
        for name in names:
            self.vitals.saw(name, 0.0)

    def lost(self, *seconds: float) -> dict[str, float]:
        """At the last of these looks; at none of the others."""
        for second in seconds[:-1]:
            assert self.vitals.lost(second) == {}
        return self.vitals.lost(seconds[-1])


def test_a_stopped_task_is_frozen() -> None:
    tasks = Tasks("worker-0", "worker-1")
    assert tasks.lost(*range(4)) == {}
    assert not tasks.vitals.any_stopped
    tasks.stopped.add("worker-1")
    assert tasks.lost(*range(4, 14)) == {}
    assert tasks.vitals.any_stopped
    assert tasks.lost(14) == {"worker-1": 10.0}
    tasks.vitals.forget("worker-1")
    assert tasks.lost(15) == {}
    assert not tasks.vitals.any_stopped


def test_a_task_that_was_stopped_for_a_moment_is_not() -> None:
    """Nor one that has said nothing before, since it waits in code that keeps Python's lock."""
    tasks = Tasks("worker-0")
    assert tasks.lost(*range(20)) == {}
    tasks.stopped.add("worker-0")
    assert tasks.lost(20, 24) == {}
    tasks.stopped.clear()
    assert tasks.lost(28, 29) == {}


def test_who_waits_for_a_frozen_task_may_be_silent_too() -> None:
    tasks = Tasks("worker-0", "worker-1", "chief-0")
    tasks.stopped.add("worker-1")  # later than the others fell silent
    tasks.vitals.saw("worker-1", 2.0)
    assert tasks.lost(*range(2, 14)) == {"worker-1": 10.0}


def test_who_runs_and_says_nothing_is_lost_in_the_end() -> None:
    tasks = Tasks("worker-0", "worker-1")
    for second in range(40):
        tasks.vitals.saw("worker-0", second)
        assert tasks.lost(second) == ({"worker-1": 30.0} if second > 30 else {})


def test_a_launcher_that_was_stopped_has_seen_nothing() -> None:
    tasks = Tasks("worker-0", "worker-1")
    tasks.stopped.add("worker-1")
    assert tasks.lost(1, 1000) == {}, "it was the launcher that slept"
    assert tasks.vitals.awake_since == 1000
    assert tasks.lost(1004, 1008, 1011) == {"worker-1": 10.0}
    tasks.vitals.forget("worker-1")
    assert tasks.lost(1013, 1017, 1021, 1025, 1028, 1031) == {"worker-0": 30.0}
