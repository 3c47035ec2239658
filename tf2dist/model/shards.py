"""The parts of variables that are cut over the parameter servers; a variable that is not cut is its own only part.

A model has whole variables. What lies on a ps, what an optimizer there updates, and what is sent are parts.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.tf_internals.keras import groups_of
from tf2dist.tf_internals.variables import PartitionedVariable

Values = dict[int, tf.Tensor]  # by id of the part
# Of the rows of a table that are read or assigned at once. gRPC and TensorFlow hold some ten copies of what is read.
PIECE_BYTES = 4 << 20


class Part(keras.Variable):
    """Some rows of a variable, on one ps.

    Its name and path are those of the whole, by which optimizers name their slots and leave out variables.

    Attributes:
        number: among the parts of the variable.
        value_of_whole: the value of the variable that is cut.
    """

    number: int

    def __init__(self, whole: keras.Variable, number: int) -> None:
        value = whole.value.parts[number]
        with _over(value):
            super().__init__(_unused, value.shape, value.dtype, trainable=whole.trainable, name=whole.name)
        self.number, self._path_of_whole = number, whole.path
        self.value_of_whole: PartitionedVariable = whole.value
        self.constraint = whole.constraint

    @property
    def path(self) -> str:
        return str(self._path_of_whole)


def parts_of(variable: keras.Variable) -> list[keras.Variable]:
    """The parts of a variable in order, always the same objects; the variable itself if it is not cut."""
    value = variable.value
    if not isinstance(value, PartitionedVariable):
        return [variable]
    if value.variables is None:
        value.variables = [Part(variable, number) for number in range(len(value.parts))]
    return value.variables


def all_parts(variables: list[keras.Variable]) -> list[keras.Variable]:
    return [part for variable in variables for part in parts_of(variable)]


def joined(parts: list[keras.Variable], interleaves: bool = False) -> keras.Variable:
    """One variable, which is read and assigned as a whole, of several parts of it; see `PartitionedVariable`."""
    value = PartitionedVariable([part.value for part in parts], interleaves)
    with _over(value):
        return keras.Variable(_unused, value.shape, value.dtype, trainable=False, name=parts[0].name)


def keras_variable(value: tf.Variable) -> keras.Variable:
    """A variable of Keras with which one of TensorFlow is read and assigned."""
    name = value.name.rpartition("/")[2].partition(":")[0]
    with _over(value):
        return keras.Variable(_unused, value.shape, value.dtype.name, trainable=False, name=name)


def by_id(variables: Iterable[keras.Variable], tensors: Iterable[tf.Tensor]) -> Values:
    """Tensors by the id of the variables that they belong to."""
    return dict(zip(map(id, variables), tensors, strict=True))


def join(variables: list[keras.Variable], values: Values) -> list[tf.Tensor]:
    """In a graph: the values of whole variables from those of their parts."""
    joined_values = []
    for variable in variables:
        first, *others = [values[id(part)] for part in parts_of(variable)]
        joined_values.append(variable.value.join([first, *others]) if others else first)
    return joined_values


def split(variables: list[keras.Variable], tensors: list[tf.Tensor]) -> Values:
    """In a graph: tensors in the shapes of whole variables, such as gradients, as those of the parts."""
    values: Values = {}
    for variable, tensor in zip(variables, tensors, strict=True):
        parts = parts_of(variable)
        values |= by_id(parts, [tensor[rows] for rows in variable.value.rows] if len(parts) > 1 else [tensor])
    return values


def global_clipping(optimizer: keras.Optimizer, variables: list[keras.Variable]) -> Callable[[Values], Values]:
    """A function that clips gradients of variables by the norm of all those that an optimizer gets, as it does now."""
    norms = [(inner.global_clipnorm, own) for inner, own in groups_of(optimizer, variables) if inner.global_clipnorm]

    def clipped(gradients: Values) -> Values:
        for norm, own in norms:
            gradients = gradients | by_id(own, tf.clip_by_global_norm([gradients[id(v)] for v in own], norm)[0])
        return gradients

    return clipped


def read_rows(variable: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    """The rows of a table with these ids, int32 [n]; nothing else of it is read, and its parts interleave."""
    parts = parts_of(variable)
    if len(parts) == 1:
        return parts[0].value.sparse_read(ids)
    places = tf.dynamic_partition(tf.range(tf.size(ids)), ids % len(parts), len(parts))
    rows = [part.value.sparse_read(tf.gather(ids, own) // len(parts)) for part, own in zip(parts, places, strict=True)]
    return tf.dynamic_stitch(places, rows)


def row_pieces(variable: keras.Variable) -> Iterator[tuple[int, int]]:
    """The rows of a table in ranges that are read or assigned at once: each the first one, and the one after the last.

    A variable whose rows a training updates is never read as a whole: TensorFlow would copy it on its ps.
    """
    rows, *others = variable.shape
    at_once = max(1, PIECE_BYTES // (int(np.prod(others)) * variable.value.dtype.size))
    for first in range(0, rows, at_once):
        yield first, min(first + at_once, rows)


def read_piece(variable: keras.Variable, first: int, last: int) -> np.ndarray:
    """The rows from `first` to before `last`, which alone are copied."""
    array = np.empty([last - first, *variable.shape[1:]], variable.value.dtype.as_numpy_dtype)
    on_servers = []
    for places, part, own in _pieces_of_parts(variable, first, last):
        with tf.device(part.device):
            on_servers.append((places, part.sparse_read(tf.range(own.start, own.stop))))
    for places, value in on_servers:
        # Copied by an operation first: `numpy` holds Python's lock until it has the value.
        with tf.device("CPU:0"):
            local = tf.identity(value)
        array[places] = local.numpy()
    return array


def assign_piece(variable: keras.Variable, first: int, array: np.ndarray) -> None:
    """Assigns rows, beginning at `first`."""
    for places, part, own in _pieces_of_parts(variable, first, first + len(array)):
        with tf.device(part.device):
            begin, end = [own.start], [own.stop]
            value = tf.convert_to_tensor(array[places], part.dtype)
            tf.raw_ops.ResourceStridedSliceAssign(ref=part.handle, begin=begin, end=end, strides=[1], value=value)


def _pieces_of_parts(variable: keras.Variable, first: int, last: int) -> Iterator[tuple[slice, tf.Variable, slice]]:
    """The rows of a range that lie on each ps: their places in the range, the part there, and their places in it."""
    value = variable.value
    is_cut = isinstance(value, PartitionedVariable)
    for part, rows in zip(value.parts, value.rows, strict=True) if is_cut else [(value, slice(None))]:
        numbers = range(*rows.indices(variable.shape[0]))
        # How many rows of the part come before `first`, and before `last`: rounded up.
        begin, end = (min(len(numbers), max(0, -((numbers.start - row) // numbers.step))) for row in (first, last))
        if begin < end:
            places = slice(numbers[begin] - first, numbers[end - 1] - first + 1, numbers.step)
            yield places, part, slice(begin, end)


@contextlib.contextmanager
def _over(value: tf.Variable | PartitionedVariable) -> Iterator[None]:
    """A Keras variable that is made in the block takes `value` instead of a new variable of TensorFlow."""
    with tf.variable_creator_scope(lambda next_creator, **kwargs: value):
        yield


def _unused(*arguments: Any, **options: Any) -> tf.Tensor:
    """The initializer of a variable that gets none."""
    raise AssertionError("a Keras variable has made a value of its own")
