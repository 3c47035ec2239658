"""A LossScaleOptimizer in mode=sync: as in Keras it leaves out the updates whose gradients overflow.

It is refused where several ps or workers would decide that apart.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.replica.small_runs import run_config, sync_loop
from tests.replica.test_finished import EXAMPLES, assert_same, leave
from tests.replica.test_like_keras import STEPS, first_layers, plain_keras, weights_of
from tests.replica.test_resume import assert_same_arrays, taken
from tf2dist import registry
from tf2dist.config.schema import AlgorithmConfig, RunConfig
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError, FitError
from tf2dist.fitting import shipping
from tf2dist.fitting.mirror import Mirror, build
from tf2dist.model.builtin import build_optimizer
from tf2dist.model.source import EpochPlan
from tf2dist.testing import SyncWorker, SyncWorkers, WorkerError
from tf2dist.training.finished_model import MODEL_FILE
from tf2dist.training.report import LearningRates

layers, optimizers = keras.layers, keras.optimizers
MODELS = ("overflowing", "half")
PAUSE = 7  # the step at which a run is resumed
SCALE = "optimizer/loss_scale/"


class Gradient(layers.Layer):  # type: ignore[misc, name-defined]
    """Returns its input, and multiplies the gradient by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, inputs: Any) -> Any:
        return tf.custom_gradient(lambda x: (tf.identity(x), lambda gradient: gradient * self.factor))(inputs)


