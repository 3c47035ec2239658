"""The history and the weights after some epochs in both modes equal those of `keras.Model.fit` on the same batches."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.in_memory_source import AsOfFit, InMemorySource, RecordingHooks, weights_of
from tests.replica.small_runs import run_config, sync_loop
from tf2dist.checkpoint.snapshot import EARLIER_ARRAY, Frozen
from tf2dist.checkpoint.store import NoSaver
from tf2dist.cluster.spec import Task
from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import NotFiniteError
from tf2dist.messages import ProgressMessage, ToLauncher
from tf2dist.model.source import EpochPlan
from tf2dist.run import announce
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.driver import Driver, Epochs
from tf2dist.training.hooks import CallbackEffects
from tf2dist.training.loop import PauseRequest
from tf2dist.training.report import NoReporter, Reporter

EPOCHS, BATCH = 3, 30
SEED = 7


def examples(make: Callable[[np.random.Generator, int], Arrays], num: int = 400) -> Splits:
    drawn = make(np.random.default_rng(0), num)
    return Splits(drawn[100:], drawn[:100], num_classes=None)


def table(rng: np.random.Generator, num: int) -> Arrays:
    x = rng.normal(size=(num, 10)).astype("float32")
    return Arrays(x, (x[:, :3].sum(1) + 0.1 * rng.normal(size=num)).astype("float32"))


def two_classes(rng: np.random.Generator, num: int) -> Arrays:
    x = rng.normal(size=(num, 8)).astype("float32")
    y = (x[:, 0] > 0.5).astype("int64")
    return Arrays(x, y, np.where(y == 1, 2.0, 0.5).astype("float32"))


def two_of_each(rng: np.random.Generator, num: int) -> Arrays:
    x = {"wide": rng.normal(size=(num, 6)).astype("float32"), "tokens": rng.integers(0, 20, (num, 5))}
    return Arrays(x, {"sum": x["wide"].sum(1), "kind": x["tokens"][:, 0] % 3})


def sentences(rng: np.random.Generator, num: int) -> Arrays:
    x = rng.integers(0, 50, (num, 7))
    return Arrays(x, (x.sum(1) > 170).astype("int32"))


def regression(class_aggregation: str | None = "uniform_average") -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([keras.Input((10,)), layers.Dense(16, "relu"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae", keras.metrics.R2Score(class_aggregation)])
    return model


def binary() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy"], weighted_metrics=[keras.metrics.AUC(name="auc")])
    return model


class SummedFirst(keras.optimizers.RMSprop):  # type: ignore[misc]
    """RMSprop that adds up the gradients of an embedding's row before it squares the sum, if a batch looks it up twice.

    So do tf2dist and Keras on JAX and PyTorch; Keras on TensorFlow squares each of them.
    """

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(tf.convert_to_tensor(gradient), variable, learning_rate)


def two_outputs() -> keras.Model:
    layers = keras.layers
    wide, tokens = keras.Input((6,), name="wide"), keras.Input((5,), dtype="int32", name="tokens")
    both = layers.Concatenate()([wide, layers.Flatten()(layers.Embedding(20, 4)(tokens))])
    outputs = {"sum": layers.Dense(1, name="sum")(both), "kind": layers.Dense(3, "softmax", name="kind")(both)}
    model = keras.Model({"wide": wide, "tokens": tokens}, outputs)
    losses = {"sum": "mae", "kind": "sparse_categorical_crossentropy"}
    model.compile(SummedFirst(0.01), losses, loss_weights={"sum": 0.5, "kind": 2.0}, metrics={"kind": ["accuracy"]})
    return model


def recurrent() -> keras.Model:
    layers = keras.layers
    inside = [layers.Embedding(50, 8), layers.GRU(6), layers.Dense(2)]
    model = keras.Sequential([keras.Input((7,), dtype="int32"), *inside])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), loss, metrics=["accuracy"])
    return model


def everything() -> keras.Model:
    layers = keras.layers
    frozen = layers.Dense(16, "relu", trainable=False)
    kept = layers.Dense(8, "relu", kernel_regularizer=keras.regularizers.L2(0.01))
    inside = [frozen, layers.BatchNormalization(momentum=0.9), kept, layers.Dropout(0.4), layers.Dense(1)]
    model = keras.Sequential([keras.Input((10,)), *inside])
    model.compile("adam", keras.losses.Huber(), metrics=["mse"])
    return model


def ones(rng: np.random.Generator, num: int) -> Arrays:
    return Arrays(np.ones([num, 1], np.float32), np.zeros([num, 1], np.float32))


class LogOfRest(keras.metrics.Metric):
    """No number in the first epoch, in which a prediction is above 0.9, and one in all later epochs."""

    def __init__(self) -> None:
        super().__init__(name="log_of_rest")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.log(0.9 - predicted)))

    def result(self) -> Any:
        return self.total + 0.0


def no_number_at_first() -> keras.Model:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[LogOfRest()])
    return model


CASES = {
    "regression": (regression, table),
    "binary": (binary, two_classes),
    "two outputs": (two_outputs, two_of_each),
    "recurrent": (recurrent, sentences),
    "everything": (everything, table),
    "no number at first": (no_number_at_first, ones),
}


# `make test` has a regression in the tests of hooks, two classes in test_tables.py, and two outputs in "everything".
MARKS = {
    **{name: [pytest.mark.slow] for name in ("regression", "binary")},
    **{name: [pytest.mark.thorough] for name in ("two outputs", "recurrent")},
}
FIRST_CASES = [pytest.param(name, marks=MARKS.get(name, [])) for name in CASES]


def source_of(name: str, **plan: Any) -> InMemorySource:
    make, drawn = CASES[name]
    return InMemorySource(
        make, examples(drawn), EpochPlan(epochs=EPOCHS, shuffle=False, validation_batch_size=BATCH, **plan)
    )


def keras_fit(
    source: InMemorySource, batch_size: int = BATCH, callbacks: tuple[keras.callbacks.Callback, ...] = ()
) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    keras.utils.set_random_seed(SEED)
    model, splits = source.make(), source.load()
    train, other = splits.train, splits.validation
    assert other is not None
    history = model.fit(
        train.x,
        train.y,
        sample_weight=train.sample_weight,
        validation_data=(other.x, other.y) if other.sample_weight is None else (other.x, other.y, other.sample_weight),
        batch_size=batch_size,
        validation_batch_size=BATCH,
        validation_steps=source.plan.validation_steps if source.plan else None,
        initial_epoch=source.plan.initial_epoch if source.plan else 0,
        callbacks=[*callbacks],
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    return history.history, weights_of(model)


# For one of `CASES`, which several tests compare.
kept_keras_fit = functools.cache(lambda name: keras_fit(source_of(name)))


def config_of(batch_size: int) -> RunConfig:
    config = run_config("given", batch_size=batch_size, steps_per_execution=5)
    config.seed = SEED
    return config


class RecordingReporter(NoReporter):
    def __init__(self) -> None:
        self.restarts = 0

    def restart_metrics(self) -> None:
        self.restarts += 1


def drive(
    loop: Any,
    source: InMemorySource,
    hooks: RecordingHooks,
    saver: NoSaver | None = None,
    reporter: NoReporter | None = None,
) -> None:
    driver_of(loop, source, hooks, saver, reporter).drive()


def driver_of(
    loop: Any,
    source: InMemorySource,
    hooks: RecordingHooks,
    saver: NoSaver | None = None,
    reporter: NoReporter | None = None,
) -> Driver:
    assert source.plan
    splits = source.load().evaluated
    length = functools.partial(Epochs, plan=source.plan, hooks=hooks)
    return Driver(loop, saver or NoSaver(), reporter or NoReporter(), splits, length, lambda: None)


def drive_in_sync(worker: SyncWorker, name: str, batch_size: int) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    return train_in_sync(worker, source_of(name) if name in CASES else trained_before(Path(name)), batch_size)


def train_in_sync(
    worker: SyncWorker, source: InMemorySource, batch_size: int
) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    config, hooks = config_of(batch_size), RecordingHooks()
    loop = sync_loop(worker, config, source)
    drive(loop, source, hooks)
    return hooks.history(), weights_of(loop.model)


def assert_same(found: Any, expected: Any, atol: float = 1e-5) -> None:
    (history, weights), (expected_history, expected_weights) = found, expected
    assert list(history) == list(expected_history)
    for key, values in expected_history.items():
        np.testing.assert_allclose(history[key], values, atol=atol, rtol=1e-5, err_msg=key)
    for mine, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("name", FIRST_CASES)
def test_one_asynchronous_worker_equals_keras(name: str, async_loop: Any, publishing: Any) -> None:
    source, config, hooks = source_of(name), config_of(BATCH), RecordingHooks()
    publishing(source.load())
    loop = async_loop(config, 1, 1, source=source)
    reporter = RecordingReporter()
    drive(loop, source, hooks, reporter=reporter)
    assert reporter.restarts == (name == "no number at first")
    assert_same((hooks.history(), weights_of(loop.model)), kept_keras_fit(name))
    assert [call[:3] for call in hooks.calls] == [
        ("begin", 0, 0),
        *[("epoch", n, 10 * (n + 1)) for n in range(EPOCHS)],
        ("end", EPOCHS, 10 * EPOCHS),
    ]


class Batches(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


@pytest.mark.parametrize("reads_progress", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_hooks_of_batches_get_the_metrics_of_the_epoch_so_far(
    reads_progress: bool, async_loop: Any, publishing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays are sent with the progress only to hooks that read them there."""
    monkeypatch.setattr("tf2dist.training.report.SEND_EVERY_SECS", 0.0)
    source = replace(source_of("regression"), make=functools.partial(regression, class_aggregation=None))
    hooks, sent, steps = RecordingHooks(reads_progress=reads_progress), list[Any](), (4, 7, 10, 14, 20)
    publishing(source.load())
    loop, theirs = async_loop(config_of(BATCH), 1, 1, source=source), Batches()
    with Reporter(tmp_path, Task("chief", 0), ToLauncher("chief-0", sent.append), 0.0) as reporter:
        reporter.follow(loop)
        length = Epochs(driver_of(loop, source, hooks, reporter=reporter), source.plan or EpochPlan(), hooks)
        length.begin()
        for step in steps:
            loop.train(step)
            reporter.on_progress(loop.progress)
            length.on_stop(PauseRequest.CHANGE)
    keras_fit(source, callbacks=(theirs,))
    paused = {step: logs for kind, _, step, logs in hooks.calls if kind == "pause"}
    told = {message.step: message.metrics for message in sent if isinstance(message, ProgressMessage)}
    for found, left_out in ((paused, set[str]()), (told, set() if reads_progress else {"r2_score"})):
        assert found.keys() == set(steps)
        for step, logs in found.items():
            expected = theirs.logs[step - 1]
            assert logs.keys() == expected.keys() - left_out
            assert all(value == pytest.approx(expected[name], 1e-4, 1e-5) for name, value in logs.items()), step
    assert [paused[step] for step in (10, 20)] == [
        {name: logs[name] for name in paused[step]} for kind, _, step, logs in hooks.calls if kind == "epoch"
    ]


