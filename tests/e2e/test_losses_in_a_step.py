"""Tasks that are lost while every worker is in the middle of a step, held there by a gate in the model."""

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from tests.conftest import Command, slowness, task_process, wait_until
from tests.e2e.test_losses import STEPS, assert_exact, start, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NUM_WORKERS = 3
GATED = """
import os

import keras
import tensorflow as tf
import tf2dist

CLOSED, INSIDE = os.environ["TEST_GATE"] + ".closed", os.environ["TEST_GATE"] + ".inside"


class Gate(keras.layers.Layer):
    def call(self, images):
        mine = tf.strings.join([INSIDE, tf.strings.as_string(tf.timestamp(), precision=9)])

        def is_closed(number):
            # The name depends on the number, or TensorFlow would look for the file once, before the loop.
            name = tf.strings.substr(CLOSED, 0, tf.minimum(number, 0) + len(CLOSED))
            return tf.size(tf.io.matching_files(name)) > 0

        def wait(number):
            with tf.control_dependencies([tf.io.write_file(mine, "")]):
                return number + 1

        with tf.control_dependencies(tf.while_loop(is_closed, wait, [tf.constant(0)])):
            return tf.identity(images)


@tf2dist.register_model("gated")
def gated(input_shape, num_classes):
    layers = keras.layers
    scaled = [keras.Input(input_shape), layers.Rescaling(1 / 255)]
    return keras.Sequential([*scaled, Gate(), layers.Flatten(), layers.Dense(num_classes)])
"""
ROLES_IN_A_STEP = [
    *(("async", task) for task in ("worker-1", "ps-0", "chief-0")),
    *(("sync", task) for task in ("worker-1", "worker-0")),
]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def start_and_close_the_gate(command: Command, mode: str) -> subprocess.Popen[str]:
    """Returns when every worker is in the middle of a step; each stays there as long as the gate is closed.

    A synchronous worker that was through before it closed waits, in the same step, for the sum of one that was not.
    """
    (command.folder / "gated.py").write_text(GATED)
    command.env["TEST_GATE"] = str(command.folder / "gate")
    more = ["model=gated", "plugins=[gated.py]", f"checkpoint.every_steps={STEPS[mode] // 12}", "watchdog_secs=20"]
    process = start(command, mode, *more)
    wait_for_step(command, process, STEPS[mode] // 6)
    (command.folder / "gate.closed").touch()
    at_the_gate = NUM_WORKERS if mode == "async" else 1
    wait_until(lambda: len(list(command.folder.glob("gate.inside*"))) >= at_the_gate, process)
    return process


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize(("mode", "task"), ROLES_IN_A_STEP)
def test_a_loss_in_the_middle_of_a_step(command: Command, mode: str, task: str, signum: signal.Signals) -> None:
    process = start_and_close_the_gate(command, mode)
    os.kill(task_process(command.folder / "run", task).pid, signum)
    (command.folder / "gate.closed").unlink()
    finished = command.finish(process)
    assert finished.code == 0, finished
    how = "was killed by SIGKILL" if signum == signal.SIGKILL else "showed no sign of life for 12 s"
    assert f"{task} {how}" in finished.stderr
    assert_exact(command, mode, restarts=1)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_launcher_killed_in_the_middle_of_a_step_leaves_no_process(command: Command, mode: str) -> None:
    process = start_and_close_the_gate(command, mode)  # it stays closed
    process.kill()
    process.communicate(timeout=10 * slowness())
