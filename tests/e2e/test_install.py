"""An installed tf2dist is whole: the command, the modules and the configuration."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY, slowness


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    completed = subprocess.run(
        list(command),
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120 * slowness(),
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


# python -m tf2dist in an environment that has no editable installation.
WITHOUT_EDITABLE = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
runpy.run_module("tf2dist", run_name="__main__", alter_sys=True)
"""


def test_the_wheel(tmp_path: Path) -> None:
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    source.mkdir()
    for name in ("tf2dist", "conf"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source, cwd=tmp_path)
    wheel = next(tmp_path.glob("tf2dist-*.whl"))
    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)

    env = {"PYTHONPATH": str(site)}
    where = run(sys.executable, "-c", "import tf2dist.conf; print(tf2dist.conf.__file__)", cwd=elsewhere, env=env)
    assert where.startswith(str(site))
    assert "name: cnn" in run(site / "bin" / "tf2dist", "--cfg", "job", "model=cnn", cwd=elsewhere, env=env)
    assert files(site / "tf2dist", "*.yaml") == {Path("conf", name) for name in files(REPOSITORY / "conf", "*.yaml")}
    # A clone hides what is installed from those who stand in it, and is not installed itself.
    in_clone = [sys.executable, "-c", WITHOUT_EDITABLE]
    assert f"file://{source}/conf" in run(*in_clone, "--info", "searchpath", cwd=source, env=env)
    assert "name: cnn" in run(*in_clone, "--cfg", "job", "model=cnn", cwd=source, env=env)
    shutil.rmtree(source / "conf")
    completed = subprocess.run(
        [*in_clone, "--help"], cwd=source, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.startswith(
        f"tf2dist: error: tf2dist ({source}/tf2dist): is not installed, and has no folder"
    )
    assert {Path("tools", "comparing", name) for name in ("report.css", "report.js")} <= files(site / "tf2dist", "*.*s")
    assert files(site / "tf2dist", "*.sh") == files(REPOSITORY / "tf2dist", "*.sh") != set(), "the engines' templates"
    modules = files(REPOSITORY / "tf2dist", "*.py") | {Path("conf/__init__.py")}
    assert files(site / "tf2dist", "*.py") == modules, "a package that pyproject.toml does not name"


def files(folder: Path, pattern: str) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob(pattern)}


def test_the_lock_file_names_no_index() -> None:
    text = (REPOSITORY / "requirements.lock").read_text()
    assert "://" not in text
    assert text.count("--hash=sha256:") > 100
    assert all("==" in line or line.startswith("    --hash") for line in text.splitlines() if line)
