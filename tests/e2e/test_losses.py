"""Tasks that are lost, by role, signal and mode; the run reaches its exact end nevertheless."""

import functools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Command, task_process, wait_until

pytestmark = pytest.mark.timeout(400)  # several runs of some 10 s, each with a limit of its own

STEPS = {"async": 9_000, "sync": 2_700, "sync_replicas": 2_700}
COMMON = [
    "data=digits",
    "model=softmax",
    "watchdog_secs=8",
    "train.log_every_steps=50",
    "train.steps_per_execution=10",
]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def start(command: Command, mode: str, *more: str) -> subprocess.Popen[str]:
    return command.start(f"mode={mode}", *COMMON, f"train.steps={STEPS[mode]}", *more)


def wait_for_step(command: Command, process: subprocess.Popen[str], step: int) -> None:
    """Waits until the first worker has logged a global step of at least `step`."""
    log = command.folder / "run" / "logs" / "worker-0.log"

    def logged() -> bool:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        steps = [line.partition("global_step=")[2].partition(",")[0] for line in lines]
        return any(int(step_text) >= step for step_text in steps if step_text)

    wait_until(logged, process)


def assert_exact(command: Command, mode: str, restarts: int, steps: int | None = None) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((command.folder / "run" / "summary.json").read_text())
    steps = steps or STEPS[mode]
    assert summary["global_step"] == summary["updates_applied"] == summary["target_step"] == steps
    assert summary["restarts"] == restarts
    assert summary["test_accuracy"] > 0.9
    assert summary["test_examples"] == 360
    return summary


WITH_PS = ["worker-1", "ps-0", "chief-0"]
ROLES = {"async": WITH_PS, "sync": ["worker-1", "worker-0"], "sync_replicas": WITH_PS}


def test_a_ps_that_is_lost(command: Command) -> None:
    """tests/e2e/test_passes.py has lost workers."""
    lose(command, "async", signal.SIGKILL, ["ps-0"], 3_000, "cluster=local2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["kill", "stop"]
)
@pytest.mark.parametrize(
    "mode", ["async", *(pytest.param(mode, marks=pytest.mark.slow) for mode in STEPS if mode != "async")]
)
def test_the_loss_of_each_role_in_turn(command: Command, mode: str, signum: signal.Signals) -> None:
    lose_each_role(command, mode, signum)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync_replicas"])
def test_the_loss_of_each_role_with_cut_variables(command: Command, mode: str) -> None:
    """The kernel of 784 rows lies on two ps, one of which is lost; what is restored must fit together."""
    more = ["cluster.num_ps=2", "cluster.placement=partitioned", "cluster.min_part_bytes=10000"]
    lose_each_role(command, mode, signal.SIGKILL, *more)
    log = (command.folder / "run" / "logs" / "chief-0.log").read_text()
    assert re.search(r"^ps-1: 15,\d{3} bytes of the model", log, re.MULTILINE)


def lose_each_role(command: Command, mode: str, signum: signal.Signals, *more: str) -> dict[str, Any]:
    return lose(command, mode, signum, ROLES[mode], STEPS[mode], *more)


