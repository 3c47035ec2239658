"""The trackers of docs/fit_recipes.md: a run of `fit` is one run there, also after it was resumed."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import slowness
from tests.e2e.test_docs import PROGRAMS

PAGE = "docs/fit_recipes.md"
# The layers of the second program have the names of the first, as in a process of its own.
TWICE = """
import keras, runpy
for name in ("begun.py", "resumed.py"):
    keras.utils.clear_session()
    runpy.run_path(name)
"""
MLFLOW_RUNS = """
import mlflow
client = mlflow.MlflowClient()
for run in mlflow.search_runs(output_format="list"):
    print(run.info.status, [each.step for each in client.get_metric_history(run.info.run_id, "val_loss")])
"""


def run(code: str, folder: Path) -> str:
    env = {**os.environ, "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=200 * slowness()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def own_files(printed: str, folder: Path) -> None:
    assert re.findall("a run with .*", printed) == ["a run with 3 epochs", "a run with 5 epochs"]


def mlflow_runs(printed: str, folder: Path) -> None:
    assert run(MLFLOW_RUNS, folder).splitlines() == [f"FINISHED {list(range(5))}"]


def wandb_folders(printed: str, folder: Path) -> None:
    """Offline, a resumed run has a second folder, which is sent to the same run."""
    ids = [path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")]
    assert len(ids) == 2
    assert len(set(ids)) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "check"),
    [("tracker.py", own_files), ("mlflow_tracker.py", mlflow_runs), ("wandb_tracker.py", wandb_folders)],
)
def test_a_tracker_has_one_run(name: str, check: Callable[[str, Path], None], tmp_path: Path) -> None:
    package = name.partition("_")[0]
    if "_" in name and not find_spec(package):
        pytest.skip(f"{package} is not installed")
    (tmp_path / "tracker.py").write_text(PROGRAMS[PAGE, name])
    program = PROGRAMS[PAGE, "tracked.py"]
    assert "epochs=5," in program
    (tmp_path / "begun.py").write_text(program.replace("epochs=5,", "epochs=3,"))
    (tmp_path / "resumed.py").write_text(program)
    check(run(TWICE, tmp_path), tmp_path)
