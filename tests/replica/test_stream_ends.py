"""Epochs that end with the data, which are as long as only the data show: the results of Keras on the same batches."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica import test_epochs
from tests.replica.in_memory_source import RecordingHooks, weights_of
from tests.replica.small_runs import sync_loop
from tests.replica.test_epochs import SEED, Keeping, assert_same, config_of, drive, trained_before
from tests.replica.test_streams import BATCH, Streamed, X, Y, drive_in_sync, sharding_of_streams, streamed
from tests.unit.test_saving import facts
from tf2dist.checkpoint.snapshot import Frozen, Snapshot
from tf2dist.checkpoint.state import input_facts, stream_positions
from tf2dist.checkpoint.store import NoSaver
from tf2dist.data.passes import UNKNOWN_STEPS, Sharding
from tf2dist.data.splits import Splits
from tf2dist.data.stream import Reader, Shard, Stream
from tf2dist.errors import DataError
from tf2dist.model.source import EpochPlan
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.hooks import CallbackEffects
from tf2dist.training.setup import EPOCH_ARRAY, EpochPosition

EPOCHS = 3
# The batches of each worker in an epoch, of other sizes.
LENGTHS = [9, 6, 13]


def batches_of(shard: Shard, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for number in range(length):
        first = (37 * shard.index + 11 * number) % 200
        size = 5 + (7 * number + 3 * shard.index) % 16
        yield X[first : first + size], Y[first : first + size]


SIGNATURE = tf.TensorSpec([None, 10], tf.float32), tf.TensorSpec([None], tf.float32)


def of_unknown_length(shard: Shard) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(
        functools.partial(batches_of, shard, LENGTHS[shard.index]), output_signature=SIGNATURE
    )


def filtered(shard: Shard) -> tf.data.Dataset:
    """Shuffled anew in each epoch, and of another length in each."""
    rows = tf.data.Dataset.from_tensor_slices((X[:250], Y[:250])).shuffle(300, seed=shard.seed)
    return rows.batch(shard.batch_size).filter(lambda x, _: tf.reduce_mean(x) > 0)


def momentum() -> keras.Model:
    """At the end of data of unknown length Keras on TensorFlow counts a step too much, which changes those of Adam."""
    named = [keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(1, name="output")]
    model = keras.Sequential([keras.Input((10,)), *named])
    model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse", metrics=["mae"])
    return model


class Ending(Streamed):
    """A stream that ends an epoch."""

    def load(self) -> Splits:
        splits = super().load()
        assert splits.stream
        splits.stream.repeats = False
        return splits


def ending(load: Any, count: int) -> Ending:
    source = streamed(momentum, load, count, steps=7)
    assert source.plan
    return Ending(source.make, source.splits, replace(source.plan, steps_per_epoch=None), loader=load, count=count)


def keras_fit(source: Streamed, dataset: tf.data.Dataset) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """A call of `fit` for each epoch, since Keras would cut an epoch that is longer than the first one."""
    keras.utils.set_random_seed(SEED)
    model, other = source.make(), source.splits.validation
    assert other
    shared = {"validation_data": (other.x, other.y), "validation_batch_size": BATCH, "verbose": 0}
    histories = [model.fit(dataset, **shared).history for _ in range(EPOCHS)]
    return {name: [history[name][0] for history in histories] for name in histories[0]}, weights_of(model)


def joined(lengths: list[int]) -> tf.data.Dataset:
    """For each step the batches of all workers as one, as long as all of them have one."""

    def batches() -> Iterator[tuple[np.ndarray, ...]]:
        shards = [batches_of(Shard(index, len(lengths), SEED, BATCH), length) for index, length in enumerate(lengths)]
        for parts in zip(*shards, strict=False):
            yield tuple(map(np.concatenate, zip(*parts, strict=True)))

    return tf.data.Dataset.from_generator(batches, output_signature=SIGNATURE)


# One asynchronous worker, and several.


@pytest.mark.parametrize("load", [of_unknown_length, pytest.param(filtered, marks=pytest.mark.thorough)])
def test_one_asynchronous_worker_equals_keras(load: Any, async_loop: Any, publishing: Any) -> None:
    source, config, hooks, saver = ending(load, 1), config_of(BATCH), RecordingHooks(), Keeping()
    config.checkpoint.every_steps = EPOCHS * LENGTHS[0]  # it is due at the last step, before the end is known
    loop = async_loop(config, 1, 1, source=source)
    publishing(source.load())
    drive(loop, source, hooks, saver)
    assert saver.kept.facts.target_step == loop.progress.global_step, "an evaluator learns that it is the last one"
    assert_same((hooks.history(), weights_of(loop.model)), keras_fit(source, load(Shard(0, 1, SEED, BATCH))))


def test_three_asynchronous_workers_read_every_batch_once_in_an_epoch(async_loop: Any, publishing: Any) -> None:
    """Calls have 5 steps: of those that reach beyond the end of a stream only the batches before it count."""
    source, config, hooks = ending(of_unknown_length, 3), config_of(BATCH), RecordingHooks()
    loop = async_loop(config, 3, 2, source=source)
    publishing(source.load(), range(3))
    drive(loop, source, hooks)
    epochs = [step for kind, _, step, _ in hooks.calls if kind == "epoch"]
    assert epochs == [sum(LENGTHS), 2 * sum(LENGTHS), 3 * sum(LENGTHS)]
    assert loop.progress.local_steps == tuple(EPOCHS * length for length in LENGTHS)
    shards = [Shard(index, 3, SEED, BATCH) for index in range(3)]
    sizes = [len(x) for shard in shards for x, _ in batches_of(shard, LENGTHS[shard.index])]
    assert loop.progress.examples == EPOCHS * sum(sizes)
    assert loop.updates_applied() == loop.progress.global_step == loop.target_step


def test_an_asynchronous_run_continues_within_its_epoch(async_loop: Any, publishing: Any) -> None:
    source, config = ending(of_unknown_length, 1), config_of(BATCH)
    whole = async_loop(config, 1, 1, source=source)
    publishing(source.load())
    for _ in range(2):
        whole.train(1 << 40)
        assert whole.epoch_has_ended
        whole.begin_epoch()
    assert whole.progress.global_step == 18

    first = async_loop(config, 1, 1, source=source)
    first.train(1 << 40)
    first.begin_epoch()
    first.train(13)
    snapshot = first.freeze()()
    assert snapshot.facts.input.positions == (4,), "of the second epoch"
    second = async_loop(config, 1, 1, start=snapshot, source=source)
    second.train(1 << 40)
    assert second.epoch_has_ended
    assert second.progress.global_step == 18
    for name, array in whole.arrays().items():
        np.testing.assert_allclose(second.arrays()[name], array, atol=1e-6, err_msg=name)
    # Saved when the epoch had ended, and before the next one began: nothing is left of it.
    third = async_loop(config, 1, 1, start=second.freeze()(), source=source)
    third.train(1 << 40)
    assert third.epoch_has_ended
    assert third.progress.global_step == 18


def test_parts_of_a_model_that_are_behind_catch_up_at_the_end(async_loop: Any, publishing: Any) -> None:
    """A worker that is lost may have pushed its last update to one ps and not to the other."""
    source, config = ending(of_unknown_length, 1), config_of(BATCH)
    loop = async_loop(config, 1, 2, source=source)
    publishing(source.load())
    loop.train(5)
    behind = loop._graphs.servers[1].counters
    counts = behind.now()
    behind.restore(counts._replace(applied=counts.applied - 1))
    loop._graphs.servers[1].number_on_from_applied()
    loop.train(1 << 40)
    applied = [server.counters.now().applied for server in loop._graphs.servers]
    assert applied[0] == applied[1] >= 9
    assert loop.epoch_has_ended
    assert loop.progress.global_step == applied[0]


# Synchronous workers.


def drive_all(worker: SyncWorker, count: int) -> Any:
    loads = [of_unknown_length, filtered] if count == 1 else [of_unknown_length]
    return [drive_in_sync(worker, ending(load, count)) for load in loads]


@pytest.mark.slow
def test_one_synchronous_worker_equals_keras(sync_workers: SyncWorkers) -> None:
    (results,) = sync_workers(drive_all, 1, args=(1,))
    for load, (*found, _) in zip([of_unknown_length, filtered], results, strict=True):
        assert_same(found, keras_fit(ending(load, 1), load(Shard(0, 1, SEED, BATCH))))


def test_synchronous_workers_end_an_epoch_with_the_first_of_them(sync_workers: SyncWorkers) -> None:
    source = ending(of_unknown_length, 2)
    ((*found, progress),), ((*others, _),) = sync_workers(drive_all, 2, args=(2,))
    assert progress.global_step == EPOCHS * 6
    assert_same(found, keras_fit(source, joined(LENGTHS[:2])))
    assert all(np.array_equal(one, other) for one, other in zip(found[1], others[1], strict=True))


def in_parts(worker: SyncWorker) -> Any:
    source, config = ending(of_unknown_length, 2), config_of(BATCH)

    def made(start: Any = None) -> Any:
        return sync_loop(worker, config, source, start)

    def ended(loop: Any) -> tuple[int, bool, int]:
        loop.train(1 << 40)
        return loop.progress.global_step, loop.epoch_has_ended, loop.num_unread

    whole = made()
    steps = [ended(whole)]
    whole.begin_epoch()
    steps.append(ended(whole))
    first = made()
    ended(first)
    first.begin_epoch()
    first.train(10)
    second = made(first.freeze()())
    steps.append(ended(second))
    third = made(second.freeze()())
    steps.append(ended(third))
    return steps, first.freeze()().facts.input.positions, whole.arrays(), second.arrays()


@pytest.mark.slow
def test_a_synchronous_run_continues_within_its_epoch(sync_workers: SyncWorkers) -> None:
    (steps, positions, whole, parts), _ = sync_workers(in_parts, 2)
    assert steps == [(6, True, 1), (12, True, 1), (12, True, 1), (12, True, 1)]
    assert positions == (4, 4)
    for name, array in whole.items():
        np.testing.assert_allclose(parts[name], array, atol=1e-6, err_msg=name)


# Positions.


@pytest.mark.parametrize("whole", [False, True])
def test_another_number_of_workers_leaves_out_as_many_batches_of_the_epoch(whole: bool) -> None:
    def sharding(workers: int, steps: int | None = None) -> Sharding:
        return sharding_of_streams("sync" if whole else "async", workers, steps)

    positions = [6, 6, 6] if whole else [5, 6, 7]
    plan, first_step = EpochPlan(epochs=4), 30
    position = EpochPosition(2, first_step, UNKNOWN_STEPS).to_array()
    before = replace(facts(36), examples=1, input=input_facts(sharding(3), positions=positions))
    snapshot = Snapshot(36, {EPOCH_ARRAY: position}, before)
    assert stream_positions(snapshot, sharding(3)) == positions
    assert stream_positions(snapshot, sharding(2)) == [9, 9]
    for workers in (2, 3):
        assert EpochPosition.of(snapshot, plan, sharding(workers)) == EpochPosition(2, 30, UNKNOWN_STEPS)
    counted = replace(plan, steps_per_epoch=20)
    assert EpochPosition.of(snapshot, counted, sharding(3, 20)) == EpochPosition(2, 36, 20), "the epoch begins again"


def test_an_epoch_that_had_a_number_of_steps_begins_again() -> None:
    """Its batches were counted over several passes, so their numbers do not tell where the pass is."""
    counted, ends = (sharding_of_streams("sync", 2, steps) for steps in (20, None))
    before = replace(facts(36), input=input_facts(counted, positions=[36, 36]))
    snapshot = Snapshot(36, {EPOCH_ARRAY: EpochPosition(1, 20, 20).to_array()}, before)
    assert stream_positions(snapshot, ends) == [0, 0]
    assert EpochPosition.of(snapshot, EpochPlan(epochs=4), ends) == EpochPosition(1, 36, UNKNOWN_STEPS)


# Readers.


def test_a_reader_counts_the_batches_before_the_end_of_an_epoch() -> None:
    reader = Reader(Stream("load", of_unknown_length, 1, SEED, BATCH, repeats=False), 0)
    sizes = [len(x) for x, _ in batches_of(Shard(0, 1, SEED, BATCH), LENGTHS[0])]

    def taken(first: int, num: int) -> list[int]:
        return [len(x) for x in reader.read_batches(first, num)[::2]]

    assert (reader.count(0, 0, 5), taken(0, 5)) == (5, sizes[:5])
    assert (reader.count(0, 5, 5), taken(5, 5)) == (4, [*sizes[5:], sizes[-1]]), "the last one fills the call"
    assert (reader.count(0, 9, 5), taken(9, 2)) == (0, [sizes[-1]] * 2)
    assert (reader.count(0, 3, 5), taken(3, 1)) == (5, sizes[3:4]), "batches of refused updates"
    assert (reader.count(1, 0, 5), taken(0, 5)) == (5, sizes[:5])
    assert reader.size(1, 8) == sizes[8]
    assert reader.size(1, 9) == -1
    new = Reader(Stream("load", of_unknown_length, 1, SEED, BATCH, repeats=False), 0)
    assert new.count(4, 9, 5) == 0, "a worker that is started again after the end of its data"
    assert len(new.read_batches(9, 3)) == 6


def test_a_reader_asks_its_stream_for_one_batch_at_a_time() -> None:
    """A generator that two threads ask at once raises an error."""

    def batches() -> Iterator[list[np.ndarray]]:
        for num in range(1, 5):
            time.sleep(0.05)
            yield [X[:num], Y[:num]]

    stream: Any = SimpleNamespace(batches=lambda *_: SimpleNamespace(as_numpy_iterator=batches))
    reader = Reader(stream, 0)
    reader.read_batches(0, 1)  # fetches two more in a thread
    assert [reader.size(0, number) for number in (2, 1)] == [3, 2]


def test_an_epoch_without_a_batch_is_an_error() -> None:
    sizes = iter([1, 2])  # as of a generator that does not begin again

    def made(shard: Shard) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(lambda: ((X[:n], Y[:n]) for n in sizes), output_signature=SIGNATURE)

    reader = Reader(Stream("load", made, 1, SEED, BATCH, repeats=False), 0)
    assert reader.count(0, 0, 5) == 2
    with pytest.raises(DataError, match="gives no batch in a pass over it"):
        reader.count(1, 0, 5)


class Noting(NoSaver):
    def __init__(self) -> None:
        self.saved: list[tuple[int, bool]] = []

    def save(self, freeze: Callable[[], Frozen], stopping: bool = False, replaces: bool = False) -> None:
        self.saved.append((freeze()().step, replaces))


@pytest.mark.parametrize(
    ("calls", "saved"),
    [
        pytest.param([], [(10, False)], marks=pytest.mark.thorough),
        pytest.param([("epoch", 0)], [(10, True)], marks=pytest.mark.thorough),
        ([("end", 1)], [(10, False), (10, True)]),
    ],
)
def test_what_callbacks_change_replaces_what_was_saved_of_the_same_step(
    calls: list[tuple[str, int]], saved: list[tuple[int, bool]], tmp_path: Path, async_loop: Any, publishing: Any
) -> None:
    """A step may have been saved before it turns out that it was the last one of a stream."""
    source, saver = trained_before(tmp_path), Noting()
    source.plan = EpochPlan(epochs=1, shuffle=False, validation_batch_size=test_epochs.BATCH)
    publishing(source.load())
    loop = async_loop(config_of(test_epochs.BATCH), 1, 1, source=source)
    bias = next(name for name in loop.named if name.startswith("model/") and name.endswith("bias"))
    change = CallbackEffects(arrays={bias: np.ones(loop.named[bias][0].shape, np.float32)})
    drive(loop, source, RecordingHooks(dict.fromkeys(calls, change)), saver)
    assert saver.saved == saved
