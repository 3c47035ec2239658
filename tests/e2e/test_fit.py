"""`tf2dist.fit` on real clusters, held against `keras.Model.fit` with the same callbacks."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tf2dist.tf_internals.keras import fresh_names

ONE = tf2dist.Local(workers=1, ps=1)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 4)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5], [0.0]] + 0.1 * RNG.normal(size=(200, 1))).astype("float32")


def regression() -> keras.Model:
    model = keras.Sequential([
        keras.Input([4]),
        keras.layers.Dense(8, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1)),
        keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2)),
    ])  # fmt: skip
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return model


def exploding() -> keras.Model:
    model = regression()
    model.compile(keras.optimizers.SGD(1e20), "mse", metrics=["mae", "accuracy"])
    return model


# Of no model: what a loss reads and a callback changes.
BETA, GAMMA = keras.Variable(0.0, trainable=False), tf.Variable(0.0, trainable=False)


def annealed() -> keras.Model:
    model = regression()
    model.compile(keras.optimizers.Adam(0.02), lambda y, p: (1 + BETA) * keras.ops.square(y - p) + GAMMA)
    return model


def keras_fit(build: Callable[[], keras.Model], **arguments: Any) -> tuple[keras.Model, dict[str, list[float]]]:
    with fresh_names():
        model = build()
    return model, model.fit(X, Y, batch_size=20, shuffle=False, verbose=0, **arguments).history


def on_one_worker(build: Any, run_dir: Path, **arguments: Any) -> tf2dist.Result:
    given = {"cluster": ONE, "batch_size": 20, "shuffle": False, "verbose": 0, "run_dir": run_dir, **arguments}
    return tf2dist.fit(build, X, Y, **given)


def assert_same(found: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def weights_agree(one: keras.Model, other: keras.Model) -> bool:
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return all(np.allclose(a, b, atol=1e-5) for a, b in pairs)


class Recorder(keras.callbacks.Callback):
    """A user's own: notes every call, halves a weight after the first epoch, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.count = 0

    def on_train_begin(self, logs: Any = None) -> None:
        assert self.params["epochs"] == 4
        self.calls.append("train begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"epoch {epoch} begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"epoch {epoch} end")
        self.count += 1
        if epoch == 0:
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel * 0.5)

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append("test begin")

    def on_test_end(self, logs: Any = None) -> None:
        assert set(logs) == {"loss", "mae"}
        self.calls.append("test end")

    def on_train_end(self, logs: Any = None) -> None:
        assert "val_loss" in logs
        self.calls.append("train end")


def all_kinds(folder: Path, notes: list[Any]) -> list[keras.callbacks.Callback]:
    calls = keras.callbacks
    folder.mkdir()
    return [
        Recorder(),
        calls.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        calls.ReduceLROnPlateau(monitor="val_mae", patience=0, min_delta=10.0, factor=0.5),
        calls.CSVLogger(str(folder / "log.csv")),
        calls.ModelCheckpoint(str(folder / "{epoch}.keras"), monitor="val_loss", save_best_only=True),
        calls.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True),
        calls.LambdaCallback(on_epoch_end=lambda epoch, logs: notes.append((epoch, logs["loss"]))),
        calls.TensorBoard(str(folder / "board"), update_freq="batch"),
        calls.TerminateOnNaN(),
        calls.EarlyStopping(patience=50),
    ]


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_callbacks_do_what_they_do_in_keras(mode: str, tmp_path: Path) -> None:
    ours: list[Any] = []
    theirs: list[Any] = []
    callbacks = [all_kinds(tmp_path / name, notes) for name, notes in (("a", ours), ("b", theirs))]
    more = {"validation_split": 0.2, "epochs": 4}
    result = on_one_worker(regression, tmp_path / "run", mode=mode, callbacks=callbacks[0], **more)
    model, history = keras_fit(regression, callbacks=callbacks[1], **more)

    assert_same(result.history, history)
    assert weights_agree(result.model, model)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    recorders = [each[0] for each in callbacks]
    assert recorders[0].calls == recorders[1].calls  # type: ignore[attr-defined]
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in "ab"]
    assert names[0] == names[1]
    rows = [list(csv.DictReader((tmp_path / name / "log.csv").open())) for name in "ab"]
    assert [list(row) for row in rows[0]] == [list(row) for row in rows[1]]
    for file in ("4.weights.h5", "2.weights.h5"):
        saved = regression(), regression()
        for each, name in zip(saved, "ab", strict=True):
            each.load_weights(tmp_path / name / file)
        assert weights_agree(*saved)
    assert list((tmp_path / "a/board").rglob("events.*"))
    assert weights_agree(result.model, tf2dist.load_model(tmp_path / "run"))
    assert float(result.model.optimizer.learning_rate) == pytest.approx(float(model.optimizer.learning_rate))
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    rates = [record["learning_rate"] for record in records if "learning_rate" in record]
    assert rates[-1] < 0.02, "the curve follows what callbacks set"


