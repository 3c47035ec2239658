"""The doctor as a user starts it, with TensorFlow in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tf2dist import findings


def test_the_whole_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tf2dist.doctor", "data=digits", "cluster=local1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    topics = {finding["topic"] for finding in json.loads(done.stdout)}
    assert topics == {"configuration", "versions", "data", "run_dir", "cores", "memory", "isolation", "gpu"}
    assert list(tmp_path.iterdir()) == []


def test_tensorflow_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "GPU_TIMEOUT_SECS", 0.01)
    assert [finding.level for finding in findings.gpus()] == ["warn"]


def test_a_tensorflow_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "LIST_GPUS", "raise ImportError('no such library')")
    (finding,) = findings.gpus()
    assert finding.level == "fail"
    assert "ImportError: no such library" in finding.text


def test_a_driver_whose_gpus_tensorflow_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: a real one (UUID: 1)'\n")
    driver.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(findings, "LIST_GPUS", "print('[]')")
    (finding,) = findings.gpus()
    assert (finding.level, finding.text) == ("warn", "the driver has 1 GPUs and TensorFlow sees none")
