"""What a worker and a parameter server exchange. Only this module knows its layout.

    pulled    the values of all variables, the ps's count of updates; with mode=sync_replicas which workers made the
              last update
    pushed    the changes of some variables, pulled values of some, the count at the pull, what `Counters.add` adds;
              with mode=sync_replicas the changes of all, the share of the batch, its sums, the count at the pull

Large tensors travel alone, and everything else in one vector; see `Buckets`. That is float32, which counts exactly
only up to 2^24. So a count, a float64, travels as the two float32 that have its bits, and a worker returns them as they
came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from tf2dist.model.packing import Buckets, Shaped
from tf2dist.training.parameter_server.counters import ONES

Parcel = list[tf.Tensor]  # the buckets that go to or come from one ps
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
    """What a worker gets from one ps.

    Attributes:
        values: the values of all variables of the ps.
        applied: the updates that these values contain at least.
        made_by: with mode=sync_replicas which workers made the last update, float32 [workers].
    """

    values: list[tf.Tensor]
    applied: PackedCount
    made_by: tf.Tensor | None = None


class Pushed(NamedTuple):
    """What one ps gets from a worker.

    Attributes:
        changes: the gradients, and the terms of the state.
        pulled: the values that were pulled of some variables.
        pulled_at: the count in the pull that the changes were computed from, int64.
        added: float32, see `Counters.add`.
    """

    changes: list[tf.Tensor]
    pulled: list[tf.Tensor]
    pulled_at: tf.Tensor
    added: tf.Tensor


class PullLayout:
    """How the buckets of a pull are made and read.

    Attributes:
        specs: the types of the buckets.

    Args:
        variables: those whose values are pulled.
        num_workers: of which is told who made the last update; None if that is not told.
        narrow: see `Buckets`.
    """

    def __init__(
        self, variables: Sequence[Shaped], num_workers: int | None = None, narrow: tf.DType | None = None
    ) -> None:
        self._sizes = [COUNT] if num_workers is None else [COUNT, num_workers]
        self._buckets = Buckets(variables, sum(self._sizes), narrow=narrow)
        self.specs = self._buckets.specs

    def pack(self, values: list[tf.Tensor], applied: PackedCount, *made_by: tf.Tensor) -> Parcel:
        return self._buckets.pack(values, applied.bits, *made_by)

    def unpack(self, buckets: Parcel) -> Pulled:
        values, (bits, *made_by) = self._buckets.unpack(buckets, *self._sizes)
        return Pulled(values, PackedCount(bits), *made_by)


class PushLayout:
    """How the buckets of a push are made and read.

    Attributes:
        variables: whose changes are pushed.
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
        narrow: tf.DType | None = None,
    ) -> None:
        self.variables, self.pulled, self._added = list(variables), list(pulled), added
        self._buckets = Buckets([*variables, *pulled], COUNT + added, narrow=narrow)
        self.specs = self._buckets.specs

    def pack(
        self, changes: list[tf.Tensor], pulled_at: PackedCount, sums: tf.Tensor, pulled: Sequence[tf.Tensor] = ()
    ) -> Parcel:
        """The buckets of one update.

        Args:
            changes: one for each of `variables`.
            pulled_at: the count as it was pulled.
            sums: float32, those of `StepOutput`: the loss, the examples, the changes of the metrics.
            pulled: one value for each of the variables `pulled`.
        """
        # The ones are sent rather than made on the ps, where each operation more is one more in every update.
        return self._buckets.pack([*changes, *pulled], pulled_at.bits, ONES, sums)

    def unpack(self, buckets: Parcel) -> Pushed:
        tensors, (bits, added) = self._buckets.unpack(buckets, COUNT, self._added)
        changes, pulled = tensors[: len(self.variables)], tensors[len(self.variables) :]
        return Pushed(changes, pulled, tf.cast(PackedCount(bits).value(), tf.int64), added)


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
    """

    def __init__(self, variables: Sequence[Shaped], num_sums: int) -> None:
        self._num_sums = num_sums
        self._buckets = Buckets(variables, 1 + num_sums + COUNT, tf.float32)
        self.specs = self._buckets.specs
        first, *large = self.specs
        self.added = [tf.TensorSpec([first.shape[0] - COUNT], first.dtype), *large]

    def pack(self, changes: list[tf.Tensor], share: tf.Tensor, sums: tf.Tensor, pulled_at: PackedCount) -> Parcel:
        """The buckets of one gradient.

        Args:
            changes: of each variable, times `share`.
            share: float32 [], of the batch: 1 if it is full, 0 if it is padding.
            sums: float32 [num_sums], the loss times `share`.
        """
        return self._buckets.pack(changes, share[None], sums[: self._num_sums], pulled_at.bits)

    def split(self, buckets: Parcel) -> tuple[Parcel, tf.Tensor]:
        """What is added up, of the types `added`, and the step of the pull, int64."""
        first, *large = buckets
        return [first[:-COUNT], *large], tf.cast(PackedCount(first[-COUNT:]).value(), tf.int64)

    def mean(self, total: Parcel) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """The mean change of each variable from the sum over an aggregate; [mean loss, other sums of the step]; and
        the factor that makes a mean of a sum."""
        _, (share, sums) = self._buckets.unpack(total, 1, self._num_sums)
        # An aggregate of padding alone, at the end of a pass, has a share of 0 and changes nothing.
        factor = tf.math.reciprocal_no_nan(share)
        # Before the types of the variables, which may be whole numbers.
        changes, _ = self._buckets.unpack([one * factor for one in total], 1, self._num_sums)
        return changes, tf.concat([sums[:1] * factor, sums[1:]], 0), factor[0]
