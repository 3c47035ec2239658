"""Asynchronous training in one process: each update is counted once, whichever worker pushes it or dies."""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import assert_exact, run_config
from tf2dist import data, registry
from tf2dist.config.schema import RunConfig
from tf2dist.data.passes import InputPosition, NumberedSteps, Sharding
from tf2dist.errors import ConfigError, NotFiniteError

MakeLoop = Callable[..., Any]


@registry.register_optimizer("add_one")
class AddOne(keras.optimizers.SGD):
    """Adds 1 to every weight, whatever the gradient: the weights count the applied updates."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(variable, tf.ones_like(gradient))


@registry.register_optimizer("record_number")
class RecordNumber(keras.optimizers.SGD):
    """Adds the number of the update to the weights, as Adam's bias correction would read it."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(variable, tf.ones_like(gradient) * tf.cast(self.iterations + 1, tf.float32))


@registry.register_optimizer("add_rate")
class AddRate(keras.optimizers.SGD):
    """Adds the learning rate to the weights."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(variable, tf.ones_like(gradient) * learning_rate)


def weights(loop: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in loop.model.trainable_variables]


@pytest.mark.parametrize(
    ("num_workers", "optimizer"),
    [
        (4, "adam"),
        pytest.param(3, "sgd", marks=pytest.mark.slow),
        pytest.param(3, "adam", marks=pytest.mark.slow),
        pytest.param(4, "sgd", marks=pytest.mark.slow),
    ],
)
def test_the_global_step_is_exact(async_loop: MakeLoop, num_workers: int, optimizer: str) -> None:
    loop = async_loop(run_config(optimizer=optimizer, steps_per_execution=10), num_workers=num_workers)
    for steps in (123, 124, 300):  # a part of a call; then a single step; then several calls
        loop.train(steps)
        assert_exact(loop, steps)
    assert all(loop.progress.local_steps), "a worker took no step"


@pytest.mark.thorough
def test_the_weights_count_the_updates(async_loop: MakeLoop) -> None:
    loop = async_loop(run_config(optimizer="add_one", steps_per_execution=10), num_workers=4)
    before = weights(loop)
    loop.train(333)
    for old, new in zip(before, weights(loop), strict=True):
        np.testing.assert_allclose(new - old, 333, atol=1e-3)


def test_every_update_gets_its_own_number(async_loop: MakeLoop) -> None:
    # With fewer workers and shorter calls no two of them would take a number at the same time.
    loop = async_loop(run_config(optimizer="record_number", steps_per_execution=10), num_workers=4)
    before = weights(loop)
    loop.train(200)
    for old, new in zip(before, weights(loop), strict=True):
        np.testing.assert_allclose(new - old, 200 * 201 / 2, atol=1e-1)


@pytest.mark.thorough  # test_algorithms.py has the rates of a schedule
def test_a_learning_rate_schedule_is_evaluated_once_at_every_step(async_loop: MakeLoop) -> None:
    config = run_config(optimizer="add_rate", steps_per_execution=10)
    config.optimizer["schedule"] = "cosine"
    config.train.steps = 250
    loop = async_loop(config, num_workers=4)
    before = weights(loop)
    loop.train(loop.target_step)
    rise = sum(0.01 * step / 12 for step in range(12))  # a twentieth of the steps
    expected = rise + sum(0.01 * (1 + np.cos(np.pi * step / 238)) / 2 for step in range(238))
    for old, new in zip(before, weights(loop), strict=True):
        np.testing.assert_allclose(new - old, expected, atol=1e-4)


def test_calls_beyond_the_end_change_nothing(async_loop: MakeLoop) -> None:
    loop = async_loop(run_config(optimizer="add_one"))
    before = weights(loop)
    limit = tf.constant(100, tf.int64)
    for _ in range(25):  # 125 more steps, such as calls that are repeated after a worker died
        loop._coordinator.schedule(loop._scheduler.function, args=(limit,))
    loop.train(100)
    assert_exact(loop, 100)
    np.testing.assert_allclose(weights(loop)[0] - before[0], 100, atol=1e-3)


def test_what_a_lost_worker_leaves_is_made_good(async_loop: MakeLoop) -> None:
    """Updates that were numbered and never came, and one that came to the first ps alone."""
    loop = async_loop(run_config(), num_workers=4)
    loop.train(50)
    for server in loop._graphs.servers:
        server.numbered.assign_add(37)  # numbered, but their worker died
    loop.train(150)
    assert_exact(loop, 150)

    behind = loop._graphs.servers[1]
    counts = behind.counters.now()
    behind.restore(counts._replace(applied=counts.applied - 1))  # as if a worker had died between two pushes
    loop.train(150)
    assert [server.counters.now().applied for server in loop._graphs.servers] == [150, 150]
    assert loop.progress.global_step == 150
    loop.train(250)
    assert 0 < loop.facts()["staleness"]["mean"] < 50, "updates of several workers are sometimes stale"


def test_a_constraint_is_refused(async_loop: MakeLoop) -> None:
    @registry.register_model("constrained")
    def constrained(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
        layers = keras.layers
        logits = layers.Dense(num_classes, kernel_constraint="non_neg")
        return keras.Sequential([keras.Input(input_shape), layers.Flatten(), logits])

    with pytest.raises(ConfigError, match="use mode=sync"):
        async_loop(run_config("constrained"))


def test_a_single_worker_is_never_stale_and_may_stop_long_before_its_end(async_loop: MakeLoop) -> None:
    """What is left of the run then, millions of passes here, is not listed one by one."""
    loop = async_loop(run_config(), num_workers=1, num_ps=1)
    loop.train(100)
    assert loop.facts()["staleness"] == {"mean": 0.0, "p50": 0, "p99": 0, "max": 0}
    before = loop._state()[0]
    loop._graphs.batch_numbers.open(10**9)
    loop._graphs.batch_numbers.close()
    begun = time.monotonic()
    assert loop._state()[0] == before
    assert time.monotonic() - begun < 30


@pytest.mark.thorough
def test_one_worker_equals_plain_keras(async_loop: MakeLoop) -> None:
    """One worker and several ps give the weights that Keras gives with the same batches, bias correction included."""
    config = run_config("dnn", "adam", hidden_units=[20])
    loop = async_loop(config, num_workers=1)
    reference = keras.models.clone_model(loop.model)
    reference.set_weights([variable.numpy() for variable in loop.model.variables])
    reference.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    splits = data.load(config.data)
    sharding = Sharding(len(splits.train), 50, 1, config.seed, whole_batch_loss=False)
    steps = NumberedSteps(sharding, InputPosition())
    for number in range(40):  # the 26th, the last of a pass, is smaller
        (batch,) = steps.examples(number, number + 1)
        reference.train_on_batch(*splits.train.take(sharding.order.rows(*batch)))
    loop.train(40)
    for expected, found in zip(reference.get_weights(), weights(loop), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.thorough
def test_evaluation_counts_every_example(async_loop: MakeLoop) -> None:
    loop = async_loop(run_config("dnn", hidden_units=[20]))
    loop.train(100)
    for split in ("test", "validation"):
        arrays = getattr(data.load(run_config().data), split)
        logits = loop.model(arrays.x).numpy()
        evaluation = loop.evaluate(split)
        assert evaluation.num_examples == len(arrays)
        assert evaluation.metrics["accuracy"] == pytest.approx((logits.argmax(-1) == arrays.y).mean())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "optimizer",
    [
        "adagrad",  # its updates wait for each other
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "sgd", "momentum", "adamw", "rmsprop")),
    ],
)
def test_every_optimizer_learns(async_loop: MakeLoop, optimizer: str) -> None:
    loop = async_loop(run_config(optimizer=optimizer), num_workers=2)
    untrained = loop.evaluate("validation").metrics["loss"]
    loop.train(300)
    assert loop.evaluate("validation").metrics["loss"] < untrained - 0.3


@pytest.mark.slow
def test_dropout_and_batch_norm_learn(async_loop: MakeLoop) -> None:
    config = run_config("cnn", "adam", dropout=0.3, batch_norm=True)
    config.optimizer["learning_rate"] = 0.001
    loop = async_loop(config, num_workers=2)
    before = [v.numpy() for v in loop.model.non_trainable_variables if "moving" in v.path]
    loop.train(150)
    after = [v.numpy() for v in loop.model.non_trainable_variables if "moving" in v.path]
    assert all(np.abs(new - old).max() > 0 for old, new in zip(before, after, strict=True))
    assert loop.progress.loss < 1.6, (
        "guessing gives 2.3; the bound is loose because the staleness depends on the machine"
    )
    assert_exact(loop, 150)


@pytest.mark.thorough
def test_clipping_by_the_global_norm_sees_all_gradients(async_loop: MakeLoop) -> None:
    config: RunConfig = run_config(optimizer="sgd")
    config.optimizer |= {"learning_rate": 1.0, "global_clipnorm": 0.001}
    loop = async_loop(config, num_workers=1)  # kernel and bias lie on different ps
    before = weights(loop)
    loop.train(1)
    change = np.sqrt(sum(((new - old) ** 2).sum() for old, new in zip(before, weights(loop), strict=True)))
    assert change == pytest.approx(0.001, rel=1e-3)


def test_clipping_by_a_norm_that_the_ps_cannot_know_is_refused(async_loop: MakeLoop) -> None:
    config = run_config(optimizer="sgd")
    config.optimizer |= {"global_clipnorm": 1.0, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match=r"optimizer \(SGD\): with mode=async global_clipnorm cannot clip"):
        async_loop(config, num_workers=1)


def test_an_error_on_a_worker_reaches_the_caller(async_loop: MakeLoop) -> None:
    loop = async_loop(run_config())
    broken = tf.function(lambda: tf.debugging.check_numerics(tf.math.log(-tf.random.uniform([])), "broken model"))
    loop._coordinator.schedule(broken)
    with pytest.raises(tf.errors.InvalidArgumentError, match="broken model"):
        loop.train(10_000_000)


def test_a_loss_that_is_not_finite_stops_the_run(async_loop: MakeLoop) -> None:
    config = run_config("dnn", hidden_units=[20])
    config.optimizer["learning_rate"] = 1e30
    with pytest.raises(NotFiniteError, match="the loss is"):
        async_loop(config).train(10_000_000)
