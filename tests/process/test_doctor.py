"""The doctor as a user starts it, with TensorFlow in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tf2dist.config.schema import DataConfig, RunConfig
from tf2dist.launch import machine, plugin_findings


def test_the_whole_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tf2dist.doctor", "data=digits", "cluster=local1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    topics = {finding["topic"] for finding in json.loads(done.stdout)}
    assert topics == {"configuration", "versions", "data", "run_dir", "cores", "memory", "isolation", "gpu"}
    assert list(tmp_path.iterdir()) == []


def test_tensorflow_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "GPU_TIMEOUT_SECS", 0.01)
    assert [finding.level for finding in machine.gpus()] == ["warn"]


def test_a_tensorflow_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIST_GPUS", "raise ImportError('no such library')")
    (finding,) = machine.gpus()
    assert finding.level == "fail"
    assert "ImportError: no such library" in finding.text


def test_a_driver_whose_gpus_tensorflow_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: a real one (UUID: 1)'\n")
    driver.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "LIST_GPUS", "print('[]')")
    (finding,) = machine.gpus()
    assert (finding.level, finding.text) == ("warn", "the driver has 1 GPUs and TensorFlow sees none")


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("import no_such_module\n", "fail  plugins: {}: it imports no_such_module, which is not there; pip install"),
        (
            "import beside\nprint('hello')\n",
            "fail  plugins: model (mine): no plugin registers it; choose one of cnn, dnn, softmax",
        ),
        pytest.param(
            "import tf2dist\ntf2dist.register_model('cnn')(print)\n",
            "fail  plugins: {}: model (cnn): is registered by tf2dist itself, and again by {}, line 2; choose another",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import os\nos._exit(7)\n",
            "fail  plugins: loading them ends the process, exit code 7; correct them",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_plugins_are_loaded_as_a_task_does(tmp_path: Path, text: str, finding: str) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(text)
    (tmp_path / "beside.py").touch()
    config = RunConfig(model={"name": "mine"}, data=DataConfig(name="digits"), plugins=[str(plugin)])
    assert str(next(plugin_findings.of_plugins(config))).startswith(finding.replace("{}", str(plugin)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.py", "mine.py"], "nothing is made"
