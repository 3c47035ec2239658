"""The algorithms of asynchronous and of synchronous training, as a user asks for them."""

import json
import re
import signal
from collections.abc import Callable

import pytest

from tests.conftest import Command, task_process
from tests.e2e.test_losses import assert_exact, lose_each_role, start, wait_for_step

ALGORITHMS = ["staleness_aware", "delay_compensated", "bounded", "downpour"]


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


LATE = """
import os, pathlib, time
mark = pathlib.Path(os.environ["TEST_MARK"])
if os.readlink("/proc/self/fd/1").endswith("worker-1.log"):
    if mark.exists():
        time.sleep(6)
    mark.touch()
"""


@pytest.mark.slow
def test_workers_do_not_wait_for_one_that_is_lost(command: Command) -> None:
    """They go on while it is not there, and it takes part again when it is back."""
    (command.folder / "late.py").write_text(LATE)
    command.env["TEST_MARK"] = str(command.folder / "mark")
    process = start(command, "async", "algorithm=bounded", "algorithm.bound=2", "plugins=[late.py]")
    wait_for_step(command, process, 500)
    task_process(command.folder / "run", "worker-1").kill()
    finished = command.finish(process)
    assert finished.code == 0, finished
    assert "worker-1 was killed by SIGKILL; starting it again" in finished.stderr
    logs = command.folder / "run" / "logs"
    chief = (logs / "chief-0.log").read_text()
    expected = "worker-1 cannot be reached (connection refused): the other workers no longer wait for it"
    assert chief.count(expected) == 1, chief[-2000:]
    assert "final accuracy" in (logs / "worker-1.log").read_text()
    summary = assert_exact(command, "async", restarts=1)
    assert summary["lead"]["max"] <= summary["bound"] == 2
    steps = [worker["local_steps"] for worker in summary["workers"]]
    assert abs(steps[0] - steps[2]) <= 2
    assert steps[1] < steps[0] - 100


@pytest.mark.slow
def test_the_log_names_the_worker_that_the_others_wait_for(command: Command) -> None:
    more = ["train.steps=600", "simulate.pause='worker-2 at 50 for 8'", "algorithm.bound=3"]
    # With calls of one step for good: while longer ones are made, all calls end, and nobody waits at the gate.
    more.append("train.steps_per_execution=1")
    finished = command("algorithm=bounded", "cluster=local3", "data=digits", "model=softmax", *more)
    assert finished.code == 0, finished
    chief = (finished.run_dir / "logs" / "chief-0.log").read_text()
    assert re.search(r"^waiting for worker-2, \d+ s$", chief, re.MULTILINE), chief[-2000:]
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == 600
    assert summary["lead"]["max"] == 3, "nobody went further in these 8 s"


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
