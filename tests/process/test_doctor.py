"""The doctor as a user starts it, with TensorFlow in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fake_gpu
from tf2dist.config.schema import DataConfig, RunConfig
from tf2dist.launch import findings


def test_the_whole_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tf2dist.doctor", "data=digits", "cluster=local1", "--json"]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert (completed.returncode, completed.stderr) == (0, ""), completed.stdout + completed.stderr
    topics = {finding["topic"] for finding in json.loads(completed.stdout)}
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


def test_how_local_workers_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "LIST_GPUS", 'print(\'["one", "two"]\')')
    (finding,) = findings.gpus(3)
    assert finding.text == "TensorFlow sees 2; 3 workers share them in turn, up to 2 on each"


@pytest.mark.thorough
@pytest.mark.skipif(bool(fake_gpu.why_not()), reason=fake_gpu.why_not())
def test_gpus_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_gpu.FakeGpus(2, tmp_path / "gpus").env.items():
        monkeypatch.setenv(name, value)
    (finding,) = findings.gpus()
    assert finding.text == "TensorFlow sees 2"


def test_other_programs_do_not_get_the_job_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    driver.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TF2DIST_TOKEN", "a secret of this job")
    look = f"import os; os.system('env >> {tmp_path}/seen'); print('[]')"
    monkeypatch.setattr(findings, "LIST_GPUS", look)
    (finding,) = findings.gpus()
    assert finding.level == "ok"
    seen = (tmp_path / "seen").read_text()
    assert seen.count("PATH=") >= 2
    assert "a secret" not in seen


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        pytest.param(
            "import no_such_module\n",
            "fail  plugins: {}: it imports no_such_module, which is not installed; install",
            marks=pytest.mark.slow,
        ),
        (
            "import beside\nprint('hello')\n",
            "fail  plugins: model (mine): no plugin registers it; choose one of cnn, dnn, softmax, tanh, two_tower",
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
    assert str(next(findings.plugins(config))).startswith(finding.replace("{}", str(plugin)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.py", "mine.py"], "nothing is made"


# Renames things in the sources of TensorFlow and Keras as a later release may, before a process of ours imports them.
RENAMING = """
from importlib.machinery import SourceFileLoader

NAMES = {names}
plain = SourceFileLoader.get_code

def get_code(self, name):
    if name.partition(".")[0] in ("keras", "tensorflow"):
        source = self.get_data(self.path)
        if any(old in source for old in NAMES):
            for old, new in NAMES.items():
                source = source.replace(old, new)
            return compile(source, self.path, "exec")
    return plain(self, name)

SourceFileLoader.get_code = get_code
"""


def other_release(folder: Path, names: dict[bytes, bytes]) -> dict[str, str]:
    """The environment of processes that find a Keras 3.99 with those names instead of the installed one's."""
    (folder / "sitecustomize.py").write_text(RENAMING.replace("{names}", repr(names)))
    about = folder / "keras-3.99.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 3.99.0\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


def versions_told(names: dict[bytes, bytes], folder: Path) -> list[str]:
    """The findings of the whole command about versions, without those that are ok."""
    command = [sys.executable, "-m", "tf2dist.doctor", "data=digits", "cluster=local1", "--json"]
    environment = other_release(folder, names)
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, env=environment)
    assert completed.returncode == 2, completed.stdout + completed.stderr
    findings = [finding for finding in json.loads(completed.stdout) if finding["topic"] == "versions"]
    return [f"{each['level']}: {each['text']}; {each['fix']}" for each in findings if each["level"] != "ok"]


@pytest.mark.slow
def test_an_untested_release_that_has_renamed_internals(tmp_path: Path) -> None:
    names = {b"_velocities": b"_second_moments", b"_py_funcs": b"_python_functions"}
    of_keras, *others = versions_told(names, tmp_path)
    assert of_keras.startswith("fail: keras 3.99.0 is not ")
    assert [line.partition(" of the kind")[0].rpartition(" ")[2] for line in others] == [
        "tensorflow.python.ops.script_ops._py_funcs",
        "Adam._velocities",
    ]
    assert all(line.startswith("fail: ") and "; install " in line for line in others)


@pytest.mark.thorough
def test_an_untested_release_that_has_all_internals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_release(tmp_path, {})
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = findings.internals()
    assert str(finding) == "ok    versions: keras 3.99.0 has the internals on which most depends"


def test_internals_of_a_tested_release_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "TRY_INTERNALS", "1 / 0")
    assert list(findings.internals()) == []


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        ("raise ImportError('no such library')", "fail  versions: keras 3.99.0 cannot be used (ImportError: no such"),
        (
            "import time; time.sleep(60)",
            "warn  versions: keras 3.99.0 could not be checked within 1 s; try again when this machine is idle",
        ),
    ],
)
def test_an_untested_release_that_cannot_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, finding: str
) -> None:
    other_release(tmp_path, {})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(findings, "TRY_INTERNALS", code)
    monkeypatch.setattr(findings, "INTERNALS_TIMEOUT_SECS", 1.0)
    assert str(next(findings.internals())).startswith(finding)
