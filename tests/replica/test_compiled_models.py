"""Losses and metrics of compiled models: those that work with several workers, and those that are refused."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import run_config, source_and_splits
from tf2dist import data
from tf2dist.data.loading import load_digits
from tf2dist.errors import ConfigError
from tf2dist.model import model_checks, support
from tf2dist.model.batch_dependence import mixes_examples
from tf2dist.model.builtin import two_tower
from tf2dist.model.compiled_step import CompiledStep
from tf2dist.model.evaluation import chunk_size, chunks
from tf2dist.model.source import EpochPlan, MakeOptimizer, build_step, plain_model
from tf2dist.model.step import Step, StepOutput

layers = keras.layers
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy
SQUARED_ERROR = keras.losses.MeanSquaredError
IS_SUM = "its loss is a sum over the batch"
NOTED = "note"  # accepted, and the user is told that the loss is not the mean over the examples


def dense(outputs: int = 10) -> keras.Model:
    return keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), layers.Dense(outputs)])


def built(make: Callable[[], keras.Model]) -> tuple[Step, MakeOptimizer]:
    """The step of a model for the digits; each of its outputs is trained to predict the class."""
    digits = load_digits(run_config().data)
    has_two_outputs = len(make().outputs) == 2
    splits = data.Splits(data.Arrays(digits.train.x, [digits.train.y] * 2) if has_two_outputs else digits.train)
    return build_step(InMemorySource(make, splits), splits, run_config(), contextlib.nullcontext())


def compiled(model: keras.Model, *arguments: Any, **more: Any) -> keras.Model:
    model.compile("sgd", *arguments, **more)
    return model


class OwnLoss(keras.Model):  # type: ignore[misc]
    def compute_loss(self, *_: Any, **__: Any) -> Any:
        return keras.ops.sum(self.trainable_variables[0])


class Repeated(keras.layers.Layer):  # type: ignore[misc]
    """Returns its input twice, with a mask for the second copy."""

    def call(self, inputs: Any) -> Any:
        return keras.ops.stack([inputs, inputs], 1)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return keras.ops.stack([keras.ops.ones_like(inputs[:, 0], bool), keras.ops.zeros_like(inputs[:, 0], bool)], 1)


def two_losses(*losses: Any) -> keras.Model:
    images = keras.Input((28, 28, 1))
    model = keras.Model(images, [layers.Dense(10)(layers.Flatten()(images)) for _ in losses])
    return compiled(model, list(losses))


def mean_of_all(y: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_pred))


def regularized(reduction: str) -> keras.Model:
    model = dense()
    model.add(layers.Dense(10, kernel_regularizer="l2"))
    return compiled(model, CROSSENTROPY(reduction=reduction))


def own_loss() -> keras.Model:
    images = keras.Input((28, 28, 1))
    return compiled(OwnLoss(images, dense()(images)))


def masked() -> keras.Model:
    model = keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), layers.Dense(1), Repeated()])
    return compiled(model, SQUARED_ERROR())


def weighted_places() -> keras.Model:
    model = keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), layers.Dense(2), layers.Reshape((2, 1))])
    return compiled(model, SQUARED_ERROR(reduction="mean_with_sample_weight"))


def masked_one_number() -> keras.Model:
    model = keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), layers.Dense(1), Repeated()])
    return compiled(model, mean_of_all)


def masked_beside_another() -> keras.Model:
    return two_losses(CROSSENTROPY(ignore_class=3), CROSSENTROPY())


def masked_beside_an_added_loss() -> keras.Model:
    model = dense()
    model.add(layers.ActivityRegularization(0.1))
    return compiled(model, CROSSENTROPY(ignore_class=3))


PARTS = "divided by the parts of the outputs that a mask or weights leave"
# What the refusal says (empty if the loss is accepted), the model, and whether a single replica is refused, too.
LOSSES: dict[str, tuple[str, Callable[[], keras.Model], bool]] = {
    "no reduction": ("gives no single number", lambda: compiled(dense(), CROSSENTROPY(reduction=None)), True),
    "a sum beside a mean": (
        "reduction=sum beside others",
        lambda: two_losses(CROSSENTROPY(reduction="sum"), CROSSENTROPY()),
        False,
    ),
    "two sums": ("reduction=sum beside others", lambda: two_losses(*[CROSSENTROPY(reduction="sum")] * 2), False),
    "a sum beside a regularizer": ("reduction=sum beside others", lambda: regularized("sum"), False),
    "a mask beside another loss": (PARTS, masked_beside_another, False),
    "a mask beside a loss of a layer": (PARTS, masked_beside_an_added_loss, False),
    "a mean over weights": ("", lambda: compiled(dense(), CROSSENTROPY(reduction="mean_with_sample_weight")), False),
    "a mask": ("", masked, False),
    "a number for a batch beside a mask": ("", masked_one_number, False),
    "a class that is ignored": ("", lambda: compiled(dense(), CROSSENTROPY(ignore_class=3)), False),
    "a number for a batch": ("", lambda: compiled(dense(), mean_of_all), False),
    "a custom compute_loss": ("", own_loss, False),
    "a sum alone": ("", lambda: compiled(dense(), CROSSENTROPY(reduction="sum")), False),
    "a mean": ("", lambda: compiled(dense(), CROSSENTROPY(reduction="mean")), False),
    "two means": ("", lambda: two_losses(CROSSENTROPY(), SQUARED_ERROR()), False),
    "a mean beside a regularizer": ("", lambda: regularized("sum_over_batch_size"), False),
    "a number for each example": (
        "",
        lambda: compiled(dense(), lambda y, y_pred: keras.ops.mean(y_pred, -1)),
        False,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_several_workers_cannot_share_are_refused(name: str) -> None:
    says, make, is_refused_for_one = LOSSES[name]
    refusal = pytest.raises(ConfigError, match=rf"^model \(given\): .*{says}.*; .*[a-z']$")
    if is_refused_for_one:
        with refusal:
            built(make)
        return
    step, _ = built(make)
    with refusal if says else contextlib.nullcontext():
        support.check_step(support.SEVERAL, "given", step)


WEIGHTED = {
    "a mask": masked,
    "a class that is ignored": lambda: compiled(dense(), CROSSENTROPY(from_logits=True, ignore_class=3)),
    "a mean over weights": lambda: compiled(
        dense(), CROSSENTROPY(from_logits=True, ignore_class=3, reduction="mean_with_sample_weight")
    ),
    "a weight for both places": weighted_places,
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_parts_of_a_batch_give_together_what_all_of_it_gives(name: str) -> None:
    """The parts are divided by the sum of their weights, which stand for what each loss is divided by."""
    digits = load_digits(run_config().data).train
    weights = np.random.default_rng(0).uniform(0.1, 3.0, len(digits)).astype("float32")
    has_places = name in ("a mask", "a weight for both places")
    labels = np.repeat(digits.y[:, None, None], 2, axis=1).astype("float32") if has_places else digits.y
    train = data.Arrays(digits.x, labels, None if name == "a mask" else weights[:, None] if has_places else weights)
    splits = data.Splits(train)
    step, _ = build_step(InMemorySource(WEIGHTED[name], splits), splits, run_config(), contextlib.nullcontext())
    assert step.weighs_losses
    place = tf.constant([0, 0], tf.int64)

    def of_part(first: int, last: int, share: float | None) -> StepOutput:
        leaves = [tf.constant(leaf) for leaf in train[first:last].leaves]
        return step(*step.values(), leaves, place, None if share is None else tf.constant(share))

    whole = of_part(0, 50, None)
    parts = [of_part(0, 20, 0.4), of_part(20, 50, 0.6)]
    total = sum(float(part.weight) for part in parts)
    if name != "a mask":  # which leaves half of each example
        assert total != pytest.approx(float(parts[0].weight) / 0.4), "a share of the examples would not do"
    assert sum(float(part.sums[0]) for part in parts) / total == pytest.approx(float(whole.sums[0]), rel=1e-5)
    for expected, one, other in zip(whole.gradients, *(part.gradients for part in parts), strict=True):
        np.testing.assert_allclose((one + other) / total, expected, rtol=1e-4, atol=1e-6)


def test_a_number_for_a_batch_is_weighted_by_its_examples_beside_a_mask() -> None:
    step, _ = built(masked_one_number)
    leaves = [tf.constant(leaf) for leaf in load_digits(run_config().data).train[:20].leaves]
    output = step(*step.values(), leaves, tf.constant([0, 0], tf.int64), tf.constant(0.25))
    assert float(output.weight) == 0.25


def squared_sum(y: Any, y_pred: Any) -> Any:
    return keras.ops.sum(keras.ops.square(y_pred))


class SumsInTraining(keras.Model):  # type: ignore[misc]
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
        return (squared_sum if training else mean_of_all)(y, y_pred)


def sums_in_training() -> keras.Model:
    images = keras.Input((28, 28, 1))
    return compiled(SumsInTraining(images, dense()(images)), mean_of_all)


def of_each_example(y: Any, y_pred: Any) -> Any:
    return keras.ops.sum(keras.ops.square(y_pred), -1)


def others_as_negatives(y: Any, y_pred: Any) -> Any:
    """A number for each example, which depends on the others."""
    labels, logits = keras.ops.arange(keras.ops.shape(y_pred)[0]), y_pred @ keras.ops.transpose(y_pred)
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


SCALARS = {
    "a mean": ("", lambda: compiled(dense(), mean_of_all)),
    "an own sum in training alone": (IS_SUM, sums_in_training),
    "a sum": (IS_SUM, lambda: compiled(dense(), squared_sum)),
    "negatives in the batch": (NOTED, lambda: compiled(dense(), others_as_negatives)),
    "an own mean": ("", lambda: compiled(dense(), of_each_example)),
    "dice": (NOTED, lambda: compiled(dense(1), keras.losses.Dice(axis=None))),
}


@pytest.mark.parametrize("name", SCALARS)
def test_losses_that_may_depend_on_the_whole_batch(name: str) -> None:
    says, make = SCALARS[name]
    step, _ = built(make)
    splits = data.Splits(load_digits(run_config().data).train)
    refusal = pytest.raises(ConfigError, match=rf"^model \(given\): .*{says}.*; .*mode=async$")
    with refusal if says == IS_SUM else contextlib.nullcontext():
        assert ("not the mean over its examples" in model_checks.check_batches("given", step, splits)) == (
            says == NOTED
        )


@pytest.mark.parametrize("make", [masked, lambda: compiled(dense(), CROSSENTROPY(ignore_class=3))])
def test_masked_losses_are_refused_where_the_shares_of_workers_are_fixed(make: Callable[[], keras.Model]) -> None:
    step, _ = built(make)
    with pytest.raises(ConfigError, match=rf"^model \(given\): .*{PARTS}.* with mode=sync_replicas .*; use mode=sync"):
        support.check_step(support.SEVERAL_REPLICAS, "given", step)


def all_metrics() -> list[keras.metrics.Metric]:
    """The metrics of Keras for three classes, each with the arguments that it needs."""
    metrics = keras.metrics
    found = [metrics.AUC(), metrics.Precision(), metrics.Recall(), metrics.F1Score(), metrics.FBetaScore("macro")]
    found += [metrics.SensitivityAtSpecificity(0.5), metrics.PrecisionAtRecall(0.5), metrics.TruePositives()]
    found += [metrics.CategoricalAccuracy(), metrics.TopKCategoricalAccuracy(2), metrics.OneHotMeanIoU(3)]
    found += [metrics.CategoricalCrossentropy(), metrics.KLDivergence(), metrics.CategoricalHinge(), metrics.Poisson()]
    found += [metrics.MeanSquaredError(), metrics.RootMeanSquaredError(), metrics.R2Score(), metrics.LogCoshError()]
    found += [metrics.CosineSimilarity(), metrics.PearsonCorrelation(), metrics.ConcordanceCorrelation()]
    return found


@pytest.mark.slow
def test_sums_of_metrics_equal_what_keras_computes_over_all_examples() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(100, 4)).astype("float32"), np.eye(3, dtype="float32")[draw.integers(0, 3, 100)]
    examples = data.Arrays(x, y, draw.uniform(0.5, 2.0, 100).astype("float32"))
    model = keras.Sequential([keras.Input([4]), layers.Dense(3, "softmax")])
    compiled(model, "categorical_crossentropy", metrics=all_metrics(), weighted_metrics=all_metrics())
    step = CompiledStep(model, examples.layout)
    support.check_step(support.ALL, "given", step)
    evaluate, sums = step.evaluate_function(), np.zeros(1 + step.metrics.size)
    for part in (examples[:7], examples[7:64], examples[64:]):
        sums += evaluate(*step.values(), part.leaves).numpy()
    assert sums[0] == 100
    found = step.metrics.results(sums[1:])
    expected = model.evaluate(x, y, 100, sample_weight=examples.sample_weight, verbose=0, return_dict=True)
    assert len(found) == 2 * len(all_metrics()) + 1
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize(
    "make",
    [
        own_loss,
        lambda: compiled(dense(), others_as_negatives),
        lambda: compiled(dense(), keras.losses.Circle()),
        lambda: compiled(dense(), CROSSENTROPY(), metrics=[others_as_negatives]),
    ],
)
def test_an_own_loss_is_evaluated_in_the_batches_of_keras(make: Callable[[], keras.Model]) -> None:
    """It need not be a mean over the examples."""
    step, _ = built(make)
    assert chunk_size(32, step, digits(), EpochPlan()) == 32
    assert chunk_size(32, built(lambda: compiled(dense(), CROSSENTROPY()))[0], digits(), EpochPlan()) > 32


def digits() -> data.Splits:
    train = load_digits(run_config().data).train
    return data.Splits(train, train[:100])


class Layer(keras.layers.Layer):  # type: ignore[misc]
    """One of the user's own, which computes with the mean over an axis of the images."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, self.axis, keepdims=True)