@pytest.mark.slow
def test_a_function_inside_a_function_and_a_custom_layer(tmp_path: Path) -> None:
    units = 5

    class Twice(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return 2 * inputs

    def distance(y: Any, prediction: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y - prediction), -1)

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(units, kernel_initializer="ones"), Twice()])
        model.add(keras.layers.Dense(1, kernel_initializer="ones"))
        model.compile("sgd", distance)
        return model

    model, history = keras_fit(build, epochs=2)
    result = on_one_worker(build, tmp_path / "function", epochs=2)
    assert_same(result.history, history)
    assert weights_agree(result.model, model)

    with fresh_names():
        compiled = build()
    for _ in range(3):
        keras.layers.Dense(1)  # the names of this process have gone on
    result = on_one_worker(compiled, tmp_path / "model", epochs=2, mode="sync")
    assert result.model is compiled, "trained in place"
    assert_same(result.history, history)
    assert weights_agree(compiled, model)
    assert_same(compiled.history.history, history)


@pytest.mark.slow
def test_a_model_that_is_trained_twice_goes_on(tmp_path: Path) -> None:
    """Its optimizer, and the random numbers that it draws."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5)])
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    ours, theirs = build(), build()
    for number in range(2):
        history = theirs.fit(X, Y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
        result = on_one_worker(ours, tmp_path / str(number), epochs=2, mode="sync")
        assert_same(result.history, history)
    assert weights_agree(ours, theirs)


@pytest.mark.slow
def test_patience_and_rate_survive_a_resume_and_the_best_weights_come_back(tmp_path: Path) -> None:
    """A validation that gets worse all the time: the first epoch is the best."""
    validation = (X, -3 * Y)

    def stopping() -> keras.callbacks.EarlyStopping:
        return keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)

    def slowing() -> keras.callbacks.Callback:
        return keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)

    class EndOf(keras.callbacks.Callback):
        def __init__(self, last: int) -> None:
            super().__init__()
            self.last = last

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == self.last:
                raise KeyError("as if the power failed")

    model, history = keras_fit(regression, epochs=20, validation_data=validation, callbacks=[stopping(), slowing()])
    assert len(history["loss"]) == 4
    arguments = {"epochs": 20, "validation_data": validation, "options": {"checkpoint.every_steps": 10}}
    with pytest.raises(KeyError, match="power failed"):
        on_one_worker(regression, tmp_path / "run", callbacks=[stopping(), slowing(), EndOf(2)], **arguments)
    again = stopping()
    result = on_one_worker(regression, tmp_path / "run", callbacks=[again, slowing()], **arguments)
    assert_same(result.history, history)
    assert again.stopped_epoch == 3
    assert float(result.model.optimizer.learning_rate) == float(model.optimizer.learning_rate) == np.float32(0.0025)
    assert weights_agree(result.model, model)
    assert weights_agree(tf2dist.load_model(tmp_path / "run"), model)


@pytest.mark.slow
def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(tf2dist.NotFiniteError, match="the loss is"):
        on_one_worker(exploding, tmp_path / "error", epochs=3)
    ended = []
    callbacks = [
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LambdaCallback(on_train_end=lambda logs: ended.append(logs)),
    ]
    more = {"epochs": 3, "validation_data": (X, Y)}
    result = on_one_worker(exploding, tmp_path / "callback", callbacks=callbacks, **more)
    assert result.model.stop_training
    assert len(ended) == 1
    _, history = keras_fit(exploding, callbacks=[keras.callbacks.TerminateOnNaN()], **more)
    assert result.history.keys() == history.keys()
    assert [len(values) for values in result.history.values()] == [1] * len(history)
    assert not np.isfinite([result.history[name] for name in ("loss", "mae", "val_loss", "val_mae")]).any()
    assert np.isfinite(result.history["accuracy"]).all()


def test_an_error_of_a_task_is_an_exception_with_the_text_of_the_command(tmp_path: Path) -> None:
    parent = os.getpid()

    def broken() -> keras.Model:
        if os.getpid() != parent:
            raise LookupError("only in a task")
        return regression()

    with pytest.raises(tf2dist.TaskFailure, match=rf"LookupError: only in a task \({__file__}:\d+\)"):
        on_one_worker(broken, tmp_path / "run")


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_hooks_of_batches_change_the_run_at_one_step(
    mode: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, float]] = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((batch, float(np.abs(self.model.get_weights()[0]).sum())))
            if len(seen) == 2:
                self.model.optimizer.learning_rate = 0.0
            if len(seen) == 4:
                self.model.stop_training = True

    result = on_one_worker(regression, tmp_path / "run", mode=mode, epochs=100_000, callbacks=[Stop()])
    steps, sums = zip(*seen, strict=True)
    assert sorted(set(steps)) == list(steps)
    assert sums[0] != sums[1], "the weights are those of the step"
    assert sums[1] == sums[2] == sums[3], "from the second call on nothing is learned"
    assert len(result.history["loss"]) < 100_000
    assert result.summary["global_step"] < 1_000_000
    assert capfd.readouterr().err.count("warning: callbacks: Stop has hooks of batches, ") == 1


@pytest.mark.thorough  # replica/test_mirror.py has all settings
def test_a_setting_of_the_optimizer_that_a_callback_changes_is_refused(tmp_path: Path) -> None:
    class Set(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.beta_1 = 0.5

    with pytest.raises(tf2dist.ConfigError, match=r"callbacks: Adam.beta_1 was 0\.9 and is 0\.5 now"):
        on_one_worker(regression, tmp_path / "run", callbacks=[Set()])


@pytest.mark.parametrize(("mode", "workers"), [("async", 1), pytest.param("sync", 2, marks=pytest.mark.thorough)])
def test_variables_of_no_model_follow_callbacks(mode: str, workers: int, tmp_path: Path) -> None:
    """As a weight of a penalty that is annealed; a resumed run has the values of its checkpoint."""
    variables = [BETA, GAMMA]

    class Anneal(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            for variable in variables:
                variable.assign_add(2.0)

    def given() -> dict[str, Any]:
        for variable in variables:
            variable.assign(1.0)  # which a task that imports this module does not do
        return {"callbacks": [Anneal()], "validation_data": (X, Y)}

    model, history = keras_fit(annealed, **given(), epochs=3)
    more = {"mode": mode, "cluster": tf2dist.Local(workers, ps=1), "batch_size": 20 // workers}
    for epochs in (2, 3) if mode == "async" else (3,):
        result = on_one_worker(annealed, tmp_path / "run", **given(), **more, epochs=epochs)
    assert_same(result.history, history)
    assert weights_agree(result.model, model)
    assert float(BETA) == float(GAMMA) == 7
