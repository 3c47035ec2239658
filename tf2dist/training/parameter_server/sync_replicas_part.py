"""The variables of the model on one parameter server, and how an aggregate changes them."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.model.optimizer_checks import check_parts
from tf2dist.process.tf_internals import count_updates_in, fix_learning_rate
from tf2dist.training.parameter_server.atomic import make_atomic
from tf2dist.training.parameter_server.on_device import on_device
from tf2dist.training.parameter_server.update_number import UpdateNumber

MakeOptimizer = Callable[[], keras.Optimizer]


class ModelPart:
    """The part of the model that lives on one ps, with an optimizer of its own.

    Attributes:
        step: the aggregates applied in the whole run, int64.
        loss_scale: by which the worker multiplies the loss, and divides the gradients again.

    Args:
        device: of the ps.
        trainable, state: those variables of the model that lie there.
        is_alone: whether the model has no other part.
        name: of the optimizer, for messages.
        keeps_rate: whether nobody changes the learning rate during the run, other than a schedule.
        earlier_updates: that the optimizer has applied before this run; they count for its schedule.
    """

    def __init__(
        self,
        device: str,
        trainable: list[keras.Variable],
        state: list[keras.Variable],
        make_optimizer: MakeOptimizer,
        is_alone: bool,
        name: str,
        keeps_rate: bool,
        earlier_updates: int,
    ) -> None:
        self.device, self._earlier_updates = device, earlier_updates
        self.trainable, self.state = trainable, state
        self.variables = [*trainable, *state]
        with tf.device(device):
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            self.optimizer = make_optimizer()
            if self.optimizer.global_clipnorm and not is_alone:
                raise ConfigError(
                    f"optimizer ({name}): with mode=sync_replicas and several ps global_clipnorm cannot clip, since "
                    "each ps has a part of the gradients; use clipnorm, or cluster.num_ps=1"
                )
            check_parts(name, self.optimizer, trainable)
            self.loss_scale, self.optimizer.loss_scale_factor = self.optimizer.loss_scale_factor, None
            self._number = UpdateNumber()
            count_updates_in(self.optimizer, self._number)
            self.optimizer.build(trainable)
            # One aggregate is applied at a time, so this is only for speed.
            if not make_atomic(self.optimizer) and keeps_rate:
                fix_learning_rate(self.optimizer)

    def apply(self, changes: list[tf.Tensor]) -> list[tf.Operation]:
        """In a graph: applies the mean changes of all variables; returns the operations that do it."""
        graph = tf.compat.v1.get_default_graph()
        earlier = len(graph.get_operations())
        self._number.set_current(self.step.read_value() + self._earlier_updates)
        # In the order of plain Keras: the call of the model changes its state, and the optimizer comes after it.
        for variable, change in zip(self.state, changes[len(self.trainable) :], strict=True):
            variable.value.assign_add(change)
        self.optimizer.apply(changes[: len(self.trainable)], self.trainable)
        return list(graph.get_operations()[earlier:])

    def values(self) -> list[tf.Tensor]:
        return [variable.value.read_value() for variable in self.variables]

    def on_device(self, function: Any, *signature: tf.TensorSpec) -> Any:
        """See `on_device`."""
        return on_device(self.device, function, *signature)