def with_operation(axis: int) -> keras.Model:
    images = keras.Input((28, 28, 1))
    outputs = dense()(images - keras.ops.mean(images, axis, keepdims=True))
    return compiled(keras.Model(images, outputs), CROSSENTROPY(from_logits=True))


def with_own_layer(axis: int) -> keras.Model:
    inside = [Layer(axis), layers.Flatten(), layers.Dense(10)]
    return compiled(keras.Sequential([keras.Input((28, 28, 1)), *inside]), CROSSENTROPY(from_logits=True))


def softmax_over(axis: int, x: Any) -> Any:
    return keras.ops.softmax(x, axis)


class Gated(Layer):
    """Its effect begins with none."""

    def build(self, shape: Any) -> None:
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x: Any) -> Any:
        return x + self.gate * super().call(x)


def with_layer(make: Callable[[int], keras.Layer], axis: int) -> keras.Model:
    inside = [layers.Flatten(), layers.Dense(10), make(axis), layers.Dense(10)]
    return compiled(keras.Sequential([keras.Input((28, 28, 1)), *inside]), CROSSENTROPY(from_logits=True))


def with_layer_of_keras(make: Callable[[int], keras.Layer]) -> Callable[[int], keras.Model]:
    return functools.partial(with_layer, make)


@pytest.mark.parametrize(
    "make",
    [
        with_operation,
        with_own_layer,
        with_layer_of_keras(layers.Softmax),
        with_layer_of_keras(lambda axis: layers.Softmax(axis - 2)),
        with_layer_of_keras(lambda axis: layers.LayerNormalization(axis, center=False, scale=False)),
        with_layer_of_keras(layers.UnitNormalization),
        with_layer_of_keras(lambda axis: layers.Softmax(axis or None)),
        with_layer_of_keras(Gated),
        with_layer_of_keras(lambda axis: layers.Dense(10, functools.partial(softmax_over, axis))),
    ],
)
def test_a_model_that_mixes_examples_is_evaluated_in_the_batches_of_keras(make: Callable[[int], keras.Model]) -> None:
    sizes = [chunk_size(32, built(functools.partial(make, axis))[0], digits(), EpochPlan()) for axis in (0, 1)]
    assert sizes[0] == 32 < sizes[1]


