"""The first start: TensorFlow is compiled to byte code while it is imported, and the limits on imports know that."""

import importlib.util
import py_compile
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tf2dist import linux
from tf2dist.errors import TaskLostError
from tf2dist.launch import findings
from tf2dist.launch import launcher as launcher_module
from tf2dist.launch.launcher import Launcher
from tf2dist.launch.warm_process import end_warm_process
from tf2dist.linux import import_limit
from tf2dist.tf_constants import IMPORTED_LAST


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Nothing is compiled, as after `uv pip install`, until this is called."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    monkeypatch.setattr(
        linux, "FIRST_START", 1000.0
    )  # a second instead of a millisecond, and a minute instead of 60 ms
    package, file = IMPORTED_LAST
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    path = str(Path(spec.origin).parent / file)

    def compile_it() -> None:
        py_compile.compile(path, doraise=True)

    return compile_it


def test_a_first_start_may_take_longer(compiled: Callable[[], None]) -> None:
    assert import_limit(2.0) == 2000.0
    compiled()
    assert import_limit(2.0) == 2.0


def test_an_environment_without_keras_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "IMPORTED_LAST", ("no_such_package", "saving.py"))
    assert import_limit(2.0) == 2.0


def test_the_doctor_waits_for_a_first_start(compiled: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "GPU_TIMEOUT_SECS", 0.06)
    monkeypatch.setattr(findings, "LIST_GPUS", "import time; time.sleep(1); print('[]')")
    assert [str(finding) for finding in findings.gpus()] == ["ok    gpu: none; the CPUs do the work"]
    compiled()
    (finding,) = findings.gpus()
    assert "was not imported in" in finding.text


def test_a_run_waits_for_a_first_start(
    tmp_path: Path, compiled: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(1)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launcher_module, "START_TIMEOUT_SECS", 0.06)
    with Launcher(tmp_path, preload=("slow",)) as launcher:
        launcher.wait_ready(lambda: None)
        assert launcher.ready
    compiled()
    end_warm_process()
    with Launcher(tmp_path, preload=("slow",)) as launcher, pytest.raises(TaskLostError, match="was not imported"):
        launcher.wait_ready(lambda: None)
