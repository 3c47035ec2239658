"""A cluster of separately started processes, each told by TF_CONFIG or by host lists which task it is."""

import json
import random
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Command, Finished, ports_of_tasks

pytestmark = pytest.mark.timeout(400)  # several runs of some 10 s, each with a limit of its own

STEPS = 200


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def addresses(counts: dict[str, int]) -> dict[str, list[str]]:
    """Addresses on this host, the ports in no order."""
    ports = ports_of_tasks(sum(counts.values()))
    random.Random(0).shuffle(ports)
    return {job: [f"localhost:{ports.pop()}" for _ in range(count)] for job, count in counts.items()}


def finish_all(command: Command, processes: dict[str, subprocess.Popen[str]]) -> dict[str, Finished]:
    ends = {name: command.finish(process, run_dir=name) for name, process in processes.items()}
    for name, end in ends.items():
        assert end.code == 0, f"{name}: {end}"
    return ends


def start_one_by_one(command: Command, jobs: dict[str, list[str]], mode: str) -> dict[str, subprocess.Popen[str]]:
    """Starts every task, seconds apart: each waits until the one before says that it has begun."""
    processes: dict[str, subprocess.Popen[str]] = {}
    for job, hosts in jobs.items():
        for index in range(len(hosts)):
            name = f"{job}-{index}"
            env = {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})}
            arguments = [f"mode={mode}", "data=digits", f"train.steps={STEPS}", "train.log_every_steps=20"]
            processes[name] = command.start(*arguments, run_dir=name, env=env)
            stderr: Any = processes[name].stderr
            assert "starting TensorFlow\n" in iter(stderr.readline, ""), "a warning may come before it"
    return processes


def test_async_the_coordinator_first(command: Command) -> None:
    jobs = addresses({"chief": 1, "ps": 1, "worker": 2})
    ends = finish_all(command, start_one_by_one(command, jobs, "async"))
    summary = json.loads((command.folder / "chief-0" / "summary.json").read_text())
    assert summary["cluster"] == {"worker": 2, "ps": 1}
    assert summary["global_step"] == summary["updates_applied"] == STEPS
    assert f"test accuracy {summary['test_accuracy']:.4f}" in ends["chief-0"].stdout
    for index in range(2):
        log = (command.folder / f"worker-{index}" / "logs" / f"worker-{index}.log").read_text()
        assert f"worker={index}, epoch=" in log
        assert f"worker={index}, final accuracy={summary['test_accuracy']:.4f}" in log
        assert not (command.folder / f"worker-{index}" / "summary.json").exists()


@pytest.mark.slow
def test_async_the_coordinator_last(command: Command) -> None:
    jobs = addresses({"worker": 1, "ps": 2, "chief": 1})
    finish_all(command, start_one_by_one(command, jobs, "async"))
    assert json.loads((command.folder / "chief-0" / "summary.json").read_text())["global_step"] == STEPS


@pytest.mark.parametrize(
    "counts", [pytest.param({"worker": 3}, marks=pytest.mark.slow), {"worker": 1, "chief": 1}], ids=str
)
def test_sync(command: Command, counts: dict[str, int]) -> None:
    jobs = addresses(counts)
    finish_all(command, start_one_by_one(command, jobs, "sync"))
    leader = "chief-0" if "chief" in counts else "worker-0"
    summaries = [path.parent.name for path in command.folder.glob("*/summary.json")]
    assert summaries == [leader]
    summary = json.loads((command.folder / leader / "summary.json").read_text())
    assert summary["cluster"]["worker"] == sum(counts.values())
    assert summary["global_step"] == summary["updates_applied"] == STEPS