class OwnAttributes(keras.Model):  # type: ignore[misc]
    """Has other things under two names of attributes of Keras's functional models."""

    def __init__(self, axis: int, inputs: Any, operations: Any) -> None:
        super().__init__()
        self.inputs, self.operations = inputs, operations
        self.inside = [layers.Rescaling(1.0), Layer(axis), layers.Flatten(), layers.Dense(10)]

    def call(self, x: Any) -> Any:
        for layer in self.inside:
            x = layer(x)
        return x


@pytest.mark.parametrize(("inputs", "operations"), [(["age", "income"], None), (Layer(1), ["sum"])])
def test_a_model_may_have_attributes_of_its_own(inputs: Any, operations: Any) -> None:
    def size(axis: int, plan: EpochPlan | None) -> int:
        source = InMemorySource(lambda: compiled(OwnAttributes(axis, inputs, operations), CROSSENTROPY()), digits())
        step, _ = build_step(source, digits(), run_config(), contextlib.nullcontext())
        return chunk_size(32, step, digits(), plan)

    assert size(0, EpochPlan()) == 32 < size(1, EpochPlan())
    assert size(0, None) > 32


@pytest.mark.parametrize("axis", [0, 1])
def test_the_trial_of_a_model_with_a_table_looks_its_rows_up(axis: int) -> None:
    tokens = keras.Input((5,), dtype="int32")
    outputs = layers.Dense(1)(Layer(axis)(layers.Reshape([80])(layers.Embedding(200_000, 16)(tokens))))
    examples = data.Arrays(np.arange(200).reshape(40, 5) % 50, np.ones(40, np.float32))
    step = CompiledStep(compiled(keras.Model(tokens, outputs), "mse"), examples.layout)
    step.lookups.choose(step.lookups.find(step.trainable))
    assert len(step.tables) == 1
    assert mixes_examples(step, data.Splits(examples)) == (axis == 0)


