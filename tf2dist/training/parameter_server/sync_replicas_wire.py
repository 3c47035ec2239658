"""What a worker and a parameter server exchange with mode=sync_replicas.

    pulled    the values of all variables, the step, and which workers made it
    pushed    the sum of a gradient: changes of all variables, share of the batch, sums; then the step of its pull

Large tensors travel alone, and everything else in one vector; see `Buckets`. A step is a float64 and travels as the two
float32 that have its bits; see `wire`.
"""

from typing import NamedTuple

import keras
import tensorflow as tf

from tf2dist.model.packing import Buckets
from tf2dist.training.parameter_server.wire import COUNT, PackedCount, Parcel


class Pulled(NamedTuple):
    """What a worker gets from one ps.

    Attributes:
        values: of all variables of the ps.
        step: the aggregates that these values contain at least.
        made_by: float32 [workers]: how many gradients of each worker are in the last aggregate; empty for a ps that
            does not decide.
    """

    values: list[tf.Tensor]
    step: PackedCount
    made_by: tf.Tensor


class PullLayout:
    """How the buckets of a pull are made and read.

    Attributes:
        specs: the types of the buckets.

    Args:
        num_workers: the size of `made_by`; 0 for a ps that does not decide.
    """

    def __init__(self, variables: list[keras.Variable], num_workers: int) -> None:
        self._buckets, self._num_workers = Buckets(variables, COUNT + num_workers), num_workers
        self.specs = self._buckets.specs

    def pack(self, pulled: Pulled) -> Parcel:
        return self._buckets.pack(pulled.values, pulled.step.bits, pulled.made_by)

    def unpack(self, buckets: Parcel) -> Pulled:
        values, (bits, made_by) = self._buckets.unpack(buckets, COUNT, self._num_workers)
        return Pulled(values, PackedCount(bits), made_by)


class PushLayout:
    """How the buckets of a push are made and read.

    All but the step is added up over an aggregate: the gradients, the changes of the state, both times the share of
    the batch; the share; and the sums of the step, where the ps keeps them.

    Attributes:
        specs: the types of the buckets.
        added: the types of what is added up.

    Args:
        variables: trainable ones, then the state.
        num_sums: of the step, see `StepOutput`; 0 for a ps that does not keep them.
    """

    def __init__(self, variables: list[keras.Variable], num_sums: int) -> None:
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

    def mean(self, total: Parcel) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The mean change of each variable from the sum over an aggregate; and [mean loss, other sums of the step]."""
        _, (share, sums) = self._buckets.unpack(total, 1, self._num_sums)
        # An aggregate of padding alone, at the end of a pass, has a share of 0 and changes nothing.
        factor = tf.math.reciprocal_no_nan(share)
        # Before the types of the variables, which may be whole numbers.
        changes, _ = self._buckets.unpack([one * factor for one in total], 1, self._num_sums)
        return changes, tf.concat([sums[:1] * factor, sums[1:]], 0)
