"""Examples of README.md and the pages in docs/ have the effects that the pages say."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import BLOCKS, PAGES, REPOSITORY, slowness
from tf2dist.config.compose import ConfigSource
from tf2dist.config.load import load
from tf2dist.config.sweeps import expanded
from tf2dist.linux import unused_ports

TEXT = "\n".join(PAGES.values()).replace("\\\n", "")  # a command may be continued on the next line


# By page and by the name in the first line of each.
PROGRAMS = {
    (block.page, block.text.partition("\n")[0].removeprefix("# ")): block.text
    for block in BLOCKS
    if block.language == "python"
}


def run_program(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a program prints, run in a folder of its own."""
    (folder / "program.py").write_text(text)
    completed = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120 * slowness(),
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed


@pytest.mark.slow
def test_the_example_of_the_fixtures(tmp_path: Path) -> None:
    """In a pytest of its own, as a user's: a process belongs to one asynchronous cluster at a time."""
    for name in ("conftest.py", "test_example.py"):
        (tmp_path / name).write_text(PROGRAMS["docs/api.md", name])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120 * slowness())
    assert "2 passed" in completed.stdout, completed.stdout + completed.stderr


def test_the_example_of_a_call_from_python(tmp_path: Path) -> None:
    completed = run_program(PROGRAMS["README.md", "train.py"], tmp_path)
    mae, steps = completed.stdout.splitlines()[0].split()
    # What a model that always answers 0 gets is 1.4; how far below it an asynchronous run comes varies with its timing.
    assert float(mae) < 0.5
    assert int(steps) % 27 == 0, "an epoch is one pass over the data by the whole cluster"
    (model,) = tmp_path.rglob("model.keras")
    assert model.with_name("training.png").is_file()
    (shown,) = [block.text for block in BLOCKS if block.page == "README.md" and block.text.startswith("fit: starting")]
    assert set(without_numbers(shown)) <= set(without_numbers(completed.stderr))


def without_numbers(text: str) -> list[str]:
    return [re.sub(r"\d+\.\d+", "N", line) for line in text.splitlines()]


def before_the_first_change() -> str:
    """The first program of the README with its first change taken back."""
    (diff,) = [block.text for block in BLOCKS if block.page == "README.md" and block.language == "diff"]
    program = PROGRAMS["README.md", "train.py"]
    before, after = (re.findall(rf"^\{sign}(.*\n)", diff, re.MULTILINE) for sign in "-+")
    importing, call = after[0], "".join(after[1:]).lstrip()
    assert importing in program
    assert call in program
    program = program.replace(importing, "").replace(call, *before)
    return re.sub(r"^print\(result.*$", "", program, flags=re.MULTILINE)


def test_the_first_change_of_the_readme_is_one_of_its_first_program() -> None:
    assert "tf2dist" not in before_the_first_change()


@pytest.mark.thorough
def test_the_first_change_of_the_readme_leads_from_keras_to_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """Without it, the program is one of Keras alone."""
    exec(before_the_first_change(), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_a_stream(tmp_path: Path) -> None:
    assert len(json.loads(run_program(PROGRAMS["docs/fit.md", "stream.py"], tmp_path).stdout)) == 5, (
        "a loss for each epoch"
    )


FOLDER = REPOSITORY / "docs/four_ideas"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_page_of_the_four_ideas_shows_the_programs_as_they_are(path: Path) -> None:
    """What they print is compared with the page by tests/e2e/test_page_commands.py."""
    name = str(path.relative_to(REPOSITORY))
    assert PROGRAMS["docs/four_ideas.md", name] == f"# {name}\n{path.read_text()}"
    code = [line for line in path.read_text().splitlines() if line.strip()]
    assert 20 <= len(code) <= 45


DEVELOPMENT = PAGES["docs/development.md"]
EXAMPLES = re.findall(
    r"^## Adding an (\w+)\n(?:(?!^## ).)*?```diff\n(.*?)```\n\n```sh\n(.*?)```", DEVELOPMENT, re.DOTALL | re.MULTILINE
)


def applied(folder: Path, *patches: str) -> None:
    """Applies them to a copy of the package."""
    for name in ("tf2dist", "conf"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tf2dist" / "conf").symlink_to(folder / "conf")  # where it is in a wheel
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    for patch in patches:
        subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=folder, check=True)
    subprocess.run([sys.executable, "-m", "ruff", "check", "tf2dist"], cwd=folder, check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--check", "tf2dist"], cwd=folder, check=True)


def test_the_patches_of_contributing_apply(tmp_path: Path) -> None:
    assert [task for task, *_ in EXAMPLES] == ["optimizer", "algorithm", "engine"]
    applied(tmp_path, *(patch for _, patch, _ in EXAMPLES))


@pytest.mark.thorough
def test_what_the_patches_of_contributing_add_can_be_composed(tmp_path: Path) -> None:
    applied(tmp_path, *(patch for _, patch, _ in EXAMPLES))
    for _, _, commands in EXAMPLES:
        words = shlex.split(next(line for line in commands.splitlines() if "-m tf2dist" in line).rstrip("&"))
        command = [sys.executable, *words[words.index("-m") :], "--cfg", "job"]
        composed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60 * slowness())
        assert composed.returncode == 0, composed.stderr


@pytest.mark.parametrize(
    "task",
    [
        *(pytest.param(task, marks=pytest.mark.thorough) for task in ("optimizer", "engine")),
        pytest.param("algorithm", marks=pytest.mark.slow),
    ],
)
def test_the_examples_of_contributing(task: str, tmp_path: Path) -> None:
    """Each is a patch and commands for a shell."""
    ((patch, commands),) = [parts for title, *parts in EXAMPLES if title == task]
    applied(tmp_path, patch)
    for shown, port in zip(("2222", "2223"), unused_ports(2), strict=True):
        commands = commands.replace(f":{shown}", f":{port}")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = ["bash", "-e", "-c", f"{commands}wait $!" if " &" in commands else commands]
    done = subprocess.run(
        script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120 * slowness(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("test accuracy") == 1


LINES = re.findall(r"python -m tf2dist ([^`|\n]*=[^`|\n]*)", TEXT.replace(DEVELOPMENT, ""))
LINES = [line for line in LINES if not any(part in line for part in ("--config-dir", "hydra/", "train.stepss"))]
LINES += re.findall(r'make train ARGS="(.*?)"', TEXT)


@pytest.mark.parametrize("line", sorted(set(LINES)))
def test_every_command_is_accepted(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    own = [argument for argument in shlex.split(line) if "=" in argument]
    if line.startswith("-m "):
        assert len(list(expanded(own, ConfigSource()))) > 1
    else:
        load(own, "{}" if "cluster=tf_config" in line else None)
