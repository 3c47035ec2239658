"""Plain asynchronous training: each update is applied as it comes, however old the values it was computed from."""

import contextlib

import keras
import tensorflow as tf


class Algorithm:
    """What a ps does with an update; the other algorithms override a part of this.

    All methods are called while graphs are made: what does nothing here costs nothing.

    Attributes:
        needs_pulled_values: whether workers send back the values that they have pulled.
        runs_alone: whether a ps may apply only one update at a time, even if the optimizer does not need that.
    """

    needs_pulled_values = False
    runs_alone = False

    def prepare(self, optimizer: keras.Optimizer) -> None:
        """Called once with the optimizer of the ps, when it is built and before it is traced.

        Raises:
            ConfigError: the algorithm cannot be combined with the optimizer.
        """

    def gradients(
        self, gradients: list[tf.Tensor], pulled: list[tf.Tensor], variables: list[keras.Variable]
    ) -> list[tf.Tensor]:
        """What the optimizer gets.

        Args:
            gradients: one for each of `variables`, as a worker has pushed them.
            pulled: the values from which they were computed; empty unless `needs_pulled_values`.
        """
        return gradients

    def update(self, staleness: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """The block in which the optimizer applies an update.

        Args:
            staleness: how many others were numbered on this ps between the pull and this update, int64.
        """
        return contextlib.nullcontext()
