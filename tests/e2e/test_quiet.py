"""The output of a run without problems, and the names that it looks up."""

import os
import re
from collections.abc import Callable

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


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_plain_run_is_quiet_and_looks_up_no_name(cold_command: Command, mode: str) -> None:
    (cold_command.folder / "sitecustomize.py").write_text(NOTE_NAMES)
    names = cold_command.folder / "names"
    names.touch()
    path = os.pathsep.join([str(cold_command.folder), str(REPOSITORY)])
    env = {"NAMES": str(names), "PYTHONPATH": path, "NO_GCE_CHECK": ""}
    finished = cold_command(f"mode={mode}", "cluster=local2", "data=digits", "train.steps=200", env=env)
    assert finished.code == 0, finished
    lines = finished.stderr.splitlines()
    assert lines[0] == "starting TensorFlow"
    assert lines[1].startswith("starting ")
    steps = [line for line in lines[2:] if not re.fullmatch(r"[a-z]+-\d.*: in .* for \d+ s", line)]  # a slow machine
    assert all(line.startswith("step ") for line in steps), finished
    assert len(steps) <= 10, "one for every five seconds"
    assert len(finished.stdout.splitlines()) == 3
    asked = set(names.read_text().splitlines())
    assert asked <= {"127.0.0.1", "::1", "None"}
