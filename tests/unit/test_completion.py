"""Shell completion, which is Hydra's own, in a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COMMAND

BASH = shutil.which("bash")
SCRIPT = """
eval "$(tf2dist --shell-completion install=bash)" || exit 1
complete -p tf2dist > /dev/null || exit 1
COMP_LINE=$1 COMP_POINT=${#1}
words=($1); COMP_CWORD=${#words[@]}
[[ $1 == *" " ]] || COMP_CWORD=$((COMP_CWORD - 1))
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a substitute for the installed command."""
    command = tmp_path / "bin" / "tf2dist"
    command.parent.mkdir()
    code = "import sys; sys.argv[0] = 'tf2dist'; from tf2dist.__main__ import main; main()"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tf2dist mode=", ["mode=async", "mode=sync", "mode=sync_replicas"]),
        ("tf2dist optimizer=sgd train.st", ["train.steps=", "train.steps_per_execution="]),
        pytest.param(
            "tf2dist optimizer=ada",
            ["optimizer=adagrad", "optimizer=adam", "optimizer=adamw"],
            marks=pytest.mark.thorough,
        ),
        pytest.param("tf2dist hydra/launcher=ba", ["hydra/launcher=basic"], marks=pytest.mark.thorough),
    ],
)
def test_completions(folder: Path, line: str, words: list[str]) -> None:
    assert BASH
    ended = subprocess.run(
        [BASH, "--norc", "-c", SCRIPT, "bash", line],
        cwd=folder,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == words


@pytest.mark.parametrize(
    ("shell", "words"),
    [("zsh", "hydra_bash_completion"), pytest.param("fish", "complete -c", marks=pytest.mark.thorough)],
)
def test_other_shells(shell: str, words: str, tmp_path: Path) -> None:
    command = [*COMMAND, "--shell-completion", f"install={shell}"]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert words in completed.stdout
