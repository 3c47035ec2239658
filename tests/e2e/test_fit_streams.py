"""`tf2dist.fit(build, data=load)` on real clusters: results, progress and messages."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.e2e.test_fit import ONE, X, Y, assert_same, regression, weights_agree
from tf2dist.tf_internals.keras import fresh_names

THREE = tf2dist.Local(workers=3, ps=1)
MODES = ["async", "sync"]


def rows(shard: tf2dist.Shard) -> tf.data.Dataset:
    """The rows of a worker in order; its last batch is smaller."""
    mine = np.array_split(np.arange(len(X)), shard.count)[shard.index]
    return tf.data.Dataset.from_tensor_slices((X[mine], Y[mine])).batch(shard.batch_size)


def generated(shard: tf2dist.Shard) -> tf.data.Dataset:
    """Batches of a Python generator, more of them for later workers."""

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, 20 * (shard.index + 2), 20):
            yield X[first : first + shard.batch_size], Y[first : first + shard.batch_size]

    signature = tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None, 1], tf.float32)
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def keras_fit(load: Any, **arguments: Any) -> tuple[keras.Model, dict[str, list[float]]]:
    with fresh_names():
        model = regression()
    dataset = load(tf2dist.Shard(0, 1, 0, 30))
    return model, model.fit(dataset.repeat(), verbose=0, **arguments).history


def fit(load: Any, run_dir: Path, cluster: tf2dist.Local = ONE, **arguments: Any) -> tf2dist.Result:
    arguments = {"batch_size": 30, "verbose": 0, "epochs": 3, **arguments}
    return tf2dist.fit(regression, data=load, cluster=cluster, run_dir=run_dir, **arguments)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_one_worker_equals_keras(mode: str, tmp_path: Path) -> None:
    """A pass has seven batches, the last of them smaller; `steps_per_epoch` may be left out."""
    validation = (X[:50], Y[:50])
    model, history = keras_fit(rows, epochs=3, steps_per_epoch=7, validation_data=validation)
    result = fit(rows, tmp_path / "run", mode=mode, validation_data=validation)
    assert_same(result.history, history)
    assert weights_agree(result.model, model)
    assert result.summary["global_step"] == 21
    assert result.summary["examples_seen"] == 600


def held_out(shard: tf2dist.Shard) -> tf.data.Dataset:
    """A part of 70 rows; the last batch is smaller."""
    mine = slice(shard.index, 70, shard.count)
    return tf.data.Dataset.from_tensor_slices((X[mine], Y[mine])).batch(shard.batch_size)


@pytest.mark.parametrize(
    "mode", [pytest.param("async", marks=pytest.mark.thorough), pytest.param("sync", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("data", [{"data": rows}, pytest.param({"x": X, "y": Y}, marks=pytest.mark.slow)], ids=len)
def test_all_workers_validate_on_their_parts_of_a_stream(mode: str, data: Any, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"batch_size": 30, "epochs": 2, "cluster": tf2dist.Local(2, 1), "mode": mode, **data}
    arguments |= {"validation_data": held_out, "validation_batch_size": 16, "run_dir": tmp_path / "run"}
    assert_validated(tf2dist.fit(regression, verbose=0, **arguments))


def assert_validated(result: tf2dist.Result) -> None:
    """Asserts that the last epoch was validated on all of `held_out`."""
    assert result.model is not None
    expected = result.model.evaluate(X[:70], Y[:70], verbose=0, return_dict=True)
    assert {name: result.history[f"val_{name}"][-1] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert result.summary["validation_examples"] == 70


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_workers_with_different_numbers_of_batches_finish(mode: str, tmp_path: Path) -> None:
    result = fit(generated, tmp_path / "run", THREE, mode=mode, steps_per_epoch=11)
    summary = result.summary
    assert summary["global_step"] == summary["updates_applied"] == 33
    assert summary["examples_seen"] == 33 * 30 * (3 if mode == "sync" else 1)
    local_steps = [worker["local_steps"] for worker in summary["workers"]]
    assert local_steps == [33] * 3 if mode == "sync" else sum(local_steps) == 33
    assert len(result.history["loss"]) == 3


def numbered(shard: tf2dist.Shard) -> tf.data.Dataset:
    """Each batch holds its own number."""

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number in range(1000):
            yield np.full([1, 1], number, "float32"), np.zeros([1, 1], "float32")

    signature = tf.TensorSpec([None, 1], tf.float32), tf.TensorSpec([None, 1], tf.float32)
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def summing() -> keras.Model:
    """A model whose only weight decreases by the number of each batch that it is trained on."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), loss=output_alone)
    return model