WEIGHTED = {"none": (), "sum": ("sum",), "kind": ("kind",)}


@pytest.mark.slow
@pytest.mark.parametrize(("of_train", "of_validation"), [("sum", "kind"), ("none", "sum"), ("sum", "none")])
def test_two_sets_have_weights_for_different_outputs(
    of_train: str, of_validation: str, async_loop: Any, publishing: Any, sync_workers: SyncWorkers
) -> None:
    def weighted(part: Arrays, names: str) -> Arrays:
        weights = np.arange(len(part), dtype=np.float32) / 100
        by_output = {name: weights if name in WEIGHTED[names] else None for name in ("sum", "kind")}
        return replace(part, sample_weight=by_output if WEIGHTED[names] else None)

    source = source_of("two outputs")
    assert source.splits.validation
    train, validation = weighted(source.splits.train, of_train), weighted(source.splits.validation, of_validation)
    given = AsOfFit(source.make, Splits(train, validation, num_classes=None), source.plan)
    config, hooks, expected = config_of(BATCH), RecordingHooks(), keras_fit(given)
    publishing(given.load())
    loop = async_loop(config, 1, 1, source=given)
    drive(loop, given, hooks)
    assert_same((hooks.history(), weights_of(loop.model)), expected)
    assert_same(sync_workers(train_in_sync, num_workers=1, args=(given, BATCH))[0], expected)


