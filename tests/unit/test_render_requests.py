"""`python -m tf2dist.render`: the requests that it refuses, and how it submits the others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tf2dist import render
from tf2dist.errors import ConfigError

SHARED = "run_dir=/shared/runs/mine"


REFUSED = {
    ("slurm", "--command", ""): "--command: is empty; give a program that calls tf2dist.fit",
    ("slurm", "--command", "python 'train.py"): "--command .*: cannot be read .*; close the quotes",
    ("slurm", "--command", "cd x && python train.py"): "no shell reads it, so cd would be a word for the program",
    ("slurm", "--command", "python prepare.py; python train.py"): "no shell reads it, so prepare.py; would be",
    ("slurm", "--command", "python -m tf2dist"): "is what runs without --command; leave it out",
    ("slurm", "--command", "python x.py", "model=cnn"): "--command: model belongs to the command line; give fit the",
    ("slurm", "--command", "python x.py", "train.epochs=3"): "--command: train.epochs is the argument epochs of fit",
    ("slurm", "--command", "python x.py", "--config-dir", "."): "--command: --config-dir.* is for python -m tf2dist",
    ("kubernetes", "--command", "python x.py"): r"mode \(async\): is not for this engine; render jobset",
    ("slurn",): "slurn: must be the name of an engine, slurm, .*did you mean slurm",
    ("slurm", "mode=synk"): "mode .synk.: ",
    ("slurm", "train.stepps=3"): "did you mean train.steps",
    (
        "slurm",
        "cluster=local2",
    ): r"cluster \(local2\): is set by the request; leave it out, and give cluster.num_workers",
    ("slurm", "cluster.rank=1"): "is set by the request",
    ("slurm", "cluster.num_workers=0"): r"cluster.num_workers \(0\): must be a whole number from 1 to",
    ("slurm", "--image", "x"): "--image: is not for slurm; leave it out",
    ("slurm", "--line", "rm -rf /"): "--line .*must be a line such as",
    ("slurm", "--line", "#SBATCH -N2\nrm x"): "--line .*must be a line such as",
    ("slurm", "--multirun", "seed=1,2"): "--multirun: is not for a request",
    ("slurm", "--gpus"): "--gpus: expected one argument",
    ("slurm", "--gpu", "1"): "--gpu",
    ("jobset", "cluster.num_workers=2", "cluster.min_workers=3"): r"the cluster has 2 workers; give at most as many",
    (
        "kubernetes",
        "mode=sync",
        "simulate.delay_secs=[1]",
    ): r"simulate.delay_secs \(\[1\]\): has 1 numbers for 3 workers",
    ("jobset", "simulate.pause='worker-3 at 5 for 1'"): r"simulate.pause .*: there is no worker worker-3",
    ("slurm", "train.batch_size_per_worker=100000"): r"train.batch_size_per_worker \(100000\): each of 3 workers has",
    ("kubernetes", "mode=async"): r"mode \(async\): is not for this engine; render jobset",
    ("jobset", "mode=sync"): "render kubernetes",
    (
        "jobset",
        "cluster.num_workers=9000",
        "train.batch_size_per_worker=5",
    ): "addresses of all tasks have 2.*,... characters, of which Linux takes 128,000",
    ("kubernetes", "mode=sync", "run_dir=runs/a"): r"run_dir \(runs/a\): .*give a path such as /runs/a",
    ("kubernetes", "mode=sync", "--name", "A"): "--name .A.: must be small letters",
    ("kubernetes", "mode=sync", "--memory", "lots"): "--memory .lots.: must be a size such as 8Gi",
    ("ray",): r"run_dir \(null\): .*give the path of a directory that all nodes share",
    ("ray", "run_dir=runs/mine"): r"run_dir \(runs/mine\): ",
    ("ray", SHARED, "--memory", "8Gi"): "--memory: is not for ray; leave it out",
    ("slurm", "--out", "/no/such/folder/x"): "--out ./no/such/folder/x.: cannot be written",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_is_wrong_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=REFUSED[arguments]) as raised:
        render.run(list(arguments))
    assert "\n" not in str(raised.value)


def test_the_command_prints_one_line_for_an_error_and_loads_no_tensorflow() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tf2dist.render", "slurm", "mode=x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(lines) == 1
    assert lines[0].startswith("tf2dist: error: mode (x): ")
    assert not re.search(r"\| +(tensorflow|keras)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("engine", "program"), [("slurm", "sbatch"), ("jobset", "kubectl"), ("compose", "docker"), ("ray", "ray")]
)
def test_submitted_is_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: str, program: str
) -> None:
    path = tmp_path / program
    source = '"$last"' if engine == "ray" else ""  # in the working directory
    path.write_text(f'#!/bin/sh\nfor last in "$@"; do :; done\ncat {source} > {tmp_path}/submitted\nexit 4\n')
    path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert render.run([engine, SHARED, "--submit"]) == 4, "the exit code of the engine's command"
    assert (tmp_path / "submitted").read_text() == capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert render.run([engine, SHARED, "--submit", "--command", "python train.py"]) == 4
    assert (tmp_path / "submitted").read_text() == capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before
    assert render.run([engine, SHARED, "--submit", "--out", str(tmp_path / "kept")]) == 4
    assert (tmp_path / "submitted").read_text() == (tmp_path / "kept").read_text()
    with pytest.raises(ConfigError, match="name a new file"):
        render.run([engine, SHARED, "--out", str(tmp_path / "kept")])


def test_what_nobody_reads_is_submitted_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat > {tmp_path}/submitted\n")
    (tmp_path / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reader, without_reader = os.pipe()
    os.close(reader)
    with open(without_reader, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert render.run(["slurm", "--submit"]) == 0
    assert (tmp_path / "submitted").read_text().startswith("#!")


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "ray").symlink_to("/bin/true")
    command = f"ulimit -f 0; PATH={tmp_path}:$PATH; {sys.executable} -m tf2dist.render"
    for arguments, words in (
        ("slurm --out job.sh", "--out (job.sh): cannot be written (File too large: raise ulimit -f); name a new file"),
        (
            f"ray {SHARED} --submit --command 'python a.py' > /dev/null",
            f"--submit ({tmp_path}): no file can be written here (File too large: raise ulimit -f); change to another "
            "folder",
        ),
    ):
        done = subprocess.run(["bash", "-c", f"{command} {arguments}"], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (2, f"tf2dist: error: {words}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["ray"]


def test_without_the_engine_nothing_can_be_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="there is no sbatch here; use --out FILE"):
        render.run(["slurm", "--submit"])
