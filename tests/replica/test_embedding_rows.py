"""Large tables of embeddings on parameter servers: their rows travel, and the result is that of Keras."""

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import assert_exact, run_config, split_of
from tf2dist import data
from tf2dist.config.schema import RunConfig
from tf2dist.data import pipeline
from tf2dist.data.arrays import Arrays
from tf2dist.data.passes import InputPosition, Sharding
from tf2dist.errors import reason_of
from tf2dist.model.source import build_step
from tf2dist.process import placement
from tf2dist.task import as_own_error

# So many rows are large as bfloat16, too.
ROWS, COLUMNS, BATCH, STEPS = 33_001, 16, 50, 12
layers = keras.layers
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def _tables_of_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PIECE_BYTES", 1 << 18)


def examples(num: int, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    # Many look-ups of a batch are of the same rows, and the last row is among them, also as -1.
    ids = np.minimum(rng.zipf(1.3, (num, 3)) + 3, ROWS - 1).astype(np.int32)
    ids[0] = -1
    item = rng.integers(0, 100, num).astype(np.int32) * 197
    return Arrays({"ids": ids, "item": item}, (ids.sum(1) % 2).astype(np.float32)[:, None])


SPLITS = data.Splits(examples(STEPS * BATCH - 20, 1), test=examples(130, 2))


def model_of(make_optimizer: Callable[[], keras.Optimizer], **of_table: Any) -> keras.Model:
    """Two tables, one of which two calls share, once in a nested model."""
    keras.utils.set_random_seed(3)
    ids, item = keras.Input((3,), name="ids", dtype="int32"), keras.Input((), name="item", dtype="int32")
    shared = layers.Embedding(ROWS, COLUMNS, name="shared")
    tower = keras.Sequential([keras.Input((3,), dtype="int32"), shared, layers.GlobalAveragePooling1D()], name="tower")
    items = layers.Embedding(ROWS, COLUMNS, name="items", **of_table)
    both = layers.Concatenate()([tower(ids), shared(item), items(item)])
    model = keras.Model({"ids": ids, "item": item}, layers.Dense(1)(layers.Dense(8, "tanh")(both)))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(make_optimizer(), loss, metrics=[keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)])
    return model


def config_of(batch_size: int = BATCH, optimizer: dict[str, Any] | None = None, **of_cluster: Any) -> RunConfig:
    config = run_config(batch_size=batch_size, steps_per_execution=3)
    cluster = replace(config.cluster, placement="partitioned", min_part_bytes=1024, **of_cluster)
    train = replace(config.train, steps=STEPS)
    return replace(config, cluster=cluster, train=train, optimizer=config.optimizer | (optimizer or {}))


def by_keras(model: keras.Model, splits: data.Splits, batch_size: int = BATCH) -> list[np.ndarray]:
    """The weights after the same steps in one process, where the gradients of a row are added up before an update."""
    sharding = Sharding(len(splits.train), batch_size, 1, 0, whole_batch_loss=True)
    for index, weights in pipeline.batches(lambda i: [i], sharding, 0, InputPosition()).take(STEPS).as_numpy_iterator():
        x, y, _ = splits.layout.pack(splits.train.take(index[weights > 0]))
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        model.optimizer.apply([tf.convert_to_tensor(g) for g in gradients], model.trainable_variables)
    return [v.numpy() for v in model.trainable_variables]


def assert_equals_keras(
    loop: Any, make: Callable[[], keras.Model], splits: data.Splits = SPLITS, tolerance: float = 1e-5
) -> None:
    expected = make()
    for found, wanted in zip(loop.model.trainable_variables, by_keras(expected, splits), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, atol=tolerance, rtol=0)
    test = split_of(splits, "test")
    expected.run_eagerly = True  # tracing takes longer than five batches
    evaluation = expected.evaluate(test.x, test.y, verbose=0, return_dict=True)
    assert loop.evaluate("test").metrics == pytest.approx(evaluation, rel=1e-4)


OPTIMIZERS: dict[str, Callable[[], keras.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipped": lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.1),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.InverseTimeDecay(0.5, 3, 0.5)),
}


@pytest.mark.parametrize(
    ("name", "num_ps"),
    [
        ("clipped", 3),
        pytest.param("adagrad", 1, marks=pytest.mark.thorough),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("sgd", 1), ("sgd", 3), ("adagrad", 3)]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("clipped", 1), ("schedule", 1), ("schedule", 3)]),
    ],
)
def test_one_worker_equals_keras(
    async_loop: Callable[..., Any], publishing: Callable[..., None], name: str, num_ps: int
) -> None:
    publishing(SPLITS)
    make = functools.partial(model_of, OPTIMIZERS[name])
    loop = async_loop(config_of(), 1, num_ps, source=InMemorySource(make, SPLITS))
    assert [table.path for table in loop.step.tables] == ["tower/shared/embeddings", "items/embeddings"]
    operations = {node.op for node in loop._scheduler.function.graph.as_graph_def().node}
    assert not operations & {"Unique", "DynamicPartition"}, "batches are routed by one function, not in each step"
    loop.train(STEPS)
    assert_exact(loop, STEPS)
    assert_equals_keras(loop, make)


