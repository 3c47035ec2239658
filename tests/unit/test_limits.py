"""The limits of time of the tests: longer on a busy machine, and nothing that a test has started outlives its end."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import MAX_SLOWNESS, REPOSITORY, slowness

HANGS = """
import signal, subprocess, sys
import pytest

WITH_A_CHILD = (
    "import subprocess, sys, time; "
    "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']).pid, flush=True); time.sleep(300)"
)

def started():
    command = [sys.executable, "-c", WITH_A_CHILD]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with open("pids", "a") as pids:
        pids.write(f"{process.pid} {process.stdout.readline()} ")
    return process

@pytest.fixture(scope="session")
def kept():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield process
    process.kill()

@pytest.mark.timeout(2)
def test_that_waits_for_its_process(kept):
    process = started()
    try:
        signal.pause()
    finally:
        process.wait()

@pytest.mark.timeout(2)
def test_that_leaves_an_orphan(kept):
    started().kill()
    signal.pause()

def test_next(kept):
    assert kept.poll() is None
"""


@pytest.mark.thorough
def test_what_a_test_has_started_ends_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest"]
    env = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    completed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60 * slowness())
    assert "2 failed, 1 passed" in completed.stdout, completed.stdout + completed.stderr
    assert completed.stdout.count("ended what the test had started: [") == 2
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4
    running = [process for process in psutil.process_iter() if process.status() != psutil.STATUS_ZOMBIE]
    assert not {process.pid for process in running} & {*pids}


def test_limits_grow_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    processors = len(os.sched_getaffinity(0))
    for load, expected in ((0.0, 1.0), (1.5 * processors, 1.5), (100.0 * processors, MAX_SLOWNESS)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        assert slowness() == expected
