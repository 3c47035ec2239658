"""The benchmark runs; what it says is for a quiet machine."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.bench import bandwidth, staleness
from tests.bench.contenders import INSTALL, is_installed, peer
from tests.bench.figures import parameter_bytes
from tests.conftest import REPOSITORY, slowness

FEW = {
    "one process softmax": {"tf2dist", "bare loop", "keras fit"},
    "input": {"ours", "per_element"},
    "fit sync": {"fit", "command"},
    "large loopback sync 2 million": {"steps", "loopback"},
}
OLD = {"tf2dist", "old program", "old, our threads", "plain port"}
MORE = {
    "async softmax": OLD,
    "sync cnn": OLD,
    "measuring": {"measured", "unmeasured"},
    "tables keras async": {"tf2dist", "keras fit"},
    "tables old 100 thousand rows": {"tf2dist", "old program"},
}
LONG = {"wide and deep": {"tf2dist", "old program", "tf2dist, sync", "tf2dist, 1 worker"}}


@pytest.mark.timeout(620)
@pytest.mark.slow
@pytest.mark.parametrize(("contenders", "scale"), [(FEW, 1.0), (MORE, 0.4), (LONG, 0.04)])
def test_the_benchmark_runs(contenders: dict[str, set[str]], scale: float, real_data: str, tmp_path: Path) -> None:
    if real_data != "mnist":
        pytest.skip("the benchmark trains on MNIST, which is not on this machine")
    arguments = ["--only", ",".join(contenders), "--rounds", "1", "--scale", str(scale), "--out", str(tmp_path)]
    command = [sys.executable, "-m", "tests.bench", *arguments]
    completed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600 * slowness())
    assert completed.returncode == 0, f"{completed.stdout}\n{completed.stderr}"
    comparisons = json.loads((tmp_path / "bench.json").read_text())["comparisons"]
    assert {one["name"]: set(one["medians"]) for one in comparisons} == contenders, completed.stdout
    for one in comparisons:
        assert all(figure > 0 for figures in one["values"].values() for figure in figures), completed.stdout
        assert one["ratio"] > 0
    assert all(f"| `{name}` |" in (tmp_path / "benchmarks.md").read_text() for name in contenders)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(320)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "contender"), [("torch gloo", "torch"), ("keras jax", "keras jax")])
def test_contenders_that_need_other_packages(name: str, contender: str, tmp_path: Path) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not installed: {INSTALL[name]}")
    random = np.random.default_rng(0)
    np.save(tmp_path / "images.npy", random.integers(256, size=(1_000, 28, 28, 1)).astype(np.uint8))
    np.save(tmp_path / "labels.npy", random.integers(10, size=1_000).astype(np.int32))
    start = time.time()
    with peer(contender, "sync", "softmax", 2, 20, str(tmp_path)) as (found, _):
        assert found["figure"] > 0
        assert start < found["first_step_at"] < time.time()


@pytest.mark.timeout(620)
@pytest.mark.slow
def test_clusters_of_different_sizes_are_measured(real_data: str, tmp_path: Path) -> None:
    if real_data != "mnist":
        pytest.skip("the benchmark trains on MNIST, which is not on this machine")
    names = ",".join(f"scale {mode} softmax" for mode in ("async", "sync", "sync_replicas"))
    arguments = ["--only", names, "--workers", "1,2", "--rounds", "1", "--scale", "0.3", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "tests.bench", *arguments]
    completed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600 * slowness())
    assert completed.returncode == 0, f"{completed.stdout}\n{completed.stderr}"
    points = json.loads((tmp_path / "bench.json").read_text())["scale"]
    assert len(points) == 3 * 2, completed.stdout  # modes, sizes
    for point in points:
        assert 0 < point["efficiency"] < 1.1, point
        servers = {"sync": {}}.get(point["mode"], {"chief": 1, "ps": 1})
        assert {role: use["tasks"] for role, use in point["roles"].items()} == servers | {"worker": point["workers"]}
        assert all(use["cpu_ms"] > 0 for use in point["roles"].values()), point
    # A worker sends its gradient to the other one, and gets as much.
    (sync,) = (one for one in points if (one["mode"], one["workers"]) == ("sync", 2))
    assert sync["roles"]["worker"]["messages"] == pytest.approx(4, abs=0.5)
    assert sync["roles"]["worker"]["kilobytes"] == pytest.approx(4 * 7850 * 4 / 1e3, rel=0.1)


@pytest.mark.slow
def test_clusters_on_limited_links_are_measured(real_data: str) -> None:
    """With local_sgd, which has the fewest bytes; `measure` skips where links cannot be limited."""
    if real_data != "mnist":
        pytest.skip("the benchmark trains on MNIST, which is not on this machine")
    setting = bandwidth.Setting("sync", "algorithm=local_sgd", bandwidth.BATCH_SIZE, 100)
    point = bandwidth.measure(setting, secs=4.0)
    # A worker sends and receives 3 parts of 4, twice: of the gradients as of the weights, but each 8 steps alone.
    sent = 2 * 3 / 4 * parameter_bytes(bandwidth.MODEL) / 8
    assert point["megabytes"] == pytest.approx(sent / 1e6, rel=0.1), point
    assert 0.2 < point["link_share"] < 1, point
    assert point["examples_per_sec"] > 0


@pytest.mark.slow
def test_the_staleness_is_measured(tmp_path: Path) -> None:
    """Five runs with the digits of scikit-learn: four rates without staleness, and three workers with the best one."""
    stage = staleness.Stage("dnn", "digits", "plain", (3,), tuned=False, seeds=(0,), optimizers=("sgd",))
    path = tmp_path / "runs.jsonl"
    staleness.fill(path, [stage], 20, 10.0)
    *first, last = staleness.read(path)
    assert {run["staleness"]["max"] for run in first if run["staleness"]} == {0}
    best = min(first, key=lambda run: float(run["validation_error"]))
    assert (last["workers"], last["learning_rate"]) == (3, best["learning_rate"])
    assert last["updates"] == best["updates"] == 20 * -(-1257 // 128), "whole batches in each pass"
    assert last["staleness"]["mean"] == pytest.approx(2, abs=0.8), "so short a run begins and ends with less"
    assert best["test_error"] < 0.1
