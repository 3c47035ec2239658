"""Models with steps of their own: what is refused, what is noted, what their steps return.

test_like_keras.py compares their training with that of Keras.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.replica import own_steps  # also registers models
from tests.replica.in_memory_source import InMemorySource, RecordingHooks, weights_of
from tests.replica.small_runs import run_config, source_and_splits
from tests.replica.test_epochs import BATCH, EPOCHS, assert_same, config_of, drive, keras_fit
from tf2dist.cluster.spec import Task
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError
from tf2dist.launch.console import result_lines
from tf2dist.messages import ToLauncher
from tf2dist.model import model_checks, support
from tf2dist.model.own_step import OwnStep
from tf2dist.model.source import EpochPlan, build_step
from tf2dist.tools.finished import predicting
from tf2dist.training.report import Reporter
from tf2dist.training.synchronous.sync_step import PhasedStep

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = X[:, :1] * 2


class Linear(keras.Model):  # type: ignore[misc]
    """A model that trains as Keras does, in its own words."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.tracker, self.count = keras.layers.Dense(1), keras.metrics.Mean(name="error"), 0
        self.second, self.averaged = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1, use_ema=True)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def error(self, data: Any) -> Any:
        return keras.ops.mean((data[1] - self(data[0])) ** 2)

    def gradients(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            error = self.error(data)
        return tape.gradient(error, self.trainable_variables)

    def update(self, data: Any, by: Any = None) -> None:
        gradients = self.gradients(data)
        (by or self.optimizer).apply_gradients(zip(gradients, self.trainable_variables, strict=True))

    def train_step(self, data: Any) -> Any:
        self.update(data)
        self.tracker.update_state(self.error(data))
        return {"error": self.tracker.result()}

    def test_step(self, data: Any) -> Any:
        self.tracker.update_state(self.error(data))
        return {"error": self.tracker.result()}


def linear(**methods: Any) -> Linear:
    """A compiled model; `methods` replace its own."""
    model: Linear = type("Linear", (Linear,), methods)()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def step_of(make: Callable[[], keras.Model], with_test: bool = True) -> Any:
    splits = Splits(Arrays(X, Y), Arrays(X[:20], Y[:20]) if with_test else None, num_classes=None)
    return build_step(InMemorySource(make, splits), splits, run_config(), contextlib.nullcontext())[0]


def in_a_branch(self: Linear, data: Any) -> Any:
    tf.cond(tf.reduce_sum(data[0]) > 0, lambda: self.update(data), lambda: None)
    return {}


def counting(self: Linear, data: Any) -> Any:
    self.count += 1
    return Linear.train_step(self, data)


def reading(self: Linear, data: Any) -> Any:
    return Linear.train_step(self, data) | {"step": self.optimizer.iterations}


def told(train_step: Callable[[Linear, Any], Any], logs: Any) -> Callable[[Linear, Any], Any]:
    """The step, with something else that it returns."""

    def changed(self: Linear, data: Any) -> Any:
        train_step(self, data)
        return logs

    return changed


def untestable(self: Linear, data: Any) -> Any:
    raise KeyError("no test")


def not_compiled() -> Linear:
    return Linear()


def eager() -> Linear:
    model = linear()
    model.run_eagerly = True
    return model


def by_two(self: Linear, data: Any) -> Any:
    self.update(data)
    self.update(data, self.second)
    return {}


def averaging(self: Linear, data: Any) -> Any:
    self.update(data, self.averaged)
    return {}


def of_nothing(self: Linear, data: Any) -> Any:
    self.optimizer.apply([None, None], self.trainable_variables)
    return {}


def scaled() -> Linear:
    model = linear()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    return model


# By a part of the message: what makes the model.
REFUSED: dict[str, Callable[[], keras.Model]] = {
    "is not compiled; call its compile": not_compiled,
    "has a method make_train_function of its own, .* train_step": lambda: linear(make_train_function=untestable),
    "has a method fit of its own, .* in a train_step": lambda: linear(fit=untestable),
    "has a method evaluate of its own, .* in a test_step": lambda: linear(evaluate=untestable),
    "run_eagerly=True, but the tasks compile": eager,
    "its train_step applies no optimizer of the model": lambda: linear(train_step=Linear.test_step),
    "its train_step applies .* with use_ema, and keras.Model.fit finishes": lambda: linear(train_step=averaging),
    "its train_step trains .*kernel by two optimizers": lambda: linear(train_step=by_two),
    "its train_step applies sgd.* of which no loss gives a gradient": lambda: linear(train_step=of_nothing),
    "its train_step applies an optimizer within a tf.cond": lambda: linear(train_step=in_a_branch),
    "its train_step changes self.count in Python": lambda: linear(train_step=counting),
    "its train_step reads .*iteration of its optimizer": lambda: linear(train_step=reading),
    "its train_step returns None, and must return a dict": lambda: linear(train_step=told(Linear.train_step, None)),
    "its train_step returns all, which is no single number": lambda: linear(
        train_step=told(Linear.train_step, {"all": tf.ones([3])})
    ),
    "its test_step returns all, which is no single number": lambda: linear(
        test_step=lambda self, data: {"all": "a text"}
    ),
    "its train_step applies a LossScaleOptimizer.*auto_scale_loss=False": scaled,
    "its train_step fails .division by zero .*test_own_steps.py:": lambda: linear(train_step=lambda self, data: 1 / 0),
    "its test_step applies an optimizer": lambda: linear(test_step=Linear.train_step),
    "its test_step fails ..no test": lambda: linear(test_step=untestable),
    "its train_step applies the optimizer sgd.*, which the model has in none of its attributes": lambda: linear(
        train_step=lambda self, data: self.update(data, keras.optimizers.SGD(0.1)) or {}
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_step_that_cannot_run_here_is_refused(says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model \(given\): .*{says}") as raised:
        step_of(REFUSED[says])
    assert "\n" not in str(raised.value)


NO_NUMBERS: dict[str, Callable[[], Any]] = {
    "text": lambda: "fine",
    "tensor of text": lambda: tf.constant("fine"),
    "None": lambda: None,
    "complex": lambda: 1j,
    "nested lists": lambda: [[1.0], [2.0]],
    "ragged": lambda: tf.RaggedTensor.from_row_lengths([1.0, 2.0], [2, 0]),
    "sparse": lambda: tf.sparse.from_dense([0.0, 1.0]),
    "metric": keras.metrics.Mean,
    "dict": lambda: {"inner": "fine"},
}


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_what_a_step_returns_must_be_numbers(kind: str) -> None:
    logs = {"error": np.float32(1), "whole": 3, "is": True, "inner": NO_NUMBERS[kind]()}
    message = r"^model \(given\): its train_step returns inner, which is no single number; return its mean, or the .*$"
    with pytest.raises(ConfigError, match=message):
        step_of(lambda: linear(train_step=told(Linear.train_step, logs)))


def twice(self: Linear, data: Any) -> Any:
    self.update(data)
    self.update(data)
    return {"error": self.error(data)}


def after_update(self: Linear, data: Any) -> Any:
    self.update(data)
    return {"error": self.error(data)}


def test_where_updates_wait_for_the_end_of_a_step_a_step_that_needs_them_is_refused_or_noted() -> None:
    repeats, reads = step_of(lambda: linear(train_step=twice)), step_of(lambda: linear(train_step=after_update))
    with pytest.raises(ConfigError, match=r"model \(m\): its train_step applies an optimizer, or .*use mode=sync"):
        support.check_step(support.ASYNC, "m", repeats)
    assert "reads weights that it has updated: with mode=async" in model_checks.note_on_phases(reads)
    for step in (repeats, reads):
        with pytest.raises(ConfigError, match="goes on with what it has updated, and with mode=sync_replicas all"):
            support.check_step(support.SYNC_REPLICAS, "m", step)
        with pytest.raises(ConfigError, match="with algorithm=local_sgd all updates"):
            support.check_step(support.LOCAL_SGD, "m", step)


def clipping_weights(self: Linear, data: Any) -> Any:
    self.update(data)
    self.dense.kernel.assign(keras.ops.clip(self.dense.kernel, -1, 1))
    return {"error": self.error(data)}


def test_what_cannot_go_on_with_updates_is_refused() -> None:
    config, splits = run_config(), Splits(Arrays(X, Y), num_classes=None)
    clips = step_of(lambda: linear(train_step=clipping_weights))
    with pytest.raises(ConfigError, match=r"updates .*kernel by an optimizer and assigns it.*use a constraint"):
        PhasedStep.check("m", config, None, splits, clips, clips.optimizer)  # type: ignore[arg-type]
    config.devices.xla, reads = True, step_of(lambda: linear(train_step=after_update))
    with pytest.raises(ConfigError, match=r"goes on with what it has updated, which devices.xla=true cannot compile"):
        PhasedStep.check("m", config, None, splits, reads, reads.optimizer)  # type: ignore[arg-type]


def gathering(self: Linear, data: Any) -> Any:
    return Linear.train_step(self, [tf2dist.gather(part) for part in data])


def test_gathering_is_refused_with_xla_and_takes_numbers() -> None:
    step = step_of(lambda: linear(train_step=gathering))
    with pytest.raises(ConfigError, match=r"model \(m\): calls tf2dist.gather, which devices.xla=true cannot compile"):
        support.check_step(support.XLA_ON_SEVERAL, "m", step)
    with pytest.raises(TypeError, match="gather takes floats and integers, and not string"):
        tf2dist.gather(["a"])


def test_other_modes_refuse_what_they_cannot_do(async_loop: Callable[..., Any], replicas_loop: Any) -> None:
    source = InMemorySource(lambda: linear(train_step=twice), Splits(Arrays(X, Y), num_classes=None))
    with pytest.raises(ConfigError, match=r"model \(given\): .*more than once.*use mode=sync"):
        async_loop(run_config(), 1, 1, source=source)
    with pytest.raises(ConfigError, match=r"model \(given\): .*with mode=sync_replicas all updates"):
        replicas_loop(run_config(), 1, 1, source=source)


def test_a_method_of_the_object_alone_is_that_of_the_model() -> None:
    def plain(**methods: Any) -> keras.Model:
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for name, method in methods.items():
            setattr(model, name, types.MethodType(method, model))
        return model

    assert isinstance(step_of(lambda: plain(test_step=lambda self, data: {"error": tf.reduce_mean(data[0])})), OwnStep)
    trained = step_of(lambda: plain(train_step=told(lambda self, data: type(self).train_step(self, data), {})))
    assert list(trained.metrics.results(np.zeros(trained.metrics.size))) == []
    own_loss = step_of(lambda: plain(compute_loss=lambda self, x, y, y_pred, *_, **__: tf.reduce_mean(y_pred)))
    assert own_loss.has_own_loss


def test_without_data_to_evaluate_no_test_step_is_needed() -> None:
    step = step_of(lambda: linear(test_step=untestable), with_test=False)
    assert isinstance(step, OwnStep)


def clipped(self: Linear, data: Any) -> Any:
    gradients = [tf.clip_by_norm(gradient, 0.1) for gradient in self.gradients(data)]
    self.optimizer.apply(gradients, self.trainable_variables)
    return {}


def summed(self: Linear, data: Any) -> Any:
    gradients = [gradient * tf.cast(tf.shape(data[0])[0], tf.float32) for gradient in self.gradients(data)]
    self.optimizer.apply(gradients, self.trainable_variables)
    return {}


def test_several_synchronous_workers_refuse_sums_and_are_told_of_other_gradients() -> None:
    splits = Splits(Arrays(X, Y), num_classes=None)
    assert model_checks.check_batches("m", step_of(linear), splits) == ""
    note = model_checks.check_batches("m", step_of(lambda: linear(train_step=clipped)), splits)
    assert note.startswith("the gradient of a batch is not the mean over its examples: each step takes the mean of")
    with pytest.raises(ConfigError, match=r"model \(m\): the gradients of its train_step are a sum over the batch"):
        model_checks.check_batches("m", step_of(lambda: linear(train_step=summed)), splits)


class Largest(Linear):
    """Keeps the largest error of an example, of its own batch or of all."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False, name="largest")

    def train_step(self, data: Any) -> Any:
        error = self.of_examples((data[1] - self(data[0])) ** 2)
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(error)))
        return super().train_step(data)

    def of_examples(self, errors: Any) -> Any:
        return errors


class LargestOfAll(Largest):
    def of_examples(self, errors: Any) -> Any:
        return tf2dist.gather(errors)


def test_several_synchronous_workers_refuse_state_that_is_no_mean_unless_they_gather_it() -> None:
    def step_with(kind: type[Linear]) -> Any:
        def make() -> Linear:
            model = kind()
            model.compile(keras.optimizers.SGD(0.1))
            return model

        return step_of(make)

    splits, of_all = Splits(Arrays(X, Y), num_classes=None), step_with(LargestOfAll)
    assert model_checks.check_batches("m", of_all, splits) == ""
    for step, gathers, way_out in ((step_with(Largest), True, ""), (of_all, False, "use mode=sync, and ")):
        says = rf"model \(m\): every step gives \S*largest a value that is not shown to be .*; {way_out}compute it"
        with pytest.raises(ConfigError, match=says):
            model_checks.check_batches("m", step, splits, gathers)


def with_numbers(self: Linear, data: Any) -> Any:
    before = self.error(data)
    self.update(data)
    return {"error": before, "examples": tf.shape(data[0])[0], "nested": {"inner": self.tracker.result()}}


def test_numbers_that_a_step_returns_are_averaged_over_the_steps() -> None:
    step = step_of(lambda: linear(train_step=with_numbers))
    assert "error, examples: the history has the mean over the steps" in model_checks.note_on_numbers(step)
    assert model_checks.note_on_numbers(step_of(linear)) == ""
    function, place = tf.function(step, autograph=False), tf.zeros([2], tf.int64)
    batches = [[tf.constant(leaf[:size]) for leaf in (X, Y)] for size in (10, 50)]
    outputs = [function(*step.values(), leaves, place) for leaves in batches]
    totals = np.sum([output.sums.numpy()[2:] for output in outputs], axis=0)
    results = step.metrics.results(totals.astype(np.float64))
    assert results["examples"] == 30.0
    assert results["error"] == pytest.approx(np.mean([output.sums[0] for output in outputs]))
    assert set(results) == {"error", "examples", "inner"}


def all_results(self: Linear, data: Any) -> Any:
    x, y = data
    for metric in self.metrics:
        metric.update_state(*([y, self(x)] if metric.name == "compile_metrics" else [self.error(data)]))
    return {metric.name: metric.result() for metric in self.metrics}


def test_results_of_compiled_metrics_and_of_dicts_are_those_of_keras_in_its_order() -> None:
    def make() -> keras.Model:
        model = linear(test_step=all_results)
        model.sums = own_steps.Sums(name="sums")
        model.compile(keras.optimizers.SGD(0.1), metrics=["mae"])
        return model

    step = step_of(make)
    sums = step.evaluate(*step.values(), [tf.constant(leaf) for leaf in (X, Y)]).numpy()
    results = step.evaluated.results(sums[1:])
    expected = step.model.evaluate(X, Y, batch_size=len(X), verbose=0, return_dict=True)
    assert list(results) == list(expected) == ["mae", "error", "loss", "sum", "weight"]
    assert results == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_takes_the_batches_that_keras_takes() -> None:
    """The metrics count each batch alike, so its size matters."""
    config = run_config("gan", batch_size=50)
    step = build_step(*source_and_splits(config), config, contextlib.nullcontext())[0]
    assert step.depends_on_batches
    assert list(step.evaluated.results(np.ones(step.evaluated.size))) == ["d_loss", "g_loss"]


class EachClass(keras.metrics.Metric):  # type: ignore[misc]
    """A metric of several numbers, whose name comes before the others in the order of names."""

    def __init__(self) -> None:
        super().__init__(name="each")
        self.total = self.add_weight(shape=(2,), initializer="zeros", name="total")

    def update_state(self, y: Any) -> None:
        self.total.assign_add(tf.stack([tf.reduce_sum(y), tf.reduce_sum(-y)]))

    def result(self) -> Any:
        return self.total + 0.0


class Quiet(Linear):
    """A model whose steps return the metrics of `kept`."""

    def __init__(self, kept: tuple[str, ...]) -> None:
        super().__init__()
        self.kept, self.each = kept, EachClass()

    def measured(self, data: Any) -> Any:
        self.each.update_state(data[1])
        self.tracker.update_state(self.error(data))
        return {metric.name: metric.result() for metric in (self.each, self.tracker) if metric.name in self.kept}

    def train_step(self, data: Any) -> Any:
        logs = self.measured(data)
        self.update(data)
        return logs

    def test_step(self, data: Any) -> Any:
        return self.measured(data)


def quiet(kept: tuple[str, ...]) -> InMemorySource:
    def make() -> keras.Model:
        model = Quiet(kept)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    plan = EpochPlan(epochs=EPOCHS, shuffle=False, validation_batch_size=BATCH)
    return InMemorySource(make, Splits(Arrays(X, Y), Arrays(X[:30], Y[:30]), num_classes=None), plan)


@functools.cache
def quiet_by_keras() -> Any:
    """Of a step that returns nothing Keras cannot make a graph, so here it returns all."""
    return keras_fit(quiet(("each", "error")))


@pytest.mark.parametrize(
    ("kept", "headline"),
    [
        ((), "no metrics"),
        pytest.param(("each",), "no metrics", marks=pytest.mark.thorough),
        (("each", "error"), "error="),
    ],
)
def test_steps_that_return_no_single_number_train_as_in_keras(
    kept: tuple[str, ...],
    headline: str,
    async_loop: Any,
    publishing: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = quiet(kept)
    publishing(source.load())
    loop, hooks, sent = async_loop(config_of(BATCH), 1, 1, source=source), RecordingHooks(), list[Any]()
    with Reporter(tmp_path, Task("chief", 0), ToLauncher("chief-0", sent.append), 0.0) as reporter:
        reporter.follow(loop)
        drive(loop, source, hooks, reporter=reporter)
    history, weights = quiet_by_keras()
    expected = {name: values for name, values in history.items() if name.removeprefix("val_") in kept}
    assert_same((hooks.history(), weights_of(loop.model)), (expected, weights))
    assert f"validation {headline}" in capsys.readouterr().out
    assert result_lines(sent[-1].summary, "").splitlines()[-1].startswith(f"validation {headline.replace('=', ' ')}")


def test_the_evaluation_of_a_finished_model_needs_no_loss() -> None:
    model = linear()
    model(X)
    assert list(predicting._results(model, "given", Arrays(X, Y))) == ["error"]


class Late(keras.Model):  # type: ignore[misc]
    """Its loss is the first to call one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.late = keras.layers.Dense(1), keras.layers.Dense(1, name="late")

    def call(self, x: Any) -> Any:
        return self.dense(x)


def late() -> keras.Model:
    model = Late()
    model.compile("sgd", lambda y, prediction: (model.late(prediction) - y) ** 2)
    return model


def test_weights_that_are_made_too_late_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model \(given\): .*late/kernel is made in the first step and would not be"):
        step_of(late, with_test=False)