@pytest.mark.slow
def test_a_batch_may_be_larger_than_the_data(async_loop: Any, publishing: Any, sync_workers: SyncWorkers) -> None:
    source, config, hooks = source_of("regression"), config_of(500), RecordingHooks()
    publishing(source.load())
    loop = async_loop(config, 1, 1, source=source)
    drive(loop, source, hooks)
    expected = keras_fit(source, 500)
    assert_same((hooks.history(), weights_of(loop.model)), expected)
    found, *_ = sync_workers(drive_in_sync, num_workers=3, args=("regression", 200))
    assert_same(found, expected)


def trained_before(folder: Path) -> InMemorySource:
    """A model that was trained before: its optimizer has a state, and its learning rate schedule has started."""
    path, splits = folder / "trained.keras", examples(table)
    if not path.exists():
        keras.utils.set_random_seed(1)
        rate = keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.5)
        model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(rate), "mse")
        model.run_eagerly = True  # tracing takes longer than ten steps
        model.fit(splits.train.x, splits.train.y, batch_size=BATCH, epochs=1, verbose=0)
        model.save(path)
    plan = EpochPlan(epochs=EPOCHS, shuffle=False, validation_batch_size=BATCH)
    return InMemorySource(lambda: keras.models.load_model(path), splits, plan)


