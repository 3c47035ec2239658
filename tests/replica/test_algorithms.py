"""The algorithms of asynchronous training, each compared with its definition on hand-made updates."""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import assert_exact, run_config, server_of
from tests.replica.test_resume import taken
from tf2dist.config.schema import ALGORITHMS, AlgorithmConfig
from tf2dist.errors import ConfigError
from tf2dist.model import builtin
from tf2dist.model.tables import Lookups
from tf2dist.training.parameter_server.algorithms import Algorithm
from tf2dist.training.parameter_server.counters import ONES
from tf2dist.training.parameter_server.wire import PackedCount
from tf2dist.training.synchronous.sync_step import SyncStep

RATE = 0.1
ASYNC = [name for name, entry in ALGORITHMS.items() if entry.mode == "async"]
OF_MODE = {"async": Algorithm, "sync": SyncStep}
FIRST = ("plain", "delay_compensated")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd"},
    "adam": {"name": "adam"},
    "adamw": {"name": "adamw", "weight_decay": 0.5},
    "adagrad": {"name": "adagrad"},  # has no fused kernel here, so it runs under a lock
    "cosine": {"name": "sgd", "schedule": "cosine"},
}
GRADIENTS = [[1.0, -2.0], [0.5, 0.5], [-1.0, 3.0], [2.0, 1.0], [1.0, 1.0], [-0.5, 2.0], [3.0, -1.0]]
PULLED_AT = [0, 0, 0, 1, 4, 5, 0]
STALENESS = [0, 1, 2, 2, 0, 0, 6]
PULLED = [[1.0, 2.0], [1.0, 2.0], [0.5, 2.5], [0.0, 1.0], [3.0, -1.0], [0.9, 2.1], [1.5, 0.0]]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_name_has_an_implementation(name: str) -> None:
    assert issubclass(pkgutil.resolve_name(ALGORITHMS[name].implementation), OF_MODE[ALGORITHMS[name].mode])


def pushed(algorithm: AlgorithmConfig, optimizer: dict[str, Any]) -> list[np.ndarray]:
    """The weights after each of the updates, on a ps of one variable."""
    weight = keras.Variable([1.0, 2.0])
    arguments = {"learning_rate": RATE, **optimizer}
    make = functools.partial(builtin.build_optimizer, arguments, len(GRADIENTS))
    config = run_config()
    config.algorithm = algorithm
    server = server_of(config, [weight], make, num_metrics=4)
    server.trace_functions({})
    layout, indices = server.push_layout({}), server.counters.indices(tf.constant(0, tf.int64))
    found = []
    for gradient, pulled_at, pulled in zip(GRADIENTS, PULLED_AT, PULLED, strict=True):
        count = PackedCount.of(tf.constant(float(pulled_at), tf.float64))
        sums, back = tf.zeros([server.counters.added - len(ONES)]), [tf.constant(pulled)] * len(layout.pulled)
        vector = layout.pack([tf.constant(gradient)], count, sums, back)
        server.push(vector, indices, tf.constant(100, tf.int64))
        found.append(weight.numpy())
    counts = server.counters.now()
    assert counts.applied == len(GRADIENTS)
    assert list(counts.staleness[:7]) == [STALENESS.count(late) for late in range(7)]
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_aware", [False, True], ids=["plain", "staleness_aware"])
def test_the_rate_is_divided_by_the_staleness(optimizer: str, is_aware: bool) -> None:
    arguments = {"learning_rate": RATE, **OPTIMIZERS[optimizer]}
    reference, weight = builtin.build_optimizer(arguments, len(GRADIENTS)), keras.Variable([1.0, 2.0])
    scheduled = builtin.build_optimizer(arguments, len(GRADIENTS)).learning_rate
    reference.build([weight])
    found = pushed(AlgorithmConfig(kind="staleness_aware" if is_aware else "plain"), OPTIMIZERS[optimizer])
    schedule = reference._learning_rate if optimizer == "cosine" else lambda number: RATE
    assert float(scheduled) == pytest.approx(float(schedule(0)))
    for number, (gradient, late) in enumerate(zip(GRADIENTS, STALENESS, strict=True)):
        rate = float(schedule(number)) / (max(1, late) if is_aware else 1)
        reference._learning_rate = rate
        reference.apply([tf.constant(gradient)], [weight])
        np.testing.assert_allclose(found[number], weight.numpy(), rtol=1e-5, err_msg=f"update {number}")