def of_eight() -> keras.Model:
    images = keras.Input((28, 28, 1), batch_size=8)
    return compiled(keras.Model(images, layers.Dense(10)(keras.ops.reshape(images, (8, 784)))), CROSSENTROPY())


@pytest.mark.parametrize("plan", [EpochPlan(), None])
def test_a_model_with_a_fixed_batch_size_is_evaluated_in_its_batches(plan: EpochPlan | None) -> None:
    step, _ = built(of_eight)
    evaluate, examples = step.evaluate_function(), load_digits(run_config().data).train[:16]
    ranges = chunks(16, chunk_size(8, step, digits(), plan))
    sums = sum(evaluate(*step.values(), examples[first:last].leaves) for first, last in ranges)
    expected = step.model.evaluate(examples.x, examples.y, 8, verbose=0, return_dict=True)
    assert step.metrics.results(sums.numpy()[1:]) == pytest.approx(expected, rel=1e-4)


def test_a_compiled_model_keeps_its_loss_metrics_and_optimizer() -> None:
    def with_adam() -> keras.Model:
        model = dense(12)
        model.compile(keras.optimizers.Adam(0.5), "mse", metrics=["mae"])
        return model

    step, make_optimizer = built(with_adam)
    optimizer = make_optimizer(10)
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert float(optimizer.learning_rate) == 0.5
    assert make_optimizer(10) is not optimizer, "each ps needs its own optimizer"
    assert step.metrics.results(np.zeros(step.metrics.size)).keys() == {"loss", "mae"}


