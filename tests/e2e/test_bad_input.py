"""Mistakes on the command line: exit code 2, a line or two, and nothing left behind."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command

WORKER = {"type": "worker", "index": 0}
ONE_WORKER = json.dumps({"cluster": {"worker": ["a:1"]}, "task": WORKER})
EVALUATOR = ["mode=sync", "cluster=hosts", "cluster.worker=[a:1]", "cluster.evaluator=[b:1]", "task.type=evaluator"]

Bad = tuple[list[str], dict[str, str], str]
BAD: list[Bad] = [
    (["trian.steps=5"], {}, "did you mean train.steps?"),
    (["cluster=local3"], {"TF_CONFIG": ONE_WORKER}, "TF_CONFIG is set"),
    ([], {"TF_CONFIG": "{"}, "TF_CONFIG: not valid JSON"),
    (["cluster=hosts"], {}, "task.type and task.index"),
    ([*EVALUATOR], {}, "task.index (null)"),
]
# Rules that tests/unit shows, too.
BAD_THOROUGH: list[Bad] = [
    (["model=resnet"], {}, "model (resnet): must be one of"),
    (["train.steps=0"], {}, "train.steps (0): must be at least 1"),
    (["train.steps=-3"], {}, "train.steps (-3): must be at least 1"),
    (["train.steps=ten"], {}, "train.steps (ten): must be a whole number"),
    (["--steps=5"], {}, "--steps=5: there is no such flag"),
    (["cluster.num_ps=0"], {}, "cluster.num_ps (0)"),
    (["data=digits", "train.batch_size_per_worker=500"], {}, "each of 3 workers has only 419"),
    (["data.dir=/no/such/folder"], {}, "data.dir (/no/such/folder): there is no such directory"),
    (["cluster=local", "cluster.num_workers=1000", "data=digits"], {}, "a local cluster has at most 64 tasks"),
    (["cluster=tf_config"], {}, "TF_CONFIG is not set"),
    (["mode=sync"], {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a"]}, "task": WORKER})}, "must be host:port"),
]


def row_of(bad: Bad, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(*bad, id=" ".join(bad[0]) or "TF_CONFIG", marks=marks)


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [*(row_of(bad) for bad in BAD), *(row_of(bad, pytest.mark.thorough) for bad in BAD_THOROUGH)],
)
def test_a_wrong_request_is_refused(command: Command, arguments: list[str], env: dict[str, str], words: str) -> None:
    finished = command(*arguments, env=env, timeout_secs=30)
    assert finished.code == 2, finished
    assert words in finished.stderr
    assert len(finished.stderr.splitlines()) <= 3
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""
    assert list(command.folder.iterdir()) == [], "nothing is half-made"


def test_a_run_directory_that_cannot_be_made(command: Command) -> None:
    (command.folder / "file").touch()
    finished = command.finish(command.start("data=digits", run_dir="file/run"))
    assert finished.code == 2, finished
    assert "cannot be written" in finished.stderr


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_run_directory_without_permission(command: Command, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    finished = command.finish(command.start("data=digits", run_dir="locked/run"))
    assert finished.code == 2, finished
    assert "cannot be written" in finished.stderr


@pytest.mark.parametrize(("flag", "words"), [("--help", "mode=async cluster=local3"), ("--version", "tf2dist 0.")])
def test_flags(command: Command, flag: str, words: str) -> None:
    finished = command(flag)
    assert finished.code == 0, finished
    assert words in finished.stdout


def test_the_configuration_is_shown(command: Command) -> None:
    finished = command("--cfg", "job", "model=cnn", "train.steps=7")
    assert finished.code == 0, finished
    assert "steps: 7" in finished.stdout
    assert list(command.folder.iterdir()) == []
