"""Synchronous training of a model whose `train_step` applies an update and goes on with the new values, as GANs do.

Each update is summed over the workers and applied where the step asks for it, so what follows sees the new values. What
the step leaves at its end, the state and the sums for the log, is summed as in any other step.
"""

import functools
from collections import Counter
from typing import Any

import keras
import tensorflow as tf

from tf2dist import data
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError
from tf2dist.model.own_step import OwnStep
from tf2dist.model.packing import Buckets, narrow_dtype
from tf2dist.model.step import ModelStep
from tf2dist.process.tf_internals import counter_of, outside_strategies
from tf2dist.training.synchronous.step import SyncStep
from tf2dist.training.synchronous.workers import Workers


class PhasedStep(SyncStep):
    """One worker's part in such steps."""

    step: OwnStep

    @staticmethod
    def check(
        name: str, config: RunConfig, workers: Workers, splits: data.Splits, step: ModelStep, optimizer: keras.Optimizer
    ) -> None:
        way_out = "leave it out, or apply all updates at the end of train_step"
        if config.devices.xla:
            raise ConfigError(
                f"model ({name}): its train_step goes on with what it has updated, which devices.xla=true cannot "
                f"compile; {way_out}"
            )
        if step.trace.assigned:
            raise ConfigError(
                f"model ({name}): its train_step updates {step.trace.assigned[0].path} by an optimizer and assigns it, "
                "too; use a constraint of the layer"
            )

    def prepare_graph(self, config: RunConfig) -> None:
        super().prepare_graph(config)
        narrow = narrow_dtype(config.cluster.transfer_dtype)
        self._of_updates = [Buckets(group.variables, 0, tf.float32, narrow) for group in self.step.groups]
        self._optimizers = self.step.optimizers_in(self.optimizer)
        # What a snapshot tells is the number of steps, in each of which an optimizer may be applied more than once.
        for inner, times in Counter(self._optimizers).items():
            counter_of(inner).assign(times * counter_of(inner))
        self._compute = functools.partial(self.step, apply=self._apply_update)

    @property
    def applied_at_end(self) -> list[keras.Variable]:
        return []

    def _apply(self, reduced: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        if self.optimizer not in self._optimizers:  # a MultiOptimizer counts the steps
            counter_of(self.optimizer).assign_add(1)
        return super()._apply(reduced)

    def _apply_update(self, number: int, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """On a replica: applies an update of the step, of which this is what the replica contributes."""
        sums = self.reduced(self._of_updates[number].pack(gradients))
        variables = self.step.groups[number].variables

        def apply(strategy: tf.distribute.Strategy, *per_replica: Any) -> None:
            # After the all-reduce the replicas of a worker hold the same sum.
            local = [strategy.experimental_local_results(one)[0] for one in per_replica]
            with outside_strategies():
                self._optimizers[number].apply(self._of_updates[number].unpack(local)[0], variables)

        # Once for all replicas of this worker.
        tf.distribute.get_replica_context().merge_call(apply, args=tuple(sums))
        return [variable.value.read_value() for variable in variables]
