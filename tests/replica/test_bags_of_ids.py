"""Lists of ids in an example, whose rows are summed or averaged: the rows travel, and the result is that of Keras."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.in_memory_source import InMemorySource
from tests.replica.test_embedding_rows import (
    BATCH,
    COLUMNS,
    OPTIMIZERS,
    ROWS,
    STEPS,
    assert_equals_keras,
    config_of,
    tables_found,
)
from tf2dist import data
from tf2dist.data.arrays import Arrays

layers = keras.layers
ops = keras.ops
LENGTH = 7  # of the longest list
pytestmark = pytest.mark.timeout(180)


def bags(num: int, seed: int) -> Arrays:
    """Padded lists of one to LENGTH ids, most of which have an id several times; and a number for each id."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.3, (num, LENGTH)), ROWS - 1).astype(np.int32)
    ids[:, -2:] = ids[:, :2]
    ids[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, num)[:, None]] = 0
    weights = rng.uniform(0.5, 2, ids.shape).astype(np.float32)
    return Arrays({"ids": ids, "weights": weights}, (ids.sum(1) % 2).astype(np.float32)[:, None])


SPLITS = data.Splits(bags(STEPS * BATCH - 20, 1), test=bags(130, 2))


class EmbedReduce(keras.layers.Embedding):  # type: ignore[misc]
    """As the layer of this name of keras_rs: a weighted mean, of rows that the call of Embedding has looked up."""

    def call(self, inputs: Any, weights: Any) -> Any:
        weights = ops.where(inputs != 0, weights, 0.0)[..., None]
        return ops.sum(super().call(inputs) * weights, 1) / ops.sum(weights, 1)

    def compute_output_spec(self, inputs: Any, weights: Any) -> Any:
        return keras.KerasTensor((inputs.shape[0], self.output_dim), self.compute_dtype)


class Scaled(keras.layers.Embedding):  # type: ignore[misc]
    """Its rows are not those of its variable."""

    @property
    def embeddings(self) -> Any:
        return 2.0 * self._embeddings.value


def summed(ids: Any, weights: Any) -> Any:
    rows = layers.Embedding(ROWS, COLUMNS)(ids)
    return ops.sum(rows * ops.cast(ids != 0, "float32")[..., None], 1)


def ragged_mean(ids: Any, weights: Any) -> Any:
    without_padding = layers.Lambda(lambda x: tf.RaggedTensor.from_tensor(x, padding=0))
    mean = layers.Lambda(lambda rows: tf.reduce_mean(rows, 1), output_shape=(COLUMNS,))
    return mean(layers.Embedding(ROWS, COLUMNS)(without_padding(ids)))


def dropped(ids: Any, weights: Any) -> Any:
    """As a dropout of words, which here happens to keep all of them."""
    keep = layers.Lambda(lambda x: tf.where(tf.random.uniform(tf.shape(x)) < 2.0, x, 0))
    return ops.sum(layers.Embedding(ROWS, COLUMNS)(keep(ids)), 1)


BAGS: dict[str, Callable[[Any, Any], Any]] = {
    "masked mean": lambda ids, weights: layers.GlobalAveragePooling1D()(
        layers.Embedding(ROWS, COLUMNS, mask_zero=True)(ids)
    ),
    "sum": summed,
    "weighted mean": lambda ids, weights: EmbedReduce(ROWS, COLUMNS)(ids, weights),
    "scaled": lambda ids, weights: ops.sum(Scaled(ROWS, COLUMNS)(ids), 1),
    "ragged": ragged_mean,
    "dropped": dropped,
}


def model_of(bag: str, make_optimizer: Callable[[], keras.Optimizer]) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = {
        "ids": keras.Input((LENGTH,), name="ids", dtype="int32"),
        "weights": keras.Input((LENGTH,), name="weights"),
    }
    outputs = layers.Dense(1)(layers.Dense(8, "tanh")(BAGS[bag](inputs["ids"], inputs["weights"])))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(make_optimizer(), loss, metrics=[keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)])
    return model


@pytest.mark.parametrize(
    ("bag", "optimizer"),
    [
        ("masked mean", "adagrad"),
        pytest.param("sum", "sgd", marks=pytest.mark.thorough),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("masked mean", "sgd"), ("sum", "adagrad"))),
    ],
)
def test_the_rows_of_bags_travel(
    async_loop: Callable[..., Any], publishing: Callable[..., None], bag: str, optimizer: str
) -> None:
    publishing(SPLITS)
    make = functools.partial(model_of, bag, OPTIMIZERS[optimizer])
    loop = async_loop(config_of(), 1, 2, source=InMemorySource(make, SPLITS))
    assert len(loop.step.tables) == 1
    loop.train(STEPS)
    assert_equals_keras(loop, make, SPLITS)


@pytest.mark.slow
@pytest.mark.parametrize("bag", ["masked mean", "sum"])
def test_replicas_equal_keras(replicas_loop: Callable[..., Any], publishing: Callable[..., None], bag: str) -> None:
    publishing(SPLITS)
    make = functools.partial(model_of, bag, OPTIMIZERS["adagrad"])
    config = replace(config_of(BATCH // 2), mode="sync_replicas")
    loop = replicas_loop(config, 2, 2, source=InMemorySource(make, SPLITS))
    assert len(loop.step.tables) == 1
    loop.train(STEPS)
    assert_equals_keras(loop, make, SPLITS)


@pytest.mark.parametrize(
    ("bag", "is_trained"),
    [
        *(("scaled", False), ("dropped", False)),
        *(pytest.param(bag, True, marks=pytest.mark.thorough) for bag in ("scaled", "dropped")),
        *(pytest.param(bag, True, marks=pytest.mark.slow) for bag in ("ragged", "weighted mean")),
    ],
)
def test_a_table_that_is_read_in_another_way_travels(
    async_loop: Callable[..., Any], publishing: Callable[..., None], bag: str, is_trained: bool
) -> None:
    make = functools.partial(model_of, bag, OPTIMIZERS["sgd"])
    source = InMemorySource(make, SPLITS)
    assert not tables_found(source)
    if is_trained:
        publishing(SPLITS)
        loop = async_loop(config_of(), 1, 2, source=source)
        assert not loop.step.tables
        loop.train(STEPS)
        assert_equals_keras(loop, make, SPLITS)
