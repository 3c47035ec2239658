"""`cluster=slurm` under a real SLURM: places, roles and whole runs on its nodes, and what is no task of a step."""

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BLOCKS, COMMAND, REPOSITORY
from tests.fake_gpu import FakeGpus, why_not
from tests.shown import is_as_shown
from tests.slurm import Slurm, slurm, submit, wait_for
from tf2dist.cluster.slurm import nodes_in

SMALL = ("data=digits", "model=softmax", "figure=false", "cluster=slurm", "devices.onednn=false")
# Prints whether the task runs on the node in the address that it has found for itself, and all addresses.
WHERE = """
import os, socket
from tf2dist.cluster.sources import find_place
from tf2dist.config.schema import ClusterConfig, RunConfig
cluster, task = find_place(RunConfig(mode="sync", cluster=ClusterConfig(kind="slurm")), os.environ)
host = cluster.address(task).partition(":")[0]
print(host == socket.gethostname(), ",".join(cluster.jobs["worker"]))
"""
FIT = """
import keras, numpy as np, tf2dist
def build():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
if __name__ == "__main__":
    x = np.ones([100, 4], "float32")
    tf2dist.fit(build, x, x[:, :1], batch_size=10, epochs=2, mode="sync", run_dir="{folder}/run")
"""
# A program of a user, which says nothing of the cluster.
SCRIPT = """
import sys
import keras, numpy as np, tf2dist
def build():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
if __name__ == "__main__":
    x = np.ones([1000, 4], "float32")
    result = tf2dist.fit(build, x, x[:, :1], batch_size=10, epochs=int(sys.argv[2]), mode=sys.argv[1])
    print("steps:", result.summary.get("global_step", "on another host"))
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(4, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _clean(nodes: Slurm, no_leftovers: Callable[[], None]) -> None:
    pass


def trained(nodes: Slurm, folder: Path, mode: str, *srun: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The summary of a run by srun that has ended well, with exact counts."""
    options = (f"mode={mode}", "train.steps=200", f"run_dir={folder / 'run'}", *SMALL)
    done = nodes.run("srun", *srun, *COMMAND, *options, env=env)
    assert done.returncode == 0, done.stdout
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == 200, done.stdout
    assert summary["test_examples"] == 360
    return summary


def test_sync_with_two_workers(nodes: Slurm, tmp_path: Path) -> None:
    assert trained(nodes, tmp_path, "sync", "-N2", "-n2")["cluster"] == {"worker": 2, "ps": 0}


def test_async_on_four_nodes(nodes: Slurm, tmp_path: Path) -> None:
    assert trained(nodes, tmp_path, "async", "-N4", "-n4")["cluster"] == {"worker": 2, "ps": 1}


def test_several_tasks_of_a_node_with_another_distribution(nodes: Slurm, tmp_path: Path) -> None:
    srun = ("-N2", "-n5", "--distribution=cyclic")
    assert trained(nodes, tmp_path, "async", *srun)["cluster"] == {"worker": 3, "ps": 1}


def test_a_heterogeneous_job(nodes: Slurm, tmp_path: Path) -> None:
    """The chief and the ps on one node, and workers with GPUs on two others."""
    options = ("cluster=slurm", "mode=async", "train.steps=200", f"run_dir={tmp_path / 'run'}", *SMALL)
    command = (*COMMAND, *options)
    done = nodes.run("srun", "-N1", "-n2", *command, ":", "-N2", "-n2", "--gpus-per-task=1", *command)
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == 200
    assert summary["cluster"] == {"worker": 2, "ps": 1}


