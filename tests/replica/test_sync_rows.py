"""Rows of large tables with mode=sync: all workers get the same bits, and the result is that of Keras."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import run_config, sync_loop
from tests.replica.test_embedding_rows import BATCH, COLUMNS, OPTIMIZERS, ROWS, SPLITS, STEPS, by_keras, model_of
from tf2dist.config.schema import RunConfig
from tf2dist.testing import SyncWorker, SyncWorkers

TIMEOUT_SECS = 300.0
layers = keras.layers
pytestmark = pytest.mark.timeout(400)


def tables_alone() -> keras.Model:
    """Matrix factorization: nothing but tables is trained."""
    keras.utils.set_random_seed(3)
    ids, item = keras.Input((3,), name="ids", dtype="int32"), keras.Input((), name="item", dtype="int32")
    users = layers.GlobalAveragePooling1D()(layers.Embedding(ROWS, COLUMNS)(ids))
    model = keras.Model({"ids": ids, "item": item}, layers.Dot(1)([users, layers.Embedding(ROWS, COLUMNS)(item)]))
    model.compile(keras.optimizers.Adagrad(keras.optimizers.schedules.InverseTimeDecay(0.5, 3, 0.5)), "mse")
    return model


def squares(y: Any, found: Any) -> Any:
    return keras.ops.mean((found - keras.ops.reshape(y, (-1, 1, 1))) ** 2, -1)


def masked() -> keras.Model:
    """Its loss is divided by the places that a mask leaves, of which each worker has another number."""
    keras.utils.set_random_seed(3)
    ids, item = keras.Input((3,), name="ids", dtype="int32"), keras.Input((), name="item", dtype="int32")
    frequent = keras.ops.where(ids > 5, ids, 0)
    both = [layers.Embedding(ROWS, COLUMNS, mask_zero=True)(frequent) for _ in range(2)]
    model = keras.Model({"ids": ids, "item": item}, layers.Dense(2)(layers.Add()(both)))
    model.compile(keras.optimizers.SGD(0.5), squares)
    return model


def chosen_by_path() -> keras.Model:
    inner = {".*items.*": keras.optimizers.SGD(0.5, global_clipnorm=0.01), ".*shared.*": keras.optimizers.Adagrad(0.1)}
    by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1, global_clipnorm=0.1), inner)
    return model_of(lambda: keras.optimizers.MultiOptimizer(by_path))


MODELS: dict[str, Callable[[], keras.Model]] = {
    **{name: functools.partial(model_of, optimizer) for name, optimizer in OPTIMIZERS.items()},
    "adam": functools.partial(model_of, keras.optimizers.Adam),
    "alone": tables_alone,
    "masked": masked,
    "chosen": chosen_by_path,
}


class Run(NamedTuple):
    model: str
    config: RunConfig
    is_trained: bool = True


class Training(NamedTuple):
    weights: list[np.ndarray]
    tables: list[str]
    updates: int
    loss: float
    note: str


def config_of(batch_size: int = BATCH, optimizer: dict[str, Any] | None = None, **of_cluster: Any) -> RunConfig:
    config = run_config(batch_size=batch_size, steps_per_execution=3)
    train, cluster = replace(config.train, steps=STEPS), replace(config.cluster, **of_cluster)
    return replace(config, train=train, cluster=cluster, optimizer=config.optimizer | (optimizer or {}))


def train(worker: SyncWorker, runs: list[Run]) -> list[Training]:
    """Several runs in one life of the workers, which take seconds to start."""
    trained = []
    for name, config, is_trained in runs:
        source = InMemorySource(MODELS[name], SPLITS)
        loop = sync_loop(worker, config, source)
        if is_trained:
            loop.train(STEPS)
        weights = [v.numpy() for v in loop.model.trainable_variables]
        loss = loop.evaluate("test").metrics["loss"] if is_trained else np.nan
        paths = [table.path for table in loop.step.tables]
        trained.append(Training(weights, paths, loop.updates_applied(), loss, loop.note))
    return trained


def assert_same_bits(trainings: list[Training]) -> None:
    first, *others = trainings
    for other in others:
        for found, expected in zip(other.weights, first.weights, strict=True):
            np.testing.assert_array_equal(found, expected)


def assert_equals_keras(name: str, trainings: list[Training], batch_size: int = BATCH) -> None:
    first = trainings[0]
    assert len(first.tables) == 2
    assert first.updates == STEPS
    assert_same_bits(trainings)
    expected = MODELS[name]()
    for found, wanted in zip(first.weights, by_keras(expected, SPLITS, batch_size), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
    test = SPLITS.test
    assert test is not None
    evaluated = expected.evaluate(test.x, test.y, verbose=0, return_dict=True)
    # A mean over places is one of the places of a batch, and Keras' batches are others.
    assert first.loss == pytest.approx(evaluated["loss"], rel=1e-4 if name != "masked" else 1e-2)


FIRST = ["masked", "chosen"]
THOROUGH = ["clipped", "adagrad", "alone"]
EXACT = [*FIRST, *THOROUGH, "sgd", "schedule"]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_models(sync_workers: SyncWorkers, num_workers: int) -> None:
    runs = [Run(name, config_of(BATCH // num_workers)) for name in EXACT]
    on_workers = sync_workers(train, num_workers, (runs,), TIMEOUT_SECS)
    for name, *trainings in zip(EXACT, *on_workers, strict=True):
        assert_equals_keras(name, trainings)


@pytest.fixture(scope="module")
def two_workers(sync_workers: SyncWorkers) -> dict[str, list[Training]]:
    """The trainings of both workers, by the names of the first models and of further runs."""
    plain = config_of(BATCH // 2)
    local = replace(plain, algorithm=replace(plain.algorithm, kind="local_sgd", local_steps=2))
    runs = {
        **{name: Run(name, plain) for name in FIRST},
        "narrow": Run("sgd", config_of(BATCH // 2, transfer_dtype="bfloat16")),
        "local": Run("sgd", local, is_trained=False),
        # The second step of a pass has 5 examples for each.
        "whole": Run("adam", config_of(285), is_trained=False),
        "lazy": Run("adam", config_of(285, optimizer={"lazy_rows": True})),
    }
    on_workers = sync_workers(train, 2, (list(runs.values()),), TIMEOUT_SECS)
    return {name: list(trainings) for name, *trainings in zip(runs, *on_workers, strict=True)}


@pytest.mark.parametrize("name", FIRST)
def test_two_workers_equal_keras(two_workers: dict[str, list[Training]], name: str) -> None:
    """Rows are looked up several times in a batch and by both workers, and the last step of a pass is short."""
    assert_equals_keras(name, two_workers[name])


@pytest.mark.thorough
def test_two_workers_with_other_tables_equal_keras(sync_workers: SyncWorkers) -> None:
    on_workers = sync_workers(train, 2, ([Run(name, config_of(BATCH // 2)) for name in THOROUGH],), TIMEOUT_SECS)
    for name, *trainings in zip(THOROUGH, *on_workers, strict=True):
        assert_equals_keras(name, trainings)


@pytest.mark.thorough
def test_workers_whose_batches_are_padding(sync_workers: SyncWorkers) -> None:
    """The second step of a pass has 5 examples for each."""
    trained = sync_workers(train, 2, ([Run("adagrad", config_of(285))],), TIMEOUT_SECS)
    assert_equals_keras("adagrad", [one[0] for one in trained], 570)


@pytest.mark.thorough
def test_workers_whose_batches_are_padding_with_the_other_all_reduce(sync_workers: SyncWorkers) -> None:
    """With three workers."""
    runs = [Run("adagrad", config_of(190, all_reduce="tensorflow"))]
    assert_equals_keras("adagrad", [trainings[0] for trainings in sync_workers(train, 3, (runs,), TIMEOUT_SECS)], 570)


def test_lazy_rows(two_workers: dict[str, list[Training]]) -> None:
    """A row that padding looks up does not count as looked up; without the option all rows travel."""
    for whole in two_workers["whole"]:
        assert not whole.tables
        assert f"its {ROWS:,} rows travel in each step, since Adam" in whole.note
    for by_row in two_workers["lazy"]:
        assert len(by_row.tables) == 2
        assert "Adam changes only the rows that a batch looks up" in by_row.note
        before, after = MODELS["adam"]().get_layer("items").embeddings.numpy(), by_row.weights[1]
        assert set(np.flatnonzero((before != after).any(1))) == set(np.unique(SPLITS.train.x["item"]))
    assert_same_bits(two_workers["lazy"])


def test_narrow_rows(two_workers: dict[str, list[Training]]) -> None:
    assert_same_bits(two_workers["narrow"])
    weights = two_workers["narrow"][0].weights
    differences = [abs(a - b).max() for a, b in zip(weights, by_keras(MODELS["sgd"](), SPLITS), strict=True)]
    assert 0 < max(differences) < 0.01


def test_tables_of_local_sgd_are_averaged_as_a_whole(two_workers: dict[str, list[Training]]) -> None:
    for training in two_workers["local"]:
        assert not training.tables
        assert "algorithm=local_sgd averages whole variables" in training.note
