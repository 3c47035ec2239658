"""What `python -m tf2dist.render ray` prints, on a real Ray cluster of three nodes."""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import slowness, start_module
from tests.e2e.test_slurm import SCRIPT
from tests.fake_gpu import FakeGpus, why_not

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]
SMALL = ("data=digits", "model=softmax", "figure=false", "devices.onednn=false")
# Runs long enough for whatever is to happen to it.
LONG = ("train.steps=1500", "checkpoint.every_steps=100", "simulate.delay_secs=[0.01,0.01]")
WAIT_SECS = 240.0
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
# One of the two tasks gets a wrong option.
ONE_IS_WRONG = """
    import ray.train
    rank = ray.train.get_context().get_world_rank()
    with open("{folder}/attempts", "a") as file:
        print(rank, file=file)
    run_command([*COMMAND, *["train.stepps=3"][:rank]])
"""
ON_GPUS = """
    import os
    os.environ.update({env})
    run_command(COMMAND)
"""
FIT = """
    import keras, numpy as np, tf2dist
    def build():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model
    x = np.ones([100, 4], "float32")
    tf2dist.fit(build, x, x[:, :1], batch_size=10, epochs=2, mode="sync", run_dir="{folder}/run")
"""


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """The environment of whoever uses a cluster of three nodes, which exists meanwhile."""
    # A socket's path has at most 107 characters, which the folders of pytest would exceed.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        mark = f"{os.environ['TF2DIST_TEST_MARK']} ray"
        env = os.environ | {"HOME": folder, "TF2DIST_TEST_MARK": mark, "RAY_USAGE_STATS_ENABLED": "0"}
        env |= {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout
        try:
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"[\d.]+:\d+", address), address
            yield env | {"RAY_ADDRESS": address}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60 * slowness())
            process.kill()
            for left in processes(mark):
                left.kill()


def processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TF2DIST_TEST_MARK") == mark:
                found.append(process)
    return found