@pytest.mark.parametrize("distribution", ["block", "cyclic", "plane=3", "plane=4", "block:cyclic"])
def test_forty_tasks_on_four_nodes_know_where_they_are(nodes: Slurm, distribution: str) -> None:
    options = ("--quiet", "--overcommit", "-N4", "-n40", f"--distribution={distribution}", f"--chdir={REPOSITORY}")
    done = nodes.run("srun", *options, sys.executable, "-c", WHERE)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["True"] * 40, done.stdout
    assert len({line[1] for line in lines}) == 1, "all find the same cluster"
    assert len(set(lines[0][1].split(","))) == 40


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("mode", "srun", "numbers"),
    [
        ("sync", ("-n2", "--gres=gpu:4"), [{0, 1}, {2, 3}]),
        ("async", ("-n4", "--gres=gpu:4"), [{0}, {1}]),
        ("sync", ("-n2", "--gpus-per-task=2"), [{0, 1}, {2, 3}]),
    ],
)
def test_workers_of_a_node_divide_its_gpus(
    nodes: Slurm, tmp_path: Path, mode: str, srun: tuple[str, ...], numbers: list[set[int]]
) -> None:
    """SLURM shows all GPUs of the step to each of its tasks, unless it binds them."""
    gpus = FakeGpus(4, tmp_path / "gpus")
    trained(nodes, tmp_path, mode, "-N1", *srun, env=gpus.env)
    used = gpus.devices()
    workers = [{number for name, (number, *_) in used.items() if name.startswith(f"worker-{i}/")} for i in (0, 1)]
    assert workers == numbers
    assert {name.partition("/")[0] for name in used} == {"worker-0", "worker-1"}


def test_node_lists_are_those_of_scontrol(nodes: Slurm) -> None:
    for text in ("n[08-11]", "r[9-11]", "n[099-101]", "x,n[1,3-4],y[001-002,7]", "a[1-2]b[3-4]", "a[1-2][3-4]"):
        assert nodes.run("scontrol", "show", "hostnames", text).stdout.split() == nodes_in(text)