def test_a_model_trained_before_continues_with_its_optimizer(tmp_path: Path, async_loop: Any, publishing: Any) -> None:
    source, config, hooks = trained_before(tmp_path), config_of(BATCH), RecordingHooks()
    publishing(source.load())
    loop = async_loop(config, 1, 1, source=source)
    drive(loop, source, hooks)
    assert_same((hooks.history(), weights_of(loop.model)), keras_fit(source))
    assert loop.updates_applied() == 10 * EPOCHS
    assert hooks.arrays[EARLIER_ARRAY] == 10, "callbacks see the count of the optimizer"
    saved = loop.freeze()()
    later = async_loop(config, 1, 2, source=source, start=saved)
    assert later.earlier_updates == 10
    later.train(saved.step)  # finishes the work of this loop


def test_callbacks_are_told_the_metrics_of_a_loss_that_is_not_finite(publishing: Any, async_loop: Any) -> None:
    def exploding() -> keras.Model:
        model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e30), "mse", metrics=["mae", "accuracy"])
        return model

    source = InMemorySource(exploding, examples(table), EpochPlan(epochs=2, shuffle=False))
    config, hooks = config_of(BATCH), RecordingHooks()
    publishing(source.load())
    with pytest.raises(NotFiniteError):
        drive(async_loop(config, 1, 1, source=source), source, hooks)
    kind, epoch, _, logs = hooks.calls[-1]
    assert (kind, epoch) == ("not finite", 0)
    assert logs.keys() == {f"{part}{name}" for part in ("", "val_") for name in ("loss", "mae", "accuracy")}
    assert np.isfinite(logs["accuracy"])
    assert not np.isfinite([logs["loss"], logs["val_loss"]]).any()
    # The first loss that is too large comes from errors that are not; which step is looked at first depends on time.
    assert not logs["mae"] < 1e20


def note_of(loop: Any, source: InMemorySource, run_dir: Path) -> str:
    """The last line for the user before the training."""
    told: list[Any] = []
    announce(driver_of(loop, source, RecordingHooks()), "", run_dir, ToLauncher("chief-0", told.append))
    return str(told[-1].text)


class Keeping(NoSaver):
    def save(self, freeze: Callable[[], Frozen], stopping: bool = False, replaces: bool = False) -> None:
        self.kept = freeze()()


def test_no_epoch_begins_in_a_resumed_run_that_a_callback_had_ended(
    tmp_path: Path, async_loop: Any, publishing: Any
) -> None:
    source, config, saver = trained_before(tmp_path), config_of(BATCH), Keeping()
    publishing(source.load())
    hooks = RecordingHooks({("epoch", 0): CallbackEffects(stop=True)})
    drive(async_loop(config, 1, 1, source=source), source, hooks, saver)
    assert saver.kept.facts.target_step == 10, "an evaluator learns that it is the last checkpoint"
    again = RecordingHooks()
    loop = async_loop(config, 1, 1, source=source, start=saver.kept)
    assert note_of(loop, source, tmp_path) == "going on at step 10", "it was stopped before it had a result"
    (tmp_path / "summary.json").touch()
    assert note_of(loop, source, tmp_path) == (
        f"{tmp_path}: this run had ended at step 10; nothing was trained; name another run_dir for a new run"
    )
    drive(loop, source, again)
    assert [call[:3] for call in again.calls] == [("begin", EPOCHS, 10), ("end", 1, 10)]


