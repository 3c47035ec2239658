"""Real tasks of a local cluster share memory for large tensors, and a worker that was lost comes back with its own."""

import json
import re
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.conftest import Command, task_process, wait_until
from tests.e2e.test_losses import wait_for_step
from tf2dist.training.asynchronous.shared_memory import works_here

STEPS = 400


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def files_mapped_by(process: psutil.Process) -> set[str]:
    """The inodes of the files in memory that a task has mapped."""
    with open(f"/proc/{process.pid}/maps") as lines:
        return set(re.findall(r"(\d+) +/memfd:tf2dist", lines.read()))


@pytest.mark.slow
def test_a_lost_worker_comes_back_with_a_file_of_its_own(command: Command) -> None:
    if not works_here():
        pytest.skip("this system has no files in memory that other processes can open")
    model = ["model=dnn", "model.hidden_units=[512,512]", "optimizer=sgd"]
    cluster = ["cluster=local", "cluster.num_workers=2", "cluster.num_ps=2"]
    options = ["data=digits", *cluster, "train.log_every_steps=10", "train.steps_per_execution=2", "figure=false"]
    process = command.start("mode=async", *model, *options, f"train.steps={STEPS}", "simulate.delay_secs=[0.05,0.05]")
    wait_for_step(command, process, 40)
    run_dir = command.folder / "run"
    workers, servers = ([task_process(run_dir, f"{job}-{index}") for index in range(2)] for job in ("worker", "ps"))
    first, second = map(files_mapped_by, workers)
    assert len(first) == len(second) == 1
    assert set.union(*map(files_mapped_by, servers)) == first | second

    workers[0].send_signal(signal.SIGKILL)

    def has_another() -> bool:
        mapped = set.union(*map(files_mapped_by, servers))
        return len(mapped) == 2 and second < mapped and not first & mapped

    wait_until(has_another, process)
    done = command.finish(process)
    assert done.code == 0, str(done)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == STEPS
    assert summary["restarts"] == 1
