"""What a step cannot give its values to is refused before training; test_public_reports.py trains what it can."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import run_config
from tests.replica.traced_models import MODELS, TracedStep, X, Y, compiled, linear
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError
from tf2dist.model.scopes import CallScope
from tf2dist.model.source import build_step
from tf2dist.model.step import Step


def step_of(make: Callable[[], keras.Model]) -> Step:
    splits = Splits(Arrays(X, Y), num_classes=None)
    return build_step(InMemorySource(make, splits), splits, run_config(), contextlib.nullcontext())[0]


class Kept(TracedStep):
    """Keeps a function that was traced when the model was made."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.first.build(shape)
        self.kept = tf.function(self.first).get_concrete_function(tf.TensorSpec([None, 4]))

    def call(self, x: Any) -> Any:
        return self.second(self.kept(x))


def concrete(layer: Any) -> Any:
    return tf.function(layer.product).get_concrete_function(tf.TensorSpec([None, 4]))


def of_tensorflow(layer: Any) -> Any:
    w = layer.w.value
    return lambda x: x @ w


# By a part of the message: what makes the model.
REFUSED: dict[str, Callable[[], keras.Model]] = {
    r"its call reads \S+/w as a variable of TensorFlow, as a function does that was traced": linear(concrete),
    r"its call reads \S+/w as a variable of TensorFlow": linear(of_tensorflow),
    r"its train_step gives \S+/kernel no gradient here, and does so in keras.Model.fit": lambda: compiled(Kept()),
}


@pytest.mark.parametrize("says", REFUSED)
def test_variables_that_are_read_past_keras_are_refused(says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model \(given\): {says}.*; pass it as an argument"):
        step_of(REFUSED[says])


def gradients_of(step: Step) -> list[np.ndarray]:
    def call() -> list[tf.Tensor]:
        return step(*step.values(), [tf.constant(X), tf.constant(Y)], tf.zeros([2], tf.int64)).gradients

    return [gradient.numpy() for gradient in tf.function(call, autograph=False)()]


@pytest.mark.parametrize("name", ["recomputed function", "traced step"])
def test_a_variable_that_keras_alone_trains_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever hides it; here a custom gradient is not told of the values that it reads."""
    monkeypatch.setattr(CallScope, "recording_reads", lambda self: contextlib.nullcontext({}))
    with pytest.raises(ConfigError, match=r"^model.*: .*/(w|kernel|bias) .*no gradient here, and .* keras.Model.fit"):
        gradients_of(step_of(MODELS[name][0]))


def test_a_variable_that_nothing_trains_is_left_alone() -> None:
    step = step_of(linear(lambda layer: lambda x: x @ layer.w))
    assert [variable.name for variable in step.trainable] == ["w"]
    assert "b" in [variable.name for variable in step.state]
    (gradient,) = gradients_of(step)
    assert gradient.any()


def ordered(layer: Any) -> Any:
    """Its two other weights have names in another order than the layers that own them."""

    def function(x: Any) -> Any:
        def backward(upstream: Any, variables: Any) -> Any:
            return upstream, [tf.constant([2.0]), tf.constant([3.0])]

        return layer.aa(layer.zz(x)), backward

    return tf.custom_gradient(function)


class Weight(keras.layers.Layer):  # type: ignore[misc]
    def build(self, shape: Any) -> None:
        name = "alpha" if self.name == "zz" else "beta"
        self.factor = self.add_weight(shape=(1,), initializer="ones", name=name)

    def call(self, x: Any) -> Any:
        return x * self.factor


class Ordered(keras.Model):  # type: ignore[misc]
    def __init__(self, frozen: bool, is_early: bool) -> None:
        super().__init__()
        self.zz, self.aa, self.last = Weight(name="zz"), Weight(name="aa"), keras.layers.Dense(1)
        for layer in (self.zz, self.aa) if is_early else ():
            layer.build([1])
        self.zz.trainable = not frozen
        self.function = ordered(self)

    def call(self, x: Any) -> Any:
        return self.last(self.function(x))


def gradients_in_keras(model: keras.Model) -> list[np.ndarray]:
    @tf.function  # type: ignore[untyped-decorator]
    def call() -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(X, Y, model(X), training=True)
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    model(X)
    return [gradient.numpy() for gradient in call()]


@pytest.mark.parametrize(("frozen", "is_early"), [(False, True), (True, True), (False, False)])
def test_a_custom_gradient_is_given_the_variables_that_tensorflow_gives(frozen: bool, is_early: bool) -> None:
    """In the order of their names in TensorFlow, which lack the layers if a call makes them, and frozen ones, too."""
    number = 2 - frozen
    wanted = gradients_in_keras(compiled(Ordered(frozen, is_early)))[:number]
    found = gradients_of(step_of(lambda: compiled(Ordered(frozen, is_early))))[:number]
    assert [one.item() for one in found] == [one.item() for one in wanted]


class Doubled(keras.metrics.Mean):  # type: ignore[misc]
    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        super().update_state(keras.ops.abs(y - y_pred))

    @tf.function  # type: ignore[untyped-decorator]
    def result(self) -> Any:
        return 2 * super().result()


def test_a_traced_result_of_a_metric_follows_its_sums() -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    metrics = step_of(lambda: compiled(model, metrics=[Doubled(name="doubled")])).metrics
    sums = [np.tile([total, 1.0], metrics.size // 2) for total in (1.0, 3.0)]  # of each metric the total and the count
    assert [metrics.results(each)["doubled"] for each in sums] == [2.0, 6.0]
