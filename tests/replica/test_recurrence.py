"""The constant factor of the old state in the new one, which is read from the graph of a step; 0 if there is none."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf2dist.data import Arrays
from tf2dist.model.compiled_step import CompiledStep
from tf2dist.model.recurrence import decay_of, recurrence_of

Change = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
# The expected factor, and the new state from the old one and an input.
CHANGES: dict[str, tuple[float, Change]] = {
    "a sum": (1, lambda old, x: old + x),
    "a sum of sums": (1, lambda old, x: x - (x - tf.add_n([x, old, x]))),
    "a moving average": (0.25, lambda old, x: old * 0.25 + x * 0.75),
    "as Adam writes it": (0.25, lambda old, x: old + (x - old) * 0.75),
    "divided": (0.5, lambda old, x: tf.identity(old + x) / 2.0),
    "in half precision": (0.5, lambda old, x: tf.cast(tf.cast(old, tf.float16) * 0.5 + 1.0, tf.float32)),
    "assigned": (0, lambda old, x: x),
    "a factor for each element": (0, lambda old, x: old * tf.constant([0.5, 0.25])),
    "times the input": (0, lambda old, x: old * x + x),
    "a maximum": (0, lambda old, x: tf.maximum(old, x)),
    "normalized": (0, lambda old, x: old / tf.norm(old)),
    "less of it": (-1, lambda old, x: x - old),
    "a factor that is its size": (0.5, lambda old, x: old * 0.5 + x * tf.cast(tf.raw_ops.Size(input=old), tf.float32)),
    "whether it is 0": (0, lambda old, x: tf.cast(tf.cast(old, tf.bool), tf.float32)),
    "its own square": (0, lambda old, x: old * old),
    "another element": (0, lambda old, x: tf.reverse(old, [0])),
    "rounded": (0, lambda old, x: tf.cast(tf.cast(old, tf.int32), tf.float32)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_factor_of_the_old_value_is_found(name: str) -> None:
    expected, change = CHANGES[name]
    results = []

    @tf.function(autograph=False)
    def step(old: tf.Tensor, x: tf.Tensor) -> None:
        results.append(decay_of(change(old, x), old))

    spec = tf.TensorSpec([2], tf.float32)
    step.get_concrete_function(spec, spec)
    assert results == [expected]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("is_copy", [False, True])
def test_the_factor_and_the_term_make_the_new_value(name: str, is_copy: bool) -> None:
    """Also of an old value that is itself the result of one of the operations that are followed."""

    @tf.function(autograph=False)
    def step(old: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        old = tf.identity(old) if is_copy else old
        new = CHANGES[name][1](old, x)
        decay, term = recurrence_of(new, old)
        return new, decay * old + term

    new, again = step(tf.constant([1.5, -2.0]), tf.constant([0.25, 8.0]))
    np.testing.assert_allclose(again, new, rtol=1e-6)


def test_the_term_is_what_the_step_adds_and_nothing_is_computed_for_it() -> None:
    @tf.function(autograph=False)
    def step(old: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        average, count, kept = old * 0.9 + x, old + 1.0, old * 0.5
        before = len(old.graph.get_operations())
        terms = [recurrence_of(new, old).term for new in (average, count)]
        assert terms[0] is x
        assert {operation.type for operation in old.graph.get_operations()[before:]} <= {"BroadcastTo", "Const"}
        return *terms, recurrence_of(kept, old).term

    _, of_count, of_kept = step(tf.constant([1e8, 1.0]), tf.constant([1.0, 1.0]))
    assert of_count.numpy().tolist() == [1, 1]  # the difference of the new and the old value is 0 in the first place
    assert of_kept.numpy().tolist() == [0, 0]


def test_integers_are_added_or_assigned() -> None:
    results = []

    @tf.function(autograph=False)
    def step(old: tf.Tensor) -> None:
        is_set = tf.cast(tf.cast(old, tf.bool), tf.int64)
        results.extend([decay_of(old + 3, old), decay_of(old * 2, old), decay_of(is_set, old)])

    step.get_concrete_function(tf.TensorSpec([], tf.int64))
    assert results == [1, 0, 0]


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int32", "int64"])
def test_integers_count_down(dtype: str) -> None:
    @tf.function(autograph=False)
    def step(old: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        new = old - tf.constant(3, old.dtype)
        decay, term = recurrence_of(new, old)
        return new, tf.cast(decay, old.dtype) * old + term

    new, again = step(tf.constant(7, dtype))
    assert int(new) == int(again) == 4


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_the_momentum_of_batch_normalization_is_found(dtype: str) -> None:
    layers = keras.layers
    norms = [layers.BatchNormalization(momentum=m, dtype=dtype) for m in (0.1, 0.75)]
    frozen = layers.BatchNormalization(trainable=False)
    model = keras.Sequential([keras.Input([4]), norms[0], layers.Dense(4), norms[1], frozen, layers.Dense(2)])
    inputs = np.zeros([3, 4], np.uint8)
    model.compile("sgd", "mse")
    step = CompiledStep(model, Arrays(inputs, np.zeros([3, 2], np.float32)).layout)
    results: list[float | None] = []

    @tf.function(autograph=False)
    def call(trainable: list[tf.Tensor], state: list[tf.Tensor]) -> None:
        leaves = [tf.constant(inputs), tf.zeros([3, 2])]
        new = step(trainable, state, leaves, tf.zeros([2], tf.int64)).state
        results.extend(decay_of(n, o) if n is not o else None for n, o in zip(new, state, strict=True))

    call.get_concrete_function(*[[tf.TensorSpec(v.shape, v.dtype) for v in vs] for vs in (step.trainable, step.state)])
    assert results == [pytest.approx(0.1), pytest.approx(0.1), 0.75, 0.75, *[None] * 4]
