"""A cluster of separately started processes, each told by TF_CONFIG or by host lists which task it is."""

import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest

from tests.conftest import COMMAND, Command, Finished, ports_of_tasks, task_process, wait_until
from tests.hosts import with_hosts_file

pytestmark = pytest.mark.timeout(400)  # several runs of some 10 s, each with a limit of its own

STEPS = 200


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def addresses(counts: dict[str, int]) -> dict[str, list[str]]:
    """Addresses on this host, with ports in no order."""
    ports = ports_of_tasks(sum(counts.values()))
    random.Random(0).shuffle(ports)
    return {job: [f"localhost:{ports.pop()}" for _ in range(count)] for job, count in counts.items()}


def finish_all(command: Command, processes: dict[str, subprocess.Popen[str]]) -> dict[str, Finished]:
    ends = {name: command.finish(process, run_dir=name) for name, process in processes.items()}
    for name, end in ends.items():
        assert end.code == 0, f"{name}: {end}"
    return ends


def start_one_by_one(command: Command, jobs: dict[str, list[str]], mode: str) -> dict[str, subprocess.Popen[str]]:
    """Starts the tasks one after another: each when the previous one has reported that it has begun."""
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


@pytest.mark.slow  # the next test starts the same tasks in another order
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


@pytest.mark.slow
@pytest.mark.parametrize("counts", [{"worker": 3}, {"worker": 1, "chief": 1}], ids=str)
def test_sync(command: Command, counts: dict[str, int]) -> None:
    jobs = addresses(counts)
    finish_all(command, start_one_by_one(command, jobs, "sync"))
    leader = "chief-0" if "chief" in counts else "worker-0"
    summaries = [path.parent.name for path in command.folder.glob("*/summary.json")]
    assert summaries == [leader]
    summary = json.loads((command.folder / leader / "summary.json").read_text())
    assert summary["cluster"]["worker"] == sum(counts.values())
    assert summary["global_step"] == summary["updates_applied"] == STEPS


