"""algorithm=downpour: as algorithm 7.1 of Dean et al. 2012 on a hand-made sequence, and as plain training."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import assert_exact, run_config, source_and_splits, split_of
from tests.replica.test_resume import taken
from tf2dist import registry
from tf2dist.config.algorithms import AlgorithmConfig
from tf2dist.config.schema import RunConfig
from tf2dist.model import models
from tf2dist.training.loop import PauseRequest

MakeLoop = Callable[..., Any]
EXAMPLES = 1257  # of the training set
LIMIT = 1000
MOMENTUM = 0.75


def downpour_config(n_push: int, n_fetch: int, **more: Any) -> RunConfig:
    config = run_config(**more)
    config.algorithm = AlgorithmConfig(kind="downpour", n_push=n_push, n_fetch=n_fetch)
    return config


class Remembering(keras.layers.Layer):
    """A layer with a state of each kind: a moving average, a counter, and what is only assigned."""

    def build(self, input_shape: Any) -> None:
        self.average = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")
        self.last = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            mean = keras.ops.mean(x)
            self.average.assign(self.average * MOMENTUM + mean * (1 - MOMENTUM))
            self.count.assign(self.count + 1)
            self.last.assign(mean)
        return x


@registry.register_model("remembering")
def remembering(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    layers = keras.layers
    flat = [layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(6, activation="tanh"), Remembering()]
    return keras.Sequential([keras.Input(input_shape), *flat, layers.Dense(num_classes)])


@registry.register_model("smooth")
def smooth(input_shape: tuple[int, ...], num_classes: int, rate: float = 0.0) -> keras.Model:
    """Differences in the last digits stay small in it; those of a cnn grow a hundredfold with each step."""
    layers = keras.layers
    flat = [layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(6, activation="tanh", name="hidden")]
    normed = [layers.BatchNormalization(momentum=MOMENTUM, name="norm"), layers.Dropout(rate)]
    return keras.Sequential([keras.Input(input_shape), *flat, *normed, layers.Dense(num_classes, name="logits")])


class Paper:
    """The algorithm as the paper has it, with a Keras optimizer as the parameter server.

    Attributes:
        weights, state: of the ps.
        rate_at: the learning rate of the update with this number.
    """

    def __init__(self, model: keras.Model, optimizer: keras.Optimizer, rate_at: Callable[[int], float]) -> None:
        self._model, self._optimizer, self.rate_at = model, optimizer, rate_at
        # Copies: a Keras variable that is made of a value of another one lies where that one does.
        self.weights = [keras.Variable(v.numpy()) for v in model.trainable_variables]
        self.state = [v.numpy() for v in model.non_trainable_variables]
        self.applied = 0
        optimizer.build(self.weights)

    def gradients(
        self, weights: Any, state: Any, x: np.ndarray, y: np.ndarray
    ) -> tuple[list[np.ndarray], list[Any], float]:
        weights = [tf.constant(weight) for weight in weights]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs, after = self._model.stateless_call(weights, state, x, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))
        gradients = [gradient.numpy() for gradient in tape.gradient(loss, weights)]
        return gradients, [value.numpy() for value in after], float(loss)

    def push(self, accrued: list[np.ndarray], num_batches: int, before: list[Any], after: list[Any]) -> None:
        self._optimizer.apply(list(map(tf.constant, accrued)), self.weights)
        (average, count, _), factor = self.state, MOMENTUM**num_batches
        self.state = [factor * average + after[0] - factor * before[0], count + num_batches, after[2]]
        self.applied += 1


class PaperWorker:
    """A worker of `Paper`; each has fetched when it is made."""

    def __init__(self, paper: Paper, batch_size: int) -> None:
        self._paper, self._batch_size, self.loss = paper, batch_size, 0.0
        self.fetch()

    def fetch(self) -> None:
        self.weights = [weight.numpy() for weight in self._paper.weights]
        self.state, self.rate = self._paper.state, self._paper.rate_at(self._paper.applied)
        self.fetched_at, self.pushes = self._paper.applied, 0

    def update(self, x: np.ndarray, y: np.ndarray) -> int:
        """Takes the batches in these examples; returns the staleness of the push. Counts the mean of their losses."""
        accrued, before = [np.zeros_like(weight) for weight in self.weights], self.state
        size = self._batch_size
        starts = range(0, len(x), size)
        for start in starts:
            part = slice(start, start + size)
            gradients, self.state, loss = self._paper.gradients(self.weights, self.state, x[part], y[part])
            accrued = [one + gradient for one, gradient in zip(accrued, gradients, strict=True)]
            self.weights = [w - self.rate * gradient for w, gradient in zip(self.weights, gradients, strict=True)]
            self.loss += loss / len(starts)
        staleness = self._paper.applied - self.fetched_at - self.pushes
        self._paper.push(accrued, len(starts), before, self.state)
        self.pushes += 1
        return staleness


SEQUENCE = [0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0]  # which worker pushes
SIZES = [10, 10, 7, 10, 3, 10, 10, 10, 5, 10, 10, 1]  # the examples of each update; a batch has 5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "learning_rate": 0.1},
    "adam": {"name": "adam", "learning_rate": 0.05, "epsilon": 1e-3},
    "cosine": {"name": "momentum", "learning_rate": 0.5, "schedule": "cosine"},
}


@pytest.mark.parametrize(("optimizer", "n_fetch"), [("sgd", 2), ("adam", 4), ("cosine", 6)])
def test_two_workers_take_turns(async_loop: MakeLoop, optimizer: str, n_fetch: int) -> None:
    """Each update of two batches, on two ps, is that of the paper; so is the staleness of each."""
    config = downpour_config(2, n_fetch, model="remembering", batch_size=5, steps_per_execution=n_fetch // 2)
    config.optimizer, config.train.steps = OPTIMIZERS[optimizer], len(SEQUENCE)
    loop = async_loop(config, num_workers=2)
    graphs, (_, splits) = loop._graphs, source_and_splits(config)
    made = models.build_optimizer(config.optimizer, len(SEQUENCE))
    schedule = made._learning_rate if optimizer == "cosine" else lambda number: made.learning_rate
    paper = Paper(loop.model, made, lambda number: float(schedule(number)))
    theirs = [PaperWorker(paper, 5) for _ in range(2)]

    calls = [graphs._begin(tf.constant(worker, tf.int64), tf.constant(LIMIT, tf.int64)) for worker in range(2)]
    pulled = [graphs._pull(call) for call in calls]
    updates, staleness, first = [0, 0], [], 0
    for number, (worker, size) in enumerate(zip(SEQUENCE, SIZES, strict=True)):
        leaves = split_of(splits, "train").take(np.arange(first, first + size))
        first += size
        staleness.append(theirs[worker].update(*leaves))
        pushes, _ = graphs._compute(pulled[worker], list(map(tf.constant, leaves)), calls[worker].worker)
        updates[worker] += 1
        pulled[worker] = graphs._exchange(calls[worker], pushes, updates[worker])
        if 2 * updates[worker] % n_fetch == 0:
            theirs[worker].fetch()
        for ours, weight in zip(loop.model.trainable_variables, paper.weights, strict=True):
            np.testing.assert_allclose(ours.numpy(), weight.numpy(), rtol=2e-4, atol=1e-5, err_msg=f"update {number}")
        for ours, state in zip(loop.model.non_trainable_variables, paper.state, strict=True):
            np.testing.assert_allclose(
                ours.numpy(), state, rtol=1e-4, atol=1e-7, err_msg=f"{ours.path}, update {number}"
            )
    assert max(staleness) > 1
    for server in graphs.servers:
        counts = server.counters.now()
        assert counts.examples == sum(SIZES)
        assert list(counts.steps) == updates
        np.testing.assert_allclose(counts.totals[:, 1], [worker.loss for worker in theirs], rtol=1e-4)
        expected = [staleness.count(late) for late in range(LIMIT)]
        assert list(counts.staleness[:LIMIT]) == expected


ALONE: dict[str, tuple[int, int, dict[str, Any]]] = {  # n_fetch, passes, arguments
    "dropout": (4, 1, {"rate": 0.3}),  # beyond a pass the batches have other numbers, and so other draws
    "clipnorm": (8, 2, {"clipnorm": 0.5}),
    "clipvalue": (4, 2, {"clipvalue": 0.01}),
    "global_clipnorm": (12, 2, {"global_clipnorm": 0.5}),
    "xla": (8, 2, {}),
}


@pytest.mark.parametrize(
    "case", [case if case == "dropout" else pytest.param(case, marks=pytest.mark.slow) for case in ALONE]
)
def test_a_worker_alone_with_sgd_is_plain_training(async_loop: MakeLoop, case: str) -> None:
    """Over whole passes, each of which ends with two of four batches, the last of them with 7 examples of 50."""
    n_fetch, passes, arguments = ALONE[case]

    def trained(config: RunConfig) -> Any:
        clipping = {name: value for name, value in arguments.items() if name != "rate"}
        config.model = {"name": "smooth", "rate": arguments.get("rate", 0.0)}
        config.optimizer |= {"learning_rate": 0.05, **clipping}
        config.devices.xla = case == "xla"
        loop = async_loop(config, num_workers=1)
        assert loop.sharding.updates_per_epoch == -(-EXAMPLES // loop.sharding.batch_size)
        loop.train(passes * loop.sharding.updates_per_epoch)
        return loop, taken(loop)

    plain, expected = trained(run_config(steps_per_execution=13))
    loop, found = trained(downpour_config(4, n_fetch, steps_per_execution=n_fetch // 4))
    assert (plain.progress.global_step, loop.progress.global_step) == (26 * passes, 7 * passes)
    assert loop.progress.examples == plain.progress.examples == passes * EXAMPLES
    np.testing.assert_allclose(loop.progress.metrics, plain.progress.metrics, rtol=1e-4)
    assert loop.facts()["staleness"]["max"] == 0, "the own updates of a worker do not count"
    for name in (name for name in expected.arrays if name.startswith("model/")):
        np.testing.assert_allclose(found.arrays[name], expected.arrays[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_pushes_of_one_batch_are_plain_training(async_loop: MakeLoop) -> None:
    """Bit for bit, with all that a worker does for each batch."""
    snapshots = []
    for config in (run_config("smooth", "adam"), downpour_config(1, 1, model="smooth", optimizer="adam")):
        config.model["rate"] = 0.3
        config.optimizer["clipnorm"] = 0.1
        loop = async_loop(config, num_workers=1)
        loop.train(27)
        assert loop.progress.examples == EXAMPLES + 50
        snapshots.append(taken(loop))
    plain, found = snapshots
    assert set(plain.arrays) == set(found.arrays)
    for name, array in plain.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
    assert found.facts == plain.facts


def examples_of(loop: Any, worker: int, steps: int) -> int:
    """The examples of a worker's first updates, by the definition of the input."""
    size, workers = int(loop.sharding.batch_size), int(loop.sharding.num_shards)
    full, rest = divmod(EXAMPLES, size * workers)
    share = rest // workers + (worker < rest % workers)
    passes, more = divmod(steps, full + 1)
    return passes * (full * size + share) + more * size