def output_alone(y: Any, output: Any) -> Any:
    return keras.ops.mean(output, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_continues_at_its_batch(mode: str, tmp_path: Path) -> None:
    """Every batch is trained on exactly once, so the weight is minus the sum of their numbers."""

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyError("as if the power failed")

    arguments: dict[str, Any] = {"cluster": ONE, "epochs": 4, "steps_per_epoch": 13, "batch_size": 1, "verbose": 0}
    arguments |= {"run_dir": tmp_path / "run", "mode": mode, "options": {"checkpoint.every_steps": 13}}
    with pytest.raises(KeyError, match="power failed"):
        tf2dist.fit(summing, data=numbered, callbacks=[Fail()], **arguments)
    result = tf2dist.fit(summing, data=numbered, **arguments)
    assert result.summary["global_step"] == 52
    assert result.model.get_weights()[0].item() == -sum(range(52))


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_an_epoch_ends_with_the_data(mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In async with that of all three workers, who have 2, 3 and 4 batches, and in sync with that of the first one.

    All workers validate on their parts of another stream.
    """
    validation = {"validation_data": held_out, "validation_batch_size": 16}
    result = fit(generated, tmp_path / "run", THREE, mode=mode, verbose=1, **validation)
    assert_validated(result)
    summary, told = result.summary, "epoch 1 ended with the data of one worker; batches of 2 others were left out"
    assert [worker["local_steps"] for worker in summary["workers"]] == ([6, 9, 12] if mode == "async" else [6] * 3)
    assert summary["global_step"] == summary["updates_applied"] == (27 if mode == "async" else 6)
    assert summary["examples_seen"] == (27 if mode == "async" else 18) * 30
    assert summary["epochs"] == len(result.history["loss"]) == 3
    assert capfd.readouterr().err.count(told) == (0 if mode == "async" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_worker_reads_its_stream_to_the_end(mode: str, tmp_path: Path) -> None:
    """Every batch of both epochs is trained on exactly once, so the weight is minus the sum of their numbers."""
    marker = tmp_path / "killed"

    def killing(shard: tf2dist.Shard) -> tf.data.Dataset:
        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for number in range(300):
                if number == 170 and shard.index == 1 and not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield np.full([1, 1], 1000 * shard.index + number, "float32"), np.zeros([1, 1], "float32")

        signature = tf.TensorSpec([None, 1], tf.float32), tf.TensorSpec([None, 1], tf.float32)
        return tf.data.Dataset.from_generator(batches, output_signature=signature)

    shared: dict[str, Any] = {"batch_size": 1, "epochs": 2, "verbose": 0, "run_dir": tmp_path / "run", "mode": mode}
    result = tf2dist.fit(summing, data=killing, cluster=tf2dist.Local(2, 1), **shared)
    assert marker.exists()
    assert result.summary["restarts"] >= 1
    assert result.summary["global_step"] == (1200 if mode == "async" else 600)
    total = 2 * (2 * sum(range(300)) + 300 * 1000)
    assert result.model.get_weights()[0].item() == (-total if mode == "async" else -total / 2)


def raising(shard: tf2dist.Shard) -> tf.data.Dataset:
    """The generator of the second worker fails after 20 batches."""

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(20):
            yield X[:30], Y[:30]
        if shard.index == 1:
            raise KeyError("no such file")
        yield from batches()

    signature = tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None, 1], tf.float32)
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def without_batches(shard: tf2dist.Shard) -> tf.data.Dataset:
    """The second worker gets no batch."""
    return generated(shard).take(0 if shard.index == 1 else 9)


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (raising, f"shard 1 of 2: KeyError: 'no such file' ({__file__}:"),
        pytest.param(without_batches, "shard 1 of 2 gives no batch", marks=pytest.mark.slow),
    ],
)
def test_data_that_fails_in_a_worker_is_named(mode: str, load: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(tf2dist.DataError) as raised:
        fit(load, tmp_path / "run", tf2dist.Local(2, 1), mode=mode, steps_per_epoch=100)
    assert f"data ({load.__name__}): {reason}" in str(raised.value).splitlines()[0]
    assert raised.value.exit_code == 2


def unknown_shape(shard: tf2dist.Shard) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter([]), (tf.float32, tf.float32))


INVALID: dict[str, tuple[Any, str]] = {
    "no dataset": (lambda shard: [X, Y], "gives a list, and must give a tf.data.Dataset"),
    "no batches": (lambda shard: tf.data.Dataset.from_tensor_slices((X, Y[:, 0])), "is no batch; end with"),
    "one example": (lambda shard: tf.data.Dataset.from_tensor_slices((X, Y)), "are no batches; end with"),
    "four parts": (lambda shard: tf.data.Dataset.from_tensor_slices((X, Y, Y, Y)).batch(9), "have 4 parts; give"),
    "unknown shape": (unknown_shape, "the number of its dimensions must be known"),
    "ragged": (lambda shard: tf.data.Dataset.from_tensors((tf.ragged.constant([[1.0], []]), Y[:2])), "RaggedTensor"),
    "raises": (lambda shard: X["no"], "shard 0 of 1: IndexError: "),
    "raises in a graph": (
        lambda shard: tf.data.Dataset.from_tensors((X, Y)).map(lambda x, y: (x, bool(y))),
        "OperatorNotAllowedInGraphError: Using a symbolic `tf.Tensor` as a Python `bool` is not allowed.",
    ),
    "no end": (lambda shard: rows(shard).repeat(), "steps_per_epoch: must be given, since data (lambda): shard 0 of 1"),
    "no function": (X, "data: is an ndarray; give a function"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_data_is_refused_before_anything_starts(kind: str, tmp_path: Path) -> None:
    load, reason = INVALID[kind]
    with pytest.raises(tf2dist.TfDistError, match=re.escape(reason)) as raised:
        fit(load, tmp_path / "run")
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_workers_that_average_seldom_cannot_tell_where_their_data_end(tmp_path: Path) -> None:
    options = {"algorithm": "local_sgd"}
    with pytest.raises(tf2dist.ConfigError, match="steps_per_epoch: must be given with algorithm=local_sgd"):
        fit(generated, tmp_path / "run", THREE, mode="sync", options=options)


def test_a_model_that_needs_a_size_which_the_data_do_not_tell_is_refused(tmp_path: Path) -> None:
    def of_unknown_width(shard: tf2dist.Shard) -> tf.data.Dataset:
        signature = tf.TensorSpec([None, None]), tf.TensorSpec([None, 1])
        return tf.data.Dataset.from_generator(lambda: iter([(X, Y)]), output_signature=signature)

    def without_input() -> keras.Model:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(tf2dist.ConfigError, match=r"cannot be called with x of the data, \('float32 \[n, None\]'"):
        tf2dist.fit(without_input, data=of_unknown_width, cluster=ONE, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def endless(shard: tf2dist.Shard) -> tf.data.Dataset:
    return rows(shard).repeat()


def of_two_columns(shard: tf2dist.Shard) -> tf.data.Dataset:
    return rows(shard).map(lambda x, y: (x[:, :2], y))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mode": "sync_replicas"}, "data: mode='sync_replicas' trains on arrays"),
        ({"x": X}, "x: cannot be given together with data; its batches are"),
        ({"y": Y}, "y: cannot be given together with data"),
        ({"sample_weight": Y}, "sample_weight: cannot be given together with data; give batches"),
        ({"class_weight": {0: 1.0}}, "class_weight: cannot be given together with data"),
        ({"validation_split": 0.1}, "validation_split: cannot be given together with data; give validation_data"),
        ({"shuffle": False}, "shuffle: cannot be given together with data; shuffle in the function"),
        ({"validation_data": rows(tf2dist.Shard(0, 1, 0, 9))}, "validation_data: is a _BatchDataset"),
        ({"validation_data": rows, "validation_steps": 3}, "use dataset.take in it"),
        ({"validation_data": endless}, "validation_data (endless): shard 0 of 1 has no end"),
        ({"validation_data": of_two_columns}, "validation_data: is ('float32 [n, 2]'"),
        ({"data": None, "x": rows(tf2dist.Shard(0, 1, 0, 9))}, "give data=load, a function that makes the dataset"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_arguments_that_do_not_fit_a_stream_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(tf2dist.ConfigError, match=re.escape(reason)):
        tf2dist.fit(regression, **{"data": rows, "cluster": ONE, **arguments})
