"""What a user of Hydra tries first, in single runs."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import slowness, warm_process_to_lend
from tf2dist.linux import CALL_MAIN, code_command

RUN = ["data=digits", "model=softmax", "mode=sync", "cluster=local1", "train.steps=5"]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def command(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Without a `run_dir` of the test; it is lent the warm process of these tests."""
    lent, descriptors = warm_process_to_lend()
    completed = subprocess.run(
        code_command(CALL_MAIN, "tf2dist.__main__", *arguments),
        cwd=folder,
        env={**os.environ, **lent},
        pass_fds=descriptors,
        capture_output=True,
        text=True,
        timeout=120 * slowness(),
    )
    assert completed.returncode == code, completed
    return completed


def test_the_directory_under_hydras_name(tmp_path: Path) -> None:
    command(
        tmp_path,
        *RUN,
        "~train.log_every_steps",
        "++seed=3",
        "hydra.run.dir=here",
        "hydra.sweep.dir=x",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["here"], "one directory, and the working one stays"
    run_dir = tmp_path / "here"
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert "- ++seed=3\n" in (run_dir / ".hydra" / "overrides.yaml").read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["seed"], summary["global_step"]) == (3, 5)


@pytest.mark.thorough
def test_hydras_logging_is_silent_unless_it_is_chosen(tmp_path: Path) -> None:
    quiet = command(tmp_path, "--cfg", "job", "-p", "seed")
    assert (quiet.stdout, quiet.stderr) == ("0\n", "")
    loud = command(tmp_path, *RUN, "hydra/hydra_logging=default", "hydra.verbose=true", "run_dir=loud")
    assert "[HYDRA] " in loud.stdout + loud.stderr


def test_hydras_own_help(tmp_path: Path) -> None:
    output = command(tmp_path, "--hydra-help")
    assert "hydra/launcher: basic" in output.stdout
    assert "--multirun" in output.stdout
    assert (output.stderr, list(tmp_path.iterdir())) == ("", [])


@pytest.mark.thorough
def test_settings_of_sweeps_do_nothing_in_a_single_run(tmp_path: Path) -> None:
    command(tmp_path, *RUN, "run_dir=one", "hydra.sweep.dir=x")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