def options_of_tasks(kind: str, jobs: dict[str, list[str]]) -> dict[str, list[str]]:
    """For each task of these jobs, in the order of ranks, the options that tell it its place."""
    tasks = [(job, index) for job, hosts in jobs.items() for index in range(len(hosts))]
    if kind == "ranks":
        listed = [f"cluster.addresses=[{','.join(address for hosts in jobs.values() for address in hosts)}]"]
        own = [[f"cluster.rank={rank}"] for rank in range(len(tasks))]
    else:
        listed = [f"cluster.{job}=[{','.join(hosts)}]" for job, hosts in jobs.items()]
        own = [[f"task.type={job}", f"task.index={index}"] for job, index in tasks]
    return {f"{job}-{index}": [f"cluster={kind}", *listed, *its] for (job, index), its in zip(tasks, own, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hosts", "ranks"])
@pytest.mark.parametrize(
    ("mode", "counts"),
    [("sync", {"worker": 2}), ("async", {"chief": 1, "ps": 1, "worker": 1})],
    ids=["sync", "async"],
)
def test_lists_and_one_run_directory(command: Command, mode: str, counts: dict[str, int], kind: str) -> None:
    arguments = [f"mode={mode}", "data=digits", f"train.steps={STEPS}", "figure=true"]
    told = options_of_tasks(kind, addresses(counts))
    started = {name: command.start(*arguments, *own) for name, own in told.items()}
    for name, process in started.items():
        end = command.finish(process)
        assert end.code == 0, f"{name}: {end}"
    assert json.loads((command.folder / "run" / "summary.json").read_text())["global_step"] == STEPS
    assert (command.folder / "run" / "training.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("tasks", ["chief ps worker evaluator", "master ps worker"], ids=["listed", "apart"])
def test_an_evaluator_follows_the_checkpoints(command: Command, tasks: str) -> None:
    """It shares the run directory, and evaluates the last checkpoint and every other that it has time for."""
    jobs = addresses(dict.fromkeys(tasks.split(), 1))
    processes = {}
    for job in dict.fromkeys([*jobs, "evaluator"]):
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
    """Otherwise each of them would wait without end."""
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
            assert codes[job].code == (3 if end == "fails" else 139), codes[job]
            assert "chief-0: " in codes[job].stderr
            assert ("the loss is" if end == "fails" else "connection") in codes[job].stderr.lower()


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
def test_a_stop_while_all_workers_are_away_saves(command: Command, frozen: bool) -> None:
    """All updates that were applied are on the ps."""
    jobs = addresses({"chief": 1, "ps": 1, "worker": 1})
    processes = {}
    for job in jobs:
        env = {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": job, "index": 0}})}
        arguments = ["data=digits", "model=softmax", "train.steps=100000000", "train.log_every_steps=10"]
        processes[job] = command.start(*arguments, run_dir=job, env=env)
    log = command.folder / "worker" / "logs" / "worker-0.log"
    wait_until(lambda: log.exists() and log.read_text().count("worker=0, epoch") > 5, processes["worker"])
    if frozen:
        task_process(command.folder / "worker", "worker-0").send_signal(signal.SIGSTOP)
    else:
        processes["worker"].kill()
        stderr: Any = processes["chief"].stderr
        assert any("worker-0 is gone" in line for line in stderr)
    processes["chief"].send_signal(signal.SIGTERM)
    ends = {job: command.finish(process, job, timeout_secs=60) for job, process in processes.items()}
    assert (ends["chief"].code, ends["ps"].code) == (143, 143), ends
    saved = ends["chief"].stderr.partition("stopped by SIGTERM; saved at step ")[2].partition(";")[0]
    (checkpoint,) = (command.folder / "chief" / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{int(saved):010}"


@pytest.mark.thorough
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
    assert finished.code == (139 if missing == "chief-0" else 138), finished
    error = finished.stderr.splitlines()[-1]
    assert error.startswith("tf2dist: error: "), finished
    assert f"{missing} at" in error, finished
    assert f"{task['type']}-0 at" not in error, "this one has come"


def start_with_hosts_file(
    command: Command, names: Path, *options: str, name: str = "late-name"
) -> "subprocess.Popen[str]":
    """A synchronous cluster of one worker whose own name is in a file of host names, now or later."""
    jobs = {"worker": [f"{name}:{ports_of_tasks(1)[0]}"]}
    env = {**os.environ, "TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 0}})}
    arguments = [*COMMAND, "mode=sync", "data=digits", "model=softmax", "train.steps=20", *options]
    run_dir = f"run_dir={command.folder / 'run'}"
    return with_hosts_file(
        names, [*arguments, run_dir], env=env, cwd=command.folder, stdout=PIPE, stderr=PIPE, text=True, stdin=DEVNULL
    )


@pytest.mark.parametrize(
    "is_known", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.thorough)]
)
def test_a_run_waits_for_its_own_name_to_lead_to_it(command: Command, tmp_path: Path, is_known: bool) -> None:
    """The DNS record of a new pod comes seconds after the pod, and until then is that of the pod before it."""
    names, name = tmp_path / "names", socket.gethostname() if is_known else "late-name"
    names.write_text("127.0.0.1 localhost\n" + (f"10.255.255.1 {name}\n" if is_known else ""))
    process = start_with_hosts_file(command, names, name=name)
    said = ""
    for line in iter(process.stderr.readline, ""):  # type: ignore[union-attr]
        said += line
        if f"waiting for this host's own name {name} to {'lead here and not' if is_known else 'be known'}" in line:
            break
    assert not (command.folder / "run").exists(), "nothing is made before it is known"
    with open(names, "w", encoding="utf-8") as file:  # in place: it is mounted
        file.write(f"127.0.0.1 localhost {name}\n")
    end = command.finish(process)
    assert end.code == 0, f"{said}{end}"
    assert json.loads((end.run_dir / "summary.json").read_text())["global_step"] == 20


def test_an_own_name_that_never_comes_is_named(command: Command, tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n")
    end = command.finish(start_with_hosts_file(command, names, "startup_timeout_secs=1"))
    assert end.code == 138, end
    assert "still does not know the name late-name; correct it, use an address, or see" in end.stderr
    assert len(end.stderr.splitlines()) == 1
    assert list(command.folder.iterdir()) == [names]


def test_hosts_with_another_keras_json_are_refused(command: Command) -> None:
    """The two workers would train on differently permuted pixels, and sum their gradients without any error."""
    jobs = addresses({"worker": 2})
    processes = {}
    for index, value in enumerate(("channels_last", "channels_first")):
        home = command.folder / f"keras{index}"
        home.mkdir()
        (home / "keras.json").write_text(json.dumps({"image_data_format": value}))
        task = {"type": "worker", "index": index}
        env = {"TF_CONFIG": json.dumps({"cluster": jobs, "task": task}), "KERAS_HOME": str(home)}
        processes[index] = command.start("mode=sync", "data=digits", run_dir=f"run{index}", env=env)
    refused = command.finish(processes[1], run_dir="run1")
    processes[0].terminate()
    assert refused.code == 2, refused
    assert "keras.image_data_format: channels_last at worker-0, channels_first here" in refused.stderr
    assert command.finish(processes[0], run_dir="run0").code == 143
