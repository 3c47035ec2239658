"""What `make lint` does, beside the other tests instead of before them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, slowness

LINES = (REPOSITORY / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0].split("\n\t")[1:]


@pytest.mark.timeout(400)  # mypy has no cache in a new clone
@pytest.mark.parametrize("line", LINES or ["make lint does nothing"])
def test_lint(line: str) -> None:
    command = line.replace("$(BIN)", str(Path(sys.executable).parent)).split()
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=380 * slowness())
    assert done.returncode == 0, done.stdout + done.stderr
