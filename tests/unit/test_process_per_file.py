"""Under pytest-xdist the tests of a file share a process, which is another one than that of the next file."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

NOTE = """
import os
import signal
import pytest

@pytest.fixture(scope="session", autouse=True)
def whole_life():
    yield
    with open("notes", "a") as notes:
        notes.write("end ")

def note(name):
    with open("notes", "a") as notes:
        notes.write(f"{name}:{os.getpid()} ")
"""
FIRST = f"""{NOTE}
def test_one(): note("one")
def test_two(): note("two")
"""
SECOND = f"""{NOTE}
def test_three(): note("three")
def test_a_lost_process(): os.kill(os.getpid(), signal.SIGKILL)
def test_four(): note("four")
@pytest.mark.timeout(0.2)
def test_the_limit_of_time(): signal.pause()
"""


@pytest.mark.thorough
def test_each_file_has_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadfile", "-p", "tests.process_per_file"]
    env = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    completed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert "the process of test_second.py has ended with code -9" in completed.stdout
    assert "Timeout" in completed.stdout
    assert "2 failed, 4 passed" in completed.stdout
    words = (tmp_path / "notes").read_text().split()
    pids = dict(word.split(":") for word in words if word != "end")
    assert pids["one"] == pids["two"]
    assert len({pids["two"], pids["three"], pids["four"]}) == 3
    assert words.count("end") == 2, "fixtures of the session end with their process, and a killed one ends none"


LOUD = """
import warnings
import pytest

@pytest.mark.parametrize("number", range(8))
def test_it(number):
    print("x" * 1_000_000)
    for line in range(50):
        warnings.warn(f"{number} {line}" + "y" * 3000)
"""


@pytest.mark.thorough
def test_warnings_beside_a_long_report_tear_no_message(tmp_path: Path) -> None:
    """A pipe takes 64 KB at once: two processes that wrote to it in turns ended the run in an undecodable message."""
    (tmp_path / "test_loud.py").write_text(LOUD)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadfile", "-p", "tests.process_per_file"]
    env = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    completed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-5000:]
    assert "8 passed, 400 warnings" in completed.stdout