@pytest.mark.parametrize(
    ("mode", "counts"),
    [
        pytest.param("sync", {"worker": 2}, id="sync"),
        pytest.param("async", {"chief": 1, "ps": 1, "worker": 1}, id="async", marks=pytest.mark.slow),
    ],
)
def test_host_lists_and_one_run_directory(command: Command, mode: str, counts: dict[str, int]) -> None:
    jobs = addresses(counts)
    lists = [f"cluster.{job}=[{','.join(hosts)}]" for job, hosts in jobs.items()]
    arguments = [f"mode={mode}", "cluster=hosts", *lists, "data=digits", f"train.steps={STEPS}"]
    tasks = [(job, index) for job, count in counts.items() for index in range(count)]
    started = {
        f"{job}-{index}": command.start(*arguments, f"task.type={job}", f"task.index={index}") for job, index in tasks
    }
    for name, process in started.items():
        end = command.finish(process)
        assert end.code == 0, f"{name}: {end}"
    assert json.loads((command.folder / "run" / "summary.json").read_text())["global_step"] == STEPS


@pytest.mark.slow
def test_an_evaluator_follows_the_checkpoints(command: Command) -> None:
    """It shares the run directory, sees every checkpoint that it has time for, and the last."""
    jobs = addresses({"chief": 1, "ps": 1, "worker": 1, "evaluator": 1})
    processes = {}
    for job in jobs:
        env = {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": job, "index": 0}})}
        arguments = ["data=digits", "model=softmax", "train.steps=4000", "checkpoint.every_steps=500"]
        processes[job] = command.start(*arguments, env=env)
    for job, process in processes.items():
        end = command.finish(process)
        assert end.code == 0, f"{job}: {end}"
    lines = [json.loads(line) for line in (command.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["task"] == "evaluator-0"]
    assert len(evaluated) >= 2
    summary = json.loads((command.folder / "run" / "summary.json").read_text())
    assert evaluated[-1]["step"] == 4000
    assert evaluated[-1]["test_accuracy"] == pytest.approx(summary["test_accuracy"])
    assert evaluated[-2]["validation_accuracy"] == pytest.approx(summary["validation_accuracy"])


@pytest.mark.slow
def test_a_coordinator_that_fails_or_dies_ends_the_others(command: Command) -> None:
    """Each of them would otherwise wait for ever: nobody else knows of them."""
    for end in ("fails", "dies"):
        jobs = addresses({"ps": 1, "worker": 1, "chief": 1})
        processes = {}
        for job in jobs:
            env = {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": job, "index": 0}})}
            rate = "1e30" if end == "fails" else "0.01"
            arguments = ["data=digits", "optimizer=sgd", f"optimizer.learning_rate={rate}", "train.steps=100000000"]
            processes[job] = command.start(*arguments, run_dir=f"{end}-{job}", env=env)
        if end == "dies":
            stderr: Any = processes["chief"].stderr
            for _ in range(2):  # some seconds of training
                assert any(line.startswith("step ") for line in stderr)
            processes["chief"].kill()
        codes = {job: command.finish(process, f"{end}-{job}", 90) for job, process in processes.items()}
        assert codes["chief"].code == (3 if end == "fails" else -9), codes["chief"]
        for job in ("ps", "worker"):
            assert codes[job].code == (3 if end == "fails" else 138), codes[job]
            assert "chief-0: " in codes[job].stderr
            assert ("the loss is" if end == "fails" else "connection") in codes[job].stderr.lower()


@pytest.mark.parametrize(
    ("mode", "counts", "missing"),
    [
        ("async", {"chief": 1, "ps": 1, "worker": 1}, "ps-0"),
        ("async", {"ps": 1, "chief": 1, "worker": 1}, "chief-0"),
        ("sync", {"worker": 2}, "worker-1"),
    ],
)
def test_a_peer_that_never_comes_is_named(command: Command, mode: str, counts: dict[str, int], missing: str) -> None:
    jobs = addresses(counts)
    task = {"type": next(iter(counts)), "index": 0}
    env = {"TF_CONFIG": json.dumps({"cluster": jobs, "task": task})}
    finished = command(f"mode={mode}", "data=digits", "startup_timeout_secs=4", env=env, timeout_secs=60)
    assert finished.code == 138, finished
    error = finished.stderr.splitlines()[-1]
    assert error.startswith("tf2dist: error: "), finished
    assert f"{missing} at" in error, finished
    assert f"{task['type']}-0 at" not in error, "this one has come"
