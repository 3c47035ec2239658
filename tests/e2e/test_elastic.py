"""Asynchronous workers that leave a running job, come back, or come late; every example is seen once in a pass."""

import json
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tf2dist
from tests.conftest import Command, Finished, wait_until
from tests.e2e import count_examples
from tests.e2e.count_examples import NUM_EXAMPLES, seen_by
from tests.e2e.test_tf_config import addresses

pytestmark = pytest.mark.timeout(400)

BATCH_SIZE = 20
FINISH_SECS = 300.0
COUNTING = [
    f"plugins=[{count_examples.__file__}]",
    *("data=numbers", "model=counting", f"train.batch_size_per_worker={BATCH_SIZE}"),
    *("train.log_every_steps=5", "task.on_term=leave"),
]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


class Job:
    """The commands of one cluster, each in a run directory with the name of its task."""

    def __init__(self, command: Command, workers: int, *options: str, ps: int = 1, epochs: int = 40) -> None:
        delays = ",".join(["0.05"] * workers)
        length = [f"train.epochs={epochs}", f"simulate.delay_secs=[{delays}]"]
        self.command, self.options, self.epochs = command, [*COUNTING, *length, *options], epochs
        self.jobs = addresses({"chief": 1, "ps": ps, "worker": workers})
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.ends: dict[str, Finished] = {}  # by task, the last one of each

    def start(self, *names: str) -> None:
        for name in names:
            job, _, index = name.partition("-")
            env = {"TF_CONFIG": json.dumps({"cluster": self.jobs, "task": {"type": job, "index": int(index)}})}
            self.processes[name] = self.command.start(*self.options, run_dir=name, env=env)

    def lines(self, name: str) -> int:
        """How often a worker has said that it trains, in all its lives."""
        log = self.command.folder / name / "logs" / f"{name}.log"
        return log.read_text(errors="replace").count("local_step=") if log.exists() else 0

    def wait_for_training(self, *names: str) -> None:
        for name in names:
            before = self.lines(name)
            wait_until(lambda name=name, before=before: self.lines(name) > before + 1, self.processes[name])  # type: ignore[misc]

    def end(self, name: str, code: int) -> Finished:
        finished = self.ends[name] = self.command.finish(self.processes.pop(name), name, FINISH_SECS)
        assert finished.code == code, f"{name}: {finished}"
        return finished

    def assert_exact(self) -> dict[str, Any]:
        """The summary of a job that has ended well."""
        for name in list(self.processes):
            self.end(name, 0)
        folder = self.command.folder / "chief-0"
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        steps = self.epochs * NUM_EXAMPLES // BATCH_SIZE
        assert summary["global_step"] == summary["updates_applied"] == steps
        assert summary["examples_seen"] == self.epochs * NUM_EXAMPLES
        assert sum(worker["local_steps"] for worker in summary["workers"]) == steps
        np.testing.assert_array_equal(seen_by(tf2dist.load_model(folder)), self.epochs)
        return summary


def events(summary: dict[str, Any]) -> list[tuple[int, str]]:
    steps = [event["step"] for event in summary["worker_events"]]
    assert steps == sorted(steps)
    assert all(0 <= step <= summary["global_step"] for step in steps)
    return [(event["worker"], event["event"]) for event in summary["worker_events"]]


def test_a_worker_leaves_and_comes_back(command: Command) -> None:
    job = Job(command, 2, epochs=20)
    job.start("chief-0", "ps-0", "worker-0", "worker-1")
    job.wait_for_training("worker-0", "worker-1")
    job.processes["worker-1"].send_signal(signal.SIGTERM)
    left = job.end("worker-1", 143)
    told = "worker-1 has left after SIGTERM; the others go on, and it may come back"
    assert left.stderr.splitlines()[-1] == f"tf2dist: error: {told}"
    job.wait_for_training("worker-0")
    job.start("worker-1")
    job.wait_for_training("worker-1")
    summary = job.assert_exact()
    assert events(summary) == [(1, "left"), (1, "back")]
    assert summary["restarts"] == 0
    assert told in job.ends["chief-0"].stderr.splitlines()
    assert "warning: worker-1" not in job.ends["chief-0"].stderr


@pytest.mark.slow
@pytest.mark.parametrize("last", ["chief-0", "ps-0"])
def test_a_worker_that_is_stopped_with_its_job_waits_for_the_leader_to_save(command: Command, last: str) -> None:
    """The signals come one after another, as when a job is deleted."""
    job = Job(command, 2, ps=2)
    names = ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    job.start(*names)
    job.wait_for_training("worker-0", "worker-1")
    for name in ("worker-0", "worker-1", last):
        job.processes[name].send_signal(signal.SIGTERM)
    ends = {name: job.end(name, 143) for name in names}
    assert "; saved at step " in ends["chief-0"].stderr
    assert all("stopped by SIGTERM" in end.stderr for end in ends.values()), ends


@pytest.mark.slow
def test_a_job_begins_with_one_worker_and_others_join(command: Command) -> None:
    """The last of its three workers never comes; the first one is lost when the second has joined, and comes back."""
    job = Job(command, 3, "cluster.min_workers=1")
    job.start("chief-0", "ps-0", "worker-1")
    job.wait_for_training("worker-1")
    job.start("worker-0")
    job.wait_for_training("worker-0", "worker-1")
    job.processes["worker-1"].kill()
    job.end("worker-1", -signal.SIGKILL)
    job.wait_for_training("worker-0")
    job.start("worker-1")
    job.wait_for_training("worker-1", "worker-0")
    summary = job.assert_exact()
    assert events(summary) == [(0, "joined"), (1, "lost"), (1, "back")]
    assert summary["workers"][2]["local_steps"] == 0
    assert all(worker["local_steps"] > 0 for worker in summary["workers"][:2])
    told = job.ends["chief-0"].stderr
    assert "beginning without worker-0 at localhost:" in told
    assert "worker-0 has joined, host " in told
    assert "worker-1 is back, host " in told


@pytest.mark.slow
def test_a_worker_comes_back_while_another_stays_away(command: Command) -> None:
    """TensorFlow alone takes nobody back until all are there."""
    job = Job(command, 3, epochs=80)
    job.start("chief-0", "ps-0", "worker-0", "worker-1", "worker-2")
    job.wait_for_training("worker-0", "worker-1", "worker-2")
    job.processes["worker-2"].send_signal(signal.SIGTERM)
    job.end("worker-2", 143)
    for _ in range(2):
        job.processes["worker-0"].kill()
        job.end("worker-0", -signal.SIGKILL)
        job.start("worker-0")
        job.wait_for_training("worker-0", "worker-1")
    summary = job.assert_exact()
    assert events(summary) == [(2, "left"), *[(0, "lost"), (0, "back")] * 2]
