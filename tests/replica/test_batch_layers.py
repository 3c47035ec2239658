"""Layers that look at the batch: of which N workers equal one with an N-fold batch, and which are refused."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import pytest

import tf2dist
from tests.replica.small_runs import run_config
from tests.replica.test_compiled_models import CROSSENTROPY, IS_SUM, NOTED, built, compiled
from tf2dist import data
from tf2dist.data.loading import load_digits
from tf2dist.errors import ConfigError
from tf2dist.model import model_checks, support
from tf2dist.model.batch_attention import recording

layers = keras.layers


class Looks(keras.layers.Layer):  # type: ignore[misc]
    """Calls a function of itself, its input and the number of examples; it has a weight of its own."""

    def __init__(self, function: Callable[..., Any], aggregation: str = "none", **more: Any) -> None:
        super().__init__(name="looks", **more)
        self.function, self.aggregation = function, aggregation
        self.generator, self.is_training = keras.random.SeedGenerator(1), False

    def build(self, shape: Any) -> None:
        more = {"initializer": "zeros", "trainable": False, "aggregation": self.aggregation}
        self.seen = self.add_weight(shape=(), name="seen", **more)

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.is_training = training
        x = keras.ops.cast(inputs, "float32") / 255
        self.function(self, x, keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return inputs


def in_batch_negatives(layer: Any, x: Any, count: Any) -> None:
    flat = keras.ops.reshape(x, (-1, 784))
    scores = keras.ops.matmul(flat, keras.ops.transpose(flat)) / 100
    right = keras.ops.arange(keras.ops.shape(x)[0])
    layer.add_loss(keras.ops.mean(CROSSENTROPY(from_logits=True, reduction=None)(right, scores)))


def negatives_of_all(layer: Any, x: Any, count: Any) -> None:
    in_batch_negatives(layer, tf2dist.gather(x), count)


def sampled(layer: Any, x: Any, count: Any) -> None:
    layer.add_loss(keras.ops.mean(keras.ops.square(x - keras.random.normal(keras.ops.shape(x), seed=layer.generator))))


def in_training_alone(layer: Any, x: Any, count: Any) -> None:
    if layer.is_training:
        layer.add_loss(keras.ops.sum(x))


def largest(layer: Any, values: Any) -> None:
    layer.seen.assign(keras.ops.maximum(layer.seen, values))


def averaged(layer: Any, values: Any) -> None:
    layer.seen.assign(0.9 * layer.seen + 0.1 * values)


def cumulative_mean(layer: Any, x: Any, count: Any) -> None:
    layer.seen.assign(layer.seen + (keras.ops.mean(x) - layer.seen) * count / (100 * layer.seen + count))


def late(layer: Any, x: Any, count: Any) -> None:
    layer.seen.assign(keras.ops.where(layer.seen > 5, keras.ops.max(x), layer.seen))


def at_most(layer: Any, x: Any, count: Any) -> None:
    decay = keras.ops.minimum(0.9, 0.1 + layer.seen)
    layer.seen.assign(decay * layer.seen + (1 - decay) * keras.ops.mean(x))


def dropped(layer: Any, x: Any) -> Any:
    return keras.random.dropout(x, 0.5, seed=layer.generator)


def of_each(x: Any) -> Any:
    return keras.ops.mean(x, (1, 2, 3))


ADDS_UP = r"every step adds to .*looks/seen a sum over its batch"
NO_MEAN = r"every step gives .*looks/seen a value that is not shown to be a mean over its batch"
HAS_SUM = r".*looks/seen has aggregation='sum', and with mode=sync_replicas the workers take the mean"
# By what a layer does: the refusal of several synchronous workers, and that of mode=sync_replicas, where they gather
# nothing; NOTED, or empty for none.
BATCHES: dict[str, tuple[Callable[[], keras.layers.Layer], str, str]] = {
    "a mean": (lambda: Looks(lambda self, x, n: self.add_loss(keras.ops.mean(x))), "", ""),
    "a sum": (lambda: Looks(lambda self, x, n: self.add_loss(keras.ops.sum(x))), IS_SUM, IS_SUM),
    "negatives": (lambda: Looks(in_batch_negatives), NOTED, NOTED),
    "negatives of all": (lambda: Looks(negatives_of_all), "", NOTED),
    "a largest": (
        lambda: Looks(lambda self, x, n: self.add_loss(keras.ops.max(keras.ops.mean(x, (1, 2))))),
        NOTED,
        NOTED,
    ),
    "a reconstruction of samples": (lambda: Looks(sampled), "", ""),
    "a sum in training alone": (lambda: Looks(in_training_alone), IS_SUM, IS_SUM),
    "a constant": (lambda: Looks(lambda self, x, n: self.add_loss(1.0 + 0 * self.seen)), "", ""),
    "regularizers": (lambda: layers.Conv2D(1, 2, kernel_regularizer="l2", activity_regularizer="l2"), "", ""),
    "steps": (lambda: Looks(lambda self, x, n: self.seen.assign_add(1)), "", ""),
    "examples": (lambda: Looks(lambda self, x, n: self.seen.assign_add(n)), ADDS_UP, ADDS_UP),
    "an average of sums": (
        lambda: Looks(lambda self, x, n: self.seen.assign(0.9 * self.seen + 0.1 * keras.ops.sum(x))),
        ADDS_UP,
        ADDS_UP,
    ),
    "an average of means": (
        lambda: Looks(lambda self, x, n: self.seen.assign(0.9 * self.seen + 0.1 * keras.ops.mean(x))),
        "",
        "",
    ),
    "a sum that is told": (lambda: Looks(lambda self, x, n: self.seen.assign_add(n), "sum"), "", HAS_SUM),
    "a mean that is told": (lambda: Looks(lambda self, x, n: self.seen.assign_add(n), "mean"), "", ""),
    "normalization": (lambda: layers.BatchNormalization(), "", ""),
    "a last mean": (lambda: Looks(lambda self, x, n: self.seen.assign(keras.ops.mean(x))), "", ""),
    "an average that warms up": (lambda: Looks(at_most), "", ""),
    "an average of variances": (
        lambda: Looks(lambda self, x, n: averaged(self, keras.ops.var(of_each(x)))),
        NOTED,
        NOTED,
    ),
    "an average that drops": (
        lambda: Looks(lambda self, x, n: averaged(self, keras.ops.mean(dropped(self, x)))),
        "",
        "",
    ),
    "steps up to a limit": (
        lambda: Looks(lambda self, x, n: self.seen.assign(keras.ops.minimum(self.seen + 1, 5))),
        "",
        "",
    ),
    "a largest value": (lambda: Looks(lambda self, x, n: largest(self, keras.ops.max(x))), NO_MEAN, NO_MEAN),
    "a largest mean": (lambda: Looks(lambda self, x, n: largest(self, keras.ops.mean(x))), NO_MEAN, NO_MEAN),
    "a last example": (lambda: Looks(lambda self, x, n: self.seen.assign(of_each(x)[-1])), NO_MEAN, NO_MEAN),
    "a cumulative mean": (lambda: Looks(cumulative_mean), NO_MEAN, NO_MEAN),
    "what does not show": (lambda: Looks(late), NO_MEAN, NO_MEAN),
    "a last random number": (
        lambda: Looks(lambda self, x, n: self.seen.assign(keras.random.normal((), seed=self.generator))),
        NO_MEAN,
        NO_MEAN,
    ),
    "a largest value of all": (
        lambda: Looks(lambda self, x, n: largest(self, keras.ops.max(tf2dist.gather(of_each(x))))),
        "",
        NO_MEAN,
    ),
    "a largest value beside what is gathered": (
        lambda: Looks(
            lambda self, x, n: largest(self, keras.ops.max(x) + 0 * keras.ops.max(tf2dist.gather(of_each(x))))
        ),
        NO_MEAN,
        NO_MEAN,
    ),
    "a largest value whose mean is told": (
        lambda: Looks(lambda self, x, n: largest(self, keras.ops.max(x)), "mean"),
        "",
        "",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_what_parts_of_a_batch_do_not_give_together_is_refused(name: str) -> None:
    make, *told = BATCHES[name]

    def model() -> keras.Model:
        middle = make()
        return compiled(keras.Sequential([keras.Input((28, 28, 1)), middle, layers.Flatten(), layers.Dense(10)]), "mse")

    step, _ = built(model)
    splits = data.Splits(load_digits(run_config().data).train)
    for says, is_told in zip(told, (False, True), strict=True):
        refusal = pytest.raises(ConfigError, match=rf"^model \(given\): .*{says}.*; .*[a-z']$")
        with refusal if says not in ("", NOTED) else contextlib.nullcontext():
            note = model_checks.check_batches("given", step, splits, gathers=not is_told)
            assert bool(note) == (says == NOTED)
            if is_told:
                support.check_step(support.SEVERAL_REPLICAS, "given", step)


def test_an_exchange_goes_on_after_another_one_within_it() -> None:
    with recording() as outer:
        with recording() as inner:
            tf2dist.gather([1.0])
        tf2dist.gather([2.0])
    assert len(inner) == len(outer) > 0