def lose(
    command: Command, mode: str, signum: signal.Signals, tasks: list[str], steps: int, *more: str
) -> dict[str, Any]:
    """A lost worker beside a ps is restarted alone; for any other task all restart from the last checkpoint."""
    process = start(command, mode, f"checkpoint.every_steps={steps // 12}", f"train.steps={steps}", *more)
    how = "was killed by SIGKILL" if signum == signal.SIGKILL else "showed no sign of life for 5 s"
    messages: list[str] = []
    stderr: Any = process.stderr
    for number, task in enumerate(tasks, start=1):
        wait_for_step(command, process, steps * number // 6)
        os.kill(task_process(command.folder / "run", task).pid, signum)
        (command.folder / "run" / "logs" / "worker-0.log").write_text("")  # its steps are of this life from now on
        messages.append(next(line for line in stderr if "warning" in line))
        assert f"{task} {how}" in messages[-1]
        if mode != "sync" and task.startswith("worker"):
            assert "starting it again" in messages[-1]
        else:
            step = int(messages[-1].partition("from the checkpoint at step ")[2])
            assert step >= steps // 12
    finished = command.finish(process)
    assert finished.code == 0, finished
    assert "warning" not in finished.stderr
    summary = assert_exact(command, mode, len(tasks), steps)
    if mode != "sync":
        gradients = steps * summary.get("replicas_to_aggregate", 1)
        assert sum(worker["local_steps"] for worker in summary["workers"]) == gradients
        log = (command.folder / "run" / "logs" / "worker-1.log").read_text()
        assert "final accuracy" in log, "it took part again"
    return summary


@pytest.mark.slow
def test_replicas_go_on_without_a_worker_while_enough_remain(command: Command) -> None:
    """Two of three make a step: while the third is frozen, steps are made, and afterwards it takes part again."""
    process = start(command, "sync_replicas", "sync_replicas.replicas_to_aggregate=2", "train.steps=8000")
    wait_for_step(command, process, 200)
    victim = task_process(command.folder / "run", "worker-2")
    victim.suspend()
    (command.folder / "run" / "logs" / "worker-0.log").write_text("")
    wait_for_step(command, process, 600)
    assert victim.status() == "stopped", "nobody has ended it yet"
    finished = command.finish(process)
    assert finished.code == 0, finished
    assert "worker-2 showed no sign of life for 5 s; starting it again" in finished.stderr
    summary = json.loads((command.folder / "run" / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == 8_000
    assert sum(summary["aggregated"]) == 16_000
    assert summary["aggregated"][2] + summary["dropped"][2] > 0


@pytest.mark.slow
def test_all_workers_lost(command: Command) -> None:
    """All of them take part again, and the updates that they had made are kept."""
    process = start(command, "async")
    wait_for_step(command, process, 1_500)
    log = command.folder / "run" / "logs" / "worker-2.log"
    before = log.read_text().count("worker=2, epoch")
    for index in range(3):
        task_process(command.folder / "run", f"worker-{index}").kill()
    wait_until(lambda: log.read_text().count("worker=2, epoch") > before + 2, process)
    finished = command.finish(process)
    assert finished.code == 0, finished
    assert finished.stderr.count("was killed by SIGKILL; starting it again") == 3
    assert assert_exact(command, "async", restarts=3)["workers"][2]["local_steps"] > 50 * (before + 2)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_restarts_come_to_an_end(command: Command, mode: str) -> None:
    process = start(command, mode, "cluster=local2", "max_restarts=1")
    for number in range(2):
        wait_for_step(command, process, 100)
        victim = task_process(command.folder / "run", "worker-1")
        (command.folder / "run" / "logs" / "worker-0.log").write_text("")
        victim.kill()
        if number == 0:
            wait_until(functools.partial(_has_another, command, victim.pid), process)
    finished = command.finish(process)
    assert finished.code == 138, finished
    assert "worker-1: was killed by SIGKILL, after 1 restarts" in finished.stderr


def _has_another(command: Command, pid: int) -> bool:
    try:
        return task_process(command.folder / "run", "worker-1").pid != pid
    except LookupError:
        return False


@pytest.mark.slow
def test_a_launcher_that_is_suspended_for_a_while_ends_no_task(command: Command) -> None:
    process = start(command, "async", "watchdog_secs=5")
    wait_for_step(command, process, 500)
    process.send_signal(signal.SIGSTOP)
    wait_for_step(command, process, 2_000)  # the tasks go on
    time.sleep(5.0)  # longer than a task may be silent
    process.send_signal(signal.SIGCONT)
    finished = command.finish(process)
    assert finished.code == 0, finished
    assert_exact(command, "async", restarts=0)


STUCK = """
import os, threading
from pathlib import Path
import keras, tensorflow as tf
from tf2dist.registry import register_model

def wait_once():
    mark = Path(os.environ["STUCK_MARK"])
    if os.environ.get("STUCK_STEP") == str(step_of.setdefault("calls", 0)) and not mark.exists():
        mark.write_text("stuck")
        threading.Event().wait()
    step_of["calls"] += 1
    return 0.0

step_of = {}

class Stuck(keras.layers.Layer):
    def call(self, inputs):
        nothing = tf.py_function(wait_once, [], tf.float32)
        nothing.set_shape([])
        return inputs + tf.stop_gradient(nothing)

@register_model("stuck")
def stuck(input_shape, num_classes):
    layers = keras.layers
    return keras.Sequential([keras.Input(input_shape), layers.Flatten(), Stuck(), layers.Dense(num_classes)])
"""


@pytest.mark.slow
def test_a_worker_that_is_stuck_in_the_users_code(command: Command) -> None:
    """It shows signs of life and makes no progress: the watchdog writes its stacks and names the function."""
    (command.folder / "stuck.py").write_text(STUCK)
    mark = command.folder / "mark"
    finished = command(
        *("mode=sync", "cluster=local2", "data=digits", "plugins=[stuck.py]", "model=stuck", "train.steps=60"),
        *("watchdog_secs=8", "train.steps_per_execution=5"),
        env={"STUCK_MARK": str(mark), "STUCK_STEP": "33"},
    )
    assert finished.code == 1, finished
    assert mark.exists()
    assert "again" not in finished.stderr
    error = r"worker-[01]: made no progress for \d+ s in wait_once \(stuck.py:11\), see the stacks in its log"
    assert re.search(error, finished.stderr), finished
    logs = "".join(path.read_text() for path in (command.folder / "run" / "logs").glob("worker-*.log"))
    assert "in wait_once" in logs


LEAVES = """
import os, threading, time
from pathlib import Path
mark, log = Path(os.environ["LEAVE_MARK"]), os.readlink("/proc/self/fd/1")

def leave():
    while "worker=1, epoch" not in Path(log).read_text(errors="replace"):
        time.sleep(0.02)
    mark.touch()
    os._exit(0)

if log.endswith("worker-1.log") and not mark.exists():
    threading.Thread(target=leave, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_that_exits_with_code_0(command: Command, mode: str) -> None:
    """Some code has ended the process: the task is named and started again."""
    (command.folder / "leaves.py").write_text(LEAVES)
    arguments = [f"mode={mode}", "cluster=local2", *COMMON, "plugins=[leaves.py]", f"train.steps={STEPS[mode]}"]
    finished = command(*arguments, env={"LEAVE_MARK": str(command.folder / "mark")})
    assert finished.code == 0, finished
    again = "starting it again" if mode == "async" else "starting all tasks again"
    warnings = [line for line in finished.stderr.splitlines() if "warning" in line]
    said = f"tf2dist: warning: worker-1 ended with exit code 0 before the end of the run; {again}"
    assert warnings == [said], finished
    assert_exact(command, mode, restarts=1)


WAITS = {
    "slow": "time.sleep(15)",
    "frozen": "time.sleep(6); os.kill(os.getpid(), signal.SIGSTOP)",
    "mute": "time.sleep(6); ctypes.PyDLL(None).sleep(60)",  # with Python's lock
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["frozen", "slow", "mute"])
def test_a_task_that_waits_for_another_at_the_start_is_not_blamed(command: Command, how: str) -> None:
    """The first worker waits for the other in a call of TensorFlow in which none of its threads can report."""
    (command.folder / "wait.py").write_text(f"""
import ctypes, os, pathlib, signal, time
mark = pathlib.Path({str(command.folder / "mark")!r})
if os.readlink("/proc/self/fd/1").endswith("worker-1.log") and not mark.exists():
    mark.touch()
    {WAITS[how]}
""")
    small = ["data=digits", "model=softmax", "train.steps=20", "watchdog_secs=5", "plugins=[wait.py]"]
    finished = command("mode=sync", "cluster=local2", *small)
    assert finished.code == 0, finished
    lost = "tf2dist: warning: worker-1 showed no sign of life for 3 s; starting all tasks again"
    warnings = [line for line in finished.stderr.splitlines() if "warning" in line]
    assert warnings == [lost] * (how != "slow"), finished
    stacks = (command.folder / "run" / "logs" / "worker-1.log").read_text()
    assert ("wait.py" in stacks) is (how == "mute"), "where it is stuck"
