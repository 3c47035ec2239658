"""What is built is whole, an index takes it, and the command, the modules, the types and the tests work from it.

The slow tests install the wheel into an environment of its own, as a user does.
"""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.conftest import BLOCKS, REPOSITORY, slowness

NOT_SOURCES = (".venv", ".git", ".*_cache", ".hypothesis", "build", "dist", "outputs", "__pycache__", "*.egg-info")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None, secs: float = 120.0) -> str:
    completed = subprocess.run(
        list(command),
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=secs * slowness(),
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


# python -m tf2dist in an environment that has no editable installation.
WITHOUT_EDITABLE = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
runpy.run_module("tf2dist", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository."""
    folder = tmp_path_factory.mktemp("built") / "source"
    shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    return folder


@pytest.fixture(scope="module")
def dist(source: Path) -> Path:
    """The folder of the wheel and the source archive."""
    folder = source.parent / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=source)
    return folder


@pytest.fixture(scope="module")
def site(dist: Path) -> Path:
    """A folder of packages where the wheel is installed."""
    folder = dist.parent / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    run(*pip, "--target", folder, next(dist.glob("tf2dist-*.whl")), cwd=dist)
    return folder


def test_an_index_takes_it(dist: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=dist)
    run(Path(sys.executable).with_name("check-wheel-contents"), next(dist.glob("*.whl")), cwd=dist)


def test_every_link_of_the_description_is_absolute(site: Path) -> None:
    (about,) = site.glob("tf2dist-*.dist-info/METADATA")
    description = str(email.message_from_string(about.read_text()).get_payload())
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    assert len(targets) > 40
    assert {target.split("//")[0] for target in targets} == {"https:"}
    readme = (REPOSITORY / "README.md").read_text()
    for path in re.findall(r"https://github\.com/tf2dist/tf2dist/(?:blob|raw)/main/([^)#\s]+)", description):
        assert (REPOSITORY / path).is_file()
        assert f"]({path}" in readme


def test_the_tests_run_from_the_source_archive(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    folder = dist.parent / "unpacked"
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    tests = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "tests").rglob("*.py")}
    assert tests == {path.relative_to(top) for path in (top / "tests").rglob("*.py")}
    told = run(sys.executable, "-m", "pytest", "-q", "tests/unit/test_palette.py", cwd=top)
    assert re.search(r"^\d+ passed in ", told.splitlines()[-1])


@pytest.mark.thorough
def test_a_program_that_uses_it_is_typed(site: Path, tmp_path: Path) -> None:
    """README's first program; Keras has no types."""
    program = next(block.text for block in BLOCKS if block.page == "README.md" and block.language == "python")
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-keras.*]\nignore_missing_imports = True\n")
    run(sys.executable, "-m", "mypy", "train.py", cwd=tmp_path, env={"PYTHONPATH": str(site)})


def test_the_wheel(source: Path, site: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
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


INSTALL_SECS = 900.0
# What would lead from an environment of its own to that of development.
IN_ITS_OWN = {"PYTHONPATH": "", "VIRTUAL_ENV": "", "TF2DIST_WARM_PROCESS": ""}
# TensorFlow is installed for the first of these tests, which takes about two minutes.
LONG = pytest.mark.timeout(1500)


def locked() -> str:
    """The versions of requirements.lock, whose hashes would be demanded of the wheel, too."""
    text = (REPOSITORY / "requirements.lock").read_text()
    return re.sub(r"^ +--hash.*\n| *\\$", "", text, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which only the wheel and what it requires are installed."""
    folder = tmp_path_factory.mktemp("own")
    asked = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder / "asked"), "packaging"]
    if subprocess.run(asked, capture_output=True, timeout=120 * slowness()).returncode:
        pytest.skip("no package index can be reached, from which TensorFlow would be installed")
    (folder / "constraints.txt").write_text(locked())
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = ["-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    run(python, *pip, next(dist.glob("tf2dist-*.whl")), cwd=folder, env=IN_ITS_OWN, secs=INSTALL_SECS)
    return python


class Elsewhere:
    """Runs commands of the environment of its own in another folder."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder

    def __call__(self, *arguments: str) -> str:
        """What the environment's Python prints with these arguments."""
        return run(self.python, *arguments, cwd=self.folder, env=IN_ITS_OWN)


@pytest.fixture
def elsewhere(python: Path, tmp_path: Path) -> Elsewhere:
    return Elsewhere(python, tmp_path)


@pytest.mark.slow
@LONG
def test_it_is_installed_alone(elsewhere: Elsewhere) -> None:
    where = elsewhere("-c", "import tf2dist.conf; print(tf2dist.conf.__file__)")
    assert where.startswith(str(elsewhere.python.parents[1]))
    elsewhere("-m", "pip", "check")
    packages = elsewhere("-m", "pip", "list")
    assert re.search(r"^tf2dist +\d", packages, re.MULTILINE)
    assert not re.search(r"^(pytest|ruff|mypy) ", packages, re.MULTILINE)


@pytest.mark.slow
@LONG
def test_a_run_and_its_prediction(elsewhere: Elsewhere) -> None:
    command = elsewhere.python.with_name("tf2dist")
    told = run(command, "data=digits", "cluster=local2", "run_dir=run", cwd=elsewhere.folder, env=IN_ITS_OWN)
    assert re.search(r"^test accuracy 0\.9\d+, loss ", told, re.MULTILINE)
    files = {path.name for path in (elsewhere.folder / "run").iterdir()}
    assert {"summary.json", "training.png", "model.keras", "config.yaml"} <= files
    assert "accuracy 0.9" in elsewhere("-m", "tf2dist.predict", "run")


@pytest.mark.slow
@LONG
def test_the_program_of_the_readme(elsewhere: Elsewhere) -> None:
    program = next(block.text for block in BLOCKS if block.page == "README.md" and block.language == "python")
    (elsewhere.folder / "train.py").write_text(program)
    error, steps = elsewhere("train.py").split("\n")[0].split()
    assert float(error) < 0.3
    assert int(steps) > 0


@pytest.mark.slow
@LONG
def test_comparing(elsewhere: Elsewhere) -> None:
    told = elsewhere(
        "-m", "tf2dist.compare", "data=digits", "modes=sync,async", "seeds=1", "until=50steps", "delays=[0]"
    )
    report = Path(told.strip().split("\n")[-1])
    assert report.name == "report.html"
    assert '<img src="data:image/svg+xml;base64,' in report.read_text()


@pytest.mark.slow
@LONG
def test_rendering_and_the_doctor(elsewhere: Elsewhere) -> None:
    assert elsewhere("-m", "tf2dist.render", "slurm", "mode=sync", "cluster.num_workers=2").startswith("#!/bin/bash")
    told = elsewhere("-m", "tf2dist.doctor", "data=digits", "cluster=local2")
    assert not re.search("^fail", told, re.MULTILINE)
    assert "ok    gpu: " in told
