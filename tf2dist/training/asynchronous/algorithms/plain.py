"""Plain asynchronous training: each update is applied as it comes, however old the values it was computed from."""

import contextlib

import keras
import tensorflow as tf


class Algorithm:
    """What a ps does with an update; the other algorithms override a part of this.

    All methods are called while graphs are made: what does nothing here costs nothing.
    """

    def prepare(self, optimizer: keras.Optimizer) -> None:
        """Called once with the optimizer of the ps, when it is built and before it is traced."""

    def update(self, staleness: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """The block in which the optimizer applies an update.

        Args:
            staleness: how many others were numbered on this ps between the pull and this update, int64.
        """
        return contextlib.nullcontext()
