"""The algorithms of asynchronous and of synchronous training, as a user asks for them."""

import json
import signal
from collections.abc import Callable

import pytest

from tests.conftest import Command
from tests.e2e.test_losses import lose_each_role

ALGORITHMS = ["staleness_aware", "delay_compensated"]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_with_another_algorithm(command: Command, algorithm: str) -> None:
    finished = command(f"algorithm={algorithm}", "cluster=local2", "data=digits", "model=softmax", "train.steps=300")
    assert finished.code == 0, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["algorithm"] == algorithm
    assert summary["global_step"] == summary["updates_applied"] == 300
    assert summary["test_accuracy"] > 0.8
    assert f"kind: {algorithm}" in (finished.run_dir / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_the_loss_of_each_role_in_turn(command: Command, algorithm: str, signum: signal.Signals) -> None:
    assert lose_each_role(command, "async", signum, f"algorithm={algorithm}")["algorithm"] == algorithm


LOCAL = ["algorithm=local_sgd", "algorithm.outer_momentum=0.3"]


@pytest.mark.slow
def test_a_run_with_local_steps(command: Command) -> None:
    """Rounds of 8 steps, the last before an evaluation of 2, and the last of the run of 1."""
    more = ["train.steps=301", "train.eval_every_steps=50", "data.num_validation=200"]
    finished = command("mode=sync", *LOCAL, "cluster=local2", "data=digits", "model=softmax", *more)
    assert finished.code == 0, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert (summary["algorithm"], summary["local_steps"]) == ("local_sgd", 8)
    assert summary["global_step"] == summary["updates_applied"] == 301
    assert [worker["local_steps"] for worker in summary["workers"]] == [301, 301]
    assert summary["test_accuracy"] > 0.8
    lines = map(json.loads, (finished.run_dir / "metrics.jsonl").read_text().splitlines())
    evaluated = [line["step"] for line in lines if "validation_accuracy" in line]
    assert evaluated == [50, 100, 150, 200, 250, 300, 301]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_the_loss_of_each_worker_with_local_steps(command: Command, signum: signal.Signals) -> None:
    assert lose_each_role(command, "sync", signum, *LOCAL)["algorithm"] == "local_sgd"


@pytest.mark.slow
def test_a_worker_that_waits_for_a_slow_one_is_not_stalled(command: Command) -> None:
    """It waits for 12 s at the end of each round, longer than the watchdog allows."""
    slow = ["simulate.delay_secs=[0,0.3]", "watchdog_secs=8", "algorithm.local_steps=40", "train.steps=160"]
    finished = command("mode=sync", "algorithm=local_sgd", "cluster=local2", "data=digits", "model=softmax", *slow)
    assert finished.code == 0, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["restarts"] == 0, finished
    assert summary["wall_secs"] > 160 * 0.3
