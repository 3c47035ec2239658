"""`tf2dist.fit` with three workers on a table of scikit-learn, compared with `keras.Model.fit`."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf2dist
from tests.e2e.test_fit import assert_same, weights_agree
from tf2dist.tf_internals.keras import fresh_names

THREE = tf2dist.Local(workers=3, ps=1)
SEED = 5
CLASS_WEIGHT = {0: 2.0, 1: 0.75}
COUNTS = ("true_positives", "true_negatives", "false_positives", "false_negatives")


def breast_cancer() -> tuple[np.ndarray, np.ndarray]:
    from sklearn import datasets  # a second, which not every process of the tests pays

    x, y = datasets.load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return ((x - x.mean(0)) / x.std(0))[order], y[order]


def build() -> keras.Model:
    model = keras.Sequential([keras.Input([30]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1, "sigmoid")])
    counts = [getattr(keras.metrics, name.title().replace("_", ""))(name=name) for name in COUNTS]
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy", *counts])
    return model


def keras_fit(**arguments: Any) -> tuple[keras.Model, dict[str, list[float]]]:
    keras.utils.set_random_seed(SEED)
    with fresh_names():
        model = build()
    return model, model.fit(*breast_cancer(), class_weight=CLASS_WEIGHT, verbose=0, **arguments).history


def fit(run_dir: Path, mode: str, **arguments: Any) -> tf2dist.Result:
    arguments |= {"class_weight": CLASS_WEIGHT, "cluster": THREE, "seed": SEED, "verbose": 0}
    x, y = breast_cancer()
    return tf2dist.fit(build, x, y, mode=mode, run_dir=run_dir, **arguments)


@pytest.mark.slow
def test_three_synchronous_workers_equal_one_with_three_times_the_batch(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"epochs": 4, "validation_split": 0.2, "shuffle": False}
    result = fit(tmp_path / "run", "sync", batch_size=16, **arguments)
    model, history = keras_fit(batch_size=48, **arguments)
    assert_same(result.history, history)
    assert weights_agree(result.model, model)
    assert result.summary["examples_seen"] == 4 * 455


@pytest.mark.slow
def test_three_synchronous_replicas_equal_one_worker_with_three_times_the_batch(tmp_path: Path) -> None:
    """That holds also if a callback changes the learning rate, and if the run is resumed with more epochs."""
    arguments: dict[str, Any] = {"validation_split": 0.2, "shuffle": False}

    def decaying_rate() -> list[keras.callbacks.Callback]:
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (1 + epoch))]

    fit(tmp_path / "run", "sync_replicas", epochs=2, callbacks=decaying_rate(), batch_size=16, **arguments)
    result = fit(tmp_path / "run", "sync_replicas", epochs=4, callbacks=decaying_rate(), batch_size=16, **arguments)
    model, history = keras_fit(batch_size=48, epochs=4, callbacks=decaying_rate(), **arguments)
    assert_same(result.history, history)
    assert weights_agree(result.model, model)
    assert result.summary["examples_seen"] == 4 * 455
    assert result.summary["aggregated"] == [4 * 10] * 3
    assert result.summary["dropped"] == [0] * 3


@pytest.mark.slow
def test_asynchronous_workers_count_every_example(tmp_path: Path) -> None:
    """The counts of steps and examples are exact, and the model is about as good as that of `keras.Model.fit`."""
    arguments: dict[str, Any] = {"epochs": 8, "validation_split": 0.2, "batch_size": 16}
    result = fit(tmp_path / "run", "async", **arguments)
    summary, history = result.summary, result.history
    steps = -(-455 // 16)  # of an epoch, whose last batch is smaller
    assert summary["global_step"] == summary["updates_applied"] == 8 * steps
    assert sum(worker["local_steps"] for worker in summary["workers"]) == 8 * steps
    counted = [[history[prefix + name] for name in COUNTS] for prefix in ("", "val_")]
    assert np.sum(counted[0]) == summary["examples_seen"]
    assert np.sum(counted[1], axis=0).tolist() == [114] * 8, (
        "each example of the validation set must be counted once an epoch"
    )
    _, expected = keras_fit(**arguments)
    assert history["val_accuracy"][-1] > expected["val_accuracy"][-1] - 0.05
    assert history["val_loss"][-1] < expected["val_loss"][-1] + 0.1
