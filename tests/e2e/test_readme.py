"""What the README shows is what happens."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Command
from tf2dist.config.load import load
from tf2dist.config.source import Source
from tf2dist.config.sweeps import sweep_of

README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_example_of_the_fixtures(tmp_path: Path) -> None:
    """In a pytest of its own, as a user's: a process belongs to one asynchronous cluster at a time."""
    conftest, tests = blocks("python")[-2:]
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_example.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_example_of_a_plugin(command: Command) -> None:
    (command.folder / "mine.py").write_text(blocks("python")[0])
    line = "'plugins=[mine.py]' model=wide +model.width=128 mode=sync"
    assert f"python -m tf2dist {line}\n" in README
    finished = command(*shlex.split(line), "data=digits", "train.steps=20")
    assert finished.code == 0, finished


def test_the_example_of_a_call_from_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("python")[1])
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    mae, steps = done.stdout.splitlines()[0].split()
    # What a model that always answers 0 gets is 1.4; how far below it an asynchronous run comes varies with its timing.
    assert float(mae) < 0.5
    assert int(steps) % 27 == 0, "an epoch is one pass over the data by the whole cluster"
    assert (tmp_path / "runs/table/model.keras").is_file()
    assert (tmp_path / "runs/table/training.png").is_file()


@pytest.mark.slow
def test_the_example_of_a_stream(tmp_path: Path) -> None:
    (tmp_path / "stream.py").write_text(blocks("python")[2])
    done = subprocess.run(
        [sys.executable, "stream.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 5, "a loss for each epoch"


def test_the_example_of_an_own_experiment(tmp_path: Path) -> None:
    assert "`conf/experiment/wide.yaml`" in README
    assert "`python -m tf2dist --config-dir conf experiment=wide`" in README
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "wide.yaml").write_text(blocks("yaml")[0])
    made = load(["experiment=wide"], None, Source(str(tmp_path)))
    assert made.model["hidden_units"] == [1000, 500]
    assert (made.optimizer["name"], made.train.steps, made.train.eval_every_steps) == ("adamw", 2000, 100)


# A command may be continued on the next line.
@pytest.mark.parametrize("line", re.findall(r"python -m tf2dist (.*mode=\w+.*)", README.replace("\\\n", "")))
def test_every_command_of_the_readme_is_accepted(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    arguments = shlex.split(line.replace("`", ""))
    if "-m" in arguments:
        own = [argument for argument in arguments if "=" in argument]
        assert len(sweep_of(own, None, Source(), lambda config: None).jobs) > 1
        return
    tf_config = "{}" if "cluster=tf_config" in line else None
    load([argument for argument in arguments if "=" in argument], tf_config)
