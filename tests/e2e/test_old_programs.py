"""The old programs beside MNIST: a regression that is drawn, and layers of one network taken over into another."""

import json
from collections.abc import Callable

import pytest
import tensorflow as tf

from tests.conftest import Command
from tests.e2e.test_run_commands import typed
from tf2dist.palette import SPLIT_STYLES


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("options", "loss"), [([], 0.013), (["mode=async"], 0.03)], ids=["sync", "async"])
def test_a_regression_is_learned_and_predict_draws_it(command: Command, options: list[str], loss: float) -> None:
    finished = command("experiment=regression", *options)
    assert finished.code == 0, finished
    assert "warning" not in finished.stderr, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert (summary["global_step"], summary["cluster"]["worker"]) == (2000, 3)
    assert summary["test_loss"] < loss, "the variance of the noise is 0.01; a straight line has 0.1"
    drawn = typed("predict", finished.run_dir, folder=command.folder)
    assert drawn.code == 0, drawn
    assert drawn.stdout.splitlines()[-1] == str(finished.run_dir / "regression.png")
    picture = tf.io.decode_png((finished.run_dir / "regression.png").read_bytes(), 3)
    assert min(picture.shape[:2]) > 400
    of_model = tf.constant(list(bytes.fromhex(SPLIT_STYLES["training"].colour[1:])), tf.uint8)
    columns = tf.reduce_any(tf.reduce_all(tf.equal(picture, of_model), axis=-1), axis=0)
    assert int(tf.math.count_nonzero(columns)) > 0.7 * picture.shape[1], "the curve goes from side to side"


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
