"""Shell completion, in a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")
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
    """A folder with a substitute for the installed command, and a configuration that tries to execute something."""
    command = tmp_path / "bin" / "tf2dist"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tf2dist "$@"\n')
    command.chmod(0o755)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").touch()
    (tmp_path / "conf" / "evil.yaml").write_text("defaults: [config, _self_]\nrun_dir: $(touch ran)\nseed: 12\n")
    (tmp_path / "conf" / "x$(touch ran)").touch()
    return tmp_path


def offered(folder: Path, line: str) -> list[str]:
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
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tf2dist mode=", ["mode=async", "mode=sync", "mode=sync_replicas"]),
        ("tf2dist optimizer=ada", ["optimizer=adagrad", "optimizer=adam", "optimizer=adamw"]),
        ("tf2dist model=", ["model=cnn", "model=dnn", "model=softmax", "model=tanh"]),
        ("tf2dist -m optimizer=sgd train.st", ["train.steps=", "train.steps_per_execution="]),
        ("tf2dist --config-dir conf experiment=m", ["experiment=mine"]),
        ("tf2dist --config-d", ["--config-dir"]),
        ("tf2dist hyd", []),
        ("tf2dist train.stepss=3 see", []),
        ("tf2dist -cd nowhere see", []),
        ("tf2dist -cd conf -cn evil seed=", ["seed=12"]),
        ("tf2dist -cd conf -cn evil run_dir=", []),
        ("tf2dist run_dir=./conf/", ["run_dir=./conf/evil.yaml", "run_dir=./conf/experiment"]),
    ],
)
def test_completions(folder: Path, line: str, words: list[str]) -> None:
    assert offered(folder, line) == words
    assert not (folder / "ran").exists()


def test_every_option_is_offered(folder: Path) -> None:
    found = offered(folder, "tf2dist ")
    assert {"mode=", "model.", "train.", "seed=", "run_dir="} <= set(found)


def test_it_starts_without_tensorflow() -> None:
    code = "import sys; from tf2dist.config import completion; completion.answer(['query=bash'], 'tf2dist mo'); "
    code += "sys.exit(sum(name in sys.modules for name in ('tensorflow', 'keras', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
