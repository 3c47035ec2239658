"""The sums of all workers give the value of every metric of Keras; other metrics are refused by name."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import run_config
from tests.replica.test_compiled_models import built, dense, mean_of_all
from tests.replica.test_compiled_models import compiled as compiled_with
from tf2dist.data.arrays import Arrays
from tf2dist.data.loading import load_digits
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError
from tf2dist.model import model_checks
from tf2dist.model.evaluation import chunk_size
from tf2dist.model.source import EpochPlan, build_step
from tf2dist.model.step import Step, without_padding

N = 60
RNG = np.random.default_rng(3)
PROBABILITIES = RNG.uniform(0.05, 0.95, (N, 1)).astype("float32")
BINARY_LABELS = RNG.integers(0, 2, (N, 1)).astype("float32")
CLASS_PROBABILITIES = RNG.dirichlet(np.ones(4), N).astype("float32")
LABELS = RNG.integers(0, 4, N).astype("int64")
ONE_HOT = np.eye(4, dtype="float32")[LABELS]
VECTORS = RNG.normal(size=(N, 3)).astype("float32")
M = keras.metrics
# Predictions and targets.
BINARY = (PROBABILITIES, BINARY_LABELS)
CLASSES = (CLASS_PROBABILITIES, LABELS)
HOT = (CLASS_PROBABILITIES, ONE_HOT)
NUMBERS = (VECTORS, RNG.normal(size=(N, 3)).astype("float32"))
POSITIVE = (PROBABILITIES, RNG.uniform(0.1, 0.9, (N, 1)).astype("float32"))
CASES: dict[str, tuple[Callable[[], Any], tuple[np.ndarray, np.ndarray]]] = {
    "AUC": (M.AUC, BINARY),
    "Accuracy": (M.Accuracy, BINARY),
    "BinaryAccuracy": (M.BinaryAccuracy, BINARY),
    "BinaryCrossentropy": (M.BinaryCrossentropy, BINARY),
    "BinaryIoU": (lambda: M.BinaryIoU(target_class_ids=[0, 1], threshold=0.5), BINARY),
    "CategoricalAccuracy": (M.CategoricalAccuracy, HOT),
    "CategoricalCrossentropy": (M.CategoricalCrossentropy, HOT),
    "CategoricalHinge": (M.CategoricalHinge, HOT),
    "CosineSimilarity": (M.CosineSimilarity, NUMBERS),
    "F1Score": (M.F1Score, HOT),
    "FBetaScore": (lambda: M.FBetaScore(beta=2.0, average="macro"), HOT),
    "FalseNegatives": (M.FalseNegatives, BINARY),
    "FalsePositives": (M.FalsePositives, BINARY),
    "Hinge": (M.Hinge, BINARY),
    "KLDivergence": (M.KLDivergence, POSITIVE),
    "LogCoshError": (M.LogCoshError, NUMBERS),
    "MeanAbsoluteError": (M.MeanAbsoluteError, NUMBERS),
    "MeanAbsolutePercentageError": (M.MeanAbsolutePercentageError, POSITIVE),
    "MeanSquaredError": (M.MeanSquaredError, NUMBERS),
    "MeanSquaredLogarithmicError": (M.MeanSquaredLogarithmicError, POSITIVE),
    "OneHotIoU": (lambda: M.OneHotIoU(num_classes=4, target_class_ids=[0, 2]), HOT),
    "OneHotMeanIoU": (lambda: M.OneHotMeanIoU(num_classes=4), HOT),
    "MeanIoU": (lambda: M.MeanIoU(num_classes=4, sparse_y_pred=False), CLASSES),
    "Poisson": (M.Poisson, POSITIVE),
    "Precision": (M.Precision, BINARY),
    "PrecisionAtRecall": (lambda: M.PrecisionAtRecall(0.5), BINARY),
    "R2Score": (M.R2Score, NUMBERS),
    "Recall": (M.Recall, BINARY),
    "RecallAtPrecision": (lambda: M.RecallAtPrecision(0.5), BINARY),
    "RootMeanSquaredError": (M.RootMeanSquaredError, NUMBERS),
    "SensitivityAtSpecificity": (lambda: M.SensitivityAtSpecificity(0.5), BINARY),
    "SparseCategoricalAccuracy": (M.SparseCategoricalAccuracy, CLASSES),
    "SparseCategoricalCrossentropy": (M.SparseCategoricalCrossentropy, CLASSES),
    "SparseTopKCategoricalAccuracy": (lambda: M.SparseTopKCategoricalAccuracy(k=2), CLASSES),
    "SpecificityAtSensitivity": (lambda: M.SpecificityAtSensitivity(0.5), BINARY),
    "SquaredHinge": (M.SquaredHinge, BINARY),
    "TopKCategoricalAccuracy": (lambda: M.TopKCategoricalAccuracy(k=2), HOT),
    "TrueNegatives": (M.TrueNegatives, BINARY),
    "TruePositives": (M.TruePositives, BINARY),
    "PearsonCorrelation": (M.PearsonCorrelation, NUMBERS),
    "ConcordanceCorrelation": (M.ConcordanceCorrelation, NUMBERS),
}


class Scale(keras.layers.Layer):  # type: ignore[misc]
    """Returns its input unchanged; it has a weight because a model must have something to train."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor


