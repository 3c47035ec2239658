"""Streams of batches of several lengths, and streams to validate on: the results of Keras on the same batches."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.in_memory_source import RecordingHooks, weights_of
from tests.replica.test_epochs import SEED, assert_same, config_of, drive
from tests.replica.test_streams import BATCH, Streamed, drive_in_sync, keras_fit, streamed
from tf2dist.data.arrays import Arrays
from tf2dist.data.stream import Load, Reader, Shard
from tf2dist.errors import ConfigError, DataError
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.loop import PauseRequest, WorkersAway
from tf2dist.training.parameter_server import schedule

RNG = np.random.default_rng(1)
SENTENCES = [RNG.integers(1, 50, length) for length in RNG.integers(2, 13, 250)]
WORDS = 20_000
PADDED = np.array([np.pad(sentence, (0, 12 - len(sentence))) for sentence in SENTENCES])
layers = keras.layers
TIMEOUT_SECS = 240.0  # the workers of one fixture train all models
pytestmark = pytest.mark.timeout(TIMEOUT_SECS + 60)


def sentences_of(shard: Shard) -> tf.data.Dataset:
    ragged = tf.ragged.constant(SENTENCES[shard.index :: shard.count], dtype=tf.int64)
    return tf.data.Dataset.from_tensor_slices(ragged).map(lambda tokens: tokens)


def kind_of(tokens: Any) -> Any:
    return tf.cast(tf.reduce_sum(tokens, -1) % 2, tf.int32)


def buckets(shard: Shard) -> tf.data.Dataset:
    """Sentences of similar lengths in a batch, and a class for each of them."""
    sentences = sentences_of(shard).map(lambda tokens: (tokens, kind_of(tokens)))
    return sentences.bucket_by_sequence_length(lambda tokens, _: tf.shape(tokens)[0], [5, 9], [BATCH] * 3)


def buckets_of_many(shard: Shard) -> tf.data.Dataset:
    """The same sentences, in a language of more words."""
    return buckets(shard).map(lambda tokens, y: (tokens * WORDS // 50, y))


def tagged(shard: Shard) -> tf.data.Dataset:
    """A class for each place of a sentence."""
    return sentences_of(shard).map(lambda tokens: (tokens, tokens % 3)).padded_batch(shard.batch_size)


def ragged(shard: Shard) -> tf.data.Dataset:
    """Ragged batches that were made dense, of numbers for each place."""
    batches = sentences_of(shard).ragged_batch(shard.batch_size).map(lambda tokens: tokens.to_tensor())
    numbers = batches.map(lambda tokens: tf.cast(tokens, tf.float32)[:, :, None] / 50)
    return numbers.map(lambda x: (tf.concat([x, x**2, tf.sin(9 * x)], -1), tf.cos(3 * x)))


def classifier() -> keras.Model:
    inside = [layers.Embedding(50, 8, mask_zero=True), layers.GlobalAveragePooling1D(), layers.Dense(2)]
    return compiled([keras.Input((None,), dtype="int32"), *inside])


def classifier_of_many() -> keras.Model:
    """Of the table only rows travel; another optimizer would need all of it."""
    inside = [layers.Embedding(WORDS, 16, mask_zero=True), layers.GlobalAveragePooling1D(), layers.Dense(2)]
    return compiled([keras.Input((None,), dtype="int32"), *inside], keras.optimizers.SGD(0.1))


def tagger() -> keras.Model:
    inside = [layers.Embedding(50, 8, mask_zero=True), layers.GRU(6, return_sequences=True), layers.Dense(3)]
    return compiled([keras.Input((None,), dtype="int32"), *inside])


def compiled(
    inside: list[Any], optimizer: keras.Optimizer | None = None, kind: type[keras.Sequential] = keras.Sequential
) -> keras.Model:
    model = kind(inside)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.5), loss, metrics=["accuracy"])
    return model


def of_places() -> keras.Model:
    model = keras.Sequential([keras.Input((None, 3)), layers.Dense(8, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


CASES: dict[str, tuple[Callable[[], keras.Model], Load, Arrays | None]] = {
    "a class of a sentence": (classifier, buckets, Arrays(PADDED[:40], (PADDED[:40].sum(1) % 2).astype("int32"))),
    "a class of a sentence of many words": (classifier_of_many, buckets_of_many, None),
    "a class of each place": (tagger, tagged, Arrays(PADDED[:40], PADDED[:40] % 3)),
    "a number of each place": (of_places, ragged, None),
}


VALIDATED = "validated on a stream"
# A training that two synchronous workers make once for two tests.
TRAINED_AS = {"a class of a sentence": VALIDATED}


def source_of(name: str, count: int = 1) -> Streamed:
    make, load, validation = CASES[name]
    return streamed(make, load, count, steps=7, validation=validation)


# A recurrent one takes longer, and test_sync_rows.py has rows of tables.
THOROUGH = ["a class of each place", "a class of a sentence of many words"]


@pytest.mark.parametrize(
    "name",
    [
        "a class of a sentence of many words",
        *(pytest.param(f"a {what} of each place", marks=pytest.mark.thorough) for what in ("class", "number")),
    ],
)
def test_one_asynchronous_worker_equals_keras(name: str, async_loop: Any, publishing: Any) -> None:
    source, config, hooks = source_of(name), config_of(BATCH), RecordingHooks()
    publishing(source.load())
    loop = async_loop(config, 1, 1, source=source)
    assert len(loop.step.tables) == ("many" in name)
    drive(loop, source, hooks)
    assert_same((hooks.history(), weights_of(loop.model)), keras_fit(source, source.loader(Shard(0, 1, SEED, BATCH))))


def drive_all_in_sync(worker: SyncWorker, count: int, names: list[str]) -> dict[str, Any]:
    sources = {name: validated(count) if name == VALIDATED else source_of(name, count) for name in names}
    return {name: drive_in_sync(worker, source) for name, source in sources.items()}


@pytest.fixture(scope="module")
def one_worker(sync_workers: SyncWorkers) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = sync_workers(drive_all_in_sync, 1, (1, [*CASES, VALIDATED]), TIMEOUT_SECS)
    return found


@pytest.fixture(scope="module")
def two_workers(sync_workers: SyncWorkers) -> dict[str, Any]:
    found: dict[str, Any]
    names = [name for name in (*CASES, VALIDATED) if name not in (*THOROUGH, *TRAINED_AS)]
    found, other = sync_workers(drive_all_in_sync, 2, (2, names), TIMEOUT_SECS)
    assert found[VALIDATED][0] == other[VALIDATED][0]
    return found


@pytest.fixture(scope="module")
def two_thorough_workers(sync_workers: SyncWorkers) -> dict[str, Any]:
    found: dict[str, Any]
    found, _ = sync_workers(drive_all_in_sync, 2, (2, THOROUGH), TIMEOUT_SECS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_synchronous_worker_equals_keras(name: str, one_worker: dict[str, Any]) -> None:
    source = source_of(name)
    *found, _ = one_worker[name]
    assert_same(found, keras_fit(source, source.loader(Shard(0, 1, SEED, BATCH))))


def joined(source: Streamed, steps: int) -> list[list[list[np.ndarray]]]:
    """For each step the leaves of each worker's batch."""
    readers = [Reader(source.load().stream, index) for index in range(2)]  # type: ignore[arg-type]
    return [[reader.read_batches(step, 1) for reader in readers] for step in range(steps)]


