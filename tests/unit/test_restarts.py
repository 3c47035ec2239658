"""Whether a failed task is restarted, without processes."""

import pytest

from tf2dist.errors import FailureRecord, LeaderLostError
from tf2dist.launch.failures import RestartDecision, RestartPolicy, cause_order

LOST = 138


def failure(task: str, exit_code: int = LOST) -> FailureRecord:
    return FailureRecord(task, 0.0, exit_code, "was killed by SIGKILL", by_signal=exit_code == LOST)


@pytest.mark.parametrize(
    ("mode", "task", "whole_cluster", "expected"),
    [
        ("async", "worker-1", True, RestartDecision.RESTART_TASK),
        ("async", "worker-1", False, RestartDecision.RESTART_TASK),
        ("async", "ps-0", True, RestartDecision.RESTART_ALL),
        ("async", "chief-0", True, RestartDecision.RESTART_ALL),
        ("async", "ps-0", False, RestartDecision.FAIL),
        ("async", "chief-0", False, RestartDecision.FAIL),
        ("sync", "worker-0", True, RestartDecision.RESTART_ALL),
        ("sync", "worker-1", True, RestartDecision.RESTART_ALL),
        ("sync", "worker-1", False, RestartDecision.FAIL),
        ("sync", "chief-0", False, RestartDecision.FAIL),
    ],
)
def test_the_loss_of_a_task(mode: str, task: str, whole_cluster: bool, expected: RestartDecision) -> None:
    policy = RestartPolicy(mode, max_restarts=3, whole_cluster=whole_cluster)
    assert policy.decide(failure(task)) is expected
    assert policy.restarts == int(expected is not RestartDecision.FAIL)


@pytest.mark.parametrize("exit_code", [1, 2, 3, 130, 143])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_failure_that_would_recur_is_not_retried(mode: str, exit_code: int) -> None:
    policy = RestartPolicy(mode, max_restarts=3, whole_cluster=True)
    for task in ("worker-0", "ps-0", "chief-0"):
        assert policy.decide(failure(task, exit_code)) is RestartDecision.FAIL
    assert policy.restarts == 0


def test_a_worker_that_reports_a_lost_peer_is_not_lost_itself() -> None:
    complaint = FailureRecord("worker-0", 0.0, LOST, "chief-0 is gone")
    assert RestartPolicy("async", 3, whole_cluster=False).decide(complaint) is RestartDecision.FAIL
    assert RestartPolicy("async", 3, whole_cluster=True).decide(complaint) is RestartDecision.RESTART_ALL
    orphan = FailureRecord("worker-0", 0.0, LeaderLostError.exit_code, "chief-0 is gone")
    assert RestartPolicy("async", 3, whole_cluster=True).decide(orphan) is RestartDecision.RESTART_ALL
    named = [complaint, orphan, failure("ps-0"), FailureRecord("chief-0", 1.0, 3, "the loss is nan")]
    assert [record.task for record in sorted(named, key=cause_order)] == [*("ps-0", "chief-0", "worker-0", "worker-0")]


def test_restarts_are_limited() -> None:
    policy = RestartPolicy("async", max_restarts=2, whole_cluster=True)
    verdicts = [policy.decide(failure(task)) for task in ("worker-0", "ps-0", "worker-1", "chief-0")]
    assert verdicts == [
        RestartDecision.RESTART_TASK,
        RestartDecision.RESTART_ALL,
        RestartDecision.FAIL,
        RestartDecision.FAIL,
    ]
    assert policy.is_exhausted
    assert RestartPolicy("sync", 0, True).decide(failure("worker-0")) is RestartDecision.FAIL