class Job:
    """A rendered script, and its runs."""

    def __init__(self, folder: Path, env: dict[str, str], *options: str, common: Sequence[str] = SMALL) -> None:
        self.folder, self.env, self.run_dir = folder, env, folder / "run"
        self.script = folder / "job.py"
        arguments = ("ray", "--out", str(self.script), f"run_dir={self.run_dir}", *common, *options)
        assert start_module(folder, "tf2dist.render", *arguments).wait(60) == 0
        self._process: subprocess.Popen[bytes] | None = None

    def replace_loop(self, code: str) -> None:
        """Puts another code in the place of the call of run_command."""
        before, call, after = self.script.read_text().partition("    run_command(COMMAND)\n")
        assert call
        self.script.write_text(before + code + after)

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "out").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, self.script], cwd=self.folder, env=self.env, stdout=output, stderr=subprocess.STDOUT
            )
        return self._process

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    def run(self) -> int:
        self.start()
        return self.code()

    def code(self) -> int:
        """The exit code of the script; asserts that it ends, and leaves no task behind."""
        assert self._process
        try:
            code = self._process.wait(WAIT_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            pytest.fail(f"not done in {WAIT_SECS:.0f} s\n{self.output}")
        self.wait(lambda: not self.tasks(), "no task is left")
        return code

    def tasks(self) -> list[psutil.Process]:
        """The commands of tasks, and what they have started, which writes into the run directory."""
        found = []
        for process in processes(self.env["TF2DIST_TEST_MARK"]):
            with contextlib.suppress(psutil.Error, OSError):
                output = os.readlink(f"/proc/{process.pid}/fd/1")
                options = [*process.cmdline(), *process.environ().get("TF2DIST_FIT_OPTIONS", "").split()]
                if output.startswith(f"{self.run_dir}/") or f"run_dir={self.run_dir}" in options:
                    found.append(process)
        return found

    def command(self, rank: int) -> psutil.Process:
        """The command of one task."""
        found = self.tasks()
        for process in found:
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TF2DIST_RANK") == str(rank) and process.parent() not in found:
                    return process
        raise LookupError(f"rank {rank} does not run\n{self.output}")

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECS
        while not condition():
            assert time.monotonic() < deadline, f"not within {WAIT_SECS:.0f} s: {what}\n{self.output}"
            time.sleep(0.2)  # the interval between two looks

    def wait_for_checkpoint(self) -> None:
        self.wait(lambda: self.saved_step(), "a checkpoint")

    def saved_step(self) -> int:
        steps = [int(path.name.partition("-")[2]) for path in self.run_dir.glob("checkpoints/step-*")]
        return max(steps, default=0)

    def summary(self, steps: int) -> dict[str, Any]:
        """The summary of a run that has ended well, with exact counts."""
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        assert found["global_step"] == found["updates_applied"] == steps, self.output
        assert found["test_examples"] == 360
        return found


@pytest.mark.thorough
def test_sync_with_two_workers(environment: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, environment, "mode=sync", "cluster.num_workers=2", "train.steps=200")
    assert job.run() == 0, job.output
    assert job.summary(200)["cluster"] == {"worker": 2, "ps": 0}
    assert "no job token" not in job.output


@pytest.mark.slow
def test_async_on_three_nodes(environment: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, environment, "mode=async", "cluster.num_workers=2", "train.steps=200")
    assert job.run() == 0, job.output
    assert job.summary(200)["cluster"] == {"worker": 2, "ps": 1}


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(("flags", "used"), [(("--gpus", "1"), [{0}, {1}]), ((), [set(), set()])])
def test_workers_use_the_gpus_that_ray_gives_them(
    environment: dict[str, str], tmp_path: Path, flags: tuple[str, ...], used: list[set[int]]
) -> None:
    gpus = FakeGpus(2, tmp_path / "gpus")
    job = Job(tmp_path, environment, "mode=sync", "cluster.num_workers=2", "train.steps=20", *flags)
    job.replace_loop(ON_GPUS.format(env=gpus.env))
    assert job.run() == 0, job.output
    job.summary(20)
    devices = gpus.devices()
    found = [{number for name, (number, *_) in devices.items() if name.startswith(f"worker-{i}/")} for i in (0, 1)]
    assert found in (used, used[::-1])


@pytest.mark.slow
def test_after_a_loss_the_tasks_go_on_from_the_last_checkpoint(environment: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, environment, "mode=sync", "cluster.num_workers=2", *LONG)
    job.start()
    job.wait_for_checkpoint()
    job.command(1).kill()
    assert job.code() == 0, job.output
    job.summary(1500)
    assert re.search(r"going on at step \d+00\b", job.output), job.output


@pytest.mark.slow
def test_after_too_many_losses_the_script_ends(environment: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, environment, "mode=sync", "cluster.num_workers=2", *LONG, "--restarts", "0")
    job.start()
    job.wait_for_checkpoint()
    job.command(1).kill()
    assert job.code() == 138, job.output
    assert "going on at step" not in job.output


@pytest.mark.slow
def test_without_a_worker_of_ray_the_others_save_first(environment: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, environment, "mode=async", "cluster.num_workers=2", *LONG)
    job.start()
    job.wait_for_checkpoint()
    worker = job.command(3).parent()
    assert worker
    worker.kill()
    assert job.code() == 0, job.output
    job.summary(1500)
    (saved,) = re.findall(r"saved at step (\d+);", job.output)
    assert f"going on at step {saved}\n" in job.output, job.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_script_saves(environment: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    job = Job(tmp_path, environment, "mode=async", "cluster.num_workers=2", *LONG)
    process = job.start()
    job.wait_for_checkpoint()
    process.send_signal(number)
    assert job.code() == 128 + number, job.output
    saved = job.saved_step()
    assert f"saved at step {saved}" in job.output
    assert job.run() == 0, job.output
    assert f"going on at step {saved}" in job.output
    job.summary(1500)


@pytest.mark.slow
def test_the_death_of_the_script_leaves_no_task_and_no_token(environment: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, environment, "mode=async", "cluster.num_workers=2", *LONG)
    process = job.start()
    job.wait_for_checkpoint()
    token = job.command(0).environ()["TF2DIST_TOKEN"].encode()
    files = [path for folder in (Path(environment["HOME"]), tmp_path) for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if token in path.read_bytes()]
    process.kill()
    assert job.code() == -signal.SIGKILL


@pytest.mark.slow
def test_an_error_of_one_task_ends_the_job_without_a_retry(environment: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, environment, "mode=sync", "cluster.num_workers=2")
    job.replace_loop(ONE_IS_WRONG.format(folder=tmp_path))
    assert job.run() == 2, job.output
    assert sorted((tmp_path / "attempts").read_text().split()) == ["0", "1"], job.output
    assert "did you mean train.steps" in job.output


@pytest.mark.slow
def test_fit_in_a_worker_joins_the_others(environment: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, environment, "mode=sync", "cluster.num_workers=2")
    job.replace_loop(FIT.format(folder=tmp_path))
    assert job.run() == 0, job.output
    assert json.loads((job.run_dir / "summary.json").read_text())["global_step"] == 10
    assert "joins 2 workers" in job.output


@pytest.mark.slow
def test_a_script_of_a_user_goes_on_after_a_loss(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ("--command", f"python {tmp_path}/train.py sync 15", "devices.onednn=false", "figure=false")
    slow = ("checkpoint.every_steps=100", "simulate.delay_secs=[0.01,0.01]")
    job = Job(tmp_path, environment, "mode=sync", "cluster.num_workers=2", *slow, *command, common=())
    job.start()
    job.wait_for_checkpoint()
    job.command(1).kill()
    assert job.code() == 0, job.output
    assert re.search(r"going on at step \d+00\b", job.output), job.output
    assert re.search(r"steps: 750$", job.output, re.MULTILINE), job.output


@pytest.mark.slow
def test_after_the_loss_of_a_node_the_tasks_go_on_at_another_one(environment: dict[str, str], tmp_path: Path) -> None:
    """The last test, which leaves a cluster of two nodes."""
    job = Job(tmp_path, environment, "mode=async", "cluster.num_workers=1", *LONG, "simulate.delay_secs=[0.01]")
    job.start()
    job.wait_for_checkpoint()
    nodes = [job.command(rank).parents()[1] for rank in range(3)]  # the parent of Ray's worker
    (lost,) = {node for node in nodes if "--head" not in node.cmdline()}
    lost.kill()
    assert job.code() == 0, job.output
    job.summary(1500)
    assert re.search(r"going on at step \d+\n", job.output), job.output
