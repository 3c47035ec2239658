"""The rows of tables: which ps has which of them, and their gradients on a ps that waits for those of other workers."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tf2dist.model.shards import Values, by_id, join, parts_of, split
from tf2dist.model.tables import Lookups, sum_by_row
from tf2dist.training.parameter_server.wire import Request, RowGradient, make_request


class Routed(NamedTuple):
    """The look-ups of a batch, by the ps that have the rows.

    Attributes:
        requests: for each ps.
        positions: see `Lookups`; the rows of a table are in the order of its parts.
    """

    requests: list[Request]
    positions: list[tf.Tensor]


class KeptRows:
    """Gradients of rows of one table that a ps of mode=sync_replicas keeps until a step is made, in numbered places.

    On the device under which it is made. TensorFlow passes on no variable whose shape may change, so a place has room
    for all look-ups of a batch.

    Args:
        num_lookups: of a batch, at most.
    """

    def __init__(self, table: keras.Variable, num_places: int, num_lookups: int) -> None:
        self._num_lookups = num_lookups
        self._ids = tf.Variable(tf.fill([num_places, num_lookups], -1), trainable=False, name="kept_ids")
        zeros = tf.zeros([num_places, num_lookups, int(table.shape[1])])
        self._gradients = tf.Variable(zeros, trainable=False, name="kept_gradients")

    def keep(self, place: tf.Tensor, ids: tf.Tensor, gradients: tf.Tensor) -> None:
        """Keeps them in the place of others."""
        missing = self._num_lookups - tf.size(ids)
        index = tf.reshape(place, [1, 1])
        self._ids.scatter_nd_update(index, tf.pad(ids, [[0, missing]], constant_values=-1)[None])
        self._gradients.scatter_nd_update(index, tf.pad(gradients, [[0, missing], [0, 0]])[None])

    def sum_of(self, places: tf.Tensor, *more: RowGradient) -> RowGradient:
        """The sum of what is kept in some places, bool [places], and of more."""
        ids = self._ids.read_value()
        given = places[:, None] & (ids >= 0)
        kept = tf.boolean_mask(ids, given), tf.boolean_mask(self._gradients.read_value(), given)
        all_ids, gradients = (tf.concat(parts, 0) for parts in zip(kept, *more, strict=True))
        return sum_by_row(all_ids, gradients)


class Routing:
    """Which ps has which rows: of a table in n parts, the row with an id is in part id % n, with the number id // n.

    Args:
        tables: whole ones.
        on_servers: of each ps the parts of these tables.
    """

    def __init__(self, tables: Sequence[keras.Variable], on_servers: Sequence[Sequence[keras.Variable]]) -> None:
        self._num_tables = [len(parts) for parts in on_servers]
        # For each table, where its parts are: the number of the ps, and which of its tables it is there.
        places = {id(part): (ps, number) for ps, parts in enumerate(on_servers) for number, part in enumerate(parts)}
        self._places = {id(table): [places[id(part)] for part in parts_of(table)] for table in tables}

    def route(self, lookups: Lookups) -> Routed:
        """On a worker's CPU: whom to ask for which rows."""
        positions: list[tf.Tensor] = []
        ids: dict[tuple[int, int], tf.Tensor] = {}
        for places, own, own_positions in zip(self._places.values(), *lookups, strict=True):
            number = len(places)
            if number == 1:
                ids[places[0]] = own
                positions.append(own_positions)
                continue
            parts = tf.dynamic_partition(tf.range(tf.size(own)), own % number, number)
            ids |= {place: tf.gather(own, part) // number for place, part in zip(places, parts, strict=True)}
            positions.append(tf.gather(tf.math.invert_permutation(tf.concat(parts, 0)), own_positions))
        requests = [
            make_request([ids[ps, number] for number in range(num_tables)])
            for ps, num_tables in enumerate(self._num_tables)
        ]
        return Routed(requests, positions)

    def join(self, variables: Sequence[keras.Variable], values: Values) -> list[tf.Tensor]:
        """The values of whole variables from those of their parts, and of tables the rows from those of each part."""
        return [
            tf.concat([values[id(part)] for part in parts_of(v)], 0) if id(v) in self._places else join([v], values)[0]
            for v in variables
        ]

    def split(self, variables: Sequence[keras.Variable], tensors: list[tf.Tensor], requests: list[Request]) -> Values:
        """Tensors in the shapes of whole variables, and of tables in those of their rows, cut for the parts."""
        values: Values = {}
        for variable, tensor in zip(variables, tensors, strict=True):
            if places := self._places.get(id(variable)):
                sizes = tf.stack([requests[ps][0][number] for ps, number in places])
                pieces = tf.split(tensor, sizes, num=len(places))
                values |= by_id(parts_of(variable), pieces)
            else:
                values |= split([variable], [tensor])
        return values
