"""What each task does on machines with GPUs, on fake ones: see `tests.fake_gpu`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command, Finished, ports_of_tasks, slowness
from tests.fake_gpu import FakeGpus, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(400),  # several runs of some 10 s, each with a limit of its own
]

# oneDNN has kernels for CPUs alone, which round in another way.
SMALL = ("data=digits", "model=softmax", "train.steps=30", "devices.onednn=false")
LOSS = "SparseSoftmaxCrossEntropyWithLogits"


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def succeed(command: Command, gpus: FakeGpus | None, *arguments: str, run_dir: str = "run") -> Finished:
    end = command(*SMALL, *arguments, run_dir=run_dir, env=gpus.env if gpus else {})
    assert end.code == 0, end
    return end


def weights(end: Finished) -> dict[str, Any]:
    (newest,) = sorted((end.run_dir / "checkpoints").glob("step-*"))[-1:]
    with np.load(newest / "arrays.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def log_of(end: Finished) -> str:
    return (end.run_dir / "logs" / "worker-0.log").read_text()


def assert_equal(first: Mapping[str, Any], second: Mapping[str, Any], atol: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("count", "second", "reason"),
    [
        pytest.param(1, 0, "2 workers share GPU", marks=pytest.mark.slow),
        pytest.param(3, 1, "worker 0 has no NCCL", marks=pytest.mark.thorough),
    ],
)
def test_sync_computes_on_gpus_what_it_computes_on_cpus(
    command: Command, tmp_path: Path, count: int, second: int, reason: str
) -> None:
    """The weights of worker 0, which all others have too, are equal to the bit."""
    on_cpus = succeed(command, None, "mode=sync", "cluster=local2", run_dir="cpus")
    gpus = FakeGpus(count, tmp_path / "gpus")
    end = succeed(command, gpus, "mode=sync", "cluster=local2")
    kernels = gpus.kernels()
    assert kernels.keys() == {"worker-0/GPU:0", "worker-1/GPU:0"}, kernels
    for device, made in kernels.items():
        assert made[LOSS], (device, made)
        assert made["MatMul"] >= 2, (device, made)  # the second one is of the backward pass
        assert made["PrefetchDataset"], f"{device}: the next batch is not copied there ahead: {made}"
    numbers = {device: number for device, (number, *_) in gpus.devices().items()}
    assert numbers == {"worker-0/GPU:0": 0, "worker-1/GPU:0": second}
    assert f"the all-reduce is tf2dist's own: {reason}" in log_of(end)
    assert_equal(weights(end), weights(on_cpus), atol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("mode=async",), marks=pytest.mark.thorough),  # the call from Python below is asynchronous
        pytest.param(("mode=sync_replicas",), marks=pytest.mark.slow),
        # Large enough for calls that end with the last step.
        pytest.param(("mode=sync_replicas", "model=dnn", "model.hidden_units=[600,600]"), marks=pytest.mark.slow),
        pytest.param(("mode=sync", "algorithm=local_sgd"), marks=pytest.mark.slow),
        *(
            pytest.param((mode, "model=cnn", "train.steps=4", "devices.precision=bfloat16"), marks=pytest.mark.slow)
            for mode in ("mode=sync", "mode=async")
        ),
    ],
    ids=" ".join,
)
def test_each_mode_computes_on_the_workers_gpus_alone(
    command: Command, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Neither a ps nor a coordinator nor the fork server has one."""
    gpus = FakeGpus(2, tmp_path / "gpus")
    succeed(command, gpus, "cluster=local2", *arguments)
    kernels = gpus.kernels()
    assert kernels.keys() == {"worker-0/GPU:0", "worker-1/GPU:0"}, kernels
    gradient = "Conv2DBackpropFilter" if "model=cnn" in arguments else "MatMul"
    for device, made in kernels.items():
        assert made[gradient] >= 2 - ("model=cnn" in arguments), (device, made)
    assert {device: found[0] for device, found in gpus.devices().items()} == {"worker-0/GPU:0": 0, "worker-1/GPU:0": 1}
    assert all(grows for *_, grows in gpus.devices().values()), "by default the memory grows"
    assert gpus.num_processes() == 2


