"""Optimizers update rows of a table as Keras updates them in the whole table."""

import functools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf2dist.model.tables import apply_rows, can_be_lazy, is_exact_by_row
from tf2dist.tf_internals.keras import count_updates_in
from tf2dist.training.parameter_server.server import UpdateNumber
from tf2dist.training.parameter_server.storage import make_atomic

optimizers = keras.optimizers
ROWS, COLUMNS, STEPS = 24, 3, 5
EXACT: dict[str, Callable[[], keras.Optimizer]] = {
    "sgd": lambda: optimizers.SGD(0.5),
    "sgd without decay": lambda: optimizers.SGD(0.5, weight_decay=0.0),
    "scheduled": lambda: optimizers.SGD(optimizers.schedules.InverseTimeDecay(0.5, 1, 1.0)),
    "clipvalue": lambda: optimizers.SGD(0.5, clipvalue=0.5),
    "clipnorm": lambda: optimizers.SGD(0.5, clipnorm=0.5),
    "adagrad": lambda: optimizers.Adagrad(0.5),
    "adagrad with clipnorm": lambda: optimizers.Adagrad(0.5, clipnorm=0.5),
}
LAZY: dict[str, Callable[[], keras.Optimizer]] = {
    "sgd with decay": lambda: optimizers.SGD(0.5, weight_decay=0.1),
    "adagrad with decay": lambda: optimizers.Adagrad(0.5, weight_decay=0.1),
    "momentum": lambda: optimizers.SGD(0.5, 0.9),
    "nesterov": lambda: optimizers.SGD(0.5, 0.9, nesterov=True),
    "rmsprop": lambda: optimizers.RMSprop(0.1),
    "centered": lambda: optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "adam": lambda: optimizers.Adam(0.1),
    "amsgrad": lambda: optimizers.Adam(0.1, amsgrad=True),
    "scheduled adam": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "adamw": lambda: optimizers.AdamW(0.1, weight_decay=0.1),
    "adamax": lambda: optimizers.Adamax(0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "lion": lambda: optimizers.Lion(0.1),
}
WHOLE: dict[str, Callable[[], keras.Optimizer]] = {
    "nadam": optimizers.Nadam,
    "adafactor": optimizers.Adafactor,
    "lamb": optimizers.Lamb,
    "schedule-free": optimizers.ScheduleFreeAdamW,
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.SGD()),
    "averaged": lambda: optimizers.SGD(use_ema=True),
    "accumulated": lambda: optimizers.Adagrad(gradient_accumulation_steps=2),
    "own": lambda: type("Own", (optimizers.SGD,), {})(),
}


class Pair:
    """The same table twice: one is updated by row, the other by Keras."""

    def __init__(self, make: Callable[[], keras.Optimizer], runs_alone: bool = False) -> None:
        values = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
        self.table, self.reference = keras.Variable(values), keras.Variable(values)
        self.by_row, self.by_keras = make(), make()
        # An optimizer also trains others, so that its slots have places.
        self.by_row.build([keras.Variable(np.zeros((ROWS, COLUMNS), np.float32)), self.table])
        self.by_keras.build([self.reference])
        apply = functools.partial(self._apply, runs_alone)
        self.apply = tf.function(apply, autograph=False, reduce_retracing=True)

    def _apply(self, runs_alone: bool, gradient: tf.Tensor, ids: tf.Tensor) -> None:
        apply_rows(self.by_row, gradient, self.table, ids, runs_alone)

    def step(self, gradient: np.ndarray, ids: np.ndarray) -> None:
        self.apply(tf.constant(gradient), tf.constant(ids))
        self.by_row.iterations.assign_add(1)
        dense = np.zeros((ROWS, COLUMNS), np.float32)
        dense[ids] = gradient
        self.by_keras.apply([tf.constant(dense)], [self.reference])

    def check(self) -> None:
        np.testing.assert_allclose(self.table, self.reference, rtol=1e-6, atol=1e-6)

    def state(self) -> list[np.ndarray]:
        of_table = [variable for variable in self.by_row.variables if variable.shape == (ROWS, COLUMNS)]
        return [variable.numpy() for variable in (self.table, *of_table)]


def steps(num_ids: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    for _ in range(STEPS):
        ids = random.permutation(ROWS)[:num_ids]
        yield random.normal(size=(num_ids, COLUMNS)).astype(np.float32), ids


@pytest.mark.parametrize("runs_alone", [False, True], ids=["at once", "alone"])
@pytest.mark.parametrize("name", EXACT)
def test_few_rows_are_updated_as_by_keras(name: str, runs_alone: bool) -> None:
    pair = Pair(EXACT[name], runs_alone)
    assert is_exact_by_row(pair.by_row)
    for num_ids in (1, 7):
        for gradient, ids in steps(num_ids):
            pair.step(gradient, ids)
            pair.check()


@pytest.mark.parametrize("name", LAZY)
def test_all_rows_are_updated_as_by_keras(name: str) -> None:
    pair = Pair(LAZY[name])
    assert can_be_lazy(pair.by_row)
    assert not is_exact_by_row(pair.by_row)
    for gradient, ids in steps(ROWS):
        pair.step(gradient, ids)
        pair.check()


@pytest.mark.parametrize("name", EXACT | LAZY)
def test_other_rows_stay_as_they_are(name: str) -> None:
    pair = Pair((EXACT | LAZY)[name])
    before = pair.state()
    for gradient, _ in steps(7):
        pair.step(gradient, np.arange(7))
    for old, new in zip(before, pair.state(), strict=True):
        np.testing.assert_array_equal(old[7:], new[7:])
    assert np.all(pair.table.numpy()[:7] != before[0][:7])


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_whole_tables_is_known(name: str) -> None:
    optimizer = WHOLE[name]()
    assert not can_be_lazy(optimizer)
    assert not is_exact_by_row(optimizer)


def test_excluded_tables_do_not_decay() -> None:
    def make() -> keras.Optimizer:
        optimizer = optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["variable"])
        return optimizer

    pair = Pair(make)
    for gradient, ids in steps(ROWS):
        pair.step(gradient, ids)
    pair.check()


def test_a_parameter_server_numbers_the_updates() -> None:
    """A kernel for whole tables stands in the place of the update, and the count is no variable."""
    pair = Pair(LAZY["adam"])
    make_atomic(pair.by_row)
    number = UpdateNumber()
    count_updates_in(pair.by_row, number)

    def apply(gradient: tf.Tensor, ids: tf.Tensor, current: tf.Tensor) -> None:
        number.set_current(current)
        apply_rows(pair.by_row, gradient, pair.table, ids)

    function = tf.function(apply, autograph=False)
    for step, (gradient, ids) in enumerate(steps(ROWS)):
        function(tf.constant(gradient), tf.constant(ids), tf.constant(step, tf.int64))
        pair.by_keras.apply([tf.constant(gradient[np.argsort(ids)])], [pair.reference])
        pair.check()


def test_plain_sgd_is_one_atomic_operation() -> None:
    pair = Pair(EXACT["sgd"])
    operations = pair.apply.get_concrete_function(*map(tf.constant, next(steps(7)))).graph.get_operations()
    on_table = [each.type for each in operations if each.type.startswith("Resource")]
    assert on_table == ["ResourceScatterNdSub"]