@pytest.mark.slow
def test_a_synchronous_worker_continues_with_an_optimizer(tmp_path: Path, sync_workers: SyncWorkers) -> None:
    expected = keras_fit(trained_before(tmp_path))
    (found,) = sync_workers(drive_in_sync, num_workers=1, args=(str(tmp_path), BATCH))
    assert_same(found, expected)


ON_ONE_WORKER = ("everything", "no number at first")


# A worker takes seconds to start, so one trains for several tests.
@pytest.fixture(scope="module")
def one_worker(sync_workers: SyncWorkers) -> dict[str, Any]:
    """Results by the names of cases, and the calls of a callback by whether it stops the training."""
    found: dict[str, Any]
    (found,) = sync_workers(drive_all_in_sync, num_workers=1)
    return found


def drive_all_in_sync(worker: SyncWorker) -> dict[str, Any]:
    calls = {f"stops: {stops}": drive_with_a_pause(worker, CallbackEffects(stop=stops)) for stops in (True, False)}
    return calls | {name: drive_in_sync(worker, name, BATCH) for name in ON_ONE_WORKER}


@pytest.mark.parametrize("name", ON_ONE_WORKER)
def test_one_synchronous_worker_equals_keras(name: str, one_worker: dict[str, Any]) -> None:
    assert_same(one_worker[name], kept_keras_fit(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regression", "two outputs"])
def test_one_synchronous_worker_equals_keras_with_other_models(name: str, sync_workers: SyncWorkers) -> None:
    (found,) = sync_workers(drive_in_sync, num_workers=1, args=(name, BATCH))
    assert_same(found, keras_fit(source_of(name)))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("two outputs", "regression", "binary", "recurrent")],
)
def test_three_synchronous_workers_equal_one_with_three_times_the_batch(name: str, sync_workers: SyncWorkers) -> None:
    found, *others = sync_workers(drive_in_sync, num_workers=3, args=(name, BATCH // 3))
    assert_same(found, keras_fit(source_of(name)))
    for _, weights in others:
        assert all(np.array_equal(one, other) for one, other in zip(weights, found[1], strict=True))


@dataclass
class Pausing(RecordingHooks):
    """Asks for one pause as soon as training has begun."""

    def wanted(self) -> bool:
        return self.calls[-1][0] == "begin"


def drive_with_a_pause(worker: SyncWorker, end: CallbackEffects) -> list[tuple[Any, ...]]:
    """The calls of a callback that ends the first epoch at a pause, and answers `end` at the end of that epoch."""
    source, config = source_of("regression"), config_of(BATCH)
    hooks = Pausing({("pause", 0): CallbackEffects(stop=True), ("epoch", 0): end})
    loop = sync_loop(worker, config, source)
    drive(loop, source, hooks)
    return [(kind, epoch, step, sorted(logs)) for kind, epoch, step, logs in hooks.calls]


@pytest.mark.parametrize("stops", [True, False])
def test_an_epoch_that_a_callback_ends_is_validated_and_its_end_is_called(
    stops: bool, one_worker: dict[str, Any]
) -> None:
    """As in Keras; if the callback then takes `stop_training` back, the next epoch follows."""
    calls = one_worker[f"stops: {stops}"]
    logs = ["loss", "mae", "r2_score", "val_loss", "val_mae", "val_r2_score"]
    step = calls[1][2]
    assert 0 < step < 10
    begun = [("begin", 0, 0, []), ("pause", 0, step, logs[:3]), ("epoch", 0, step, logs)]
    later = [] if stops else [("epoch", n, step + 10 * n, logs) for n in range(1, EPOCHS)]
    assert calls == [*begun, *later, ("end", 1 + len(later), step + 10 * len(later), [])]
