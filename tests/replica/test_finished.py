"""The Keras model that a run writes, saved and loaded in one process; `e2e/test_finished` has real runs."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.replica.test_optimizers import OwnMomentum
from tests.unit.test_saving import facts, no_more_open_files
from tf2dist import evaluate, registry
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import named_variables, values
from tf2dist.checkpoint.store import Checkpoints
from tf2dist.config.schema import DataConfig, RunConfig
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import CheckpointError, ConfigError, DataError, TaskLostError
from tf2dist.model.own_step import OwnStep
from tf2dist.process import heartbeat
from tf2dist.tools.finished import load_model, opening
from tf2dist.tools.finished import predict_command as predict
from tf2dist.tools.finished.opening import data_of
from tf2dist.tools.finished.predicting import read
from tf2dist.tools.finished.shell import CommandLine
from tf2dist.training import finished_model
from tf2dist.training.finished_model import (
    DESCRIPTION,
    MODEL_FILE,
    TEMPORARY,
    describe,
    named_groups,
    saved_variables,
    write_model,
)

EXAMPLES = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)


class Twice(keras.layers.Layer):  # type: ignore[misc]
    """A custom layer: loading it needs code of the user."""

    def call(self, inputs: Any) -> Any:
        return 2.0 * inputs


def nameless() -> keras.Model:
    """Layers without explicit names, which Keras numbers separately for each model; and a model within the model."""
    layers = keras.layers
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(), layers.Dropout(0.5)])
    model = keras.Sequential([keras.Input((6,)), inner, layers.Dense(5), layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def with_own_layer() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), Twice(), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def trained(build: Callable[[], keras.Model]) -> keras.Model:
    model = build()
    targets = np.arange(20) % 3 if model.loss != "mse" else np.zeros((20, 3))
    model.run_eagerly = True  # for three steps
    model.fit(EXAMPLES, targets, epochs=3, verbose=0)
    return model


def outputs_of(model: keras.Model) -> np.ndarray:
    return np.asarray(model(EXAMPLES, training=False))


def snapshot_of(model: keras.Model, step: int) -> Snapshot:
    variables = [both[0] for both in saved_variables(model).values()]
    return Snapshot(step, values(named_variables(model, variables, [model.optimizer])), facts(step))


def leave(run_dir: Path, model: keras.Model, build: Callable[[], keras.Model], step: int = 7) -> list[str]:
    """Writes the model as the leader of a run does; returns the warnings."""
    warnings: list[str] = []
    describe(run_dir, model, lambda: build().optimizer, warnings.append)
    snapshot = snapshot_of(model, step)
    Checkpoints(run_dir / "checkpoints").save(snapshot)
    write_model(run_dir, model, model.optimizer, lambda: snapshot.arrays, snapshot.num_updates, build, warnings.append)
    return warnings


def assert_same(loaded: keras.Model, model: keras.Model) -> None:
    """Equal outputs, and an optimizer in the same state."""
    assert loaded.compiled
    np.testing.assert_allclose(outputs_of(loaded), outputs_of(model), rtol=1e-5)
    assert_same_values(loaded.optimizer.variables, model.optimizer.variables)


def assert_same_values(loaded: list[keras.Variable], variables: list[keras.Variable]) -> None:
    for its, own in zip(loaded, variables, strict=True):
        np.testing.assert_allclose(its.numpy(), own.numpy(), rtol=1e-6, err_msg=own.path)


@pytest.mark.parametrize("step", [None, 7])
def test_a_model_whose_layers_have_no_names(tmp_path: Path, step: int | None) -> None:
    model = trained(nameless)
    assert leave(tmp_path, model, nameless) == []
    model.optimizer.iterations.assign(7)
    loaded = tf2dist.load_model(tmp_path, step)
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in model.layers]
    assert int(loaded.optimizer.iterations) == 7
    assert_same(loaded, model)


@keras.saving.register_keras_serializable("tests_finished")
class AsInKeras(OwnMomentum):
    def build(self, variables: list[keras.Variable]) -> None:
        self.built = False  # each call makes all variables, as in the docstring of `keras.Optimizer`
        super().build(variables)


def test_an_optimizer_that_keras_has_built_is_not_built_again(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(AsInKeras(0.1), "mse")
    model.fit(EXAMPLES, np.ones((20, 3)), batch_size=5, verbose=0)
    config = keras.saving.serialize_keras_object(model)
    assert leave(tmp_path, model, lambda: keras.saving.deserialize_keras_object(config), step=4) == []
    for step in (None, 4):
        assert_same(tf2dist.load_model(tmp_path, step), model)


@keras.saving.register_keras_serializable("tests_finished")
class InTurns(keras.Sequential):  # type: ignore[misc]
    """Trains its first layer twice in a step by one optimizer, and its second by another of the same class."""

    def compile(self, several: bool = True) -> None:
        super().compile(keras.optimizers.RMSprop(0.01))
        self.several, self.others = several, [keras.optimizers.RMSprop(0.02), keras.optimizers.RMSprop(0.03)]

    def get_compile_config(self) -> dict[str, Any]:
        return {"several": self.several}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**config)
        if self.several:
            for optimizer, layer in zip(self.others, self.layers, strict=True):
                optimizer.build(layer.trainable_variables)
        else:
            self.optimizer.build(self.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        first, second = self.others if self.several else (self.optimizer, self.optimizer)
        for optimizer, layer in ((first, self.layers[0]), (first, self.layers[0]), (second, self.layers[1])):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(data[0]) - data[1]) ** 2)
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("several", [False, True])
def test_the_optimizers_of_a_step_of_ones_own_are_those_that_it_applies(tmp_path: Path, several: bool) -> None:
    def build() -> keras.Model:
        model = InTurns([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3)])
        model.compile(several)
        return model

    model, targets = build(), np.ones((20, 3), np.float32)
    step = OwnStep(model, Arrays(EXAMPLES, targets).layout, "given", None)
    step.optimizer.build(step.trainable)
    model.fit(EXAMPLES, targets, batch_size=10, epochs=3, verbose=0)
    variables = [both[0] for both in saved_variables(model).values()]
    snapshot = Snapshot(6, values(named_variables(model, variables, [step.optimizer])), facts(6))
    groups = named_groups(step)
    model.alias = step.groups[0].optimizer  # a second attribute of the run's model
    aliased = named_groups(step)
    del model.alias
    describe(tmp_path, model, lambda: build().optimizer, pytest.fail, aliased)
    Checkpoints(tmp_path / "checkpoints").save(snapshot)
    write_model(tmp_path, model, step.optimizer, lambda: snapshot.arrays, 6, build, pytest.fail, groups)
    for loaded in (tf2dist.load_model(tmp_path), tf2dist.load_model(tmp_path, 6)):
        for its, own in zip(loaded.others, model.others, strict=True):
            assert_same_values(its.variables, own.variables)
        if several:
            assert not loaded.optimizer.built or not np.any([v.numpy().any() for v in loaded.optimizer.variables[2:]])
        else:
            assert int(loaded.optimizer.iterations) == 18
            assert_same_values(loaded.optimizer.variables, model.optimizer.variables)
    assert loaded.alias in (loaded.optimizer, *loaded.others)
    description, owner = tmp_path / DESCRIPTION, "others/0" if several else "optimizer"
    description.write_text(re.sub(rf'"({owner}|alias)"(?=,?\n)', '"gone"', description.read_text()))
    with pytest.warns(UserWarning, match="gives a loaded model no gone"):
        assert_same_values(tf2dist.load_model(tmp_path, 6).weights, model.weights)


def test_a_run_that_has_not_ended_gives_its_newest_checkpoint(tmp_path: Path) -> None:
    model, given = trained(nameless), []
    for saved_step in (3, 5):
        leave(tmp_path, model, nameless, saved_step)
        given.append(outputs_of(model))
        model.layers[-1].bias.assign([1.0, 2.0, 3.0])
    (tmp_path / MODEL_FILE).unlink()
    for step, outputs in ((3, given[0]), (None, given[1])):
        np.testing.assert_allclose(outputs_of(tf2dist.load_model(tmp_path, step)), outputs, rtol=1e-5)


def test_evaluated_weights_may_differ_from_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = trained(nameless)
    before = outputs_of(model)
    describe(tmp_path, model, lambda: nameless().optimizer, pytest.fail)
    Checkpoints(tmp_path / "checkpoints").save(snapshot_of(model, 7))
    model.layers[-1].bias.assign([1.0, 2.0, 3.0])  # as an optimizer with moving averages of the weights does at the end
    write_model(tmp_path, model, model.optimizer, lambda: snapshot_of(model, 7).arrays, 7, nameless, pytest.fail)
    at_the_end = outputs_of(tf2dist.load_model(tmp_path))
    np.testing.assert_allclose(at_the_end, outputs_of(model), rtol=1e-5)
    np.testing.assert_allclose(outputs_of(tf2dist.load_model(tmp_path, 7)), before, rtol=1e-5)
    assert not np.allclose(at_the_end, before)


def test_a_wait_for_the_disk_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the call in which Keras writes the weights nor in the one that flushes the file to the disk."""
    monkeypatch.setattr(heartbeat, "_watchdog_secs", 1.0)
    monkeypatch.setattr(heartbeat, "_deadline", 0.0)
    left: list[float] = []

    def recording(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            left.append(heartbeat._deadline - time.monotonic())
            heartbeat.progress()
            return call(*args, **options)

        return noted

    model = trained(nameless)
    monkeypatch.setattr(keras.saving, "save_model", recording(keras.saving.save_model))
    describe(tmp_path, model, lambda: nameless().optimizer, pytest.fail)
    monkeypatch.setattr(os, "fsync", recording(os.fsync))
    write_model(tmp_path, model, model.optimizer, lambda: snapshot_of(model, 7).arrays, 7, nameless, pytest.fail)
    assert min(left[:2]) > heartbeat.START_SECS / 2


def test_a_learning_rate_that_a_callback_has_changed(tmp_path: Path) -> None:
    model = trained(nameless)
    model.optimizer.learning_rate = 0.002
    leave(tmp_path, model, nameless)
    assert float(tf2dist.load_model(tmp_path).optimizer.learning_rate) == pytest.approx(0.002)


@pytest.mark.parametrize("step", [None, 7])
def test_custom_classes_come_from_the_caller(tmp_path: Path, step: int | None) -> None:
    model = trained(with_own_layer)
    assert leave(tmp_path, model, with_own_layer) == []
    with pytest.raises(ConfigError, match=r"needs the class Twice, which is your own code; give custom_objects"):
        tf2dist.load_model(tmp_path, step)
    for loaded in (tf2dist.load_model(tmp_path, step, {"Twice": Twice}), registered(tmp_path, step)):
        np.testing.assert_allclose(outputs_of(loaded), outputs_of(model), rtol=1e-5)


def registered(run_dir: Path, step: int | None) -> keras.Model:
    with keras.saving.custom_object_scope({"Twice": Twice}):
        return tf2dist.load_model(run_dir, step)


@pytest.mark.parametrize(("role", "words"), [("layer", "a Lambda layer"), ("loss", "a lambda as its loss")])
def test_a_lambda_is_not_executed_without_consent(tmp_path: Path, role: str, words: str) -> None:
    def build() -> keras.Model:
        doubling = keras.layers.Lambda(lambda x: 2.0 * x, output_shape=(6,))
        first = doubling if role == "layer" else keras.layers.Identity()
        model = keras.Sequential([keras.Input((6,)), first, keras.layers.Dense(3)])
        model.compile("sgd", (lambda y, p: (y - p) ** 2) if role == "loss" else "mse")
        return model

    assert leave(tmp_path, build(), build) == []
    for step in (None, 7):
        with pytest.raises(ConfigError, match=f"its model has {words}, which is code in the file"):
            tf2dist.load_model(tmp_path, step)


@pytest.mark.parametrize("name", ["arrays", "stream"])
def test_the_data_of_a_call_of_fit_have_to_be_named(name: str, tmp_path: Path) -> None:
    """A run does not keep a copy of the data."""
    leave(tmp_path, nameless(), nameless)
    (tmp_path / "config.yaml").write_text(RunConfig(data=DataConfig(name=name)).to_yaml())
    for command in (evaluate, predict):
        with pytest.raises(
            ConfigError, match=rf"data \({name}\): came with the call of tf2dist.fit, .*; give data=NAME"
        ):
            command.run([str(tmp_path)])


def test_options_of_the_data_apply_to_those_of_the_run(tmp_path: Path) -> None:
    """Not to mnist, the default of a training."""
    own = DataConfig(name="digits", num_validation=50, offline="fail")
    (tmp_path / "config.yaml").write_text(RunConfig(data=own).to_yaml())
    line = CommandLine(tmp_path, [], {}, ["data.num_validation=100"], None, [])
    name, splits = data_of(line)
    assert (name, len(splits.validation or ())) == ("digits", 100)
    name, splits = data_of(replace(line, data=[f"data.dir={tmp_path}"]))
    assert (name, len(splits.validation or ())) == ("digits", 50), "the run's own number"
    with pytest.raises(ConfigError, match=r"data\.size: is not an option of data=digits"):
        data_of(replace(line, data=["+data.size=3"]))


class OfWords(keras.Model):  # type: ignore[misc]
    """A subclass of keras.Model, which has no `output_shape`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.words = keras.layers.StringLookup(vocabulary=["good", "bad"], output_mode="one_hot")
        self.outputs_of = keras.layers.Dense(2, "softmax")

    def call(self, inputs: Any) -> Any:
        return self.outputs_of(self.words(inputs))


def test_the_commands_take_text_and_a_model_without_an_output_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, labels = np.array([["good"], ["bad"]] * 5), np.array([0, 1] * 5)

    def build() -> keras.Model:
        model = OfWords()
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    split = Arrays(words, labels)
    monkeypatch.setitem(registry.DATA, "words", lambda config: Splits(split, split, split))
    monkeypatch.setattr(opening, "code_of", lambda plugins: {"OfWords": OfWords})
    model = build()
    model.fit(tf.constant(words), labels, verbose=0)
    leave(tmp_path, model, build)
    (tmp_path / "config.yaml").write_text(RunConfig(data=DataConfig(name="words")).to_yaml())
    evaluate.run([str(tmp_path)])
    assert "10 examples of words, test" in capsys.readouterr().out
    predict.run([str(tmp_path)])
    accuracy = model.evaluate(tf.constant(words), labels, verbose=0)[1]
    assert f"accuracy {accuracy:.4f} over 10 examples" in capsys.readouterr().out


def test_refusals_name_the_folder_the_file_or_the_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run_dir \(.*nowhere\): there is no such folder"):
        tf2dist.load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"run_dir \(~nosuchuser/a\): there is no such home directory"):
        tf2dist.load_model("~nosuchuser/a")
    with pytest.raises(CheckpointError, match=r"holds neither model\.keras nor a checkpoint"):
        tf2dist.load_model(tmp_path)
    model = trained(nameless)
    leave(tmp_path, model, nameless, step=3)
    leave(tmp_path, model, nameless, step=7)
    with pytest.raises(CheckpointError, match=r"step \(5\): there is no such checkpoint; choose one of 3, 7"):
        tf2dist.load_model(tmp_path, 5)
    (tmp_path / "checkpoints" / "step-0000000003" / "arrays.npz").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"step \(3\): .* is damaged"):
        tf2dist.load_model(tmp_path, 3)
    (tmp_path / MODEL_FILE).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"model\.keras: cannot be loaded"):
        tf2dist.load_model(tmp_path)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.json: cannot be loaded"):
        tf2dist.load_model(tmp_path, 7)
    (tmp_path / "model.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.json"):
        tf2dist.load_model(tmp_path, 7)


def test_a_file_that_cannot_be_read_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path, trained(nameless), nameless, step=3)
    checkpoint = tmp_path / "checkpoints" / "step-0000000003"
    # What is asked before a file of the run is opened, which a process without descriptors could not ask either.
    monkeypatch.setattr(load_model, "_check_memory", lambda *_: None)
    monkeypatch.setattr(Checkpoints, "paths", lambda _: [checkpoint])
    for step, first_file in ((None, tmp_path / MODEL_FILE), (3, checkpoint / "manifest.json")):
        with no_more_open_files(), pytest.raises(TaskLostError) as told:
            tf2dist.load_model(tmp_path, step)
        assert str(told.value) == f"{first_file}: cannot be read (Too many open files); try again when it can be"
    monkeypatch.undo()
    with no_more_open_files(), pytest.raises(TaskLostError, match=r"cannot be read \(Too many open files\)"):
        tf2dist.load_model(tmp_path)


def test_a_file_without_an_example_to_predict_is_refused(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input([28, 28]), keras.layers.Flatten()])
    empty = tmp_path / "empty.npy"
    np.save(empty, np.zeros((0, 28, 28), np.uint8))
    with pytest.raises(DataError, match=r"empty\.npy: is uint8 \[0, 28, 28\], without any examples; save one"):
        read(empty, model)
    with pytest.raises(DataError, match=r"gone\.npy: cannot be read \(No such file or directory\); name an image"):
        read(tmp_path / "gone.npy", model)
    empty.write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.npy: is no numpy array \(No data left in file\); save one"):
        read(empty, model)


def test_a_model_that_differs_from_the_checkpoint_is_refused(tmp_path: Path) -> None:
    leave(tmp_path, trained(nameless), nameless)
    leave(tmp_path, trained(with_own_layer), with_own_layer, step=8)
    with pytest.raises(CheckpointError, match=r"the model is another one: missing: .* extra: "):
        tf2dist.load_model(tmp_path, 7, {"Twice": Twice})


def test_a_model_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    """No part of its file stays, and no model of an earlier run."""
    model = trained(nameless)
    leave(tmp_path, model, nameless)

    def other() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    (text,) = leave(tmp_path, model, other)
    assert text.startswith("model.keras could not be written (the model is another one")
    assert not (tmp_path / MODEL_FILE).exists()
    (tmp_path / "nowhere" / "run").parent.write_bytes(b"")
    texts = leave_only(tmp_path / "nowhere" / "run", model)
    assert all("could not be written (Not a directory)" in text for text in texts)
    assert len(texts) == 2


class Around(keras.Model):  # type: ignore[misc]
    """A model that Keras cannot describe: it is made from another one, and does not say how."""

    def __init__(self, inner: keras.Model) -> None:
        super().__init__()
        self.inner = inner

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


def test_the_warning_says_what_a_model_lacks(tmp_path: Path) -> None:
    model = Around(nameless())
    model.compile("sgd", "mse")
    warnings: list[str] = []
    describe(tmp_path, model, lambda: keras.optimizers.SGD(), warnings.append)
    assert "Please implement `get_config()`.); load_model will need the end of the run" in warnings[0]


def leave_only(run_dir: Path, model: keras.Model) -> list[str]:
    warnings: list[str] = []
    describe(run_dir, model, lambda: nameless().optimizer, warnings.append)
    write_model(run_dir, model, model.optimizer, lambda: snapshot_of(model, 7).arrays, 7, nameless, warnings.append)
    return warnings


def test_only_weights_that_were_saved_are_said_to_be_in_the_checkpoints(tmp_path: Path) -> None:
    model, warnings = trained(nameless), list[str]()
    given = model, model.optimizer, lambda: snapshot_of(model, 7).arrays, 7, nameless, warnings.append
    (tmp_path / MODEL_FILE).mkdir()
    for is_saved in (True, False):
        write_model(tmp_path, *given, is_saved=is_saved)
    failed = "model.keras could not be written (Is a directory)"
    assert warnings == [f"{failed}; the checkpoints have the model, for load_model", failed]


def test_a_link_is_replaced_and_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    run_dir = tmp_path / "run"
    (run_dir / TEMPORARY).mkdir(parents=True)
    (run_dir / TEMPORARY / "half").write_text("half")
    model = trained(nameless)
    describe(run_dir, model, lambda: nameless().optimizer, pytest.fail)
    (run_dir / MODEL_FILE).symlink_to(precious)
    write_model(run_dir, model, model.optimizer, lambda: snapshot_of(model, 7).arrays, 7, nameless, pytest.fail)
    assert precious.read_text() == "keep me"
    assert not (run_dir / MODEL_FILE).is_symlink()
    assert sorted(path.name for path in run_dir.iterdir()) == ["model.json", "model.keras"]


HUGE = 1 << 42


def test_a_model_that_does_not_fit_into_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither written nor loaded; both say in a line what it needs."""
    model, warnings = trained(nameless), list[str]()
    leave(tmp_path, model, nameless)
    with open(tmp_path / "table", "wb") as file:
        file.truncate(HUGE)
    table = np.memmap(tmp_path / "table", np.uint8, "r")
    given = model, model.optimizer, lambda: snapshot_of(model, 7).arrays | {"optimizer/table": table}, 7, nameless
    (tmp_path / MODEL_FILE).unlink()
    write_model(tmp_path, *given, warnings.append)
    needs = r"needs 13194\.1 GB of memory, and this machine has \d+\.\d GB free; "
    assert re.fullmatch(
        f"model.keras was not written: it {needs}the checkpoints have the model, for load_model", warnings[0]
    )
    assert_same(tf2dist.load_model(tmp_path), tf2dist.load_model(tmp_path, 7))

    (tmp_path / "table").rename(tmp_path / MODEL_FILE)
    with pytest.raises(ConfigError, match=needs + "load it on another machine"):
        tf2dist.load_model(tmp_path)
    monkeypatch.setattr(finished_model, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"needs 0\.0 GB of memory, and this machine has 0\.0 GB free"):
        tf2dist.load_model(tmp_path, 7)