@pytest.mark.thorough
def test_rows_of_tables_on_gpus(command: Command, tmp_path: Path) -> None:
    """They are looked up, and their gradients computed, on the GPUs, with the results of CPUs."""
    clicks = ["data=clicks", "data.num_users=40000", "data.num_impressions=6000", "data.num_validation=500"]
    clicks += ["model=two_tower", "optimizer=adagrad", "train.steps=20"]
    found = []
    # In each run a step has 100 examples, the same ones.
    for mode, workers, has_gpus in (("async", 1, False), ("async", 1, True), ("sync", 2, True)):
        run_dir = f"{mode}-{has_gpus}"
        gpus = FakeGpus(workers, tmp_path / f"gpus-{run_dir}")
        cluster = [f"mode={mode}", f"cluster=local{workers}", f"train.batch_size_per_worker={100 // workers}"]
        end = command(*clicks, *cluster, run_dir=run_dir, env=gpus.env if has_gpus else {})
        assert end.code == 0, end
        assert "travel in each step" not in end.stderr, "the tables must not travel as a whole"
        found.append(weights(end))
        if has_gpus:
            assert gpus.kernels().keys() == {f"worker-{index}/GPU:0" for index in range(workers)}
    on_cpu, *on_gpus = found
    for one in on_gpus:
        trained = {name: one[name] for name in on_cpu if name.startswith(("model/", "optimizer/"))}
        assert_equal(trained, {name: on_cpu[name] for name in trained}, atol=1e-5)


@pytest.mark.slow
def test_a_run_moves_from_cpus_to_a_gpu(command: Command, tmp_path: Path) -> None:
    for mode, steps, gpus in [("async", 10, None), ("sync", 20, FakeGpus(1, tmp_path / "gpus"))]:
        end = succeed(command, gpus, "cluster=local1", f"mode={mode}", f"train.steps={steps}")
        assert json.loads((end.run_dir / "summary.json").read_text())["global_step"] == steps
        assert not gpus or gpus.kernels().keys() == {"worker-0/GPU:0"}


def start_hosts(
    command: Command, mode: str, jobs: dict[str, int], gpus: FakeGpus, *arguments: str, visible: Mapping[str, str] = {}
) -> dict[str, Finished]:
    """Runs tasks of a cluster, all of them on this host, as users do: each by its own command with TF_CONFIG.

    Args:
        visible: CUDA_VISIBLE_DEVICES of tasks, by their names.
    """
    ports = ports_of_tasks(sum(jobs.values()))
    cluster = {job: [f"localhost:{ports.pop()}" for _ in range(count)] for job, count in jobs.items()}
    started = {}
    for job, count in jobs.items():
        for index in range(count):
            name = f"{job}-{index}"
            env = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})} | gpus.env
            env |= {"CUDA_VISIBLE_DEVICES": visible[name]} if name in visible else {}
            run_dir = "worker-0" if job == "evaluator" else name  # it reads the checkpoints of the leader
            started[name] = command.start(f"mode={mode}", *SMALL, *arguments, run_dir=run_dir, env=env)
    return {name: command.finish(process, run_dir=name) for name, process in started.items()}


def all_succeed(ends: dict[str, Finished]) -> None:
    for name, end in ends.items():
        assert end.code == 0, f"{name}: {end}"


