"""The parameter servers of algorithm=downpour, whose updates hold several batches."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.training.parameter_server.counters import TOTALS
from tf2dist.training.parameter_server.server import ParameterServer
from tf2dist.training.parameter_server.wire import PackedCount, Parcel

EXAMPLES = 2 + TOTALS.index("examples")  # their place in what an update adds, after the first two of the ones


class Clipping(NamedTuple):
    """How single gradients are clipped; at most one of the two is given.

    Attributes:
        norm: the largest L2 norm.
        value: the largest absolute value of an element.
    """

    norm: float | None
    value: float | None

    @classmethod
    def taken_from(cls, optimizer: keras.Optimizer) -> "Clipping":
        """Leaves the optimizer without clipping."""
        found = cls(optimizer.clipnorm, optimizer.clipvalue)
        optimizer.clipnorm = optimizer.clipvalue = None
        return found

    def clipped(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.norm:
            return [tf.clip_by_norm(gradient, self.norm) for gradient in gradients]
        if self.value:
            return [tf.clip_by_value(gradient, -self.value, self.value) for gradient in gradients]
        return gradients


class DownpourServer(ParameterServer):
    """A ps of which a worker gets the learning rate with the variables.

    Attributes:
        clipping: of the gradient of each batch, by the worker: the optimizer gets sums of them.

    Args:
        n_push: the most batches of an update.
        batch_size: examples.
        arguments: those of `ParameterServer`.
    """

    pulled_others = (1,)

    def __init__(self, n_push: int, batch_size: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._n_push, self._batch_size = n_push, batch_size
        if self.optimizer.gradient_accumulation_steps:
            raise ConfigError(
                f"optimizer.gradient_accumulation_steps ({self.optimizer.gradient_accumulation_steps}): makes one "
                "update of several, as algorithm=downpour makes one of several batches; leave it out, and give "
                "algorithm.n_push"
            )
        self.clipping = Clipping.taken_from(self.optimizer)

    def rate(self, pulled: Parcel) -> tf.Tensor:
        """The learning rate in what was pulled, float32 [1]."""
        (rate,) = self.pull_layout.others(pulled)
        return rate

    def power(self, decay: float, batches: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """``decay ** batches``; the same on the worker and on the ps, and `decay` itself for one batch."""
        # From a table: the power that TensorFlow computes may differ in its last digit.
        return tf.gather(tf.constant(decay ** np.arange(self._n_push + 1), dtype), batches)

    def _others(self, applied: PackedCount) -> list[tf.Tensor]:
        return [tf.reshape(self.learning_rate(applied), [1])]

    def _factor(self, decay: float, dtype: tf.DType, added: tf.Tensor) -> tf.Tensor:
        batches = tf.cast(tf.math.ceil(added[EXAMPLES] / self._batch_size), tf.int32)
        return self.power(decay, batches, dtype)