def test_staleness_aware_refuses_gradient_accumulation() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.gradient_accumulation_steps \(2\): makes one update of several"):
        pushed(AlgorithmConfig(kind="staleness_aware"), {"name": "adam", "gradient_accumulation_steps": 2})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_are_corrected_for_their_delay(optimizer: str) -> None:
    strength = 0.25
    arguments = {"learning_rate": RATE, **OPTIMIZERS[optimizer]}
    reference, weight = builtin.build_optimizer(arguments, len(GRADIENTS)), keras.Variable([1.0, 2.0])
    found = pushed(AlgorithmConfig(kind="delay_compensated", strength=strength), OPTIMIZERS[optimizer])
    for number, (gradient, pulled) in enumerate(zip(map(np.array, GRADIENTS), PULLED, strict=True)):
        corrected = gradient + strength * gradient * gradient * (weight.numpy() - np.array(pulled))
        reference.apply([tf.constant(corrected, tf.float32)], [weight])
        np.testing.assert_allclose(found[number], weight.numpy(), rtol=1e-5, err_msg=f"update {number}")


@pytest.mark.parametrize("decay", [0.0, 0.95])
def test_the_correction_is_relative_to_a_moving_mean_square(decay: float) -> None:
    weight, mean_square, strength = np.array([1.0, 2.0]), np.zeros(2), 0.25
    options = AlgorithmConfig(kind="delay_compensated", strength=strength, mean_square_decay=decay)
    found = pushed(options, OPTIMIZERS["sgd"])
    for number, (gradient, pulled) in enumerate(zip(map(np.array, GRADIENTS), PULLED, strict=True)):
        mean_square = decay * mean_square + (1 - decay) * gradient**2
        factor = strength / np.sqrt(mean_square + 1e-7)
        weight = weight - RATE * (gradient + factor * gradient**2 * (weight - np.array(pulled)))
        np.testing.assert_allclose(found[number], weight, rtol=1e-5, err_msg=f"update {number}")


def test_a_worker_pushes_the_values_that_it_pulled(async_loop: Callable[..., Any]) -> None:
    """`delay_compensated` needs them on the ps: each ps gets the values of its own variables."""
    config = run_config("dnn", hidden_units=[8])
    config.algorithm = AlgorithmConfig(kind="delay_compensated")
    graphs = async_loop(config)._graphs
    leaves = [tf.zeros([50, *spec.shape[1:]], spec.dtype) for spec in graphs.step.layout.batched(None)]
    for server in graphs.servers:
        for number, variable in enumerate(server.trainable):
            variable.assign(tf.fill(variable.shape, 0.5 + number))
    pulled = [server.pull() for server in graphs.servers]
    pushes, _ = graphs._compute(pulled, leaves, tf.constant(0, tf.int64), graphs.routing.route(Lookups([], [])))
    for server, push in zip(graphs.servers, pushes, strict=True):
        _, sent_back, *_ = server._push_layout.unpack(push)
        for variable, sent in zip(server.trainable, sent_back, strict=True):
            np.testing.assert_array_equal(sent, variable.numpy())


@pytest.mark.parametrize(
    "algorithm",
    ["delay_compensated", *(pytest.param(name, marks=pytest.mark.slow) for name in ASYNC if name not in FIRST)],
)
def test_counts_are_exact_and_a_run_is_resumed(async_loop: Callable[..., Any], algorithm: str) -> None:
    config = run_config(optimizer="adam", steps_per_execution=5)
    config.algorithm = AlgorithmConfig(kind=algorithm)
    loop = async_loop(config, num_workers=2)
    for steps in (20, 63, 80):
        loop.train(steps)
        assert_exact(loop, steps)
    assert loop.facts()["algorithm"] == algorithm
    resumed = async_loop(config, num_workers=2, num_ps=1, start=taken(loop))
    resumed.train(100)
    assert_exact(resumed, 100)
    other = async_loop(run_config(optimizer="adam"), num_workers=2, start=taken(resumed))
    other.train(120)
    assert_exact(other, 120)
