"""The memory of training and evaluation: no copy of the data, and few examples at a time."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import run_config, sync_loop
from tf2dist import registry
from tf2dist.config.schema import RunConfig
from tf2dist.data import Arrays, Splits
from tf2dist.model.source import RegisteredSource
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.evaluator import Evaluator

SIZE_MB, SHAPE = 300, (31, 31, 3)


def own_mb() -> float:
    """The private memory of this process in MB, without the pages of mapped files."""
    found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def train_on_mapped(worker: SyncWorker, path: str, skipped: int) -> tuple[float, list[int], bool]:
    """Trains without the `skipped` first images.

    Returns:
        The MB that training adds to the memory, the values of some images, and whether images are read in place.
    """
    from tf2dist.data import pipeline

    before = own_mb()
    images, config = np.load(path, mmap_mode="r"), run_config()
    few = Arrays(images[:50], np.zeros(50, np.int32))
    train = Arrays(images[skipped:], np.zeros(len(images) - skipped, np.int32))
    source = RegisteredSource(config)
    source.load = lambda: Splits(train, few, few)  # type: ignore[method-assign]
    loop = sync_loop(worker, config, source)
    loop.train(3)
    local_results, (iterator,) = loop._graphs._strategy.experimental_local_results, loop._graphs.feed.iterators
    batches = [local_results(next(iterator)[0])[0] for _ in range(3)]
    values = [int(batch.numpy().max()) for batch in batches]
    return own_mb() - before, values, pipeline._same_memory(train.x) is not None


@pytest.mark.thorough
@pytest.mark.parametrize("skipped", [64, 1])
def test_synchronous_workers_hold_no_copy_of_mapped_images(
    sync_workers: SyncWorkers, tmp_path: Path, skipped: int
) -> None:
    """TensorFlow reads a mapping in place if it is aligned to 64 bytes; otherwise it gets a copy of each batch."""
    path, count = tmp_path / "images.npy", SIZE_MB * 2**20 // int(np.prod(SHAPE))
    images = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(count, *SHAPE))
    images[:] = 7
    del images  # flushes the mapping to the file
    for added_mb, values, is_shared in sync_workers(train_on_mapped, num_workers=2, args=(str(path), skipped)):
        assert values == [7, 7, 7]
        assert is_shared == (skipped == 64)
        assert added_mb < SIZE_MB - 100


LARGE = (256, 256, 3)
evaluated: list[int] = []  # the number of examples in each forward pass of `counted`


@registry.register_data("large")
def large(config: Any) -> Splits:
    def arrays(count: int) -> Arrays:
        return Arrays(np.zeros((count, *LARGE), np.uint8), np.zeros(count, np.int32))

    return Splits(arrays(60), arrays(25), arrays(25))


@registry.register_model("counted")
def counted(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A model that notes in `evaluated` how many examples each forward pass has."""

    def count(images: Any) -> Any:
        tf.numpy_function(lambda number: evaluated.append(int(number)), [tf.shape(images)[0]], [])
        return images

    layers = keras.layers
    pooled = [
        layers.Rescaling(1 / 255),
        layers.Lambda(count, output_shape=input_shape),
        layers.MaxPooling2D(64),
        layers.Flatten(),
    ]
    return keras.Sequential([keras.Input(input_shape), *pooled, layers.Dense(num_classes, name="logits")])


def config_of_large() -> RunConfig:
    config = run_config("counted", batch_size=10)
    config.data.name = "large"
    return config


def test_the_evaluation_holds_no_more_large_images_at_a_time_than_the_training(
    async_loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tf2dist import data
    from tf2dist.training.parameter_server import batches

    # Under another name, so that the digits stay published for the other tests.
    monkeypatch.setattr(batches, "NAME", "large")
    config = config_of_large()
    splits = data.load(config.data)
    batches.publish(splits)
    loop = async_loop(config, num_workers=1)
    evaluator = Evaluator(config, RegisteredSource(config), splits, pytest.fail)
    for evaluate in (lambda: loop.evaluate("test"), lambda: evaluator.evaluate(loop.freeze()(), "test")):
        evaluated.clear()
        assert evaluate().num_examples == 25
        assert sorted(evaluated) == [5, 10, 10]
