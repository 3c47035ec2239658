"""algorithm=local_sgd: compared with its definition, with plain training, and with itself when it is resumed."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.given import Given
from tests.replica.small_runs import run_config, source_and_splits
from tests.replica.test_epochs import regression
from tests.replica.test_resume import arrived, assert_same_arrays, taken
from tests.replica.test_streams import BATCH, of_generator, streamed
from tf2dist import registry
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.config.schema import AlgorithmConfig, RunConfig
from tf2dist.data.stream import Reader
from tf2dist.errors import ConfigError
from tf2dist.model import models
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.loop import PauseRequest
from tf2dist.training.synchronous.local_sgd.checks import check

layers = keras.layers
Batches = list[tuple[np.ndarray, np.ndarray]]  # of one worker, one for each step
PAUSES = (7, 14)  # the rounds have 3, 3, 1, 3, 3 and 1 steps; the 13th step of 2 * 50 examples has the last 57
AVERAGES = 6
OUTER = {"outer_momentum": 0.9, "outer_learning_rate": 0.7}
ALL = ("model/", "optimizer/", "outer/")


@registry.register_model("normed")
def normed(input_shape: tuple[int, ...], num_classes: int, synchronized: bool = False) -> keras.Model:
    """With moving averages, and with weights of which the mean does not fulfil their constraint."""
    unit = layers.Dense(12, "relu", name="unit", kernel_constraint=keras.constraints.UnitNorm())
    norm = layers.BatchNormalization(momentum=0.8, synchronized=synchronized, name="norm")
    inside = [layers.Rescaling(1 / 255), layers.Flatten(), unit, norm, layers.Dense(num_classes, name="logits")]
    return keras.Sequential([keras.Input(input_shape), *inside])


def local_config(optimizer: str, per_call: int | None = 7, local_steps: int = 3, **algorithm: float) -> RunConfig:
    config = run_config("normed", optimizer, steps_per_execution=per_call)
    config.mode = "sync"
    config.optimizer["learning_rate"] = 0.05 if optimizer != "adam" else 0.01
    config.algorithm = AlgorithmConfig(kind="local_sgd", local_steps=local_steps, **algorithm)  # type: ignore[arg-type]
    return config


def plain_config(optimizer: str) -> RunConfig:
    return replace(local_config(optimizer), algorithm=AlgorithmConfig())


CASES = {
    "sgd": local_config("sgd"),
    "momentum": local_config("momentum", per_call=2),  # a round takes two calls
    "adam": local_config("adam", per_call=None),
    "outer momentum": local_config("momentum", **OUTER),
    "outer rate": local_config("sgd", per_call=1, outer_learning_rate=1.2),
}
CASES["tensorflow"] = replace(CASES["sgd"], cluster=replace(CASES["sgd"].cluster, all_reduce="tensorflow"))
STREAM = streamed(regression, of_generator, 2, steps=7)
STREAM_CONFIG = local_config("adam", per_call=10)
STREAM_CONFIG.train.batch_size_per_worker = BATCH
INTERRUPTED = local_config("momentum", **OUTER)
STEP_BY_STEP = ("sgd", "momentum")


class Counted:
    """An all-reduce that counts how often it is called."""

    lost = None

    def __init__(self, inner: Any) -> None:
        self._inner, self.calls = inner, 0

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        self.calls += 1
        found: np.ndarray = self._inner(vector)
        return found


def built(worker: SyncWorker, config: RunConfig, start: Snapshot | None = None, given: Given | None = None) -> Any:
    from tf2dist.training.synchronous.loop import SyncLoop

    source, splits = (given, given.load()) if given else source_and_splits(config)
    mine, strategy = start if worker.index == 0 else None, worker.strategy
    return SyncLoop.build(config, worker.cluster, worker.task, source, splits, mine, lambda progress: None, strategy)


def trained(worker: SyncWorker, config: RunConfig, pauses: tuple[int, ...], given: Given | None = None) -> Any:
    """Trains to each of these steps; returns what the worker has before and afterwards."""
    loop = built(worker, config, given=given)
    before = loop.snapshot().arrays
    if loop._graphs._all_reduce:  # or it is TensorFlow's
        loop._graphs._all_reduce = Counted(loop._graphs._all_reduce)
    for until in pauses:
        loop.train(until)
    return SimpleNamespace(
        before=before,
        after=loop.snapshot(),
        updates=loop.updates_applied(),
        progress=loop.progress,
        metrics=loop.metrics.results(loop.progress.metrics),
        averages=loop._graphs._all_reduce.calls if loop._graphs._all_reduce else AVERAGES,
        facts=loop.facts(),
    )


def stopped_and_resumed(worker: SyncWorker) -> dict[str, Any]:
    """A run that the second worker asks to stop, in parts; and runs that continue with other algorithms."""
    first = built(worker, INTERRUPTED)
    wants = PauseRequest.STOP if worker.index == 1 else PauseRequest.NOTHING
    requested = first.train(22, lambda: wants if first.progress.global_step > 3 else PauseRequest.NOTHING)
    stopped = arrived(first.snapshot())
    second = built(worker, INTERRUPTED, stopped)
    begun = second.snapshot()
    second.train(22)
    plain = built(worker, plain_config("momentum"), stopped)
    plain.train(22)
    again = built(worker, INTERRUPTED, arrived(plain.snapshot()))
    again_begun = again.snapshot()
    again.train(30)
    snapshots = {"stopped": stopped, "begun": begun, "resumed": second.snapshot(), "plain": plain.snapshot()}
    return snapshots | {"again": again_begun, "requested": requested, "updates": again.updates_applied()}


def train_all(worker: SyncWorker) -> dict[str, Any]:
    """Everything in one life of the workers, which take seconds to start."""
    found = {name: trained(worker, config, PAUSES) for name, config in CASES.items()}
    found["stream"] = trained(worker, STREAM_CONFIG, PAUSES, STREAM)
    for name in STEP_BY_STEP:
        found[f"plain {name}"] = trained(worker, plain_config(name), (14,))
        found[f"{name} step by step"] = trained(worker, local_config(name), tuple(range(1, 15)))
    found["plain adam"] = trained(worker, plain_config("adam"), (14,))
    found["adam of one step"] = trained(worker, local_config("adam", local_steps=1), (14,))
    found["straight"] = trained(worker, INTERRUPTED, (22,))
    return found | stopped_and_resumed(worker)


@pytest.fixture(scope="module")
def results(sync_workers: SyncWorkers) -> list[dict[str, Any]]:
    return sync_workers(train_all, num_workers=2, timeout_secs=300)


# The definition.


@dataclass
class ByHand:
    """A worker by the definition, in plain Keras.

    Attributes:
        variables: of the model, then the slots of the optimizer.
    """

    model: keras.Model
    optimizer: keras.Optimizer
    batches: Batches
    variables: list[keras.Variable]

    @classmethod
    def of(cls, model: keras.Model, optimizer: keras.Optimizer, batches: Batches, before: Any) -> "ByHand":
        optimizer.build(model.trainable_variables)
        for name, variable in named(model).items():
            variable.assign(before[name])
        slots = [v for v in optimizer.variables if v.name not in ("iteration", "learning_rate")]
        return cls(model, optimizer, batches, [*model.weights, *slots])

    def step(self, number: int) -> tuple[float, int]:
        """Takes a step; returns its loss and the number of its examples."""
        x, y = self.batches[number]
        with tf.GradientTape() as tape:
            loss = self.model.compute_loss(x, y, self.model(x, training=True), training=True)
        trainable = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, trainable), trainable)
        return float(loss), len(x)


def named(model: keras.Model) -> dict[str, keras.Variable]:
    return {f"model/{v.path.removeprefix(f'{model.name}/')}": v for v in model.weights}


def round_lengths(local_steps: int) -> Iterator[int]:
    for begin, end in zip((0, *PAUSES), PAUSES, strict=False):
        for first in range(begin, end, local_steps):
            yield min(local_steps, end - first)


def by_definition(workers: list[ByHand], algorithm: AlgorithmConfig) -> tuple[float, int]:
    """Trains the workers to the last pause; returns the mean loss and the number of the examples."""
    rate, momentum = algorithm.outer_learning_rate, algorithm.outer_momentum
    trainable = {v.path: np.zeros(v.shape) for v in workers[0].model.trainable_variables}  # and their momenta
    step, loss_sum, examples = 0, 0.0, 0
    for length in round_lengths(algorithm.local_steps):
        begun, seen = [v.numpy() for v in workers[0].variables], np.zeros(len(workers))
        for number in range(step, step + length):
            for index, worker in enumerate(workers):
                loss, count = worker.step(number)
                seen[index] += count
                loss_sum += loss * count
        step, examples = step + length, examples + int(seen.sum())
        for place, old in enumerate(begun):
            variables = [worker.variables[place] for worker in workers]
            change = np.average([v.numpy() - old for v in variables], axis=0, weights=seen)
            if (path := variables[0].path) in trainable:
                trainable[path] = momentum * trainable[path] + rate * change
                change = momentum * trainable[path] + rate * change
            new = old + change
            if constraint := variables[0].constraint:
                new = constraint(tf.constant(new, tf.float32)).numpy()
            for variable in variables:
                variable.assign(new)
    return loss_sum / examples, examples


def cut_by_hand(config: RunConfig) -> list[Batches]:
    """The batches of two workers, from the order of each epoch."""
    train, batch_size = source_and_splits(config)[1].train, config.train.batch_size_per_worker
    parts: list[Batches] = [[], []]
    for epoch in range(2):
        seed = [config.seed, epoch]
        order = tf.random.experimental.stateless_shuffle(tf.range(len(train)), seed, alg="philox").numpy()
        for first in range(0, len(train), batch_size * 2):
            for part, rows in zip(parts, np.array_split(order[first : first + batch_size * 2], 2), strict=True):
                part.append((train.x[rows], train.y[rows]))
    return parts


def compiled_normed() -> keras.Model:
    model = normed((28, 28, 1), 10)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def assert_defined(
    found: list[Any], make: Callable[[], keras.Model], config: RunConfig, new_optimizer: Any, parts: list[Batches]
) -> None:
    one, other = found
    workers = [ByHand.of(make(), new_optimizer(), batches, one.before) for batches in parts]
    loss, examples = by_definition(workers, config.algorithm)
    for name, variable in named(workers[0].model).items():
        np.testing.assert_allclose(one.after.arrays[name], variable.numpy(), atol=2e-5, rtol=0, err_msg=name)
    assert_same_arrays(one.after, other.after, ALL)
    for result in found:
        assert result.progress.global_step == result.updates == 14
        assert result.progress.local_steps == (14, 14)
        assert result.progress.examples == examples
        assert result.metrics["loss"] == pytest.approx(loss, rel=1e-4)
        assert result.averages == AVERAGES == len(list(round_lengths(3)))
        assert result.facts == {"algorithm": "local_sgd", "local_steps": 3}
    assert one.progress.loss == other.progress.loss


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_what_the_definition_says(results: list[dict[str, Any]], name: str) -> None:
    """Whatever the calls are: several rounds long, one round, or a part of one."""
    config, found = CASES[name], [result[name] for result in results]
    new_optimizer = functools.partial(models.build_optimizer, config.optimizer, 14)
    assert_defined(found, compiled_normed, config, new_optimizer, cut_by_hand(config))
    assert found[0].progress.examples == 1257 + 100
    assert any(name.startswith("outer/") for name in found[0].after.arrays) == (config.algorithm.outer_momentum > 0)


def test_workers_with_streams_take_batches_of_any_size(results: list[dict[str, Any]]) -> None:
    parts = [Reader(STREAM.load().stream, index) for index in range(2)]  # type: ignore[arg-type]
    batches = [[tuple(reader.take(step, 1)) for step in range(14)] for reader in parts]
    make = functools.partial(keras.optimizers.Adam, 0.01)
    assert_defined([result["stream"] for result in results], regression, STREAM_CONFIG, make, batches)


# Plain training.


@pytest.mark.parametrize("optimizer", STEP_BY_STEP)
def test_rounds_of_one_step_are_plain_training(results: list[dict[str, Any]], optimizer: str) -> None:
    """With an optimizer that is linear in the gradient; the batches of the 13th step differ in size."""
    plain, local = (results[0][name] for name in (f"plain {optimizer}", f"{optimizer} step by step"))
    # The mean over the workers of weights with a norm of 1 has none, so the constrained ones differ.
    assert local.averages == 14
    for name, array in plain.after.arrays.items():
        np.testing.assert_allclose(local.after.arrays[name], array, atol=1e-6, rtol=0, err_msg=name)
    assert local.progress.examples == plain.progress.examples
    np.testing.assert_allclose(local.progress.metrics, plain.progress.metrics, rtol=1e-5)


def test_local_steps_of_1_are_plain_training_with_any_optimizer(results: list[dict[str, Any]]) -> None:
    plain, local = (results[0][name] for name in ("plain adam", "adam of one step"))
    assert_same_arrays(plain.after, local.after, ALL)
    assert local.facts["algorithm"] == "local_sgd"
    assert plain.facts == {"algorithm": "plain"}


# A run in parts.


def test_a_run_that_was_stopped_ends_like_one_that_was_not(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["requested"] == PauseRequest.STOP
        assert 3 < result["stopped"].step < 22
        assert result["stopped"].step % 3 == 0, "the request takes effect at an average"
        assert_same_arrays(result["begun"], result["stopped"], ALL)
        assert_same_arrays(result["resumed"], result["straight"].after, ALL)
        assert result["resumed"].facts == result["straight"].after.facts


def test_a_run_changes_its_algorithm_and_its_mode(results: list[dict[str, Any]], async_loop: Any) -> None:
    """What only the outer optimizer has is left out, and begins anew."""
    result = results[0]
    outer = {name for name in result["stopped"].arrays if name.startswith("outer/")}
    assert outer == {f"outer/{name}/momentums" for name in OF_NORMED}
    assert all(np.any(result["stopped"].arrays[name]) for name in outer)
    assert not outer & set(result["plain"].arrays)
    assert_same_arrays(result["again"], result["plain"], ("model/", "optimizer/"))
    assert not any(np.any(result["again"].arrays[name]) for name in outer)
    assert result["updates"] == 30


OF_NORMED = ["unit/kernel", "unit/bias", "norm/gamma", "norm/beta", "logits/kernel", "logits/bias"]
