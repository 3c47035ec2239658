"""What stands in a Keras variable in place of a `tf.Variable` if its value does not lie in one of its own.

TensorFlow's own `ShardedVariable` cannot: it is not public, has no `numpy`, and Keras takes it for a tensor.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.process.tf_internals.lacks import attribute


class StandIn:
    """A variable that can be read and assigned as any other.

    Attributes:
        shape, dtype, name, trainable: as those of a `tf.Variable`.
        device: on which it lies; "" for several.
    """

    shape: tf.TensorShape
    dtype: tf.DType
    name: str
    trainable: bool
    device: str

    def read_value(self) -> tf.Tensor:
        raise NotImplementedError

    def assign(self, value: Any) -> "StandIn":
        """Sets the value from an array or a tensor."""
        raise NotImplementedError

    def numpy(self) -> np.ndarray:
        return np.asarray(self.read_value())

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype) if dtype else self.numpy()


def _operator(name: str) -> Any:
    def operator(self: StandIn, *others: Any) -> Any:
        return getattr(self.read_value(), name)(*others)

    return operator


# Python looks for these on the class alone. Two variables are still equal only if they are the same.
for each in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(StandIn, each, _operator(each))


class PartitionedVariable(StandIn):
    """A variable that is cut along its first axis, and lies on no single device.

    Attributes:
        parts: in order; they agree in all axes but the first.
        variables: the Keras variables of the parts, once they have been made; see `process.parts`.
    """

    device = ""

    def __init__(self, parts: Sequence[tf.Variable | StandIn]) -> None:
        self.parts = list(parts)
        self.variables: list[keras.Variable] | None = None
        self.sizes = [int(part.shape[0]) for part in self.parts]
        first = self.parts[0]
        self.shape = tf.TensorShape([sum(self.sizes), *first.shape[1:]])
        self.dtype, self.name, self.trainable = first.dtype, first.name, first.trainable
        # By these TensorFlow and Keras know a variable: optimizers one of theirs, a strategy one of its own.
        self._unique_id = f"partitioned_{id(self)}"

    @property
    def _distribute_strategy(self) -> tf.distribute.Strategy | None:
        return _strategy_of(self.parts[0])

    def read_value(self) -> tf.Tensor:
        return tf.concat([part.read_value() for part in self.parts], 0)

    def numpy(self) -> np.ndarray:
        array = np.empty(self.shape.as_list(), self.dtype.as_numpy_dtype)
        # One after the other: all parts and the whole together would take twice the memory.
        for part, rows in zip(self.parts, self._rows(), strict=True):
            array[rows] = part.numpy()
        return array

    def assign(self, value: Any) -> "PartitionedVariable":
        # Each ps gets its part alone.
        for part, rows in zip(self.parts, self._rows(), strict=True):
            part.assign(value[rows])
        return self

    def _rows(self) -> list[slice]:
        ends = np.cumsum(self.sizes).tolist()
        return [slice(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]


class View(StandIn):
    """A variable that lies in a vector with others.

    Args:
        vector: it.
        first: the place of the first element.
        before: what had the value until now.
    """

    def __init__(self, vector: tf.Variable, first: int, before: tf.Variable) -> None:
        self.shape, self.dtype, self.name, self.trainable = before.shape, before.dtype, before.name, before.trainable
        self.device = vector.device
        self._vector, self._places = vector, slice(first, first + before.shape.num_elements())
        # By this an optimizer knows the variable that it was built with.
        self._unique_id = attribute(tf, before, "_unique_id", str)

    def read_value(self) -> tf.Tensor:
        return tf.reshape(self._vector.read_value()[self._places], self.shape)

    @property
    def _distribute_strategy(self) -> tf.distribute.Strategy | None:
        return _strategy_of(self._vector)

    def assign(self, value: Any) -> "View":
        self._vector[self._places].assign(tf.reshape(tf.cast(value, self.dtype), [-1]))
        return self


def _strategy_of(variable: tf.Variable | View) -> tf.distribute.Strategy | None:
    strategy: tf.distribute.Strategy | None = attribute(
        tf, variable, "_distribute_strategy", tf.distribute.Strategy | None
    )
    return strategy


def let_lie_in(vector: keras.Variable, variables: Sequence[keras.Variable]) -> None:
    """Turns variables into views of a vector, which has their values already, one after the other."""
    first = 0
    for variable in variables:
        before = attribute(keras, variable, "_value", tf.Variable)
        variable._value = View(vector.value, first, before)
        first += before.shape.num_elements()
