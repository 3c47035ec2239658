"""Real tasks that make no progress, without TensorFlow: what the user reads, and how the run ends."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.unit.scripted import host_run
from tf2dist.config.schema import RunConfig
from tf2dist.errors import TaskFailure
from tf2dist.launch.launcher import Launcher
from tf2dist.launch.monitor import Monitor, Tasks


def test_a_function_of_the_users_that_never_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_leftovers: Callable[[], None]
) -> None:
    """It is named while it runs and in the final error, and the task is not restarted."""
    with Launcher(tmp_path, preload=()) as launcher:

        def start(task: str, restarts: int) -> None:
            launcher.start(task, "tests.process.targets:stand", {}, sys_path=sys.path)

        monitor = Monitor(host_run(RunConfig(watchdog_secs=5.0), tmp_path), launcher, None, lambda: None)
        with pytest.raises(TaskFailure) as caught:
            monitor.run(Tasks(["chief-0"], "chief-0", start))
    assert caught.value.exit_code == 1
    where = r"never_returns \(targets.py:\d+\)"
    error = rf"chief-0: made no progress for [3-9] s in {where}, see the stacks in its log"
    assert re.fullmatch(error, str(caught.value)), caught.value
    stderr = capsys.readouterr().err
    assert re.search(rf"^chief-0: in {where} for [1-9] s$", stderr, re.MULTILINE), stderr
    assert "again" not in stderr
    log = (tmp_path / "chief-0.log").read_text()
    assert re.search(r"^no progress for [3-9] s; the stacks of all threads:$", log, re.MULTILINE)
    assert "in never_returns" in log


IDLE = """
import threading
ready = threading.Event()
def waits_for_work():
    ready.set()
    threading.Event().wait()
threading.Thread(target=waits_for_work, daemon=True).start()
ready.wait()
"""


def test_a_waiting_thread_of_the_users_is_not_blamed(tmp_path: Path) -> None:
    """It does not explain why the main thread makes no progress."""
    (tmp_path / "idle.py").write_text(IDLE)
    code = "import idle; from tf2dist.process.heartbeat import current_function; print(current_function())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    completed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)
    where, is_users = ast.literal_eval(completed.stdout)
    assert not is_users, where
