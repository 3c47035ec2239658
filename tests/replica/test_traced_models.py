"""What a step cannot give its values to is refused before training; test_public_reports.py trains what it can."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import run_config
from tests.replica.traced_models import MODELS, TracedStep, X, Y, compiled, linear
from tf2dist.data.arrays import Arrays, Splits
from tf2dist.errors import ConfigError
from tf2dist.model.call_scope import CallScope
from tf2dist.model.source import build_step
from tf2dist.model.step import ModelStep


def step_of(make: Callable[[], keras.Model]) -> ModelStep:
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


@pytest.mark.parametrize("name", ["recomputed function", "traced step"])
def test_a_variable_that_keras_alone_trains_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever hides it; here a custom gradient is not told of the values that it reads."""
    monkeypatch.setattr(CallScope, "noting_reads", lambda self: contextlib.nullcontext({}))
    with pytest.raises(
        ConfigError, match=r"model \(given\): .*(w|kernel|bias).* no gradient here, and .* keras.Model.fit"
    ):
        step_of(MODELS[name][0])


def test_a_variable_that_nothing_trains_is_accepted() -> None:
    step = step_of(linear(lambda layer: lambda x: x @ layer.w))
    assert [variable.name for variable in step.trace.ungraded] == ["b"]
