"""Asynchronous training in which an update counts for less the staler it is.

The learning rate of an update is divided by its staleness, if that is more than 1: W. Zhang, S. Gupta, X. Lian, J. Liu:
Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016. The rate is divided and not the gradient: Adam and
its kin divide by the size of the gradients, which would cancel it. Weight decay, which is a multiple of the
rate, becomes smaller with it.
"""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.tf_internals import scale_learning_rate
from tf2dist.training.parameter_server.algorithms.plain import Algorithm


class StalenessAware(Algorithm):
    """See `Algorithm`."""

    _factor: tf.Tensor | None = None  # while an update is traced

    def prepare(self, optimizer: keras.Optimizer) -> None:
        if optimizer.gradient_accumulation_steps:
            raise ConfigError(
                f"optimizer.gradient_accumulation_steps ({optimizer.gradient_accumulation_steps}): makes one update of "
                "several gradients, each with a staleness of its own; leave it out, or algorithm=staleness_aware"
            )
        scale_learning_rate(optimizer, lambda: self._factor)

    @contextlib.contextmanager
    def update(self, staleness: tf.Tensor) -> Iterator[None]:
        self._factor = 1 / tf.cast(tf.maximum(staleness, 1), tf.float32)
        try:
            yield
        finally:
            self._factor = None  # a tensor of one graph, which means nothing outside of it
