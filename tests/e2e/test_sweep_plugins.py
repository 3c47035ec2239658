"""Launchers and sweepers of others, as a user of Hydra installs them, each with real runs."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import ended, wait_until
from tests.e2e.test_sweep import rows, start

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def test_two_jobs_side_by_side_in_networks_of_their_own(tmp_path: Path) -> None:
    arguments = ["mode=async", "train.steps=3000", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    stdout, _ = ended(start(tmp_path, *arguments, "hydra.sweep.dir=sweep"), 0)
    done = rows(tmp_path / "sweep")
    assert [(row["seed"], row["state"]) for row in done] == [("1", "done"), ("2", "done")]
    assert stdout.splitlines()[-4].split()[:2] == ["job", "seed"]
    assert [(tmp_path / "sweep" / job).stat().st_mode & 0o777 for job in "01"] == [0o700, 0o700]
    # Each has begun before the other has ended.
    times = [(tmp_path / "sweep" / job / ".hydra" / "config.yaml").stat().st_mtime for job in "01"]
    ends = [(tmp_path / "sweep" / job / "summary.json").stat().st_mtime for job in "01"]
    assert max(times) < min(ends)


def test_jobs_side_by_side_are_stopped_and_go_on(tmp_path: Path) -> None:
    arguments = ["mode=sync", "train.steps=40000", "seed=1,2,3", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    folder = tmp_path / "sweep"
    process = start(tmp_path, *arguments, "hydra.sweep.dir=sweep")
    logs = [folder / job / "logs" / "worker-0.log" for job in "01"]
    wait_until(lambda: all(log.exists() and "global_step=" in log.read_text() for log in logs), process)
    os.kill(process.pid, signal.SIGTERM)
    _, stderr = ended(process, 143)
    assert stderr.count("saved at step ") == 2
    assert {row["state"] for row in rows(folder)} == {"stopped"}
    _, stderr = ended(start(tmp_path, *arguments, "hydra.sweep.dir=sweep"), 0)
    assert stderr.count("going on at step ") == 2
    assert {row["state"] for row in rows(folder)} == {"done"}


def test_a_search_maximizes_the_validation_accuracy(tmp_path: Path) -> None:
    """Also where a trial fails."""
    arguments = [
        "mode=sync",
        "figure=false",
        "train.steps=30",
        "hydra/sweeper=optuna",
        "hydra.sweeper.direction=maximize",
    ]
    arguments += ["optimizer.learning_rate=choice(0.001,0.1,1e38)", "hydra.sweeper.n_trials=10"]
    arguments += ["hydra.sweeper.sampler.seed=1", "hydra.sweep.dir=sweep"]
    ended(start(tmp_path, *arguments), 3)
    result = rows(tmp_path / "sweep")
    assert len(result) == 10
    assert {row["state"] for row in result if row["optimizer.learning_rate"] == "1e+38"} == {"failed"}
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert best["best_params"] == {"optimizer.learning_rate": 0.1}
    assert 0.5 < best["best_value"] <= 1


def test_a_job_in_a_process_of_its_own(tmp_path: Path) -> None:
    arguments = ["mode=sync", "train.steps=20", "seed=1,2", "hydra/launcher=submitit_local", "hydra.sweep.dir=sweep"]
    ended(start(tmp_path, *arguments), 0)
    assert [row["state"] for row in rows(tmp_path / "sweep")] == ["done", "done"]
