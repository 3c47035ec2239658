"""The coordinator's shutdown message reaches every server that runs, whatever befalls the others."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import ports_of_tasks


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.mark.thorough
def test_a_lost_worker_takes_the_shutdown_message_from_no_other_task() -> None:
    """TensorFlow raises the error of an operation on one task in any thread, so also in the message to another."""
    ports = map(str, ports_of_tasks(7))
    command = [sys.executable, "-m", "tests.process.shutdown_messages", *ports]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    *lines, codes = ended.stdout.splitlines()
    tasks = ["ps-0", *(f"worker-{index}" for index in range(5))]
    assert json.loads(codes) == {task: -9 if task == "worker-1" else 0 for task in tasks}, (lines, ended.stderr)
    assert not lines, "no message is missing"
