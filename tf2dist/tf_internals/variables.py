"""Values of Keras variables that do not lie in a `tf.Variable` of their own.

TensorFlow's own `ShardedVariable` cannot: it is not public, has no `numpy`, and Keras takes it for a tensor.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.tf_internals.tensorflow import attribute


class ProxyVariable:
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

    def assign(self, value: Any) -> "ProxyVariable":
        """Sets the value from an array or a tensor."""
        raise NotImplementedError

    def numpy(self) -> np.ndarray:
        return np.asarray(self.read_value())

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype) if dtype else self.numpy()


def _operator(name: str) -> Any:
    def operator(self: ProxyVariable, *others: Any) -> Any:
        return getattr(self.read_value(), name)(*others)

    return operator


# Python looks for these on the class alone. Two variables are still equal only if they are the same.
for each in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(ProxyVariable, each, _operator(each))


class PartitionedVariable(ProxyVariable):
    """A variable that is cut along its first axis, and lies on no single device.

    Attributes:
        parts: in order; they agree in all axes but the first.
        variables: the Keras variables of the parts, once they have been made; see `model.shards`.
        rows: of the whole, that each part has: rows that follow each other, or every n-th one.

    Args:
        interleaves: whether each part has every n-th row.
    """

    device = ""

    def __init__(self, parts: Sequence[tf.Variable | ProxyVariable], interleaves: bool = False) -> None:
        self.parts, self.interleaves = list(parts), interleaves
        self.variables: list[keras.Variable] | None = None
        sizes = [int(part.shape[0]) for part in self.parts]
        ends = np.cumsum(sizes).tolist()
        self.rows = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        if interleaves:
            self.rows = [slice(number, None, len(self.parts)) for number in range(len(self.parts))]
        first = self.parts[0]
        self.shape = tf.TensorShape([sum(sizes), *first.shape[1:]])
        self.dtype, self.name, self.trainable = first.dtype, first.name, first.trainable
        # By these TensorFlow and Keras know a variable: optimizers one of theirs, a strategy one of its own.
        self._unique_id = f"partitioned_{id(self)}"

    @property
    def _distribute_strategy(self) -> tf.distribute.Strategy | None:
        return _strategy_of(self.parts[0])

    def read_value(self) -> tf.Tensor:
        return self.join([part.read_value() for part in self.parts])

    def join(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """The value of the whole, from those of the parts."""
        if not self.interleaves:
            return tf.concat(values, 0)
        longest, rest = -(-self.shape[0] // len(values)), self.shape[1:].as_list()
        padded = [
            tf.pad(value, [[0, longest - part.shape[0]], *([0, 0] for _ in rest)])
            for value, part in zip(values, self.parts, strict=True)
        ]
        return tf.reshape(tf.stack(padded, 1), [longest * len(values), *rest])[: self.shape[0]]

    def numpy(self) -> np.ndarray:
        array = np.empty(self.shape.as_list(), self.dtype.as_numpy_dtype)
        # One after the other: all parts and the whole together would take twice the memory.
        for part, rows in zip(self.parts, self.rows, strict=True):
            array[rows] = part.numpy()
        return array

    def assign(self, value: Any) -> "PartitionedVariable":
        # Each ps gets its part alone.
        for part, rows in zip(self.parts, self.rows, strict=True):
            part.assign(value[rows])
        return self


class View(ProxyVariable):
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


class Rows(ProxyVariable):
    """Some rows of a variable, which are read once, and written by `write`; the other rows are not touched.

    Args:
        variable: it.
        ids: integers [U], each of them once.
    """

    def __init__(self, variable: tf.Variable, ids: tf.Tensor) -> None:
        self.shape = tf.TensorShape([ids.shape[0], *variable.shape[1:]])
        self.dtype, self.name, self.trainable = variable.dtype, variable.name, variable.trainable
        self.device = variable.device
        self._handle, self._ids = variable.handle, ids
        self._current: tf.Tensor | None = None
        self._is_changed = False
        self._unique_id = attribute(tf, variable, "_unique_id", str)

    def read_value(self) -> tf.Tensor:
        if self._current is None:
            self._current = tf.raw_ops.ResourceGather(resource=self._handle, indices=self._ids, dtype=self.dtype)
        return self._current

    def assign(self, value: Any) -> "Rows":
        self._current, self._is_changed = tf.convert_to_tensor(value, self.dtype), True
        return self

    def assign_add(self, value: Any) -> "Rows":
        return self.assign(self.read_value() + value)

    def assign_sub(self, value: Any) -> "Rows":
        return self.assign(self.read_value() - value)

    def write(self) -> None:
        # Copies rows, in a tenth of the time in which ResourceScatterNdUpdate computes with each of them. It takes no
        # lock: who reads meanwhile may see a part of a row before the update, and the rest after it.
        if self._is_changed:
            tf.raw_ops.ResourceScatterUpdate(resource=self._handle, indices=self._ids, updates=self._current)


class AtomicRows(Rows):
    """Rows from which others may subtract at the same time; only `assign_sub` writes them."""

    def assign_sub(self, value: Any) -> "AtomicRows":
        tf.raw_ops.ResourceScatterNdSub(ref=self._handle, indices=self._ids[:, tf.newaxis], updates=value)
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


@contextlib.contextmanager
def rows_in_place_of(variables: Sequence[keras.Variable], ids: tf.Tensor, kind: type[Rows] = Rows) -> Iterator[None]:
    """A block in which each of these variables stands for its rows of these ids, which are written at its end."""
    values = [attribute(keras, variable, "_value", tf.Variable) for variable in variables]
    rows = [kind(value, ids) for value in values]
    for variable, own in zip(variables, rows, strict=True):
        variable._value = own
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable._value = value
    for own in rows:
        own.write()