def test_a_script_or_shell_without_srun_is_told_so(nodes: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec {shlex.join([*COMMAND, *SMALL])}\n")
    for command in (("sbatch", "--wait", f"--output={tmp_path}/out", str(script)), ("salloc", "-N2", *COMMAND, *SMALL)):
        done = nodes.run(*command)
        text = done.stdout + ((tmp_path / "out").read_text() if command[0] == "sbatch" else "")
        assert done.returncode == 2, text
        assert "not a task in it; start it with srun, as in srun --ntasks=4 python -m tf2dist cluster=slurm" in text


def test_two_steps_of_a_job_do_not_meet(nodes: Slurm, tmp_path: Path) -> None:
    common = shlex.join([*COMMAND, *SMALL, "mode=sync", "train.steps=200"])
    runs = [f"srun --overlap -N2 -n2 {common} run_dir={tmp_path}/{name}" for name in ("a", "b")]
    script = tmp_path / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", f"{runs[0]} &", runs[1], "code=$?", "wait $! && exit $code"]))
    done = nodes.run("sbatch", "--wait", "-N2", "-n2", f"--output={tmp_path}/out", str(script))
    assert done.returncode == 0, (tmp_path / "out").read_text()
    for name in ("a", "b"):
        assert json.loads((tmp_path / name / "summary.json").read_text())["global_step"] == 200


def test_the_rendered_script_trains_on_four_nodes(nodes: Slurm, tmp_path: Path) -> None:
    options = ("mode=async", "cluster.num_workers=2", "train.steps=200")
    submit(nodes, tmp_path, "--line=#SBATCH --wait", "--line=#SBATCH --nodes=4", *options)
    (run_dir,) = (tmp_path / "runs").glob("tf2dist-*")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == 200
    assert summary["cluster"] == {"worker": 2, "ps": 1}
    assert "no job token" not in (tmp_path / "out").read_text()
    assert not list(tmp_path.glob(".*.token"))


def stop_and_requeue(nodes: Slurm, folder: Path, job: str) -> None:
    """Stops a job as --signal does before the time limit, and preemption before its end; waits until it is queued."""
    nodes.run("scancel", "--signal=TERM", f"{job}.0")

    # Before its tasks have ended, the job counts the restart already, and then sets its time of start anew.
    def is_requeued() -> bool:
        shown = nodes.run("scontrol", "show", "job", job).stdout
        return "Restarts=1" in shown and "JobState=PENDING" in shown

    wait_for("requeued", folder, is_requeued)


def start_now(nodes: Slurm, job: str) -> None:
    """Starts a job again that waits for its two minutes after a requeue."""
    time.sleep(3)  # "Job credential revoked" is what nodes say of a job that begins again at once
    nodes.run("scontrol", "update", f"JobId={job}", "StartTime=now")


def test_the_rendered_script_goes_on_after_a_signal_and_ends_at_scancel(nodes: Slurm, tmp_path: Path) -> None:
    job = submit(
        nodes,
        tmp_path,
        *("--line=#SBATCH --nodes=2", "mode=sync", "cluster.num_workers=2", "train.steps=100000"),
        *("simulate.delay_secs=[0.01,0.01]", "checkpoint.every_steps=50"),
    )
    runs, output = tmp_path / "runs", tmp_path / "out"
    wait_for("a checkpoint", tmp_path, lambda: any(runs.glob("tf2dist-*/checkpoints/step-*")))
    stop_and_requeue(nodes, tmp_path, job)
    steps = {path.name for path in runs.glob("tf2dist-*/checkpoints/step-*")}
    saved = max(int(name.partition("-")[2]) for name in steps)
    start_now(nodes, job)
    wait_for("more steps", tmp_path, lambda: not {one.name for one in runs.glob("tf2dist-*/checkpoints/*")} <= steps)
    assert len(list(runs.glob("tf2dist-*"))) == 1, "one run directory for all starts"
    assert f"going on at step {saved}\n" in output.read_text()
    nodes.run("scancel", job)
    wait_for("ended", tmp_path, lambda: "JobState=CANCELLED" in nodes.run("scontrol", "show", "job", job).stdout)
    wait_for("no task is left", tmp_path, lambda: not nodes.run("squeue", "-h").stdout)


def test_a_script_of_a_user_goes_on_after_a_signal(nodes: Slurm, tmp_path: Path) -> None:
    """It says nothing of the cluster, and the run directory is that of the job."""
    (tmp_path / "train.py").write_text(SCRIPT)
    job = submit(
        nodes,
        tmp_path,
        *("--line=#SBATCH --nodes=4", "mode=async", "cluster.num_workers=1", "cluster.num_ps=2"),
        *("simulate.delay_secs=[0.01]", "checkpoint.every_steps=50", "--command", "python train.py async 20"),
        common=("figure=false", "devices.onednn=false"),
    )
    runs, output = tmp_path / "runs", tmp_path / "out"
    wait_for("a checkpoint", tmp_path, lambda: any(runs.glob("tf2dist-*/checkpoints/step-*")))
    stop_and_requeue(nodes, tmp_path, job)
    start_now(nodes, job)
    wait_for(
        "completed",
        tmp_path,
        lambda: "JobState=COMPLETED" in nodes.run("scontrol", "show", "job", job).stdout,
        secs=300,
    )
    text = output.read_text()
    saved = re.findall(r"saved at step (\d+)", text)
    assert f"going on at step {saved[0]}\n" in text
    assert "steps: 2000\n" in text
    (summary,) = [json.loads(path.read_text()) for path in runs.glob("tf2dist-*/summary.json")]
    assert summary["cluster"] == {"worker": 1, "ps": 2}


def test_the_program_of_the_page(nodes: Slurm, tmp_path: Path) -> None:
    page = [block for block in BLOCKS if block.page == "docs/engines.md"]
    (program,) = [block.text for block in page if block.text.startswith("# train.py\n")]
    (shown,) = re.findall(r"^\$ cat slurm-7.out\n(.*)", "".join(block.text for block in page), re.M | re.S)
    (tmp_path / "train.py").write_text(program)
    request = ("mode=sync", "cluster.num_workers=2", "--command", "python train.py")
    job = submit(nodes, tmp_path, "--line=#SBATCH --wait", "--line=#SBATCH --nodes=2", *request, common=())
    printed = (tmp_path / "out").read_text().replace(str(tmp_path), "/home/me").replace(f"-{job}\n", "-7\n")
    assert is_as_shown(shown.partition("python -m tf2dist")[0], printed), printed


def test_the_doctor_and_fit_find_the_same_place(nodes: Slurm, tmp_path: Path) -> None:
    doctor = nodes.run("srun", "-N2", "-n2", sys.executable, "-m", "tf2dist.doctor", "cluster=slurm", "mode=sync")
    for rank in (0, 1):
        assert f"ok    cluster: 2 worker; this is worker-{rank}" in doctor.stdout
        assert f"ok    ports: worker-{rank} can listen at host{rank}:" in doctor.stdout
    program = tmp_path / "program.py"
    program.write_text(FIT.format(folder=tmp_path))
    done = nodes.run("srun", "-N2", "-n2", sys.executable, str(program))
    assert done.returncode == 0, done.stdout
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("fit: ")) == [
        "fit: worker-0 joins 2 workers",
        "fit: worker-1 joins 2 workers",
    ]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 10
