"""Runs of an earlier version, made before the package was rearranged, are read and continued as it did."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Command, slowness
from tf2dist import evaluate

OLD_RUNS = Path(__file__).with_name("old_runs")
OPTIONS = ("cluster=local1", "data=digits", "model=softmax", "optimizer=sgd", "optimizer.learning_rate=0.1", "seed=3")
# The bias of the model after 60 steps of that version, of which 40 are in its directory.
BIAS = [
    *(0.0052870600, -0.0194531251, 0.0009406577, 0.0021058060, 0.0129590984),
    *(0.0081358524, -0.0032360575, 0.0068842172, -0.0199353993, 0.0063119046),
]


@pytest.mark.parametrize(
    "mode", ["async", *(pytest.param(mode, marks=pytest.mark.thorough) for mode in ("sync", "sync_replicas"))]
)
def test_a_run_goes_on(mode: str, command: Command, no_leftovers: Callable[[], None]) -> None:
    run_dir = command.folder / "run"
    shutil.copytree(OLD_RUNS / mode, run_dir)
    (run_dir / "logs").mkdir()  # its files are not kept here
    before = json.loads((run_dir / "summary.json").read_text())
    finished = command(f"mode={mode}", *OPTIONS, "train.steps=60")
    assert finished.code == 0, finished
    assert "going on at step 40" in finished.stderr
    with np.load(run_dir / "checkpoints" / "step-0000000060" / "arrays.npz") as arrays:
        np.testing.assert_allclose(arrays["model/logits/bias"], BIAS, rtol=1e-4, atol=1e-7)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary.keys() == before.keys()
    assert (summary["updates_applied"], summary["examples_seen"]) == (60, before["examples_seen"] + 19 * 100 + 57)
    if mode == "sync":
        again = command(f"mode={mode}", *OPTIONS, "train.steps=60")
        assert f"{run_dir}: this run had ended at step 60; nothing was trained; name another run_dir" in again.stderr


@pytest.mark.thorough
def test_an_evaluation_needs_no_matplotlib(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no such symbol')\n")
    command = [sys.executable, "-m", "tf2dist.evaluate", str(OLD_RUNS / "async")]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100 * slowness())
    assert done.returncode == 0, done.stderr


def test_a_finished_model_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((OLD_RUNS / "sync" / "summary.json").read_text())
    evaluate.run([str(OLD_RUNS / "sync")])
    *metrics, _ = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in metrics] == ["loss", "accuracy"]
    for name, value in map(str.split, metrics):
        assert float(value) == pytest.approx(summary[f"test_{name}"], rel=1e-4)