def clipped_small_table() -> keras.Model:
    keras.utils.set_random_seed(3)
    ids, item = keras.Input((3,), name="ids", dtype="int32"), keras.Input((), name="item", dtype="int32")
    rows = layers.Flatten()(layers.Embedding(20, 4)(keras.ops.mod(ids, 20)))
    model = keras.Model({"ids": ids, "item": item}, layers.Dense(1)(rows))
    model.compile(keras.optimizers.SGD(0.5, global_clipnorm=0.05), "mse", metrics=["mae"])
    return model


def test_the_norm_of_all_gradients_takes_the_sum_for_a_row(
    async_loop: Callable[..., Any], publishing: Callable[..., None]
) -> None:
    """Also of a table that travels as a whole."""
    publishing(SPLITS)
    loop = async_loop(config_of(), 1, 2, source=InMemorySource(clipped_small_table, SPLITS))
    assert not loop.step.tables
    loop.train(STEPS)
    assert_equals_keras(loop, clipped_small_table)


@pytest.mark.parametrize(
    ("name", "num_ps"),
    [
        ("adagrad", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("sgd", 1), ("sgd", 3), ("adagrad", 1)]),
    ],
)
def test_replicas_equal_keras(
    replicas_loop: Callable[..., Any], publishing: Callable[..., None], name: str, num_ps: int
) -> None:
    publishing(SPLITS)
    make = functools.partial(model_of, OPTIMIZERS[name])
    config = replace(config_of(BATCH // 2), mode="sync_replicas")
    loop = replicas_loop(config, 2, num_ps, source=InMemorySource(make, SPLITS))
    assert len(loop.step.tables) == 2
    loop.train(STEPS)
    assert loop.progress.global_step == STEPS
    assert_equals_keras(loop, make)


@pytest.mark.thorough
def test_narrow_rows(async_loop: Callable[..., Any], publishing: Callable[..., None]) -> None:
    publishing(SPLITS)
    make = functools.partial(model_of, OPTIMIZERS["sgd"])
    loop = async_loop(config_of(transfer_dtype="bfloat16"), 1, 2, source=InMemorySource(make, SPLITS))
    loop.train(STEPS)
    for found, wanted in zip(loop.model.trainable_variables, by_keras(make(), SPLITS), strict=True):
        assert 0 < np.abs(found.numpy() - wanted).max() < 0.01


def tables_of(loop: Any) -> list[str]:
    return [table.path for table in loop.step.tables]


def tables_found(source: InMemorySource) -> list[str]:
    """The tables of which all calls of the model only look rows up, which is the same in every mode."""
    step, _ = build_step(source, source.load(), config_of(), contextlib.nullcontext())
    return [table.path for table in step.lookups.find(step.trainable)]


def test_an_optimizer_that_moves_all_rows_moves_them(
    async_loop: Callable[..., Any], publishing: Callable[..., None]
) -> None:
    """Unless it is told not to; and a note says so in either case."""
    publishing(SPLITS)
    make = functools.partial(model_of, lambda: keras.optimizers.Adam(0.01))
    source = InMemorySource(make, SPLITS)
    loop = async_loop(config_of(), 1, 2, source=source)
    assert not loop.step.tables
    assert f"its {ROWS:,} rows travel in each step, since Adam" in loop.note
    assert "optimizer.lazy_rows=true" in loop.note
    loop.train(STEPS)
    assert_equals_keras(loop, make, tolerance=1e-4)  # Adam's step of a gradient near 0 depends on its last bits
    lazy = async_loop(config_of(optimizer={"lazy_rows": True}), 1, 2, source=source)
    assert len(tables_of(lazy)) == 2
    assert "Adam changes only the rows that a batch looks up" in lazy.note
    lazy.train(STEPS)
    before, after = (model.get_layer("items").embeddings.numpy() for model in (make(), lazy.model))
    looked_up = np.unique(SPLITS.train.x["item"])
    changed = np.flatnonzero((before != after).any(1))
    assert set(changed) <= set(looked_up)
    assert len(changed) > len(looked_up) / 2


def model_of_long_ids() -> keras.Model:
    ids, item = keras.Input((3,), name="ids", dtype="int64"), keras.Input((), name="item", dtype="int32")
    rows = layers.Flatten()(layers.Embedding(ROWS, COLUMNS, name="items")(ids))
    model = keras.Model({"ids": ids, "item": item}, layers.Dense(1)(rows))
    model.compile(keras.optimizers.SGD(0.5), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


# Of the last one 32 bits are the id of a row.
@pytest.mark.parametrize(
    ("wrong", "split"),
    [(ROWS, "test"), pytest.param(-ROWS - 1, "train", marks=pytest.mark.slow), (2**32 + 5, "train")],
)
def test_an_id_that_a_table_has_not_is_named_with_its_layer(
    async_loop: Callable[..., Any], publishing: Callable[..., None], wrong: int, split: str
) -> None:
    parts = {"train": examples(60, 1), "test": examples(60, 2)}
    for arrays in parts.values():
        arrays.x["ids"] = arrays.x["ids"].astype(np.int64)
    parts[split].x["ids"][37, 1] = wrong
    publishing(splits := data.Splits(parts["train"], test=parts["test"]))
    loop = async_loop(config_of(), 1, 3, source=InMemorySource(model_of_long_ids, splits))
    assert len(loop.step.tables) == 1
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        loop.evaluate("test") if split == "test" else loop.train(STEPS)
    told = reason_of(as_own_error(error.value))
    assert re.fullmatch(rf"assertion failed: \[id {wrong} is not in \[0, {ROWS}\)\], in the layer \w+/items", told)


class Tied(keras.layers.Layer):  # type: ignore[misc]
    """Looks rows up in a table, and multiplies what it makes of them by the whole table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(ROWS, COLUMNS, name="items")

    def build(self, shape: Any) -> None:
        self.table.build(shape)

    def call(self, ids: Any) -> Any:
        return keras.ops.mean(keras.ops.matmul(self.table(ids), keras.ops.transpose(self.table.embeddings)), -1)


class Routed(keras.layers.Layer):  # type: ignore[misc]
    """Looks up what the weights of the model say."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(ROWS, COLUMNS, name="items")

    def build(self, shape: Any) -> None:
        self.table.build(shape)
        self.first = self.add_weight(shape=(), initializer="ones")

    def call(self, ids: Any) -> Any:
        return keras.ops.mean(self.table(ids + keras.ops.cast(self.first, "int32")), -1) * self.first


def model_with(layer: Callable[[], Any]) -> keras.Model:
    """A table of which rows travel, and another layer."""
    keras.utils.set_random_seed(3)
    ids, item = keras.Input((3,), name="ids", dtype="int32"), keras.Input((), name="item", dtype="int32")
    both = [
        layers.Flatten()(layers.Embedding(ROWS, COLUMNS, name="rows")(ids)),
        keras.ops.reshape(layer()(item), (-1, 1)),
    ]
    model = keras.Model({"ids": ids, "item": item}, layers.Dense(1)(layers.Concatenate()(both)))
    model.compile(keras.optimizers.SGD(0.5), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


WHOLE: dict[str, Callable[[], keras.Model]] = {
    "penalty": functools.partial(model_of, OPTIMIZERS["sgd"], embeddings_regularizer="l2"),
    "tied": functools.partial(model_with, Tied),
    "routed": functools.partial(model_with, Routed),
    "bfloat16": functools.partial(model_of, OPTIMIZERS["sgd"], dtype="bfloat16"),
}


@pytest.mark.parametrize(
    ("name", "is_trained"),
    [
        *((name, False) for name in ("penalty", "tied", "routed")),
        *(pytest.param(name, True, marks=pytest.mark.thorough) for name in ("penalty", "tied", "routed")),
        pytest.param("bfloat16", True, marks=pytest.mark.slow),
    ],
)
def test_a_table_that_is_not_only_looked_up_travels(
    async_loop: Callable[..., Any], publishing: Callable[..., None], name: str, is_trained: bool
) -> None:
    source = InMemorySource(WHOLE[name], SPLITS)
    (found,) = tables_found(source)
    assert "items" not in found
    if is_trained:
        publishing(SPLITS)
        loop = async_loop(config_of(), 1, 2, source=source)
        assert tables_of(loop) == [found]
        loop.train(STEPS)
        assert_equals_keras(loop, WHOLE[name])


def words(num: int, seed: int) -> Arrays:
    number = np.random.default_rng(seed).zipf(1.3, num) % 50
    text = np.array([f"w{one}" for one in number]).astype(object)
    return Arrays({"text": text, "number": number * 7}, (number % 2).astype(np.float32)[:, None])


LOOKUPS: dict[str, Callable[[], Any]] = {
    "text": lambda: layers.StringLookup(vocabulary=[f"w{one}" for one in range(40)], num_oov_indices=2),
    "number": lambda: layers.IntegerLookup(vocabulary=list(range(0, 250, 7))),
    "hash": lambda: layers.Hashing(ROWS),
}


def model_of_words(kind: str) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = {
        "text": keras.Input((), name="text", dtype="string"),
        "number": keras.Input((), name="number", dtype="int64"),
    }
    ids = LOOKUPS[kind]()(inputs["number" if kind == "number" else "text"])
    model = keras.Model(inputs, layers.Dense(1)(layers.Embedding(ROWS, COLUMNS)(ids)))
    model.compile(keras.optimizers.Adagrad(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("kind", ["text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("number", "hash"))])
def test_ids_that_a_layer_looks_up(async_loop: Callable[..., Any], publishing: Callable[..., None], kind: str) -> None:
    splits = data.Splits(words(STEPS * BATCH - 20, 1), test=words(130, 2))
    publishing(splits)
    make = functools.partial(model_of_words, kind)
    loop = async_loop(config_of(), 1, 2, source=InMemorySource(make, splits))
    assert len(loop.step.tables) == 1
    loop.train(STEPS)
    assert_equals_keras(loop, make, splits)