def classifier(
    scale: float, optimizer: keras.Optimizer, steps: int, input_shape: tuple[int, ...], num_classes: int
) -> keras.Model:
    """Its gradients overflow for single examples: sums over them overflow later on two workers, which have halves."""
    # In between, what TensorFlow does not take for one product with 1.
    hidden = [layers.Dense(20, "relu", name="hidden"), Gradient(1e-4), layers.ReLU(), Gradient(1e4)]
    model = keras.Sequential([*first_layers(input_shape), *hidden, layers.Dense(num_classes, name="logits")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers.LossScaleOptimizer(optimizer, scale, steps), loss, metrics=["accuracy"])
    return model


@registry.register_model("overflowing")
def overflowing(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """The scale is too large at first, and grows to that again after every second update."""
    schedule = optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    choices = optimizers.OptimizerMap(optimizers.SGD(schedule), {".*hidden.*": optimizers.Adam(0.002)})
    return classifier(2.0**127, optimizers.MultiOptimizer(choices), 2, input_shape, num_classes)


@registry.register_model("half")
def half(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return classifier(2.0**14, optimizers.Adam(0.002), 100, input_shape, num_classes)
    finally:
        keras.config.set_dtype_policy("float32")


def config_of(name: str, num_workers: int) -> RunConfig:
    return run_config(name, batch_size=100 // num_workers, steps_per_execution=5)


def train_all(worker: SyncWorker) -> dict[str, dict[str, Any]]:
    """What each model is after all steps, the second half of which "overflowing" takes in a resumed run."""
    found = {}
    for name in MODELS:
        config, start = config_of(name, worker.cluster.num_workers), None
        for until_step in (PAUSE, STEPS) if name == "overflowing" else (STEPS,):
            loop = sync_loop(worker, config, start=start)
            loop.train(until_step)
            start = taken(loop)
        assert loop.progress.global_step == STEPS
        found[name] = {
            "weights": weights_of(loop.model),
            "snapshot": start,
            "applied": loop.updates_applied(),
            "small": loop.small_arrays(),
            "rates": LearningRates(loop.optimizer, 0).at(STEPS),
            "accuracy": loop.evaluate("test").metrics["accuracy"],
        }
    return found


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_scale_and_the_updates_are_those_of_keras(sync_workers: SyncWorkers, num_workers: int) -> None:
    one, *others = sync_workers(train_all, num_workers, timeout_secs=240)
    for name in MODELS:
        expected, found = plain_keras(name), one[name]
        optimizer = expected["model"].optimizer
        applied, arrays = int(optimizer.iterations), found["snapshot"].arrays
        assert 0 < applied < STEPS, "some updates must overflow, or nothing is shown"
        assert (found["applied"], int(arrays[f"{SCALE}iteration"])) == (applied, applied)
        assert {name: float(array) for name, array in found["small"].items()} == {
            name: float(array) for name, array in arrays.items() if name.startswith(SCALE)
        }, "callbacks that see no weights see other counts"
        assert float(arrays[f"{SCALE}dynamic_scale"]) == float(optimizer.dynamic_scale)
        assert int(arrays[f"{SCALE}step_counter"]) == int(optimizer.step_counter)
        for array, other in zip(found["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(array, other, atol=2e-5 if name == "overflowing" else 1e-3, rtol=0)
        assert found["accuracy"] == pytest.approx(expected["test"]["accuracy"], abs=0.01)
        inner = getattr(optimizer.inner_optimizer, "optimizers", [optimizer.inner_optimizer])
        assert found["rates"] == pytest.approx([float(each.learning_rate) for each in inner])
        for other in others:
            assert_same_arrays(other[name]["snapshot"], found["snapshot"], ("model/", "optimizer/"))


def test_callbacks_see_what_was_applied() -> None:
    model = keras.Sequential([keras.Input([2]), layers.Dense(1)])
    model.compile(optimizers.LossScaleOptimizer(optimizers.SGD(0.5)), "mse")
    mirror = Mirror(model)
    scale = {f"{SCALE}iteration": np.array(8), f"{SCALE}dynamic_scale": np.array(64.0, np.float32)}
    mirror.put(scale, (0.25,), 10)
    optimizer = model.optimizer
    assert (int(optimizer.iterations), float(optimizer.dynamic_scale)) == (8, 64.0)
    assert float(optimizer.learning_rate) == 0.25
    assert mirror.changes() == ({}, ())
    optimizer.dynamic_scale.assign(32.0)
    assert mirror.changes() == ({f"{SCALE}dynamic_scale": np.array(32.0)}, ())


def test_an_optimizer_by_name_is_scaled_as_keras_does_when_it_compiles() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        scaled = build_optimizer({"name": "adam", "learning_rate": 0.5}, 10)
        assert isinstance(scaled, optimizers.LossScaleOptimizer)
        assert float(scaled.learning_rate) == 0.5
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_scale_that_keras_adds_when_it_loads_a_model_is_refused(tmp_path: Path) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input([2]), layers.Dense(1)])
        model.compile(optimizers.SGD(0.5, loss_scale_factor=8.0), "mse", auto_scale_loss=False)
        data = Arrays(np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32))
        with pytest.raises(
            FitError, match=r"is an SGD, and .* gives a LossScaleOptimizer .* without auto_scale_loss=False"
        ):
            shipping.ship(tmp_path, model, "it", Splits(data, num_classes=None), EpochPlan())
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_model_that_keras_has_trained_is_taken() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input([6]), layers.Dense(3)])
        model.compile(optimizers.Adam(0.5), "mse")
        targets = np.ones((len(EXAMPLES), 3), np.float32)
        model.fit(EXAMPLES, targets, batch_size=5, verbose=0)
        build(model, "it", Arrays(EXAMPLES, targets).layout)
        Mirror(model)
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_finished_model_has_the_scale_and_the_optimizer_of_the_run(tmp_path: Path) -> None:
    """Keras builds the optimizer of a compiled model that it loads, as it is loaded for the end of a run of `fit`."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input([6]), layers.Dense(3)])
        model.compile(optimizers.Adam(0.5), "mse")
        model.fit(EXAMPLES, np.ones((len(EXAMPLES), 3)), batch_size=5, verbose=0)
        config = keras.saving.serialize_keras_object(model)
        assert leave(tmp_path, model, lambda: keras.saving.deserialize_keras_object(config)) == []
        for loaded in (
            keras.saving.load_model(tmp_path / MODEL_FILE),
            tf2dist.load_model(tmp_path),
            tf2dist.load_model(tmp_path, 7),
        ):
            assert_same(loaded, model)
    finally:
        keras.config.set_dtype_policy("float32")


REFUSED = r"optimizer \(.*\): a LossScaleOptimizer leaves out .*with {} nobody sees all; use mode=sync, or give"


def test_it_is_refused_with_parameter_servers(
    async_loop: Callable[..., Any], replicas_loop: Callable[..., Any]
) -> None:
    for make_loop, mode in ((async_loop, "async"), (replicas_loop, "sync_replicas")):
        with pytest.raises(ConfigError, match=REFUSED.format(f"mode={mode}")):
            make_loop(config_of("half", 1))


def train_locally(worker: SyncWorker) -> None:
    config = replace(config_of("half", 1), algorithm=AlgorithmConfig(kind="local_sgd", local_steps=4))
    sync_loop(worker, config)


def test_it_is_refused_where_each_worker_takes_steps_of_its_own(sync_workers: SyncWorkers) -> None:
    with pytest.raises(WorkerError, match=REFUSED.format("algorithm=local_sgd")):
        sync_workers(train_locally, 1)