def padded(parts: list[list[np.ndarray]]) -> Iterator[np.ndarray]:
    """The leaves of the batches of a step as one batch, which is as long as the longest of them."""
    for leaves in zip(*parts, strict=True):
        length = max(leaf.shape[1] if leaf.ndim > 1 else 0 for leaf in leaves)
        yield np.concatenate([np.pad(x, [(0, 0), (0, length - x.shape[1])]) if length else x for x in leaves])


@pytest.mark.parametrize(
    ("name", "fixture"),
    [
        ("a class of a sentence", "two_workers"),
        *(pytest.param(name, "two_thorough_workers", marks=pytest.mark.thorough) for name in THOROUGH),
    ],
)
def test_synchronous_workers_with_batches_of_two_lengths_equal_keras(
    name: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    """Keras gets the batches of a step as one, padded to the longer of them; the mask leaves out what was added."""
    source = source_of(name, 2)
    steps = joined(source, 21)
    assert any(one[0].shape[1] != other[0].shape[1] for one, other in steps)
    signature = tuple(source.load().layout.batched(None))
    whole = tf.data.Dataset.from_generator(lambda: map(tuple, map(padded, steps)), output_signature=signature)
    history, weights = keras_fit(source, whole)
    found, found_weights, _ = request.getfixturevalue(fixture)[TRAINED_AS.get(name, name)]
    # Keras weighs a batch in the metrics of places by its length, and the padding makes it longer.
    same = [metric for metric in history if name != "a class of each place" or metric != "accuracy"]
    if name in TRAINED_AS:
        same = [metric for metric in same if not metric.startswith("val_")]
    expected = {metric: history[metric] for metric in same}
    assert_same(({metric: found[metric] for metric in same}, found_weights), (expected, weights))


def test_without_a_mask_every_place_of_all_workers_counts_alike(two_workers: dict[str, Any]) -> None:
    """Keras gets the places of all sentences of a step as one sentence, of which its loss is the mean."""
    source = source_of("a number of each place", 2)
    steps = joined(source, 21)
    assert any(one[0].shape[1] != other[0].shape[1] for one, other in steps)

    def one_sentence(parts: list[list[np.ndarray]]) -> tuple[np.ndarray, ...]:
        pairs = zip(*parts, strict=True)
        return tuple(np.concatenate([leaf.reshape(1, -1, leaf.shape[-1]) for leaf in leaves], 1) for leaves in pairs)

    signature = tuple(source.load().layout.batched(None))
    whole = tf.data.Dataset.from_generator(lambda: map(one_sentence, steps), output_signature=signature)
    _, weights = keras_fit(source, whole)
    _, found, _ = two_workers["a number of each place"]
    assert_same(({}, found), ({}, weights))


def two_tags() -> keras.Model:
    x = keras.Input((None, 3))
    model = keras.Model(x, [layers.Dense(1)(x), layers.Dense(1)(x)])
    model.compile("sgd", ["mse", "mae"])
    return model


def two_numbers(shard: Shard) -> tf.data.Dataset:
    return ragged(shard).map(lambda x, y: (x, (y, y)))


def refused(worker: SyncWorker) -> str:
    try:
        drive_in_sync(worker, streamed(two_tags, two_numbers, 2, steps=7, validation=None))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_several_losses_of_places_are_refused_for_synchronous_workers(sync_workers: SyncWorkers) -> None:
    assert all("or by the length of a batch" in text for text in sync_workers(refused, num_workers=2))


# Streams to validate on.


def held_out(shard: Shard) -> tf.data.Dataset:
    """Other sentences, with weights, which those of the training do not have; the last of three shards is empty."""
    tokens = PADDED[:90] if shard.count == 1 else PADDED[:90].reshape(-1, 45, 12)[shard.index % 2]
    weights = np.linspace(0, 2, len(tokens))
    batches = tf.data.Dataset.from_tensor_slices((tokens, kind_of(tokens), weights)).batch(shard.batch_size)
    return batches.take(0) if shard.index == 2 else batches


def validated(count: int) -> Streamed:
    source = streamed(classifier, buckets, count, steps=7, validation=None)
    return replace(source, validation_loader=held_out)


def keras_fit_and_validate(source: Streamed, count: int) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    keras.utils.set_random_seed(SEED)
    model, shards = source.make(), [held_out(Shard(index, count, SEED, BATCH)) for index in range(count)]
    history = model.fit(
        buckets(Shard(0, 1, SEED, BATCH)).repeat(),
        validation_data=functools.reduce(tf.data.Dataset.concatenate, shards),
        steps_per_epoch=7,
        epochs=3,
        verbose=0,
    )
    return history.history, weights_of(model)


def evaluated_by_keras(weights: list[np.ndarray], count: int) -> dict[str, Any]:
    """The metrics of a model with these weights, over all shards."""
    model, shards = classifier(), [held_out(Shard(index, count, SEED, BATCH)) for index in range(count)]
    for variable, value in zip(model.weights, weights, strict=True):
        variable.assign(value)
    whole = functools.reduce(tf.data.Dataset.concatenate, shards)
    return {name: pytest.approx(value, rel=1e-5) for name, value in model.evaluate(whole, return_dict=True).items()}


@pytest.mark.thorough
def test_one_asynchronous_worker_validates_on_a_stream_as_keras(async_loop: Any, publishing: Any) -> None:
    source, config, hooks = validated(1), config_of(BATCH), RecordingHooks()
    publishing(source.load())
    loop = async_loop(config, 1, 1, source=source)
    drive(loop, source, hooks)
    assert_same((hooks.history(), weights_of(loop.model)), keras_fit_and_validate(source, 1))


@pytest.mark.thorough
def test_a_stop_does_not_wait_for_the_end_of_a_validation(
    async_loop: Any, publishing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop discards it, and has seconds to save the run, where a validation may have hours."""
    monkeypatch.setattr(schedule, "QUIET_SECS", 0.2)
    source = replace(validated(1), validation_loader=lambda shard: held_out(shard).repeat(600))
    publishing(source.load())
    loop = async_loop(config_of(BATCH), 1, 1, source=source)
    loop.train(7)
    with pytest.raises(WorkersAway):
        loop.evaluate("validation", lambda: PauseRequest.STOP)
    loop._coordinator.join()


class OwnTestStep(keras.Sequential):  # type: ignore[misc]
    """A classifier whose `test_step` returns more plain numbers than its `train_step`."""

    def train_step(self, data: Any) -> Any:
        return {"loss": super().train_step(data)["loss"]}

    def test_step(self, data: Any) -> Any:
        tokens, y, _ = data
        logits = self(tokens)
        right = keras.ops.equal(keras.ops.argmax(logits, -1), keras.ops.cast(y, "int64"))
        return {"right": keras.ops.mean(keras.ops.cast(right, "float32")), "largest": keras.ops.max(logits)}


def with_own_test_step() -> keras.Model:
    return compiled(classifier().layers, kind=OwnTestStep)


def test_a_models_own_test_step_validates_on_a_stream(async_loop: Any, publishing: Any) -> None:
    """Plain numbers are means over the batches, of which `fit` of Keras shows the last one."""
    source = replace(validated(1), make=with_own_test_step)
    publishing(source.load())
    loop = async_loop(config_of(BATCH), 1, 1, source=source)
    assert loop.step.evaluated.size > loop.step.metrics.size
    loop.train(5)
    evaluation, model = loop.evaluate("validation"), with_own_test_step()
    for variable, value in zip(model.weights, weights_of(loop.model), strict=True):
        variable.assign(value)
    batches = [model.test_on_batch(*batch, return_dict=True) for batch in held_out(Shard(0, 1, SEED, BATCH))]
    means = {name: np.mean([logs[name] for logs in batches]) for name in ("largest", "right")}
    assert evaluation.num_examples == 90
    assert evaluation.metrics == pytest.approx(means, rel=1e-5)


def test_three_asynchronous_workers_evaluate_every_shard_once(async_loop: Any, publishing: Any) -> None:
    source = validated(3)
    publishing(source.load(), range(3))
    loop = async_loop(config_of(BATCH), 3, 2, source=source)
    loop.train(2)
    evaluations, weights = [loop.evaluate("validation") for _ in range(2)], weights_of(loop.model)
    for evaluation in evaluations:
        assert evaluation.num_examples == 90
        assert evaluation.metrics == evaluated_by_keras(weights, 3)


@pytest.mark.slow
def test_one_synchronous_worker_validates_on_a_stream_as_keras(one_worker: dict[str, Any]) -> None:
    *found, _ = one_worker[VALIDATED]
    assert_same(found, keras_fit_and_validate(validated(1), 1))


def test_synchronous_workers_validate_on_a_stream_as_keras(two_workers: dict[str, Any]) -> None:
    history, weights, _ = two_workers[VALIDATED]
    assert {name: history[f"val_{name}"][-1] for name in ("accuracy", "loss")} == evaluated_by_keras(weights, 2)


def test_a_stream_to_validate_on_must_have_an_example(async_loop: Any, publishing: Any) -> None:
    source = replace(validated(1), validation_loader=lambda shard: held_out(shard).take(0))
    publishing(source.load())
    loop = async_loop(config_of(BATCH), 1, 1, source=source)
    with pytest.raises(DataError, match="validation_data: gives no batch to any worker"):
        loop.evaluate("validation")
