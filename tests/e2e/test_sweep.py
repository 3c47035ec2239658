"""Sweeps as a user starts them: one run after the other, also after a failure, and resumed after a stop."""

import csv
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import ended, our_processes, slowness, start_module, wait_until

pytestmark = pytest.mark.timeout(300)
SMALL = ["-m", "data=digits", "model=softmax", "cluster=local1", "optimizer=sgd"]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return start_module(folder, "tf2dist", *SMALL, *arguments)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_job_that_fails_does_not_affect_the_others(tmp_path: Path) -> None:
    """The sweep exits with the code of that job, here of a loss that is not finite."""
    stdout, stderr = ended(start(tmp_path, "mode=sync", "train.steps=20", "optimizer.learning_rate=1e38,0.1"), 3)
    (folder,) = tmp_path.glob("multirun/*-*-*/*-*-*")
    assert [row["state"] for row in rows(folder)] == ["failed", "done"]
    assert [row["exit_code"] for row in rows(folder)] == ["3", "0"]
    assert [row["optimizer.learning_rate"] for row in rows(folder)] == ["1e+38", "0.1"]
    assert float(rows(folder)[1]["test_accuracy"]) > 0.3
    table = stdout.splitlines()[-4:]
    assert table[0].split()[:3] == ["job", "optimizer.learning_rate", "test"]
    assert table[1].endswith("failed (3)")
    assert table[2].split()[:2] == ["1", "0.1"]
    assert table[3] == str(folder)
    assert "job 1 optimizer.learning_rate=0.1\n" in stderr
    expected = (
        f"1 of 2 jobs failed: job 0 (exit code 3); the same command with hydra.sweep.dir={folder} tries them again"
    )
    assert stderr.splitlines()[-1] == f"tf2dist: error: {expected}"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path, number: int) -> None:
    """Ctrl-C reaches all processes of the terminal, SIGTERM only the one that a scheduler has started."""
    options = ["mode=async,sync", "train.steps=2500", "hydra.sweep.dir=sweep"]
    folder = tmp_path / "sweep"
    ended(start(tmp_path, "mode=async", "train.steps=2500", "hydra.sweep.dir=sweep"), 0)
    first = (folder / "0" / "summary.json").read_bytes()

    process = start(tmp_path, *options)
    log = folder / "1" / "logs" / "worker-0.log"
    wait_until(lambda: log.exists() and "global_step=" in log.read_text(), process)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    stdout, stderr = ended(process, 128 + number)
    assert "job 0 mode=async: is done already" in stderr
    assert "saved at step " in stderr
    assert f"; the same command with hydra.sweep.dir={folder} goes on" in stderr.splitlines()[-1]
    assert [row["state"] for row in rows(folder)] == ["done", "stopped"]
    assert "stopped" in stdout.splitlines()[-2]

    stdout, stderr = ended(start(tmp_path, *options), 0)
    assert "going on at step " in stderr
    assert [row["state"] for row in rows(folder)] == ["done", "done"]
    assert (folder / "0" / "summary.json").read_bytes() == first

    again, stderr = ended(start(tmp_path, *options), 0)
    assert stderr.count("is done already") == 2
    assert again.splitlines() == stdout.splitlines()[-4:]
    _, stderr = ended(start(tmp_path, *options, "seed=1"), 2)
    assert "0 in it is of another sweep (seed=0 there, 1 here)" in stderr


@pytest.mark.slow
def test_the_job_of_a_killed_sweep_ends_too(tmp_path: Path) -> None:
    others = our_processes()  # such as the fork server of a fixture, which ends with pytest
    process = start(tmp_path, "mode=sync", "train.steps=1000000", "seed=1,2", "hydra.sweep.dir=sweep")
    log = tmp_path / "sweep" / "0" / "logs" / "worker-0.log"
    wait_until(lambda: log.exists() and "global_step=" in log.read_text(), process)
    process.kill()
    process.communicate(timeout=60 * slowness())
    _, left = psutil.wait_procs([each for each in our_processes() if each not in others], timeout=60 * slowness())
    assert not left, [each.cmdline() for each in left] + [log.read_text()]
    assert not (tmp_path / "sweep" / "1").exists()
