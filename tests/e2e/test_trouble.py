"""Failures without a lost task: a loss that is not finite, a full disk, an error in the user's code."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Command, leave_free

pytestmark = pytest.mark.timeout(400)  # several runs of some 10 s, each with a limit of its own

SMALL = ["data=digits", "model=softmax", "cluster=local2"]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync", "sync_replicas"])
def test_a_loss_that_is_not_finite(command: Command, mode: str) -> None:
    assert command(f"mode={mode}", *SMALL, "optimizer=sgd", "train.steps=20").code == 0
    worse = ["optimizer=sgd", "optimizer.learning_rate=1e38", "train.steps=2000", "figure=true"]
    finished = command(f"mode={mode}", *SMALL, *worse)
    assert finished.code == 3, finished
    assert (finished.run_dir / "training.png").exists(), "how the loss grew can be seen"
    assert "try a lower learning rate" in finished.stderr
    assert "Traceback" not in finished.stderr
    newest = max((command.folder / "run" / "checkpoints").iterdir())
    with np.load(newest / "arrays.npz") as arrays:
        assert all(np.isfinite(array).all() for array in arrays.values()), "the last good one stays the newest"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_full_disk(small_disk: Callable[[str], Path], mode: str) -> None:
    """The training goes on to its end, and keeps the checkpoint that it could write."""
    command = Command(small_disk("size=3m"))
    arguments = [f"mode={mode}", *SMALL, "model=softmax", "checkpoint.every_steps=100", "checkpoint.keep=2"]
    assert command(*arguments, "train.steps=100").code == 0
    (command.folder / "run" / "model.keras").unlink()  # the next run would remove it, and have room then
    fill = leave_free(command.folder, 0)
    finished = command(*arguments, "train.steps=300")
    assert "could not be saved (No space left on device); what was saved before stays" in finished.stderr, finished
    assert "Traceback" not in finished.stderr
    assert "step 300/300" in finished.stderr
    assert finished.code == 1, "the result could not be written either"
    assert "summary.json" in finished.stderr
    names = [path.name for path in (command.folder / "run" / "checkpoints").iterdir()]
    assert names == ["step-0000000100"]
    fill.unlink()
    again = command(*arguments, "train.steps=300")
    assert again.code == 0, again
    assert json.loads((command.folder / "run" / "summary.json").read_text())["global_step"] == 300


BROKEN = """
import os
import keras, tensorflow as tf
from tf2dist.registry import register_model

def break_down(x):
    if os.readlink("/proc/self/fd/1").endswith("worker-1.log"):
        raise RuntimeError("the cause is in this line")
    return x

class Broken(keras.layers.Layer):
    def call(self, inputs):
        outputs = tf.py_function(break_down, [inputs], tf.float32)
        outputs.set_shape(inputs.shape)
        return outputs

@register_model("broken")
def broken(input_shape, num_classes):
    layers = keras.layers
    return keras.Sequential([keras.Input(input_shape), layers.Flatten(), Broken(), layers.Dense(num_classes)])
"""


def test_an_error_of_the_user_on_one_worker_is_shown_first_and_whole(command: Command) -> None:
    (command.folder / "broken.py").write_text(BROKEN)
    finished = command(
        "mode=sync", *SMALL[:1], "cluster=local3", "plugins=[broken.py]", "model=broken", "train.steps=9"
    )
    assert finished.code == 1, finished
    output = finished.stderr.partition("tf2dist: error:")[2]
    assert "the cause is in this line" in output
    assert "break_down" in output
    assert output.count("Traceback (most recent call last)") <= 2, "the others in a line each"
    last = [line for line in output.splitlines() if line and not line.startswith("  then")][-1]
    assert last.startswith("worker-1: ")