@pytest.mark.thorough
def test_tasks_of_one_host_divide_its_gpus(command: Command, tmp_path: Path) -> None:
    """Two GPUs of a synchronous worker are two replicas, with half of its batch each; an evaluator gets the rest."""
    gpus = FakeGpus(5, tmp_path / "gpus")
    ends = start_hosts(command, "sync", {"worker": 2, "evaluator": 1}, gpus, "train.batch_size_per_worker=50")
    all_succeed(ends)
    assert {device: number for device, (number, *_) in gpus.devices().items()} == {
        "worker-0/GPU:0": 0,
        "worker-0/GPU:1": 1,
        "worker-1/GPU:0": 2,
        "worker-1/GPU:1": 3,
    }
    kernels = gpus.kernels()
    assert kernels.keys() == gpus.devices().keys() | {"localhost-0/GPU:0"}, "the last one is the evaluator's"
    assert gpus.numbers() == {0, 1, 2, 3, 4}
    assert all(kernels[device][LOSS] and kernels[device]["MatMul"] >= 2 for device in gpus.devices()), kernels
    assert "the all-reduce is TensorFlow's ring over gRPC: a worker has several GPUs" in log_of(ends["worker-0"])
    # Keras' numbers for 100 examples a step.
    alone = succeed(command, None, "mode=sync", "cluster=local1", run_dir="alone")
    assert_equal(weights(ends["worker-0"]), weights(alone), atol=1e-6)


def test_synchronous_workers_with_unequal_gpus_are_refused(command: Command, tmp_path: Path) -> None:
    told, visible = "worker-0 has 0, worker-1 has 2", {"worker-0": "", "worker-1": "0,1"}
    ends = start_hosts(command, "sync", {"worker": 2}, FakeGpus(2, tmp_path / "gpus"), visible=visible)
    for end in ends.values():
        assert end.code == 2, end
        (line,) = [line for line in end.stderr.splitlines() if "error" in line]
        assert f"devices (GPUs): {told}; synchronous workers need equally many" in line, end


@pytest.mark.slow
def test_asynchronous_workers_take_one_gpu_each_or_none(command: Command, tmp_path: Path) -> None:
    gpus = FakeGpus(3, tmp_path / "gpus")
    jobs = {"chief": 1, "ps": 1, "worker": 3}
    ends = start_hosts(command, "async", jobs, gpus, visible={"worker-0": "0,1", "worker-1": "2", "worker-2": ""})
    all_succeed(ends)
    assert {number for number, *_ in gpus.devices().values()} == {0, 2}, gpus.devices()
    assert "uses one of the 2 GPUs that it sees; start a worker for each" in ends["worker-0"].stderr


@pytest.mark.slow
def test_a_fraction_of_the_memory_is_fixed(command: Command, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES may name a GPU in any of its ways: TensorFlow is asked for the fraction, not nvidia-smi."""
    gpus = FakeGpus(3, tmp_path / "gpus")
    gpus.env["CUDA_VISIBLE_DEVICES"] = "2"
    succeed(command, gpus, "mode=async", "cluster=local2", "devices.gpu_memory_fraction=0.4")
    assert set(gpus.devices().values()) == {(2, 0.4, False)}, gpus.devices()
    end = command("mode=sync", "cluster=local2", *SMALL, "devices.gpu_memory_fraction=0.6", run_dir="b", env=gpus.env)
    assert end.code == 2, end
    assert "devices.gpu_memory_fraction (0.6): 2 workers share a GPU, so it must be at most 0.5" in end.stderr


FIT = """
import keras, numpy as np, tf2dist
x = np.random.default_rng(0).normal(size=(80, 3)).astype("float32")
model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
tf2dist.fit(model, x, x.sum(1), epochs=2, batch_size=10, cluster=tf2dist.Local(workers=2), verbose=0)
"""


def test_fit_leaves_the_gpus_to_the_workers(tmp_path: Path) -> None:
    """The calling process has made variables, so it has devices of its own, whose memory grows."""
    gpus = FakeGpus(2, tmp_path / "gpus")
    env = os.environ | gpus.env
    command = [sys.executable, "-c", FIT]
    completed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150 * slowness())
    assert completed.returncode == 0, completed.stderr
    kernels = {device: made for device, made in gpus.kernels().items() if not device.startswith("localhost")}
    assert kernels.keys() == {"worker-0/GPU:0", "worker-1/GPU:0"}, kernels
    assert all(made["MatMul"] > 2 for made in kernels.values())
    numbers = {device: number for device, (number, *_) in gpus.devices().items() if device in kernels}
    assert numbers == {"worker-0/GPU:0": 0, "worker-1/GPU:0": 1}
    assert all(grows for *_, grows in gpus.devices().values())
