"""The two vectors that a worker and a parameter server exchange with mode=sync_replicas.

    pulled    the values of all variables, the step, and which workers made it
    pushed    the sum of a gradient: changes of all variables, share of the batch, sums; then the step of its pull

A step is a float64 and travels as the two float32 that have its bits; see `asynchronous.vectors`.
"""

from typing import NamedTuple

import keras
import tensorflow as tf

from tf2dist.model.packing import Packing
from tf2dist.training.asynchronous.vectors import COUNT, PackedCount


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
    """How the vector of a pull is made and read.

    Attributes:
        spec: the type of the vector.

    Args:
        num_workers: the size of `made_by`; 0 for a ps that does not decide.
    """

    def __init__(self, variables: list[keras.Variable], num_workers: int) -> None:
        self._packing, self._num_workers = Packing(variables), num_workers
        self.spec = tf.TensorSpec([self._packing.size + COUNT + num_workers], tf.float32)

    def pack(self, pulled: Pulled) -> tf.Tensor:
        return self._packing.pack(pulled.values, pulled.step.bits, pulled.made_by)

    def unpack(self, vector: tf.Tensor) -> Pulled:
        values, (bits, made_by) = self._packing.unpack(vector, COUNT, self._num_workers)
        return Pulled(values, PackedCount(bits), made_by)


class PushLayout:
    """How the vector of a push is made and read.

    Its first part is what is added up over an aggregate: the gradients, the changes of the state, both times the
    share of the batch; the share; and the sums of the step, where the ps keeps them.

    Attributes:
        spec: the type of the vector.
        size: of the part that is added up.

    Args:
        variables: trainable ones, then the state.
        num_sums: of the step, see `StepOutput`; 0 for a ps that does not keep them.
    """

    def __init__(self, variables: list[keras.Variable], num_sums: int) -> None:
        self._packing, self._num_sums = Packing(variables), num_sums
        self.size = self._packing.size + 1 + num_sums
        self.spec = tf.TensorSpec([self.size + COUNT], tf.float32)

    def pack(self, changes: list[tf.Tensor], share: tf.Tensor, sums: tf.Tensor, pulled_at: PackedCount) -> tf.Tensor:
        """The vector of one gradient.

        Args:
            changes: of each variable, times `share`.
            share: float32 [], of the batch: 1 if it is full, 0 if it is padding.
            sums: float32 [num_sums], the loss times `share`.
        """
        return self._packing.pack(changes, share[None], sums[: self._num_sums], pulled_at.bits)

    def split(self, vector: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The part that is added up, float32 [size], and the step of the pull, int64."""
        return vector[: self.size], tf.cast(PackedCount(vector[self.size :]).value(), tf.int64)

    def mean(self, total: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The mean change of each variable from the sum over an aggregate; and [mean loss, other sums of the step]."""
        *parts, share, sums = tf.split(total, [self._packing.size, 1, self._num_sums])
        # An aggregate of padding alone, at the end of a pass, has a share of 0 and changes nothing.
        factor = tf.math.reciprocal_no_nan(share)
        changes, _ = self._packing.unpack(parts[0] * factor)
        return changes, tf.concat([sums[:1] * factor, sums[1:]], 0)
