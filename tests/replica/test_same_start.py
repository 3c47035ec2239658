"""Synchronous workers start with the same model, or report in one line what differs."""

import os
import re
import tempfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import run_config, source_and_splits, sync_loop
from tf2dist import data, registry
from tf2dist.checkpoint.snapshot import Weights
from tf2dist.config.schema import RunConfig
from tf2dist.data.loading import load_digits
from tf2dist.errors import ConfigError, DataError
from tf2dist.model.source import EpochPlan
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.synchronous import sync_setup
from tf2dist.training.synchronous.workers import PIECE_BYTES, Workers

layers = keras.layers
UNSEEDED = np.random.default_rng


@registry.register_model("own_weights")
def own_weights(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Draws its weights from a generator that the run does not seed."""
    logits = layers.Dense(num_classes)
    model = keras.Sequential([keras.Input(input_shape), layers.Flatten(), logits])
    logits.set_weights([UNSEEDED().normal(size=weight.shape) for weight in logits.get_weights()])
    return model


@registry.register_model("own_table")
def own_table(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Draws a table that is sent in several pieces, and of which rows travel."""
    pixels = keras.Input(input_shape)
    ids = keras.ops.cast(layers.Flatten()(pixels) * 16, "int32")
    table = layers.Embedding(70_000, 16)
    model = keras.Model(pixels, layers.Dense(num_classes)(layers.GlobalAveragePooling1D()(table(ids))))
    table.set_weights([UNSEEDED().normal(size=(70_000, 16))])
    return model


@registry.register_model("own_structure")
def own_structure(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Has a layer whose size differs from process to process."""
    hidden = layers.Dense(10 + os.getpid() % 1000)
    return keras.Sequential([keras.Input(input_shape), layers.Flatten(), hidden, layers.Dense(num_classes)])


@registry.register_optimizer("own_rate")
def own_rate(learning_rate: float) -> keras.Optimizer:
    """Draws its learning rate from a generator that the run does not seed."""
    return keras.optimizers.SGD(learning_rate * UNSEEDED().uniform())


@registry.register_data("own_examples")
def own_examples(config: Any) -> data.Splits:
    """Draws its number of examples from a generator that the run does not seed."""
    splits, num_examples = load_digits(config), int(UNSEEDED().integers(500, 1000))
    return data.Splits(splits.train[:num_examples], splits.validation, splits.test)


def train(worker: SyncWorker, config: RunConfig) -> Any:
    loop = sync_loop(worker, config)
    loop.train(10)
    return [variable.numpy() for variable in loop.model.variables]


class Rate(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule without `get_config`, as in many tutorials."""

    def __call__(self, step: Any) -> Any:
        return 0.5


def test_optimizers_without_a_configuration_can_be_compared() -> None:
    schedule, function, number = [
        sync_setup._description_of_optimizer(keras.optimizers.SGD(rate, name="mine"))
        for rate in (Rate(), lambda: 0.25, 0.25)
    ]
    assert function == number != schedule


def test_weights_are_compared_without_a_copy_of_them() -> None:
    """A worker keeps the memory that it frees, so copies at the start would stay for the whole run."""
    config = run_config()
    _, splits = source_and_splits(config)
    kernel = keras.Variable(np.ones([1024, 1024], np.float32))
    alone: Any = SimpleNamespace(count=1, index=0, gather=lambda own: np.array([own]))
    tracemalloc.start()
    try:
        optimizer = keras.optimizers.SGD()
        sync_setup.synchronize_initial_state(config, splits, optimizer, alone, {"model/kernel": [kernel]}, ())
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1 << 20


def test_weights_of_any_type_and_shape_can_be_compared() -> None:
    config = run_config()
    _, splits = source_and_splits(config)
    alone: Any = SimpleNamespace(count=1, index=0, gather=lambda own: np.array([own]))
    shapes: list[tuple[int, ...]] = [(), (0, 3), (2, 3)]
    made = [keras.Variable(np.ones(shape), dtype=kind) for kind in ("bfloat16", "float16", "int8") for shape in shapes]
    named = {f"model/{number}": [variable] for number, variable in enumerate(made)}
    sync_setup.synchronize_initial_state(config, splits, keras.optimizers.SGD(), alone, named, ())


@pytest.mark.parametrize(
    ("model", "num_workers"), [pytest.param("own_weights", 3, marks=pytest.mark.slow), ("own_table", 2)]
)
def test_all_workers_start_with_the_weights_of_the_first(
    sync_workers: SyncWorkers, model: str, num_workers: int
) -> None:
    first, *others = sync_workers(train, num_workers, (run_config(model),))
    for other in others:
        for expected, found in zip(first, other, strict=True):
            np.testing.assert_array_equal(found, expected)


class MixingOn(keras.layers.Layer):  # type: ignore[misc]
    """Computes with the mean over the examples of a batch, or with that over the columns."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.over = 0 if mixes else 1

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, self.over, keepdims=True)


def validate(worker: SyncWorker, mixing: int) -> tuple[int, int]:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input([4]), MixingOn(worker.index == mixing), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x = np.random.default_rng(0).random([300, 4], np.float32)
    examples = data.Arrays(x, x[:, 0])
    source = InMemorySource(make, data.Splits(examples, examples, num_classes=None), EpochPlan())
    loop = sync_loop(worker, run_config(), source)
    return loop._evaluated_at_once, loop.evaluate("validation").num_examples


def test_all_workers_evaluate_as_many_examples_at_once(sync_workers: SyncWorkers) -> None:
    """Only one of them finds that the model mixes the examples of a batch."""
    assert sync_workers(validate, 2, (0,)) == [(50, 300)] * 2


def all_sorts() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    bits = random.integers(0, 256, 3 * PIECE_BYTES + 12, np.uint8)  # as floats: NaN, -0.0 and all others
    columns = np.asfortranarray(random.random([500, 1000], np.float32))
    return {
        "bits": bits.view(np.float32),
        "bytes": bits[: PIECE_BYTES + 1],
        "columns": columns,
        "small": bits[:5],
        "none": np.zeros([0, 3]),
        "number": np.array(7),
    }


def sent(worker: SyncWorker) -> tuple[list[str], dict[str, np.ndarray], int]:
    """What arrives, and by how many MB the memory of the process grows when 128 MB are sent."""
    workers, leads = Workers(worker.cluster, worker.task, worker.strategy), worker.task.index == 0
    head, arrays = workers.broadcast_arrays(["head"] if leads else None, all_sorts() if leads else {})
    before = anonymous_mb()
    with tempfile.TemporaryFile() as file:
        zeros = np.memmap(file, np.float32, "w+", shape=(32, 1 << 20))
        workers.broadcast_arrays(None, {"zeros": zeros} if leads else {})
    return head, arrays, anonymous_mb() - before


def anonymous_mb() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"RssAnon:\s*(\d+)", status)[0]) >> 10


def test_arrays_arrive_bit_by_bit_and_in_little_memory(sync_workers: SyncWorkers) -> None:
    for head, arrays, grown_mb in sync_workers(sent, 2):
        assert head == ["head"]
        assert arrays.keys() == all_sorts().keys()
        for name, array in all_sorts().items():
            assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
            assert arrays[name].tobytes() == array.tobytes(), name
        assert grown_mb < 100


def gathered(worker: SyncWorker) -> tuple[list[Any], int]:
    """What arrives of one, two and four numbers, and how often a graph was made for them."""
    workers, index = Workers(worker.cluster, worker.task, worker.strategy), worker.task.index
    rows = [workers.gather([2.0**52 + index, *range(1, num)]).tolist() for num in (1, 2, 4)]
    return rows, workers._sum.experimental_get_tracing_count()


def test_numbers_are_gathered_by_one_graph(sync_workers: SyncWorkers) -> None:
    first, second = 2.0**52, 2.0**52 + 1
    rows = [[[first], [second]], [[first, 1], [second, 1]], [[first, 1, 2, 3], [second, 1, 2, 3]]]
    assert sync_workers(gathered, 2) == [(rows, 1)] * 2


def keeps_what_it_has_read(worker: SyncWorker) -> bool:
    start = Weights({"model/kernel": np.zeros(3)})
    return Workers(worker.cluster, worker.task, worker.strategy).broadcast_start(start) is start


def test_a_single_worker_sends_nothing(sync_workers: SyncWorkers) -> None:
    assert sync_workers(keeps_what_it_has_read, 1) == [True]


DIFFERENCES = {
    "model": "model (own_structure): its builder makes other variables on worker-1 than on worker-0",
    "optimizer": "optimizer (own_rate): not the same on worker-1 as on worker-0",
    "data": "data (own_examples): not the same examples on worker-1 as on worker-0",
}


def refused(worker: SyncWorker) -> dict[str, str]:
    """What is told for each of these differences."""
    found = {}
    for option in DIFFERENCES:
        config = run_config("own_structure" if option == "model" else "softmax")
        config.optimizer["name"] = "own_rate" if option == "optimizer" else "sgd"
        config.data.name = "own_examples" if option == "data" else "digits"
        with pytest.raises((ConfigError, DataError)) as caught:
            train(worker, config)
        found[option] = str(caught.value)
    return found


def test_a_difference_between_workers_is_named(sync_workers: SyncWorkers) -> None:
    for found in sync_workers(refused, 2):
        for option, says in DIFFERENCES.items():
            assert found[option].startswith(says)
