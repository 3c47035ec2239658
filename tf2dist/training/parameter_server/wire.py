"""Layouts of what a worker and a parameter server exchange. Only this module knows them.

    pulled    the values of all variables, the ps's count of updates; with mode=sync_replicas which workers made the
              last update; of tables the rows that the worker has asked for
    pushed    the changes of some variables, pulled values of some, the count at the pull, what `Counters.add` adds;
              with mode=sync_replicas the changes of all, the share of the batch, its sums, the count at the pull;
              of tables the request, the gradients of the rows, and the request of the next step

Large tensors travel alone, and everything else in one vector; see `Buckets`. That is float32, which counts exactly
only up to 2^24. So a count, a float64, travels as the two float32 that have its bits, and a worker returns them as they
came.

Whether a table travels as a whole or by its rows is decided here alone: the rows follow in the same vector, so that
they cost no transfer of their own, each of which adds some 700 bytes and a call. A ps without tables gets no request
and sends no rows. With a kernel of [3, 2], a bias of [2], and a table with 2 columns of which a batch needs the rows 4
and 9, the vectors of mode=async are, by their numbers of float32:

    request   [2, 4, 9], int32: how many ids of each table, then the ids
    pulled    6 kernel, 2 bias, 2 count, 4 rows
    pushed    6 + 2 gradients, 2 count, 5 added (the `ONES`, the loss, the examples), 3 request, 4 gradients of rows,
              and the request of the next step
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import keras
import tensorflow as tf

from tf2dist.model.packing import Buckets, Shaped
from tf2dist.training.parameter_server.counters import ONES

WireTensors = list[tf.Tensor]  # the buckets that go to or come from one ps
# Asks one ps for rows: an int32 vector, how many ids of each table, then the ids as the ps counts them; empty without
# tables.
Request = Sequence[tf.Tensor]
RowGradient = tuple[tf.Tensor, tf.Tensor]  # the ids of rows, each once, and their gradients
COUNT = 2  # the number of float32 that carry a float64


@dataclass(frozen=True)
class PackedCount:
    """How many updates a ps has applied, as it travels.

    Attributes:
        bits: float32 [2].
    """

    bits: tf.Tensor

    @classmethod
    def of(cls, count: tf.Tensor) -> "PackedCount":
        """Packs a float64."""
        # Bits, not a conversion: as numbers the two halves mean nothing, so nothing may compute with them.
        return cls(tf.bitcast(count, tf.float32))

    def value(self) -> tf.Tensor:
        """The count as float64."""
        return tf.bitcast(self.bits, tf.float64)


class Pulled(NamedTuple):
    """Values that a worker gets from one ps.

    Attributes:
        values: the values of all variables of the ps.
        applied: the updates that these values contain at least.
        rows: of each table the rows that were asked for, [n, columns].
        made_by: with mode=sync_replicas which workers made the last update, float32 [workers].
        open: with mode=sync_replicas whether the ps takes gradients, float32 [1].
    """

    values: list[tf.Tensor]
    applied: PackedCount
    rows: list[tf.Tensor]
    made_by: tf.Tensor | None = None
    open: tf.Tensor | None = None


def make_request(ids: list[tf.Tensor]) -> Request:
    """Asks a ps for the rows with these ids of each of its tables."""
    return [tf.concat([tf.stack([tf.size(own) for own in ids]), *ids], 0)] if ids else []


def add_request(buckets: WireTensors, request: Request) -> WireTensors:
    """A push with the request of the next step at its end."""
    first, *others = buckets
    return [tf.concat([first, *(tf.bitcast(one, tf.float32) for one in request)], 0), *others] if request else buckets


class RowsLayout:
    """The rows of the tables of one ps at the end of the first bucket.

    Attributes:
        request_types: the type of a request.
        sizes: of the vector of rows, as `Buckets.unpack` takes it; empty without tables.

    Args:
        tables: the tables there, or their parts.
        narrow: the type in which rows travel in training; None for their own.
    """

    def __init__(self, tables: Sequence[keras.Variable], narrow: tf.DType | None = None) -> None:
        self._number, self._narrow = len(tables), narrow
        self._columns = [int(table.shape[1]) for table in tables]
        self.request_types = [tf.TensorSpec([None], tf.int32)] if tables else []
        self.sizes = [-1] if tables else []

    def open(self, types: list[tf.TensorSpec]) -> list[tf.TensorSpec]:
        """The types of buckets of which the first is followed by rows."""
        return [tf.TensorSpec([None], types[0].dtype), *types[1:]] if self._number else types

    def no_rows(self) -> Request:
        """A request for no rows."""
        return [tf.zeros([self._number], tf.int32)] if self._number else []

    def ids(self, *request: tf.Tensor) -> list[tf.Tensor]:
        """The ids of each table in a request."""
        number = self._number
        return [ids for one in request for ids in tf.split(one[number:], one[:number], num=number)]

    def pack(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The vector of these rows, float32; none without rows."""
        if not rows:
            return []
        flat = tf.concat([tf.reshape(own, [-1]) for own in rows], 0)
        if self._narrow:
            pairs = tf.pad(tf.cast(flat, self._narrow), [[0, tf.size(flat) % 2]])
            flat = tf.bitcast(tf.reshape(pairs, [-1, 2]), tf.float32)
        return [flat]

    def unpack(self, flat: Sequence[tf.Tensor], request: Request) -> list[tf.Tensor]:
        """The rows of each table from their vector, [n, columns], in the order of the request; none without one."""
        if not request:
            return []
        (vector,), (ids,) = flat, request
        counts = tf.unstack(ids[: self._number], self._number)
        sizes = [count * columns for count, columns in zip(counts, self._columns, strict=True)]
        if self._narrow:
            vector = tf.cast(tf.reshape(tf.bitcast(vector, self._narrow), [-1])[: tf.add_n(sizes)], tf.float32)
        parts = tf.split(vector, tf.stack(sizes), num=len(sizes))
        return [tf.reshape(part, [-1, columns]) for part, columns in zip(parts, self._columns, strict=True)]

    def pack_gradients(self, gradients: Sequence[tf.Tensor], request: Request) -> list[tf.Tensor]:
        """The vectors of a request and of the gradients of its rows."""
        return [*(tf.bitcast(ids, tf.float32) for ids in request), *self.pack(gradients)]

    def unpack_gradients(self, tail: Sequence[tf.Tensor]) -> list[RowGradient]:
        """The gradients of the rows of each table in what follows a push."""
        if not tail:
            return []
        (vector,) = tail
        end_of_ids, end = self._ends(vector)
        request = [tf.bitcast(vector[:end_of_ids], tf.int32)]
        return list(zip(self.ids(*request), self.unpack([vector[end_of_ids:end]], request), strict=True))

    def next_request(self, tail: Sequence[tf.Tensor]) -> Request:
        """The request that `add_request` has added, in what follows a push."""
        return [tf.bitcast(vector[self._ends(vector)[1] :], tf.int32) for vector in tail]

    def _ends(self, vector: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Where the request ends in what follows a push, and where the gradients end."""
        counts = tf.bitcast(vector[: self._number], tf.int32)
        end_of_ids = self._number + tf.reduce_sum(counts)
        size = tf.reduce_sum(counts * self._columns)
        return end_of_ids, end_of_ids + ((size + 1) // 2 if self._narrow else size)


class PullLayout:
    """How the buckets of a pull are made and read.

    Attributes:
        specs: the types of the buckets.
        rows: of the tables.

    Args:
        variables: those whose values are pulled.
        tables: those of which rows are pulled.
        num_workers: of which a pull reports who made the last update, and whether the ps is open; None if it does not.
        narrow: see `Buckets`.
    """

    def __init__(
        self,
        variables: Sequence[Shaped],
        tables: Sequence[keras.Variable] = (),
        num_workers: int | None = None,
        narrow: tf.DType | None = None,
    ) -> None:
        self._sizes, self.rows = [COUNT] if num_workers is None else [COUNT, num_workers, 1], RowsLayout(tables, narrow)
        self._buckets = Buckets(variables, sum(self._sizes), narrow=narrow)
        self.specs = self.rows.open(self._buckets.specs)

    def pack(
        self, values: list[tf.Tensor], applied: PackedCount, rows: Sequence[tf.Tensor] = (), *reported: tf.Tensor
    ) -> WireTensors:
        """Packs a pull; `reported`: with mode=sync_replicas the fields `made_by` and `open` of `Pulled`."""
        return self._buckets.pack(values, applied.bits, *reported, *self.rows.pack(rows))

    def unpack(self, buckets: WireTensors, request: Request = ()) -> Pulled:
        """Reads what was packed; `request`: of the rows, or none if they are not needed."""
        values, (bits, *others) = self._buckets.unpack(buckets, *self._sizes, *self.rows.sizes)
        reported, flat = others[: len(self._sizes) - 1], others[len(self._sizes) - 1 :]
        return Pulled(values, PackedCount(bits), self.rows.unpack(flat, request), *reported)


class PushLayout:
    """How the buckets of a push are made and read.

    Attributes:
        variables: whose changes are pushed.
        tables: of whose rows gradients are pushed.
        pulled: whose pulled values are sent back.
        specs: the types of the buckets.

    Args:
        added: how many numbers an update adds to the counters.
        narrow: see `Buckets`.
    """

    def __init__(
        self,
        variables: Sequence[Shaped],
        added: int,
        pulled: Sequence[Shaped] = (),
        tables: Sequence[keras.Variable] = (),
        narrow: tf.DType | None = None,
    ) -> None:
        self.variables, self.pulled, self.tables, self._added = list(variables), list(pulled), list(tables), added
        self._buckets = Buckets([*variables, *pulled], COUNT + added, narrow=narrow)
        self._rows = RowsLayout(tables, narrow)
        self.specs = self._rows.open(self._buckets.specs)

    def pack(
        self,
        changes: list[tf.Tensor],
        pulled_at: PackedCount,
        sums: tf.Tensor,
        pulled: Sequence[tf.Tensor] = (),
        rows: Sequence[tf.Tensor] = (),
        request: Request = (),
    ) -> WireTensors:
        """The buckets of one update.

        Args:
            changes: one for each of `variables`.
            pulled_at: the count as it was pulled.
            sums: float32, those of `StepOutput`: the loss, the examples, the changes of the metrics.
            pulled: one value for each of the variables `pulled`.
            rows: the gradients of the rows of each of `tables`.
            request: of these rows.
        """
        # The ones are sent rather than made on the ps, where each operation more is one more in every update.
        own = pulled_at.bits, ONES, sums
        return self._buckets.pack([*changes, *pulled], *own, *self._rows.pack_gradients(rows, request))

    def unpack(
        self, buckets: WireTensors
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor, tf.Tensor, list[RowGradient]]:
        """An update that one ps gets from a worker.

        Returns:
            The gradients and the terms of the state; the values that were pulled of some variables; the count in the
            pull that these changes were computed from, int64; what is added to the counters, float32, see
            `Counters.add`; and of each table the gradients of its rows.
        """
        tensors, (bits, added, *tail) = self._buckets.unpack(buckets, COUNT, self._added, *self._rows.sizes)
        changes, pulled = tensors[: len(self.variables)], tensors[len(self.variables) :]
        pulled_at = tf.cast(PackedCount(bits).value(), tf.int64)
        return changes, pulled, pulled_at, added, self._rows.unpack_gradients(tail)

    def next_request(self, buckets: WireTensors) -> Request:
        """The request that `add_request` has added."""
        size = self._buckets.specs[0].shape[0]
        return self._rows.next_request([buckets[0][size:] for _ in self._rows.sizes])


class GradientLayout:
    """How the buckets of a gradient are made and read, which a ps of mode=sync_replicas adds to others.

    All but the step is added up over an aggregate: the gradients, the changes of the state, both times the share of
    the batch; the share; and the sums of the step, where the ps keeps them.

    Attributes:
        specs: the types of the buckets.
        added: the types of what is added up.

    Args:
        variables: trainable ones, then the state.
        num_sums: of the step, see `StepOutput`; 0 for a ps that does not keep them.
        tables: of whose rows gradients are pushed.
    """

    def __init__(self, variables: Sequence[Shaped], num_sums: int, tables: Sequence[keras.Variable] = ()) -> None:
        self._num_sums, self._rows = num_sums, RowsLayout(tables)
        self._buckets = Buckets(variables, 1 + num_sums + COUNT, tf.float32)
        first, *large = self._buckets.specs
        self.specs = self._rows.open(self._buckets.specs)
        self.added = [tf.TensorSpec([first.shape[0] - COUNT], first.dtype), *large]

    def pack(
        self,
        changes: list[tf.Tensor],
        share: tf.Tensor,
        sums: tf.Tensor,
        pulled_at: PackedCount,
        rows: Sequence[tf.Tensor] = (),
        request: Request = (),
    ) -> WireTensors:
        """The buckets of one gradient.

        Args:
            changes: of each variable, times `share`.
            share: float32 [], of the batch: 1 if it is full, 0 if it is padding.
            sums: float32 [num_sums], the loss times `share`.
            rows: the gradients of the rows of each of the tables.
            request: of these rows.
        """
        own = share[None], sums[: self._num_sums], pulled_at.bits
        return self._buckets.pack(changes, *own, *self._rows.pack_gradients(rows, request))

    def unpack(self, buckets: WireTensors) -> tuple[WireTensors, tf.Tensor, list[RowGradient]]:
        """A gradient as it is added to others.

        Returns:
            What is added up over an aggregate, see `added`; the step of the pull that it was computed from, int64; and
            of each table the gradients of its rows.
        """
        first, *large = buckets
        added, bits, *tail = tf.split(first, [self.added[0].shape[0], COUNT, *self._rows.sizes])
        pulled_at = tf.cast(PackedCount(bits).value(), tf.int64)
        return [added, *large], pulled_at, self._rows.unpack_gradients(tail)

    def mean(self, total: WireTensors) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """The mean change of each variable from the sum over an aggregate; [mean loss, other sums of the step]; and
        the factor that makes a mean of a sum."""
        _, (share, sums) = self._buckets.unpack(total, 1, self._num_sums)
        # An aggregate of padding alone, at the end of a pass, has a share of 0 and changes nothing.
        factor = tf.math.reciprocal_no_nan(share)
        # Before the types of the variables, which may be whole numbers.
        changes, _ = self._buckets.unpack([one * factor for one in total], 1, self._num_sums)
        return changes, tf.concat([sums[:1] * factor, sums[1:]], 0), factor[0]
