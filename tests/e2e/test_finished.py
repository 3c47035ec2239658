"""The Keras model that real runs leave: in the caller's process it is the model that was evaluated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf2dist
from tests.conftest import Command
from tf2dist import data
from tf2dist.config.schema import DataConfig

# Compiled by its builder, with layers that have no names, with state that is not trained, and with an optimizer that
# has the last word on the weights.
PLUGIN = """
import keras

import tf2dist


@tf2dist.register_model("nameless")
def nameless(input_shape, num_classes):
    keras.layers.Dense(1)  # so that the numbers in the names of the others begin elsewhere
    layers = [keras.layers.Dense(20, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    ends = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten()], [keras.layers.Dense(num_classes)]
    model = keras.Sequential([keras.Input(input_shape), *ends[0], *layers, *ends[1]])
    model.compile(
        keras.optimizers.RMSprop(0.003, momentum=0.5, use_ema=True, ema_momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")],
    )
    return model
"""


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def evaluated(model: keras.Model) -> dict[str, float]:
    test = data.load(DataConfig(name="digits", num_validation=180)).test
    assert test is not None
    result: dict[str, float] = model.evaluate(test.x, test.y, verbose=0, return_dict=True)
    return result


def arrays_of(run_dir: Path, step: int) -> dict[str, Any]:
    with np.load(run_dir / "checkpoints" / f"step-{step:010}" / "arrays.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize(
    ("mode", "cluster"), [("async", ["cluster.num_ps=2"]), pytest.param("sync", [], marks=pytest.mark.slow)]
)
def test_the_model_that_was_evaluated(command: Command, mode: str, cluster: list[str]) -> None:
    (command.folder / "mine.py").write_text(PLUGIN)
    options = ["plugins=[mine.py]", "model=nameless", "data=digits", "train.steps=60", "checkpoint.every_steps=30"]
    finished = command(f"mode={mode}", "cluster=local1", *cluster, *options)
    assert finished.code == 0, finished
    assert "warning: model" not in finished.stderr, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert (finished.run_dir / "model.keras").is_file(), "without it load_model takes the checkpoint"

    model = tf2dist.load_model(finished.run_dir)
    for name, value in evaluated(model).items():
        assert value == pytest.approx(summary[f"test_{name}"], abs=1e-5)
    assert model.optimizer.use_ema
    assert int(model.optimizer.iterations) == 60
    assert float(model.optimizer.learning_rate) == pytest.approx(0.003)

    # The checkpoints hold the weights from which a training goes on, which are not the averages.
    last, middle = tf2dist.load_model(finished.run_dir, 60), tf2dist.load_model(finished.run_dir, 30)
    assert not np.allclose(last.trainable_variables[0].numpy(), model.trainable_variables[0].numpy())
    for loaded, step in ((last, 60), (middle, 30)):
        arrays = arrays_of(finished.run_dir, step)
        for prefix, own, variables in (
            ("model/", "kernel", loaded.trainable_variables),
            ("optimizer/", "kernel/momentums", loaded.optimizer.variables),
        ):
            there = [array for name, array in arrays.items() if name.startswith(prefix) and name.endswith(own)]
            here = [v.numpy() for v in variables if v.path.endswith(("kernel", "kernel_momentum"))]
            assert len(there) == len(here) == 2
            for mine, its in zip(sorted(here, key=np.size), sorted(there, key=np.size), strict=True):
                np.testing.assert_array_equal(mine, its)


@pytest.mark.slow
def test_it_takes_what_the_data_gives_and_goes_with_the_next_run(command: Command) -> None:
    """A model of this package takes the bytes of images. A run that goes on removes the model until its own end."""
    options = ["mode=sync", "cluster=local2", "data=digits", "model=softmax"]
    assert command(*options, "train.steps=100").code == 0
    first = evaluated(tf2dist.load_model(command.folder / "run"))
    assert first["accuracy"] > 0.7
    (command.folder / "run" / "model.keras").write_bytes(b"of the first run")
    (command.folder / "run" / "model.json").unlink()
    assert command(*options, "train.steps=110").code == 0
    model = tf2dist.load_model(command.folder / "run")
    assert int(model.optimizer.iterations) == 110
    assert evaluated(model)["loss"] < first["loss"]
