"""Plain asynchronous training: each update is applied as it comes, however old the values it was computed from."""

import contextlib
import pkgutil

import keras
import tensorflow as tf

from tf2dist import data
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.config.schema import ALGORITHMS, RunConfig
from tf2dist.data.passes import Sharding
from tf2dist.model.checks import check_assigned, check_losses, check_updates
from tf2dist.model.step import ModelStep
from tf2dist.training.parameter_server.async_setup import UpdateRule
from tf2dist.training.parameter_server.counters import AsyncOrigin
from tf2dist.training.parameter_server.graphs import AsyncGraphs
from tf2dist.training.parameter_server.schedule import AsyncScheduler


class Algorithm(UpdateRule):
    """What a ps does with an update; the other algorithms override a part of this.

    All methods are called while graphs are made: what does nothing here costs nothing. Every update that a ps has
    numbered is applied and counted. An algorithm changes its gradients or its learning rate, and cannot refuse it.

    Attributes:
        needs_pulled_values: whether workers send back the values that they have pulled.
        runs_alone: whether a ps may apply only one update at a time, even if the optimizer does not need that.
    """

    graphs_class, scheduler_class = AsyncGraphs, AsyncScheduler
    needs_pulled_values = False
    runs_alone = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def prepare(self, optimizer: keras.Optimizer) -> None:
        """Called once with the optimizer of each ps, when it is built and before it is traced.

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
            variables: if `runs_alone`, the trainable ones of this ps. Otherwise small ones may lie in a vector, which
                is padded at its end and so longer than its gradient; see `storage`.
        """
        return gradients

    def update(self, staleness: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """The block in which the optimizer applies an update, such as one in which its learning rate is scaled.

        Args:
            staleness: how many others were numbered on this ps between the pull and this update, int64.
        """
        return contextlib.nullcontext()

    def check_model(self, name: str, step: ModelStep, splits: data.Splits) -> str:
        check_assigned(name, step.trace)
        check_losses(name, step, num_replicas=1)
        return check_updates(name, step)

    def origin(self, start: Snapshot | None, sharding: Sharding, num_metrics: int) -> AsyncOrigin:
        return AsyncOrigin.of(start, sharding, num_metrics)


def algorithm_of(config: RunConfig) -> Algorithm:
    """The algorithm that the option names; each is in a file of its own, which is imported only if it is chosen."""
    algorithm: Algorithm = pkgutil.resolve_name(ALGORITHMS[config.algorithm.kind].implementation)(config)
    return algorithm
