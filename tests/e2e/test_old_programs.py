"""The old programs beside MNIST: a regression that is drawn, and layers of one network taken over into another."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import tensorflow as tf

from tests.conftest import Command


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("options", "loss"), [([], 0.013), (["mode=async"], 0.03)], ids=["sync", "async"])
def test_a_regression_is_learned_and_drawn(command: Command, options: list[str], loss: float) -> None:
    finished = command("experiment=regression", *options)
    assert finished.code == 0, finished
    assert "warning" not in finished.stderr, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert (summary["global_step"], summary["cluster"]["worker"]) == (2000, 3)
    assert summary["test_loss"] < loss, "the variance of the noise is 0.01; a straight line has 0.1"
    picture = tf.io.decode_png((finished.run_dir / "regression.png").read_bytes(), 3)
    assert min(picture.shape[:2]) > 400
    red = tf.reduce_all(tf.equal(picture, tf.constant([192, 57, 43], tf.uint8)), axis=-1)
    columns = tf.reduce_any(red, axis=0)
    assert int(tf.math.count_nonzero(columns)) > 0.7 * picture.shape[1], "the curve goes from side to side"


def test_a_signal_leaves_only_the_drawing_out(command: Command) -> None:
    process = command.start("experiment=regression", "cluster=local1", "train.steps=20", "figure=false")
    assert process.stderr
    while (line := process.stderr.readline()) and not line.startswith("drawing regression.png; Ctrl-C"):
        pass
    process.send_signal(signal.SIGINT)
    finished = command.finish(process, timeout_secs=30)
    assert finished.code == 0, "the run is done"
    picture = finished.run_dir / "regression.png"
    told = "tf2dist: warning: regression.png could not be drawn (stopped by a signal); python -m "
    shown = finished.stderr.strip()  # the signal may come while the end of the line before is written
    assert shown.startswith(told), finished
    assert not picture.exists()
    module, run_dir = shown.removeprefix(told).removesuffix(" draws it").split()
    done = subprocess.run([sys.executable, "-m", module, run_dir], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{picture}\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_layers_that_were_trained_before_help(command: Command) -> None:
    """Three hidden layers go into a network with a fourth, which learns in steps that are too few from scratch."""
    options = ["mode=sync", "cluster=local1", "data=digits", "optimizer=adam"]
    three, four = "model.hidden_units=[100,50,50]", "model.hidden_units=[100,50,50,20]"
    source = command(*options, three, "train.steps=600", run_dir="three")
    taken = f"init_from={source.run_dir}", "init_layers=hidden[123]"
    accuracies = {}
    for name, more in (("transferred", taken), ("from_scratch", ())):
        finished = command(*options, four, "train.steps=30", *more, run_dir=name)
        assert finished.code == 0, finished
        assert ("weights of hidden1, hidden2, hidden3 from" in finished.stderr) == (name == "transferred")
        accuracies[name] = json.loads((finished.run_dir / "summary.json").read_text())["test_accuracy"]
    assert accuracies["transferred"] > accuracies["from_scratch"] + 0.1, accuracies
