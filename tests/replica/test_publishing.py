"""Graphs of the coordinator read the examples that a worker publishes, from memory or from a mapped file."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import split_of
from tf2dist import data
from tf2dist.config.schema import DataConfig
from tf2dist.data import Arrays, Splits
from tf2dist.registry import DATA
from tf2dist.training.parameter_server import inputs
from tf2dist.training.parameter_server.inputs import publish, remote_examples

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (100, 3, 2, 1), np.uint8)


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gives every test its own name: a process publishes once under a name, and other tests use the default."""
    monkeypatch.setattr(inputs, "NAME", tmp_path.name)


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
    read = tf.function(lambda split, index: remote_examples(split, index, splits.layout), autograph=False)
    index = np.array([[3, 9, 0], [9, 1, 2]])
    for split in ("train", "validation", "test"):
        expected = split_of(splits, split)
        images, labels = read(split, tf.constant(index))
        np.testing.assert_array_equal(images, expected.x[index])
        np.testing.assert_array_equal(labels, expected.y[index])


def test_shapes_are_known_while_a_graph_is_made() -> None:
    @tf.function(autograph=False)
    def read(index: tf.Tensor) -> None:
        images, labels = remote_examples("train", index, arrays(IMAGES).layout)
        assert (images.shape.as_list(), labels.shape.as_list()) == ([None, 50, 3, 2, 1], [None, 50])

    read.get_concrete_function(tf.TensorSpec([None, 50], tf.int32))


@pytest.mark.parametrize("mode", ["r", "c"])
def test_mapped_arrays_are_not_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str) -> None:
    """With copies, each worker on a host would hold all of the data in memory."""
    images = mapped(tmp_path / "a.npy", IMAGES, mode)
    splits = Splits(arrays(images[10:]), arrays(images[:10]), arrays(images[::-1]))
    monkeypatch.setitem(DATA, "mapped", lambda config: splits)
    loaded = data.load(DataConfig(name="mapped"))
    publish(loaded)
    for split in ("train", "validation"):
        taking = inputs._published[inputs._token(split)]
        assert np.shares_memory(taking.__self__.x, images)
    np.testing.assert_array_equal(split_of(loaded, "test").x, IMAGES[::-1])
