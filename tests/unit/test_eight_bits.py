"""Floats in eight bits are rounded by less than a step, right on average, and alike in every run."""

import numpy as np
import pytest
import tensorflow as tf

from tf2dist.model import eight_bits
from tf2dist.model.eight_bits import BLOCK, SIZE, STEP

SHAPES: list[tuple[int, ...]] = [(SIZE,), (3, 5), (2, SIZE, 3), (SIZE + 1,), (1,)]


def travelled(array: np.ndarray, xla: bool = False) -> np.ndarray:
    """What arrives; `xla`: if the sender compiles its graph."""
    spec = tf.TensorSpec(array.shape, array.dtype)
    encode = tf.function(eight_bits.encode, jit_compile=True) if xla else eight_bits.encode
    blocks = encode(tf.constant(array))
    assert eight_bits.encoded_spec(spec).is_compatible_with(blocks)
    tensor = eight_bits.decode(blocks, spec)
    assert spec.is_compatible_with(tensor)
    return np.array(tensor)


def in_blocks(array: np.ndarray) -> np.ndarray:
    """As numpy sees the blocks."""
    return np.array(eight_bits.encode(tf.constant(array))).reshape(-1).view(BLOCK)


def of_blocks(blocks: np.ndarray) -> np.ndarray:
    floats: np.ndarray = blocks["values"] * blocks["scale"][:, None]
    return floats.reshape(-1)


def added(*summands: np.ndarray) -> np.ndarray:
    """The sum in blocks."""
    into = np.zeros(len(summands[0]), BLOCK)
    rooms = np.full([2, len(into) * SIZE], 7.0, np.float32)
    eight_bits.add(list(summands), into, *rooms)
    return into


@pytest.mark.parametrize("shape", SHAPES)
def test_a_float_is_rounded_by_less_than_a_step(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = travelled(array)
    assert np.max(np.abs(found - array)) <= np.max(np.abs(array)) * STEP * 1.0001
    largest = np.unravel_index(np.argmax(np.abs(array)), shape)
    assert found[largest] == pytest.approx(array[largest], rel=0.02)


def test_blocks_have_scales_of_their_own() -> None:
    array = np.concatenate([np.full(SIZE, 1e-6), np.full(SIZE, 1e6)]).astype(np.float32)
    np.testing.assert_allclose(travelled(array), array, rtol=0.01)


def test_what_is_much_smaller_than_a_step_is_right_on_average() -> None:
    """A hundredth of a step arrives as a whole step in one of a hundred cases."""
    small = 0.01 * STEP
    array = np.full([4_000, SIZE], small, np.float32)
    array[:, 0] = 1.0
    found = travelled(array)[:, 1:]
    assert 0.009 < np.mean(found > 0) < 0.011
    np.testing.assert_allclose(np.mean(found), small, rtol=0.1)
    total = of_blocks(added(in_blocks(array), in_blocks(array))).reshape(-1, SIZE)[:, 1:]
    np.testing.assert_allclose(np.mean(total), 2 * small, rtol=0.1)


def test_the_same_floats_are_rounded_alike_and_others_are_not() -> None:
    array = np.random.default_rng(0).normal(size=[64, SIZE]).astype(np.float32)
    np.testing.assert_array_equal(travelled(array), travelled(array))
    errors = travelled(array) - array, travelled(1.001 * array) - 1.001 * array
    assert abs(np.corrcoef(errors[0].ravel(), errors[1].ravel())[0, 1]) < 0.5


def test_zeros_stay_zeros() -> None:
    zeros = np.zeros(SIZE + 3, np.float32)
    np.testing.assert_array_equal(travelled(zeros), zeros)
    np.testing.assert_array_equal(of_blocks(added(in_blocks(zeros), in_blocks(zeros))), np.zeros(2 * SIZE))


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float, xla: bool) -> None:
    """So that a run that has diverged is noticed."""
    array = np.ones(2 * SIZE, np.float32)
    array[5] = bad
    found = travelled(array, xla)
    assert not np.isfinite(found[:SIZE]).all()
    np.testing.assert_allclose(found[SIZE:], 1.0, rtol=0.01)
    good = in_blocks(np.ones(2 * SIZE, np.float32))
    for summands in ((in_blocks(array), good), (good, in_blocks(array))):
        total = of_blocks(added(*summands))
        assert not np.isfinite(total[:SIZE]).all()
        np.testing.assert_allclose(total[SIZE:], 2.0, rtol=0.02)


def test_the_smallest_floats() -> None:
    array = np.full(SIZE, np.finfo(np.float32).tiny, np.float32)
    assert np.isfinite(travelled(array)).all()
    assert np.isfinite(of_blocks(added(in_blocks(array), in_blocks(array)))).all()


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_sum_is_rounded_once(count: int) -> None:
    arrays = np.random.default_rng(count).normal(size=[count, 8 * SIZE]).astype(np.float32)
    summands = [in_blocks(array) for array in arrays]
    exact = np.sum([of_blocks(one) for one in summands], axis=0)
    steps = np.abs(exact.reshape(-1, SIZE)).max(axis=1, keepdims=True) * STEP
    errors = (of_blocks(added(*summands)) - exact).reshape(-1, SIZE)
    assert np.all(np.abs(errors) <= steps * 1.0001)
    assert abs(np.mean(errors / steps)) < 0.05
    np.testing.assert_array_equal(of_blocks(added(*summands)), of_blocks(added(*summands)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_floats(dtype: str) -> None:
    spec = tf.TensorSpec([SIZE], dtype)
    found = eight_bits.decode(eight_bits.encode(tf.cast(tf.range(SIZE), dtype)), spec)
    assert found.dtype == dtype
    np.testing.assert_allclose(tf.cast(found, tf.float32), np.arange(SIZE), atol=3)
