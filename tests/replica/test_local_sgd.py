"""algorithm=local_sgd: compared with its definition, with plain training, and with itself when it is resumed."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica import local_sgd_runs as runs
from tests.replica.local_sgd_runs import AVERAGES, CHANGED, CHANGING, LONG, PAUSES, QUICK, STREAM, of_model, plain_of
from tests.replica.small_runs import source_and_splits
from tests.replica.test_epochs import regression
from tests.replica.test_resume import assert_same_arrays, taken
from tf2dist.config.schema import AlgorithmConfig, RunConfig
from tf2dist.data.stream import Reader
from tf2dist.model import builtin
from tf2dist.testing import SyncWorkers
from tf2dist.training.loop import PauseRequest

Batches = list[tuple[np.ndarray, np.ndarray]]  # of one worker, one for each step
ALL = ("model/", "optimizer/", "outer/")


@pytest.fixture(scope="module")
def quick(sync_workers: SyncWorkers) -> list[dict[str, Any]]:
    return sync_workers(runs.train_quickly, num_workers=2)


@pytest.fixture(scope="module")
def long(sync_workers: SyncWorkers) -> list[dict[str, Any]]:
    return sync_workers(runs.train_long, num_workers=2, timeout_secs=300)


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
        for variable, array in zip(all_of(model), of_model(before).values(), strict=True):
            variable.assign(array)
        slots = [v for v in optimizer.variables if v.name not in ("iteration", "learning_rate")]
        return cls(model, optimizer, batches, [*all_of(model), *slots])

    def step(self, number: int) -> tuple[float, int]:
        """Takes a step; returns its loss and the number of its examples."""
        x, y = self.batches[number]
        with tf.GradientTape() as tape:
            loss = self.model.compute_loss(x, y, self.model(x, training=True), training=True)
        trainable = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, trainable), trainable)
        return float(loss), len(x)


def all_of(model: keras.Model) -> list[keras.Variable]:
    """In the order of a snapshot."""
    return [*model.trainable_variables, *model.non_trainable_variables]


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
        for worker in workers if step == PAUSES[0] else []:
            worker.variables[CHANGED].assign_add(tf.fill(worker.variables[CHANGED].shape, 0.5))
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
    model = runs.normed((28, 28, 1), 10)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def assert_defined(
    found: list[Any], make: Callable[[], keras.Model], config: RunConfig, new_optimizer: Any, parts: list[Batches]
) -> None:
    one, other = found
    workers = [ByHand.of(make(), new_optimizer(), batches, one.before) for batches in parts]
    loss, examples = by_definition(workers, config.algorithm)
    for variable, (name, array) in zip(all_of(workers[0].model), of_model(one.after.arrays).items(), strict=True):
        np.testing.assert_allclose(array, variable.numpy(), atol=1e-5, rtol=0, err_msg=name)
    assert_same_arrays(one.after, other.after, ALL)
    for result in found:
        assert result.progress.global_step == result.updates == 14
        assert result.progress.local_steps == (14, 14)
        assert result.progress.examples == examples
        assert result.metrics["loss"] == pytest.approx(loss, rel=1e-4)
        assert result.averages == AVERAGES == len(list(round_lengths(3)))
        assert result.facts == {"algorithm": "local_sgd", "local_steps": 3}
    assert one.progress.loss == other.progress.loss


def assert_case(config: RunConfig, found: list[Any]) -> None:
    new_optimizer = functools.partial(builtin.build_optimizer, config.optimizer, 14)
    assert_defined(found, compiled_normed, config, new_optimizer, cut_by_hand(config))
    assert found[0].progress.examples == 1257 + 100
    assert any(name.startswith("outer/") for name in found[0].after.arrays) == (config.algorithm.outer_momentum > 0)


@pytest.mark.parametrize("name", QUICK)
def test_a_run_is_what_the_definition_says(quick: list[dict[str, Any]], name: str) -> None:
    """Whatever the calls are: several rounds long, one round, or a part of one."""
    assert_case(QUICK[name], [result[name] for result in quick])


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_more_runs_are_what_the_definition_says(long: list[dict[str, Any]], name: str) -> None:
    assert_case(LONG[name], [result[name] for result in long])


@pytest.mark.slow
def test_workers_with_streams_take_batches_of_any_size(long: list[dict[str, Any]]) -> None:
    readers = [Reader(STREAM.load().stream, index) for index in range(2)]  # type: ignore[arg-type]
    batches: list[Any] = [[tuple(reader.read_batches(step, 1)) for step in range(14)] for reader in readers]
    make = functools.partial(keras.optimizers.Adam, 0.01)
    assert_defined([result["stream"] for result in long], regression, runs.STREAM_CONFIG, make, batches)


# Plain training.


def assert_plain(results: list[dict[str, Any]], optimizer: str) -> None:
    plain, local = (results[0][name] for name in (f"plain {optimizer}", f"{optimizer} step by step"))
    assert local.averages == 14
    for name, array in plain.after.arrays.items():
        np.testing.assert_allclose(local.after.arrays[name], array, atol=1e-6, rtol=0, err_msg=name)
    assert local.progress.examples == plain.progress.examples
    np.testing.assert_allclose(local.progress.metrics, plain.progress.metrics, rtol=1e-5)


def test_rounds_of_one_step_are_plain_training(quick: list[dict[str, Any]]) -> None:
    """With momentum, which is linear in the gradient; the batches of the 13th step differ in size."""
    assert_plain(quick, "momentum")


@pytest.mark.slow
def test_rounds_of_one_step_are_plain_training_with_sgd(long: list[dict[str, Any]]) -> None:
    assert_plain(long, "sgd")


@pytest.mark.slow
def test_local_steps_of_1_are_plain_training_with_any_optimizer(long: list[dict[str, Any]]) -> None:
    plain, local = (long[0][name] for name in ("plain adam", "adam of one step"))
    assert_same_arrays(plain.after, local.after, ALL)
    assert local.facts == {"algorithm": "local_sgd"}
    assert plain.facts == {"algorithm": "plain"}


def test_state_that_all_workers_compute_alike_moves_without_examples_too(quick: list[dict[str, Any]]) -> None:
    for result in quick:
        *_, steps, examples = of_model(result["padded"].after.arrays).values()
        assert [steps, examples] == [2, 9]


# A run in parts.


def test_a_run_that_was_stopped_ends_like_one_that_was_not(quick: list[dict[str, Any]]) -> None:
    """Bit for bit; the second worker alone has asked for the stop."""
    for result in quick:
        assert result["requested"] == PauseRequest.STOP
        assert result["stopped"].step == 7 + 6, "after a call of two rounds"
        assert_same_arrays(result["begun"], result["stopped"], ALL)
        assert_same_arrays(result["resumed"], result["outer momentum"].after, ALL)
        assert result["resumed"].facts == result["outer momentum"].after.facts


@pytest.mark.slow
def test_a_run_changes_its_algorithm_and_its_mode(long: list[dict[str, Any]], async_loop: Any) -> None:
    """What only the outer optimizer has is left out, and starts over."""
    _, local, plain_begun, plain, begun, again = long[0]["changes"]
    outer = {f"outer/{name}/momentums" for name in OF_NORMED}
    assert outer == {name for name in local.arrays if name.startswith("outer/")}
    assert all(np.any(local.arrays[name]) for name in outer)
    for before, after in ((local, plain_begun), (plain, begun)):
        assert_same_arrays(before, after, ("model/", "optimizer/"))
    assert not outer & set(plain.arrays)
    assert not any(np.any(begun.arrays[name]) for name in outer)
    assert again.step == long[0]["updates"] == 21
    config = replace(plain_of(CHANGING), mode="async")
    loop = async_loop(config, num_workers=2, num_ps=1, start=again)
    assert_same_arrays(taken(loop), again, ("model/", "optimizer/"))
    loop.train(40)
    assert loop.updates_applied() == 40


OF_NORMED = ["unit/kernel", "unit/bias", "norm/gamma", "norm/beta", "logits/kernel", "logits/bias"]
