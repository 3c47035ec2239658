"""Graphs of the coordinator read the examples that a worker publishes, from memory or from a mapped file."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import split_of
from tf2dist import data
from tf2dist.config.schema import DataConfig
from tf2dist.data import Arrays, Splits
from tf2dist.data.passes import ExampleOrder, InputPosition, NumberedSteps, Sharding
from tf2dist.registry import DATA
from tf2dist.training.parameter_server import batches
from tf2dist.training.parameter_server.batches import (
    EVALUATED,
    evaluated_examples,
    gathered_batches,
    publish,
    remote_ranges,
)

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (100, 3, 2, 1), np.uint8)


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gives every test its own name: a process publishes once under a name, and other tests use the default."""
    monkeypatch.setattr(batches, "NAME", tmp_path.name)


def arrays(images: np.ndarray) -> Arrays:
    return Arrays(images, RANDOM.integers(0, 10, len(images)).astype(np.int32))


def mapped(path: Path, images: np.ndarray, mode: str = "r") -> np.ndarray:
    np.save(path, images)
    array: np.ndarray = np.load(path, mmap_mode=mode)  # type: ignore[arg-type]
    return array


def test_every_split_is_read_unchanged(tmp_path: Path) -> None:
    whole = mapped(tmp_path / "a.npy", IMAGES)
    splits = Splits(arrays(whole[10:]), arrays(whole[:10]), arrays(IMAGES[::-1]))
    publish(splits)
    (tmp_path / "a.npy").unlink()  # the examples stay readable even if the file is removed
    read = tf.function(lambda number, index: evaluated_examples(number, index, splits.layout), autograph=False)
    index = np.array([[3, 9, 0], [9, 1, 2]])
    for number, split in enumerate(EVALUATED):
        expected = split_of(splits, split)
        images, labels = read(tf.constant(number), tf.constant(index))
        np.testing.assert_array_equal(images, expected.x[index])
        np.testing.assert_array_equal(labels, expected.y[index])

    order = ExampleOrder(90, 3, True)
    batches = tf.function(lambda ranges: remote_ranges(ranges, order, splits.layout), autograph=False)
    ranges = [(5, 9), (180, 184), (7, 7)]
    leaves = batches(tf.constant(ranges, tf.int64))
    for one, images, labels in zip(ranges, leaves[::2], leaves[1::2], strict=True):
        np.testing.assert_array_equal(images, splits.train.x[order.rows(*one)])
        np.testing.assert_array_equal(labels, splits.train.y[order.rows(*one)])


def test_shapes_are_known_while_a_graph_is_made() -> None:
    @tf.function(autograph=False)
    def read(ranges: tf.Tensor) -> None:
        leaves = remote_ranges(ranges, ExampleOrder(90, 3, True), arrays(IMAGES).layout)
        assert [leaf.shape.as_list() for leaf in leaves] == [[None, 3, 2, 1], [None]] * 5

    read.get_concrete_function(tf.TensorSpec([5, 2], tf.int64))


@pytest.mark.parametrize("num_bytes", [1, 150, 1 << 22])
def test_a_call_takes_its_batches_in_one_or_several_requests(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """The steps go from one pass into the next, and the last one of a pass has fewer examples."""
    monkeypatch.setattr(batches, "GATHERED_AT_ONCE", num_bytes)
    splits = Splits(arrays(IMAGES), None, None)
    publish(splits)
    sharding = Sharding(len(IMAGES), 7, 2, seed=3, whole_batch_loss=False)
    steps = NumberedSteps(sharding, InputPosition())
    read = tf.function(lambda ranges: gathered_batches(ranges, sharding, splits.layout), autograph=False)
    ranges = tf.stack(steps.ranges(tf.range(10, 20, dtype=tf.int64)), 1)
    for (images, labels), limits in zip(read(ranges), ranges, strict=True):
        rows = sharding.order.rows(*map(int, limits))
        np.testing.assert_array_equal(images, IMAGES[rows])
        np.testing.assert_array_equal(labels, splits.train.y[rows])


@pytest.mark.parametrize("mode", ["r", "c"])
def test_mapped_arrays_are_not_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str) -> None:
    """With copies, each worker on a host would hold all of the data in memory."""
    images = mapped(tmp_path / "a.npy", IMAGES, mode)
    splits = Splits(arrays(images[10:]), arrays(images[:10]), arrays(images[::-1]))
    monkeypatch.setitem(DATA, "mapped", lambda config: splits)
    loaded = data.load(DataConfig(name="mapped"))
    publish(loaded)
    for split in ("train", "validation"):
        assert np.shares_memory(split_of(loaded, split).x, images)
    np.testing.assert_array_equal(split_of(loaded, "test").x, IMAGES[::-1])
