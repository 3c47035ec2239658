"""The rows of tables in what a worker and the ps exchange: which ps has which rows, and how they travel.

A worker asks each ps for the rows of its batch by a request, int32: how many ids of each table, then the ids as the ps
counts them. The rows come behind what else is pulled, in the same vector. What is pushed ends with the request, as the
bits of floats, with the gradients of the rows, and with the request of the next step. So rows cost no transfer of their
own, each of which adds some 700 bytes and a call.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tf2dist.model.shards import parts_of
from tf2dist.model.tables import Lookups
from tf2dist.training.parameter_server.wire import Parcel

Request: TypeAlias = "tf.Tensor | None"


class Routed(NamedTuple):
    """The look-ups of a batch, by the ps that have the rows.

    Attributes:
        requests: for each ps, int32 [tables there + ids]; None for one without tables.
        positions: see `Lookups`; the rows of a table are in the order of its parts.
    """

    requests: list[Request]
    positions: list[tf.Tensor]


class RowsLayout:
    """How rows of the tables of one ps are asked for and travel.

    Attributes:
        tables: the tables there, or their parts.

    Args:
        narrow: the type in which rows travel in training; None for their own.
    """

    def __init__(self, tables: Sequence[keras.Variable], narrow: tf.DType | None = None) -> None:
        self.tables, self._narrow = list(tables), narrow
        self._columns = [int(table.shape[1]) for table in tables]

    @property
    def request_types(self) -> list[tf.TensorSpec]:
        """Of the arguments that a pull takes."""
        return [tf.TensorSpec([None], tf.int32)] if self.tables else []

    @staticmethod
    def asked(request: Request) -> list[tf.Tensor]:
        """The arguments that a pull takes."""
        return [] if request is None else [request]

    def asked_nothing(self) -> list[tf.Tensor]:
        """As `asked`, for no rows."""
        return self.asked(tf.zeros([len(self.tables)], tf.int32) if self.tables else None)

    def open(self, types: list[tf.TensorSpec]) -> list[tf.TensorSpec]:
        """The types of a parcel whose first bucket is followed by rows."""
        return [tf.TensorSpec([None], types[0].dtype), *types[1:]] if self.tables else types

    def request(self, ids: list[tf.Tensor]) -> Request:
        return tf.concat([tf.stack([tf.size(own) for own in ids]), *ids], 0) if ids else None

    def ids(self, request: tf.Tensor) -> list[tf.Tensor]:
        """Those of each table in a request."""
        number = len(self.tables)
        return list(tf.split(request[number:], request[:number], num=number))

    def append(self, parcel: Parcel, rows: list[tf.Tensor], *before: tf.Tensor) -> Parcel:
        """The parcel with rows behind its first bucket, and float32 vectors before these."""
        first, *others = parcel
        flat = tf.concat([tf.reshape(own, [-1]) for own in rows], 0)
        if self._narrow:
            pairs = tf.pad(tf.cast(flat, self._narrow), [[0, tf.size(flat) % 2]])
            flat = tf.bitcast(tf.reshape(pairs, [-1, 2]), tf.float32)
        return [tf.concat([first, *before, flat], 0), *others]

    def split(self, parcel: Parcel, types: list[tf.TensorSpec]) -> tuple[Parcel, tf.Tensor | None]:
        """The parcel without what `append` has added to it, and that; None without tables."""
        if not self.tables:
            return parcel, None
        first, *others = parcel
        size = types[0].shape[0]
        return [tf.ensure_shape(first[:size], [size]), *others], first[size:]

    def rows(self, flat: tf.Tensor | None, request: Request) -> list[tf.Tensor]:
        """The rows that were asked for, float32 [n, columns] of each table, from the end of a vector."""
        if flat is None or request is None:
            return []
        counts = tf.unstack(request[: len(self.tables)], len(self.tables))
        sizes = [count * columns for count, columns in zip(counts, self._columns, strict=True)]
        if self._narrow:
            flat = tf.cast(tf.reshape(tf.bitcast(flat, self._narrow), [-1])[: tf.add_n(sizes)], tf.float32)
        parts = tf.split(flat, tf.stack(sizes), num=len(sizes))
        return [tf.reshape(part, [-1, columns]) for part, columns in zip(parts, self._columns, strict=True)]

    def pack_gradients(self, parcel: Parcel, request: Request, gradients: list[tf.Tensor]) -> Parcel:
        """A push, with the gradients of rows behind it."""
        if request is None:
            return parcel
        return self.append(parcel, gradients, tf.bitcast(request, tf.float32))

    def pack_request(self, parcel: Parcel, request: Request) -> Parcel:
        """A push with the request of the next step at its end."""
        if request is None:
            return parcel
        first, *others = parcel
        return [tf.concat([first, tf.bitcast(request, tf.float32)], 0), *others]

    def next_request(self, added: tf.Tensor | None) -> list[tf.Tensor]:
        """What `pack_request` has added, as the arguments of a pull."""
        if added is None:
            return []
        return [tf.bitcast(added[self._end_of_gradients(added) :], tf.int32)]

    def _end_of_gradients(self, added: tf.Tensor) -> tf.Tensor:
        number = len(self.tables)
        counts = tf.bitcast(added[:number], tf.int32)
        size = tf.reduce_sum(counts * self._columns)
        return number + tf.reduce_sum(counts) + ((size + 1) // 2 if self._narrow else size)

    def gradients(self, added: tf.Tensor | None) -> "list[RowGradient]":
        """The ids and the gradients of each table in what `pack_gradients` has added."""
        if added is None:
            return []
        number = len(self.tables)
        counts = tf.bitcast(added[:number], tf.int32)
        size = number + tf.reduce_sum(counts)
        request = tf.bitcast(added[:size], tf.int32)
        flat = added[size : self._end_of_gradients(added)]
        return list(zip(self.ids(request), self.rows(flat, request), strict=True))


RowGradient = tuple[tf.Tensor, tf.Tensor]  # the ids of rows, each once, and their gradients


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
        return added_up(all_ids, gradients)


def added_up(ids: tf.Tensor, gradients: tf.Tensor) -> RowGradient:
    """Adds up the gradients of each row."""
    unique, places = tf.unique(ids)
    return unique, tf.math.unsorted_segment_sum(gradients, places, tf.size(unique))


class Routing:
    """Which ps has which rows: of a table in n parts, the row with an id is in part id % n, with the number id // n.

    Args:
        tables: whole ones.
        layouts: of each ps, with the parts of these tables.
    """

    def __init__(self, tables: Sequence[keras.Variable], layouts: Sequence[RowsLayout]) -> None:
        self._layouts = layouts
        # For each table, where its parts are: the number of the ps, and which of its tables it is there.
        places = {
            id(part): (ps, number) for ps, layout in enumerate(layouts) for number, part in enumerate(layout.tables)
        }
        self._places = [[places[id(part)] for part in parts_of(table)] for table in tables]

    def route(self, lookups: Lookups) -> Routed:
        """On a worker's CPU: whom to ask for which rows."""
        positions: list[tf.Tensor] = []
        ids: dict[tuple[int, int], tf.Tensor] = {}
        for places, own, own_positions in zip(self._places, *lookups, strict=True):
            number = len(places)
            if number == 1:
                ids[places[0]] = own
                positions.append(own_positions)
                continue
            parts = tf.dynamic_partition(tf.range(tf.size(own)), own % number, number)
            ids |= {place: tf.gather(own, part) // number for place, part in zip(places, parts, strict=True)}
            positions.append(tf.gather(tf.math.invert_permutation(tf.concat(parts, 0)), own_positions))
        requests = [
            layout.request([ids[ps, number] for number in range(len(layout.tables))])
            for ps, layout in enumerate(self._layouts)
        ]
        return Routed(requests, positions)

    def join(self, rows: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """The rows of each table, from those of each ps."""
        return [tf.concat([rows[ps][number] for ps, number in places], 0) for places in self._places]

    def cut(self, gradients: list[tf.Tensor], requests: list[tf.Tensor]) -> list[list[tf.Tensor]]:
        """The gradients of the rows on each ps, from those of each table."""
        cuts: dict[tuple[int, int], tf.Tensor] = {}
        for places, gradient in zip(self._places, gradients, strict=True):
            sizes = tf.stack([requests[ps][number] for ps, number in places])
            cuts |= zip(places, tf.split(tf.convert_to_tensor(gradient), sizes, num=len(places)), strict=True)
        return [[cuts[ps, number] for number in range(len(layout.tables))] for ps, layout in enumerate(self._layouts)]