def compiled(metrics: list[Callable[[], Any]], width: int) -> keras.Model:
    keras.utils.clear_session()  # Keras numbers the names of metrics; this starts at 0 again
    model = keras.Sequential([keras.Input((width,)), Scale()])
    model.compile("sgd", lambda y, outputs: keras.ops.mean(outputs, axis=-1), metrics=[make() for make in metrics])
    return model


DATA = {"binary": BINARY, "classes": CLASSES, "one-hot": HOT, "numbers": NUMBERS, "positive": POSITIVE}


def source_of(kind: str) -> InMemorySource:
    """A model that is compiled with all metrics for this kind of data, and the data."""
    outputs, targets = DATA[kind]
    metrics = [make for make, data in CASES.values() if data[0] is outputs and data[1] is targets]
    assert metrics
    return InMemorySource(
        lambda: compiled(metrics, outputs.shape[1]), Splits(Arrays(outputs, targets), num_classes=None)
    )


THOROUGH = ("one-hot", "numbers", "binary")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.thorough if kind in THOROUGH else ()) for kind in DATA]
)
def test_the_sums_of_three_workers_equal_keras(kind: str) -> None:
    assert_same_as_keras(source_of(kind))


def assert_same_as_keras(source: InMemorySource) -> None:
    """Asserts that the sums of three workers give the results of Keras, in its order."""
    step, _ = build_step(source, source.load(), run_config(), contextlib.nullcontext())
    train = source.load().train
    parts = [train[:10], train[10:45], train[45:]]
    result = np.sum([metric_sums(step, part) for part in parts], axis=0)
    results = step.metrics.results(result[1:])
    expected = source.make().evaluate(train.x, train.y, batch_size=7, verbose=0, return_dict=True)
    assert result[0] == N
    assert list(results) == list(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(results[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


class Counted(keras.metrics.Metric):  # type: ignore[misc]
    """Its result is its variable, as in the docstring of `keras.metrics.Metric`."""

    def __init__(self) -> None:
        super().__init__(name="counted")
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="count")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(keras.ops.size(y))

    def result(self) -> Any:
        return self.count


class Rates(Counted):
    """Its result is several numbers by name, some of them in a dict of their own."""

    def result(self) -> Any:
        return {"z_rate": self.count / 90, "nested": {"twice": self.count * 2}, "a_count": self.count}


def test_results_that_are_variables_or_dicts_are_those_of_keras() -> None:
    splits = Splits(Arrays(*BINARY), num_classes=None)
    assert_same_as_keras(InMemorySource(lambda: compiled([Counted, Rates, M.BinaryAccuracy], 1), splits))


def metric_sums(step: Step, part: Arrays) -> np.ndarray:
    sums: np.ndarray = step.evaluate(*step.values(), [tf.constant(leaf) for leaf in part.leaves]).numpy()
    return sums


@pytest.mark.parametrize(("share", "left"), [(0.0, [0.0, 0.0]), (0.5, [np.nan, 3.0]), (None, [np.nan, 3.0])])
def test_padding_counts_for_nothing_even_where_it_gives_no_number(share: float | None, left: list[float]) -> None:
    sums = without_padding(tf.constant([np.nan, 3.0]), None if share is None else tf.constant(share))
    np.testing.assert_array_equal(sums, left)


def test_every_metric_of_keras_is_tested() -> None:
    classes = {
        name
        for name, kind in vars(M).items()
        if isinstance(kind, type) and issubclass(kind, M.Metric) and name == kind.__name__
    }
    # Base classes, and metrics that take no targets; MeanIoU stands for its base class IoU.
    untested = {"Mean", "Sum", "Metric", "MeanMetricWrapper", "IoU"}
    assert classes - untested == set(CASES)


class Largest(keras.metrics.Metric):  # type: ignore[misc]
    """Its state is a maximum, which workers cannot add up."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(outputs)))

    def result(self) -> Any:
        return self.value


class SumFromOne(Largest):
    """Its state is a sum, but does not begin at zero."""

    def reset_state(self) -> None:
        self.value.assign(1.0)

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.value.assign_add(keras.ops.sum(outputs))


class SumOfAllEpochs(SumFromOne):
    """Its state is a sum, and begins at zero in the first epoch alone."""

    def reset_state(self) -> None:
        pass


@pytest.mark.parametrize("metric", [Largest, SumFromOne, SumOfAllEpochs])
def test_a_metric_whose_state_is_not_a_sum_is_refused_by_name(metric: Any) -> None:
    source = InMemorySource(lambda: compiled([metric], 1), Splits(Arrays(*BINARY), num_classes=None))
    words = (
        r"^model \(given\): the metric variable largest\S* is no sum over the examples of one epoch, so several workers"
    )
    with pytest.raises(ConfigError, match=words):
        build_step(source, source.load(), run_config(), contextlib.nullcontext())


# Metrics that are one number for a batch.


def largest_output(y: Any, y_pred: Any) -> Any:
    return keras.ops.max(keras.ops.abs(y_pred))


def less_the_mean(y: Any, y_pred: Any) -> Any:
    """A number for each example, which depends on the others."""
    return keras.ops.mean(keras.ops.square(y_pred - keras.ops.mean(y_pred, 0)), -1)


class Tracking(keras.Model):  # type: ignore[misc]
    """The example in Keras's `Model.compute_loss`: its metrics are the tracker alone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
        loss = keras.ops.mean(keras.ops.square(y_pred - keras.ops.cast(y, y_pred.dtype)))
        self.loss_tracker.update_state(loss)
        return loss

    def reset_metrics(self) -> None:
        self.loss_tracker.reset_state()

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


def tracking() -> keras.Model:
    images = keras.Input((28, 28, 1))
    return compiled_with(Tracking(images, dense(1)(images)), "mse")


@pytest.mark.parametrize("make", [lambda: compiled_with(dense(1), "mse", metrics=["mae", largest_output]), tracking])
def test_a_metric_that_is_one_number_for_a_batch_is_evaluated_in_the_batches_of_keras(
    make: Callable[[], keras.Model],
) -> None:
    step, _ = built(make)
    size = chunk_size(32, step, Splits(load_digits(run_config().data).train), EpochPlan())
    examples = load_digits(run_config().data).train[:100]
    parts = [examples[first : first + size] for first in range(0, 100, size)]
    sums = np.sum([step.evaluate(*step.values(), [tf.constant(leaf) for leaf in part.leaves]) for part in parts], 0)
    expected = step.model.evaluate(examples.x, examples.y, 32, verbose=0, return_dict=True)
    assert step.metrics.results(sums[1:]) == pytest.approx(expected, rel=1e-4)


def test_a_metric_that_is_one_number_for_a_batch_is_noted_where_workers_have_parts() -> None:
    splits = Splits(load_digits(run_config().data).train)
    for metrics, noted in (
        ([largest_output, "mae"], "largest_output: the number"),
        ([less_the_mean, "mae"], "less_the_mean: the number"),
        ([mean_of_all, "mae"], ""),
    ):
        step, _ = built(functools.partial(compiled_with, dense(1), "mse", metrics=metrics))
        assert step.depends_on_batches
        note = model_checks.check_batches("given", step, splits)
        assert note.startswith(noted)
        assert bool(note) == bool(noted)
