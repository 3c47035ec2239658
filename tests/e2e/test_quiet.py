"""The output of a run without problems, and the names that it looks up."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Command

NOTE_NAMES = """
import os, socket

def noted(function):
    def note(host, *args, **kwargs):
        with open(os.environ["NAMES"], "a") as names:
            names.write(f"{host}\\n")
        return function(host, *args, **kwargs)
    return note

for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
    setattr(socket, name, noted(getattr(socket, name)))
"""


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def recording_names(folder: Path) -> dict[str, str]:
    """The variables of a command that notes what names it looks up."""
    (folder / "sitecustomize.py").write_text(NOTE_NAMES)
    (folder / "names").touch()
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    return {"NAMES": str(folder / "names"), "PYTHONPATH": path, "NO_GCE_CHECK": ""}


def assert_asked_for_no_name(folder: Path) -> None:
    assert set((folder / "names").read_text().splitlines()) <= {"127.0.0.1", "::1", "None"}


@pytest.mark.parametrize(
    "mode", [pytest.param("async", marks=pytest.mark.thorough), pytest.param("sync", marks=pytest.mark.slow)]
)
def test_a_plain_run_is_quiet_and_looks_up_no_name(cold_command: Command, mode: str) -> None:
    """So is the first run of test_train.py."""
    env = recording_names(cold_command.folder)
    finished = cold_command(f"mode={mode}", "cluster=local2", "data=digits", "train.steps=200", env=env)
    assert finished.code == 0, finished
    lines = finished.stderr.splitlines()
    assert lines[0] == "starting TensorFlow"
    assert lines[1].startswith("starting ")
    steps = [line for line in lines[2:] if not re.fullmatch(r"[a-z]+-\d.*: in .* for \d+ s", line)]  # a slow machine
    assert all(line.startswith("step ") for line in steps), finished
    assert len(steps) <= 10, "one for every five seconds"
    assert len(finished.stdout.splitlines()) == 3
    assert_asked_for_no_name(cold_command.folder)
