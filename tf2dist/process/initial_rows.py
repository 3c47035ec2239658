"""The first values of a table that is cut over the ps: each ps draws the rows that it holds, a piece at a time.

They are those that Keras' initializer has for the whole table, which would take up to three times its size on one ps.
TensorFlow's random numbers come from Philox, a function of a key and a counter: four numbers of an array have the same
counter, and the next four the next one. So they can be drawn from any place on.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.process.parts import PIECE_BYTES
from tf2dist.process.tf_internals import new_variable, seed_of

PER_COUNTER = 4

# draw(first, number), in a graph: so many numbers of a table, row after row, from the one with the index `first` on.
Draw = Callable[[tf.Tensor, int], tf.Tensor]


class InitialRows:
    """The rows that a table begins with.

    Attributes:
        shape, dtype: of the whole table.
    """

    dtype = tf.float32

    def __init__(self, shape: tf.TensorShape, draw: Draw) -> None:
        self.shape, self._draw = shape, draw

    @classmethod
    def of(cls, initial_value: object, dtype: Any) -> "InitialRows | None":
        """Of a new variable, from the value and the type that Keras gives TensorFlow.

        None if it is drawn at once: no matrix of float32, not larger than a piece, or of an unknown initializer.
        """
        found = new_variable(initial_value)
        if found is None or len(found.shape) != 2 or dtype != cls.dtype:
            return None
        shape, draw = tf.TensorShape(found.shape), _draw(found.initializer)
        is_large = shape.num_elements() * cls.dtype.size > PIECE_BYTES
        return cls(shape, draw) if draw and is_large else None

    def assign_to(self, parts: list[tf.Variable]) -> None:
        """Gives every n-th row to each of n parts, on their devices, all at the same time."""
        fills = [functools.partial(self._fill, part, number, len(parts)) for number, part in enumerate(parts)]
        with ThreadPoolExecutor(len(parts)) as threads:
            for future in [threads.submit(fill) for fill in fills]:
                future.result()

    def _fill(self, part: tf.Variable, number: int, num_parts: int) -> None:
        rows, columns = part.shape
        at_once = max(1, PIECE_BYTES // (self.dtype.size * columns * num_parts))  # rows of each part
        of_all = num_parts * columns
        own = slice(number * columns, (number + 1) * columns)

        def assign(first: tf.Tensor) -> list[tf.Tensor]:
            # Beyond the last row, too: numbers that nobody uses.
            drawn = tf.reshape(self._draw(first * of_all, at_once * of_all), [at_once, of_all])[:, own]
            last = tf.minimum(first + at_once, rows)
            value = drawn[: last - first]
            tf.raw_ops.ResourceStridedSliceAssign(ref=part.handle, begin=[first], end=[last], strides=[1], value=value)
            return [last]

        def fill() -> None:
            tf.while_loop(lambda first: first < rows, assign, [tf.constant(0, tf.int64)], parallel_iterations=1)

        with tf.device(part.device):
            tf.function(fill, autograph=False).get_concrete_function()()


def _draw(initializer: keras.Initializer) -> Draw | None:
    """As the initializers of Keras and the functions of TensorFlow that they call; None for one that is not known."""
    kind, seed = type(initializer), seed_of(initializer)
    if kind in (keras.initializers.Zeros, keras.initializers.Ones):
        return lambda first, number: initializer([number], "float32")
    if seed is None:
        return None
    if kind is keras.initializers.RandomUniform:
        draw, low, high = tf.raw_ops.StatelessRandomUniformV2, initializer.minval, initializer.maxval
        scale, offset = np.float32(high) - np.float32(low), low
    elif kind is keras.initializers.RandomNormal:
        draw, scale, offset = tf.raw_ops.StatelessRandomNormalV2, initializer.stddev, initializer.mean
    else:
        return None

    def numbers(first: tf.Tensor, number: int) -> tf.Tensor:
        start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        counter = start.counter + tf.cast([first // PER_COUNTER, 0], tf.uint64)
        before = first % PER_COUNTER
        drawn = draw(shape=[before + number], key=start.key, counter=counter, alg=tf.random.Algorithm.PHILOX.value)
        return drawn[before:] * scale + offset

    return numbers
