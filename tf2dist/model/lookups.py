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


class LookupTrace:
    """The look-ups of a call of the model, found by tracing it once.

    Attributes:
        read_whole: the ids of those tables that the call does not only look up, or whose rows depend on other values
            of the model.
        num_lookups: in each of the other tables; None if that is not known before the batch.

    Args:
        call: calls the model, given values for all variables and the leaves of a batch.
        variables: of the model.
        layers: those of the tables, see `tables_of`.
        signature: the types of the leaves.
    """

    def __init__(
        self,
        call: Callable[[list[tf.Tensor], list[tf.Tensor]], Any],
        variables: Sequence[keras.Variable],
        layers: dict[int, list[keras.layers.Embedding]],
        signature: list[tf.TensorSpec],
    ) -> None:
        self.read_whole: set[int] = set()
        self.num_lookups: list[int | None] = []
        ids: dict[int, list[tf.Tensor]] = {table: [] for table in layers}

        def looked_up(*leaves: tf.Tensor) -> list[tf.Tensor]:
            values = [tf.compat.v1.placeholder(v.dtype, v.shape) for v in variables]
            unknown = list(values)

            def read(table: keras.Variable, wanted: tf.Tensor) -> tf.Tensor:
                ids[id(table)].append(tf.reshape(tf.cast(wanted, tf.int32), [-1]))
                unknown.append(tf.compat.v1.placeholder(table.dtype, [*wanted.shape, table.shape[1]]))
                return unknown[-1]

            with reading([layer for shared in layers.values() for layer in shared], read):
                call(values, list(leaves))
            dependent = reached_from(*unknown)
            for variable, value in zip(variables, values, strict=True):
                own = ids.get(id(variable), [])
                if id(variable) in ids and (not own or value.consumers() or any(i.name in dependent for i in own)):
                    self.read_whole.add(id(variable))
            own_ids = [tf.concat(own, 0) for table, own in ids.items() if table not in self.read_whole]
            self.num_lookups = [own.shape[0] for own in own_ids]
            return own_ids

        wrapped = tf.compat.v1.wrap_function(looked_up, signature)
        # The rest of the call would be computed, too, where it has operations with side effects.
        self._looked_up = wrapped.prune(wrapped.inputs[: len(signature)], wrapped.structured_outputs)

    def __call__(self, leaves: list[tf.Tensor]) -> Lookups:
        """In a graph on a CPU: the look-ups of a batch in those tables that are not read as a whole."""
        unique = [tf.unique(ids) for ids in self._looked_up(*leaves)]
        return Lookups([ids for ids, _ in unique], [positions for _, positions in unique])
