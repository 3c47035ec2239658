"""Large tables of `keras.layers.Embedding`, of which a step needs only the rows that its batch looks up.

In a step such a table has no value as a whole. The ids that the batch looks up follow from the batch alone, by a graph
of their own. With them the rows are fetched from wherever the table lies, and the calls of the layers take their rows
from these. So the gradient of a table is that of the fetched rows.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf2dist.model.packing import is_large
from tf2dist.model.recurrence import reached_from
from tf2dist.process.tf_internals import layers_of, table_of

MAX_ROWS = 2**31 - 1  # of a table: ids travel as int32


class Lookups(NamedTuple):
    """What a batch looks up, one tensor for each table.

    Attributes:
        ids: of the rows, int32 [n], each once, in the order in which they are first looked up.
        positions: where in `ids` each look-up finds its row, int32 [lookups], in the order of the calls.
    """

    ids: list[tf.Tensor]
    positions: list[tf.Tensor]


Read = Callable[[keras.Variable, tf.Tensor], tf.Tensor]  # of a table and int32 ids of any shape, the rows


def tables_of(model: keras.Model) -> dict[int, list[keras.layers.Embedding]]:
    """The layers of each large table of a model, by the id of its variable, that only look its rows up."""
    found: dict[int, list[keras.layers.Embedding]] = {}
    for layer in layers_of(model):
        table = table_of(layer)
        if table is not None and is_large(table) and table.shape[0] <= MAX_ROWS and table.constraint is None:
            found.setdefault(id(table), []).append(layer)
    return found


@contextlib.contextmanager
def reading(layers: Sequence[keras.layers.Embedding], read: Read) -> Iterator[None]:
    """In the block these layers take their rows from `read`."""

    def calling(layer: keras.layers.Embedding, table: keras.Variable) -> Callable[[Any], Any]:

        def call(inputs: Any) -> Any:
            if not isinstance(inputs, tf.Tensor):  # Keras looks up in ragged and sparse ones in other ways
                return type(layer).call(layer, inputs)
            ids = tf.cast(inputs, inputs.dtype if inputs.dtype in (tf.int32, tf.int64) else tf.int32)
            ids = tf.where(ids < 0, ids + table.shape[0], ids)  # as in Keras, from the end
            return keras.ops.cast(read(table, ids), layer.compute_dtype)

        return call

    for layer in layers:
        layer.call = calling(layer, table_of(layer))  # Python finds it before the method of the class
    try:
        yield
    finally:
        for layer in layers:
            del layer.call


class RowReader:
    """Reads the rows of tables from those that were fetched for a batch; see `reading`.

    Args:
        tables: the variables.
        rows: float [n, columns] of each, those of `Lookups.ids`.
        positions: see `Lookups`.
    """

    def __init__(
        self, tables: Sequence[keras.Variable], rows: Sequence[tf.Tensor], positions: Sequence[tf.Tensor]
    ) -> None:
        self._left = {id(table): pair for table, pair in zip(tables, zip(rows, positions, strict=True), strict=True)}

    def __call__(self, table: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
        rows, positions = self._left[id(table)]
        own, left = positions[: tf.size(ids)], positions[tf.size(ids) :]
        self._left[id(table)] = rows, left
        return tf.ensure_shape(tf.gather(rows, tf.reshape(own, tf.shape(ids))), [*ids.shape, table.shape[1]])


class _AllFound(BaseException):
    """Ends a call of the model; no `Exception`, which Keras would wrap in others."""


Call = Callable[[list[tf.Tensor], list[tf.Tensor]], Any]  # of the model, with values for its variables and a batch


class LookupTrace:
    """What a call of the model looks up in tables, found by tracing it.

    Attributes:
        read_whole: the ids of those tables that the call does not only look up, or whose rows depend on other values
            of the model.
        num_calls: how often the call looks up in each table, by id.
        num_lookups: of a batch in each table, by id; None if that is not known before the batch.

    Args:
        call: calls the model.
        variables: those for which it is given values.
        layers: those of the tables, see `tables_of`.
        signature: the types of the leaves.
        num_calls: after so many the call may end; None for all.
    """

    def __init__(
        self,
        call: Call,
        variables: Sequence[keras.Variable],
        layers: dict[int, list[keras.layers.Embedding]],
        signature: list[tf.TensorSpec],
        num_calls: int | None = None,
    ) -> None:
        self.read_whole: set[int] = set()
        self.num_calls: dict[int, int] = {}
        self.num_lookups: dict[int, int | None] = {}
        self._call, self._variables, self._layers, self._num_calls = call, variables, layers, num_calls
        self._trace = tf.function(self._looked_up, autograph=False).get_concrete_function(*signature)

    def __call__(self, leaves: list[tf.Tensor]) -> Lookups:
        """In a graph on a CPU: the look-ups of a batch."""
        unique = [tf.unique(ids) for ids in self._trace(*leaves)]
        return Lookups([ids for ids, _ in unique], [positions for _, positions in unique])

    def _looked_up(self, *leaves: tf.Tensor) -> list[tf.Tensor]:
        ids: dict[int, list[tf.Tensor]] = {table: [] for table in self._layers}
        # Nothing that is computed from these is ever run.
        values = [tf.compat.v1.placeholder(v.dtype, v.shape) for v in self._variables]
        unknown = list(values)

        def read(table: keras.Variable, wanted: tf.Tensor) -> tf.Tensor:
            ids[id(table)].append(tf.reshape(tf.cast(wanted, tf.int32), [-1]))
            if sum(map(len, ids.values())) == self._num_calls:
                raise _AllFound
            unknown.append(tf.compat.v1.placeholder(table.dtype, [*wanted.shape, table.shape[1]]))
            return unknown[-1]

        with (
            contextlib.suppress(_AllFound),
            reading([layer for shared in self._layers.values() for layer in shared], read),
        ):
            self._call(values, list(leaves))
        dependent = reached_from(*unknown)
        for variable, value in zip(self._variables, values, strict=True):
            own = ids.get(id(variable), [])
            if id(variable) in ids and (not own or value.consumers() or any(i.name in dependent for i in own)):
                self.read_whole.add(id(variable))
        self.num_calls = {table: len(own) for table, own in ids.items()}
        found = {table: tf.concat(own, 0) for table, own in ids.items() if own}
        self.num_lookups = {table: own.shape[0] for table, own in found.items()}
        return list(found.values())