def test_a_model_that_is_compiled_without_an_optimizer_takes_that_of_the_options() -> None:
    def with_none() -> keras.Model:
        model = dense(12)
        model.compile(None, "mse", metrics=["mae"])
        return model

    step, make_optimizer = built(with_none)
    assert type(make_optimizer(10)) is keras.optimizers.SGD
    assert step.metrics.results(np.zeros(step.metrics.size)).keys() == {"loss", "mae"}
    splits = data.Splits(load_digits(run_config().data).train)
    finished = plain_model(InMemorySource(with_none, splits), splits, 0, lambda: keras.optimizers.Adagrad(0.5))
    assert isinstance(finished.optimizer, keras.optimizers.Adagrad)
    assert finished.get_compile_config()["optimizer"]["config"]["learning_rate"] == 0.5
    assert finished.evaluate(splits.train.x[:9], splits.train.y[:9, None], verbose=0, return_dict=True).keys() == {
        *("loss", "mae")
    }


def test_a_click_is_the_product_of_the_two_towers() -> None:
    model = two_tower({"user": (), "item": (), "context": (3,)}, None, 5, 7, columns=4)
    x = {"user": np.array([1, 4]), "item": np.array([0, 6]), "context": np.ones([2, 3], np.float32)}
    user, item = keras.Model(model.inputs, [model.get_layer(f"{name}_tower").output for name in ("user", "item")])(x)
    assert user.shape == (2, 4)
    products = np.sum(user * item, axis=1, keepdims=True)
    np.testing.assert_allclose(model(x), 1 / (1 + np.exp(-products)), rtol=1e-5)


def test_a_model_that_is_not_compiled_needs_class_labels() -> None:
    source, splits = source_and_splits(run_config("softmax"))
    towers, _ = source_and_splits(run_config("two_tower", num_users=5, num_items=5))
    splits = replace(splits, num_classes=None)
    for each, says in (
        (
            InMemorySource(dense, splits),
            r"model \(given\): is not compiled, and the data has no classes; compile it with its loss",
        ),
        (
            towers,
            r"model \(two_tower\): takes user, item and context, and the data is .*; register a model that fits",
        ),
        (source, r"model \(softmax\): classifies images, and the data is .*uint8 \[n, 28, 28, 1\].*; register a model"),
    ):
        with pytest.raises(ConfigError, match=says):
            build_step(each, splits, run_config(), contextlib.nullcontext())
