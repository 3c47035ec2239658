"""Non-trainable state, such as moving averages, while several workers push at the same time."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.replica.small_runs import assert_exact, run_config, split_of
from tf2dist import data, registry
from tf2dist.config.schema import RunConfig
from tf2dist.model.evaluation import Evaluation

MakeLoop = Callable[..., Any]
STEPS = 200


@registry.register_model("fast_norm")
def fast_norm(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    layers = keras.layers
    norm = layers.BatchNormalization(momentum=0.1, name="norm")
    hidden = [layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(20, "relu"), norm]
    return keras.Sequential([keras.Input(input_shape), *hidden, layers.Dense(num_classes)])


@keras.saving.register_keras_serializable("test_async_state")
class Notes(keras.layers.Layer):
    """A layer with every kind of state: sums in three forms, a last value, a largest value, a constant."""

    def build(self, input_shape: Any) -> None:
        def weight(name: str, dtype: str = "float32", initializer: str = "zeros") -> Any:
            return self.add_weight(shape=(), name=name, dtype=dtype, initializer=initializer, trainable=False)

        self.calls, self.examples = weight("calls", "int64"), weight("examples")
        self.left = weight("left")
        self.last, self.largest = weight("last"), weight("largest")
        self.fixed = weight("fixed", initializer="ones")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
            self.examples.assign(self.examples + keras.ops.cast(keras.ops.shape(inputs)[0], "float32"))
            self.left.assign(-(2.0 - self.left))
            self.last.assign(keras.ops.mean(inputs))
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(inputs)))
        return inputs * self.fixed


@registry.register_model("notes")
def notes(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    layers = keras.layers
    scaled = [keras.Input(input_shape), layers.Rescaling(1 / 255)]
    return keras.Sequential([*scaled, Notes(), layers.Flatten(), layers.Dense(num_classes)])


def state(loop: Any) -> dict[str, np.ndarray]:
    return {variable.name: variable.numpy() for variable in loop.model.non_trainable_variables}


def plain_keras(config: RunConfig, model: keras.Model) -> Evaluation:
    """The evaluation of the test set after plain Keras has trained the same model for the same number of steps."""
    splits = data.load(config.data)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss_function, metrics=["accuracy"])
    order = np.random.default_rng(0)
    for _ in range(STEPS):
        images, labels = splits.train.take(order.choice(len(splits.train), 50, replace=False))
        model.train_on_batch(images, labels)
    test = split_of(splits, "test")
    return Evaluation(model.evaluate(test.x, test.y, verbose=0, return_dict=True), len(test))


@pytest.mark.thorough
def test_fast_moving_averages_of_four_workers_equal_those_of_plain_keras(async_loop: MakeLoop) -> None:
    """Adding up the workers' changes would be wrong: several of them may start from the same old average."""
    config = run_config("fast_norm")
    loop = async_loop(config, num_workers=4)
    reference = keras.models.clone_model(loop.model)
    reference.set_weights([variable.numpy() for variable in loop.model.variables])
    expected = plain_keras(config, reference)
    loop.train(STEPS)
    assert_exact(loop, STEPS)
    assert loop.facts()["staleness"]["mean"] > 0, "no worker pushed between another's pull and push"
    plain = {variable.name: variable.numpy() for variable in reference.non_trainable_variables}
    assert state(loop)["moving_variance"].min() >= 0
    for name in ("moving_mean", "moving_variance"):  # each is hardly more than that of the last batch: 50 examples
        assert state(loop)[name].mean() == pytest.approx(plain[name].mean(), rel=0.4)
    found = loop.evaluate("test")
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=0.5)
    assert found.metrics["accuracy"] == pytest.approx(expected.metrics["accuracy"], abs=0.08)


def test_sums_are_exact_and_assigned_values_are_kept(async_loop: MakeLoop) -> None:
    loop = async_loop(run_config("notes", steps_per_execution=5), num_workers=4)
    loop.train(100)
    assert_exact(loop, 100)
    found = state(loop)
    assert found["calls"] == 100
    assert found["examples"] == loop.progress.examples, "layers have seen padding"
    assert found["left"] == -200
    means = data.load(run_config().data).train.x.mean(axis=(1, 2, 3)) / 255
    assert means.min() < found["last"] < means.max()
    assert found["largest"] == 1
    assert found["fixed"] == 1