@pytest.mark.slow
def test_counts_are_exact_and_a_run_is_resumed(async_loop: MakeLoop) -> None:
    """With another number of batches and workers, and as plain training, at the right place of the data."""
    config = downpour_config(3, 6, optimizer="adam", steps_per_execution=4)
    loop = async_loop(config, num_workers=3)
    for until in (1, 30, 61):
        loop.train(until)
        assert_exact(loop, until)
        steps = loop.progress.local_steps
        assert loop.progress.examples == sum(examples_of(loop, worker, n) for worker, n in enumerate(steps))
    paused = loop.train(LIMIT, lambda: PauseRequest.SAVE if loop.progress.global_step > 80 else PauseRequest.NOTHING)
    assert paused == PauseRequest.SAVE
    stopped_at = loop.progress.global_step
    assert 80 < stopped_at < LIMIT
    assert_exact(loop, stopped_at)
    assert loop.facts() | {"n_push": 3, "n_fetch": 6} == loop.facts()
    before = loop.progress.local_steps

    same = async_loop(config, num_workers=3, num_ps=1, start=taken(loop))
    same.train(stopped_at + 40)
    assert_exact(same, stopped_at + 40)
    assert taken(same).facts.input.positions == same.progress.local_steps
    assert min(now - then for now, then in zip(same.progress.local_steps, before, strict=True)) >= 0
    examples = sum(examples_of(same, worker, n) for worker, n in enumerate(same.progress.local_steps))
    assert same.progress.examples == examples

    passes = examples / EXAMPLES
    other = async_loop(downpour_config(2, 2, optimizer="adam"), start=taken(same))
    assert_position(other, passes)
    other.train(stopped_at + 80)
    assert other.updates_applied() == stopped_at + 80
    plain = async_loop(run_config(optimizer="adam"), start=taken(other))
    assert_position(plain, other.progress.examples / EXAMPLES)


def assert_position(loop: Any, passes: float) -> None:
    expected = [round(passes * steps) for steps in loop.sharding.counted_steps()]
    assert list(taken(loop).facts.input.positions) == expected
