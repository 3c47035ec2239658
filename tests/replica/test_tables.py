"""Both modes give the results of `keras.Model.fit` for a regression, two weighted classes and three classes."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest

from tests.replica.in_memory_source import AsOfFit, RecordingHooks, weights_of
from tests.replica.test_epochs import BATCH, EPOCHS, SEED, assert_same, config_of, drive, train_in_sync
from tf2dist.data.splits import Splits
from tf2dist.fitting.request import training_set, validation_set
from tf2dist.model.source import EpochPlan
from tf2dist.testing import SyncWorker, SyncWorkers

layers = keras.layers
VALIDATION = 0.2
NUM_TRAINED = {"diabetes": 353, "breast cancer": 455, "wine": 142}  # examples without those for validation


def diabetes() -> keras.Model:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(16, "relu"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae", keras.metrics.R2Score()])
    return model


def breast_cancer() -> keras.Model:
    model = keras.Sequential([keras.Input((30,)), layers.Dense(8, "tanh"), layers.Dense(1, "sigmoid")])
    counts = [keras.metrics.TruePositives(name="hits"), keras.metrics.AUC(name="auc")]
    model.compile("rmsprop", "binary_crossentropy", metrics=["accuracy", *counts], weighted_metrics=["binary_accuracy"])
    return model


def wine() -> keras.Model:
    model = keras.Sequential([keras.Input((13,)), layers.Dense(16, "relu"), layers.Dense(3, "softmax")])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@dataclass(frozen=True)
class Table:
    """A table of scikit-learn, by its name there; its columns have mean 0 and standard deviation 1."""

    name: str
    make: Callable[[], keras.Model]
    class_weight: dict[int, float] | None = None

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """x [n, columns] and y [n], shuffled, because the file may be sorted by class."""
        datasets = importlib.import_module("sklearn.datasets")  # a second, which not every process of the tests pays
        x, y = getattr(datasets, f"load_{self.name}")(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        is_number = y.dtype.kind == "f"
        return standardized(x)[order], (standardized(y) if is_number else y)[order]

    def source(self) -> AsOfFit:
        examples = training_set(*self.columns(), None, self.class_weight)
        train, validation = validation_set(examples, None, VALIDATION, self.class_weight is not None)
        plan = EpochPlan(epochs=EPOCHS, shuffle=False, validation_batch_size=BATCH)
        return AsOfFit(self.make, Splits(train, validation, num_classes=None), plan)


def standardized(columns: np.ndarray) -> np.ndarray:
    found: np.ndarray = (columns - columns.mean(0)) / columns.std(0)
    return found


TABLES = {
    "diabetes": Table("diabetes", diabetes),
    "breast cancer": Table("breast_cancer", breast_cancer, {0: 2.5, 1: 0.75}),
    "wine": Table("wine", wine),
}


def keras_fit(table: Table) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """What `fit` of Keras returns; it applies `class_weight` itself."""
    keras.utils.set_random_seed(SEED)
    model = table.make()
    history = model.fit(
        *table.columns(),
        batch_size=BATCH,
        epochs=EPOCHS,
        class_weight=table.class_weight,
        validation_split=VALIDATION,
        shuffle=False,
        verbose=0,
    )
    return history.history, weights_of(model)


Trained = dict[str, tuple[Any, list[np.ndarray]]]


def train_tables_in_sync(worker: SyncWorker, names: list[str], batch_size: int) -> Trained:
    return {name: train_in_sync(worker, TABLES[name].source(), batch_size) for name in names}


THOROUGH = ["wine", "diabetes"]


# Workers take seconds to connect, so the same ones train on all tables.
@pytest.fixture(scope="module", params=[1, pytest.param(3, marks=pytest.mark.slow)])
def results_of_workers(sync_workers: SyncWorkers, request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """Gives the results of each worker; three workers with a third of the batch each must equal one worker."""

    @functools.cache
    def trained(is_thorough: bool) -> list[Trained]:
        names = [name for name in TABLES if (name in THOROUGH) == is_thorough]
        return sync_workers(train_tables_in_sync, request.param, (names, BATCH // request.param))

    return lambda name: [found[name] for found in trained(name in THOROUGH)]


@pytest.mark.parametrize(
    ("name", "steps_per_call"),
    [
        pytest.param("diabetes", 5, marks=pytest.mark.thorough),
        pytest.param("breast cancer", None, marks=pytest.mark.slow),
        pytest.param("wine", 40, marks=pytest.mark.thorough),
    ],
)
def test_one_asynchronous_worker_equals_keras(
    name: str, steps_per_call: int | None, async_loop: Any, publishing: Any
) -> None:
    """Steps beyond the end of an epoch are refused; their batches belong to the next epoch."""
    source, config, hooks = TABLES[name].source(), config_of(BATCH), RecordingHooks()
    config.train.steps_per_execution = steps_per_call
    publishing(source.load())
    loop = async_loop(config, 1, 1, source=source)
    drive(loop, source, hooks)
    assert_same((hooks.history(), weights_of(loop.model)), keras_fit(TABLES[name]))
    assert loop.progress.examples == EPOCHS * NUM_TRAINED[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in THOROUGH else []) for name in TABLES]
)
def test_synchronous_workers_equal_keras(name: str, results_of_workers: Callable[[str], list[Any]]) -> None:
    expected = keras_fit(TABLES[name])
    for found in results_of_workers(name):
        assert_same(found, expected)
