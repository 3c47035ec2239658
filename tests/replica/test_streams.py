"""Training on batches from a function of the user gives the results of `keras.Model.fit` on the same batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.in_memory_source import InMemorySource, RecordingHooks, weights_of
from tests.replica.small_runs import sync_loop
from tests.replica.test_epochs import SEED, assert_same, config_of, drive, everything, regression, two_outputs
from tests.unit.test_saving import facts
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import input_facts, stream_positions
from tf2dist.config.schema import RunConfig
from tf2dist.data import splits
from tf2dist.data.arrays import Arrays
from tf2dist.data.passes import Sharding
from tf2dist.data.splits import Splits
from tf2dist.data.stream import Load, Reader, Shard, Stream
from tf2dist.model.source import EpochPlan
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.setup import sharding_of

BATCH, EPOCHS = 20, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 10)).astype("float32")
Y = X[:, :3].sum(1)
WIDE = {"wide": X[:, :6], "tokens": RNG.integers(0, 20, (300, 5))}


def of_rows(shard: Shard) -> tf.data.Dataset:
    """Every worker reads a part of the rows; its last batch is smaller."""
    rows = np.array_split(np.arange(250), shard.count)[shard.index]
    return tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).batch(shard.batch_size)


def of_trees(shard: Shard) -> tf.data.Dataset:
    """Dicts of inputs, outputs and sample weights."""
    y = {"sum": WIDE["wide"].sum(1), "kind": WIDE["tokens"][:, 0] % 3}
    weights = {"sum": np.linspace(0, 1, 300), "kind": np.ones(300)}
    return tf.data.Dataset.from_tensor_slices((WIDE, y, weights)).batch(shard.batch_size)


def of_generator(shard: Shard) -> tf.data.Dataset:
    """Batches of several sizes, whose number TensorFlow does not know."""

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, 250, 25):
            size = 5 + (first // 25 * 7 + shard.index * 3) % 19
            yield X[first : first + size].astype("float64"), Y[first : first + size]

    signature = (tf.TensorSpec([None, 10], tf.float64), tf.TensorSpec([None], tf.float32))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


CASES: dict[str, tuple[Callable[[], keras.Model], Load]] = {
    "rows": (regression, of_rows),
    "trees": (two_outputs, of_trees),
    "generator": (everything, of_generator),
}


@dataclass
class Streamed(InMemorySource):
    """A model and a stream, as `fit` passes them to the tasks."""

    loader: Load = of_rows
    count: int = 1
    validation_loader: Load | None = None

    def load(self) -> Splits:
        load, shared = self.validation_loader, (self.count, SEED, BATCH)
        validation = Stream("validation", load, *shared, "validation_data") if load else None
        return splits.streamed(Stream("load", self.loader, *shared), self.splits.validation, validation)


VALIDATION = Arrays(X[250:], Y[250:])


def streamed(
    make: Callable[[], keras.Model], load: Load, count: int, steps: int, validation: Arrays | None = VALIDATION
) -> Streamed:
    validation = validation if load is not of_trees else None
    plan = EpochPlan(epochs=EPOCHS, steps_per_epoch=steps, validation_batch_size=BATCH)
    return Streamed(make, Splits(Arrays(X), validation), plan, loader=load, count=count)


def keras_fit(source: Streamed, dataset: tf.data.Dataset) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    assert source.plan
    keras.utils.set_random_seed(SEED)
    model, other = source.make(), source.splits.validation
    history = model.fit(
        dataset.repeat(),
        validation_data=(other.x, other.y) if other else None,
        validation_batch_size=BATCH,
        epochs=source.plan.epochs,
        steps_per_epoch=source.plan.steps_per_epoch,
        verbose=0,
    )
    return history.history, weights_of(model)


# Whole runs.


@pytest.mark.parametrize(
    "name", ["trees", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("rows", "generator"))]
)
def test_one_asynchronous_worker_equals_keras(name: str, async_loop: Any, publishing: Any) -> None:
    """Calls have 5 steps and epochs 7: updates beyond the end of an epoch are refused, and no batch is left out."""
    source, config, hooks = streamed(*CASES[name], 1, steps=7), config_of(BATCH), RecordingHooks()
    publishing(source.load())
    loop = async_loop(config, 1, 1, source=source)
    drive(loop, source, hooks)
    assert_same((hooks.history(), weights_of(loop.model)), keras_fit(source, source.loader(Shard(0, 1, SEED, BATCH))))


def drive_in_sync(worker: SyncWorker, source: Streamed, start: Snapshot | None = None, until: int | None = None) -> Any:
    config, hooks = config_of(BATCH), RecordingHooks()
    loop = sync_loop(worker, config, source, start)
    if until:
        loop.train(until)
        return loop.freeze()()
    drive(loop, source, hooks)
    return hooks.history(), weights_of(loop.model), loop.progress


def drive_all_in_sync(worker: SyncWorker) -> dict[str, Any]:
    return {name: drive_in_sync(worker, streamed(*CASES[name], 1, steps=7)) for name in CASES}


# A worker takes seconds to start, so the same one trains on all streams.
@pytest.fixture(scope="module")
def one_worker(sync_workers: SyncWorkers) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = sync_workers(drive_all_in_sync, num_workers=1)
    return found


@pytest.mark.slow  # test_stream_lengths.py and test_stream_ends.py have streams of two synchronous workers
@pytest.mark.parametrize("name", CASES)
def test_one_synchronous_worker_equals_keras(name: str, one_worker: dict[str, Any]) -> None:
    source = streamed(*CASES[name], 1, steps=7)
    *found, _ = one_worker[name]
    assert_same(found, keras_fit(source, source.loader(Shard(0, 1, SEED, BATCH))))


def joined_batches(source: Streamed, count: int, steps: int) -> tf.data.Dataset:
    """A dataset with one batch for each step: the batches of all workers, concatenated."""
    shards = [Reader(source.load().stream, index) for index in range(count)]  # type: ignore[arg-type]

    def batches() -> Iterator[tuple[np.ndarray, ...]]:
        for step in range(steps):
            parts = [reader.read_batches(step, 1) for reader in shards]
            yield tuple(map(np.concatenate, zip(*parts, strict=True)))

    signature = tuple(source.load().layout.batched(None))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


@pytest.mark.parametrize("load", [pytest.param(each, marks=pytest.mark.slow) for each in (of_rows, of_generator)])
def test_synchronous_workers_equal_one_with_all_their_batches(load: Load, sync_workers: SyncWorkers) -> None:
    """Batches in a step differ in size; each worker has five batches in a pass, and epochs have seven steps."""
    source = streamed(regression, load, 3, steps=7)
    (*found, progress), *others = sync_workers(drive_in_sync, num_workers=3, args=(source,))
    whole = joined_batches(source, 3, 7 * EPOCHS)
    assert_same(found, keras_fit(source, whole))
    assert progress.examples == sum(len(x) for x, _ in whole)
    for _, weights, _ in others:
        assert all(np.array_equal(one, other) for one, other in zip(weights, found[1], strict=True))


@pytest.mark.slow
def test_a_synchronous_run_continues_at_its_batch(sync_workers: SyncWorkers) -> None:
    source = streamed(regression, of_generator, 2, steps=7)
    whole = sync_workers(drive_in_sync, 2, args=(source, None, 21))[0]
    snapshot = sync_workers(drive_in_sync, 2, args=(source, None, 10))[0]
    assert snapshot.facts.input.positions == (10, 10)
    parts = sync_workers(drive_in_sync, 2, args=(source, snapshot, 21))[0]
    assert parts.facts.examples == whole.facts.examples
    for name, array in whole.arrays.items():
        np.testing.assert_allclose(parts.arrays[name], array, atol=1e-6, err_msg=name)


# Readers and positions.


def test_a_reader_repeats_batches_of_refused_updates() -> None:
    reader = Reader(Stream("load", of_generator, 2, SEED, BATCH), 1)
    sizes = [5 + (number % 10 * 7 + 3) % 19 for number in range(40)]

    def taken(first: int, num: int) -> list[int]:
        leaves = reader.read_batches(first, num)
        assert np.array_equal(leaves[0][:, :3].sum(1), leaves[1])
        return [len(x) for x in leaves[::2]]

    assert taken(0, 4) == sizes[:4]
    assert taken(2, 4) == sizes[2:6], "batches of two refused updates are repeated"
    assert reader.size(0, 6) == sizes[6]
    assert taken(25, 3) == sizes[25:28], "across the end of a pass"
    assert taken(3, 2) == sizes[3:5], "before the batches that are kept"


def test_whole_passes_are_not_read_again() -> None:
    read: list[int] = []  # the examples

    def counted(shard: Shard) -> tf.data.Dataset:
        def note(number: tf.Tensor) -> tf.Tensor:
            read.append(int(number))
            return number

        numbers = tf.data.Dataset.range(10).map(lambda n: tf.ensure_shape(tf.numpy_function(note, [n], tf.int64), []))
        return numbers.batch(2)

    reader = Reader(Stream("load", counted, 1, SEED, 2), 0)
    # A pass has 5 batches, so batch 1002 is the third one of a pass.
    assert [x.tolist() for x in reader.read_batches(1002, 2)] == [[4, 5], [6, 7]]
    assert len(read) < 30


def sharding_of_streams(mode: str, workers: int, steps: int | None) -> Sharding:
    """As a run counts their batches; `steps`: of an epoch, None if it ends with the data."""
    streams: Any = SimpleNamespace(stream=True)
    return sharding_of(RunConfig(seed=SEED), mode, streams, EpochPlan(steps_per_epoch=steps), workers, BATCH)


@pytest.mark.parametrize("whole", [False, True])
def test_positions_count_batches_of_the_streams(whole: bool) -> None:
    """Another length of the epochs keeps each position; another number of workers keeps the fraction of the epoch."""

    def sharding(steps: int, workers: int) -> Sharding:
        return sharding_of_streams("sync" if whole else "async", workers, steps)

    positions = [6, 6, 6] if whole else [5, 6, 7]
    before = input_facts(sharding(12, 3), positions=positions)
    snapshot = Snapshot(6, {}, replace(facts(6), examples=1, input=before))
    assert stream_positions(snapshot, sharding(50, 3)) == positions
    assert sharding(11, 2).updates_per_pass == 11
    assert stream_positions(snapshot, sharding(11, 2)) == ([6, 6] if whole else [9, 8]), (
        "half of an epoch; or one and a half, which are 18 updates of 12 an epoch"
    )
