"""What becomes of rendered jobs under a real SLURM: time limits, preemptions, lost nodes and late tasks."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import COMMAND
from tests.slurm import Slurm, slurm, submit, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def slow(mode: str, num_workers: int, steps: int) -> tuple[str, ...]:
    """Options of a run that takes about 20 steps a second; with asynchronous workers each does."""
    delays = f"simulate.delay_secs=[{','.join(['0.05'] * num_workers)}]"
    size = f"cluster.num_workers={num_workers}"
    return f"mode={mode}", size, f"train.steps={steps}", delays, "checkpoint.every_steps=100"


@pytest.fixture
def nodes(tmp_path: Path, no_leftovers: Callable[[], None]) -> Iterator[Slurm]:
    (tmp_path / "slurm").mkdir()
    with slurm(4, tmp_path / "slurm") as cluster:
        yield cluster


def state_of(nodes: Slurm, job: str) -> str:
    return nodes.run("scontrol", "show", "job", job).stdout


def check_requeued_and_finished(nodes: Slurm, job: str, folder: Path, steps: int) -> None:
    """Waits for the end of a job that SLURM has put back into the queue."""
    wait_for("requeued", folder, lambda: "Restarts=0" not in state_of(nodes, job), secs=200)
    # SLURM waits for two minutes otherwise.
    nodes.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for("completed", folder, lambda: "JobState=COMPLETED" in state_of(nodes, job), secs=300)
    (run_dir,) = (folder / "runs").glob("tf2dist-*")
    summary = json.loads((run_dir / "summary.json").read_text())
    output = (folder / "out").read_text()
    assert summary["global_step"] == summary["updates_applied"] == steps, output
    resumed = re.search(r"going on at step (\d+)\n", output)
    assert resumed, output
    assert 0 < int(resumed[1]) < steps


def checkpoints(folder: Path) -> list[Path]:
    return list(folder.glob("runs/tf2dist-*/checkpoints/step-*"))


@pytest.mark.parametrize(("mode", "steps"), [("sync", 1200), ("async", 2400)])
def test_a_job_goes_on_after_its_time_limit(nodes: Slurm, tmp_path: Path, mode: str, steps: int) -> None:
    """The signal comes two minutes before the limit, so within the first minute."""
    lines = ("--line=#SBATCH --nodes=4", "--line=#SBATCH --time=3")
    job = submit(nodes, tmp_path, *lines, *slow(mode, 2, steps))
    check_requeued_and_finished(nodes, job, tmp_path, steps)


def test_a_job_goes_on_after_a_preemption(nodes: Slurm, tmp_path: Path) -> None:
    job = submit(nodes, tmp_path, "--line=#SBATCH --nodes=4", *slow("async", 2, 500))
    wait_for("a checkpoint", tmp_path, lambda: bool(checkpoints(tmp_path)))
    urgent = nodes.run("srun", "--partition=urgent", "--nodes=4", "--exclusive", "true", timeout_secs=100)
    assert urgent.returncode == 0, urgent.stdout
    check_requeued_and_finished(nodes, job, tmp_path, 500)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_job_goes_on_after_the_loss_of_a_node(nodes: Slurm, tmp_path: Path, mode: str) -> None:
    """On nodes that are left. The script is on the first node, and a task on the lost one."""
    num_nodes, num_workers = {"sync": (2, 2), "async": (3, 1)}[mode]
    job = submit(nodes, tmp_path, f"--line=#SBATCH --nodes={num_nodes}", *slow(mode, num_workers, 500))
    wait_for("a checkpoint", tmp_path, lambda: bool(checkpoints(tmp_path)))
    nodes.lose(1)
    check_requeued_and_finished(nodes, job, tmp_path, 500)


def test_a_task_that_comes_late_is_waited_for(nodes: Slurm, tmp_path: Path) -> None:
    late = ("sh", "-c", 'sleep $((SLURM_PROCID * 20)); exec "$@"', "sh")  # the last of two tasks: 20 s
    options = ("cluster=slurm", "mode=sync", "data=digits", "model=softmax", "figure=false", "train.steps=100")
    done = nodes.run("srun", "-N2", "-n2", *late, *COMMAND, *options, f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 100
