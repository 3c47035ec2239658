"""Commands that start one run after the other, in a process group of their own, as a shell starts them."""

import subprocess
import sys
from pathlib import Path


def start_module(folder: Path, module: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts ``python -m module`` in the folder."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    """The stdout and stderr; asserts that the command has ended with this code."""
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == code, stdout + stderr
    return stdout, stderr
