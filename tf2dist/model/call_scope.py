"""What a call of a model assigns and what its losses give, caught while it is traced."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


@contextlib.contextmanager
def noting(losses: list[keras.losses.Loss]) -> Iterator[list[tuple[keras.losses.Loss, tf.Tensor]]]:
    """Notes what the losses give before it is reduced to a number."""
    found: list[tuple[keras.losses.Loss, tf.Tensor]] = []

    def noting(loss: keras.losses.Loss) -> Any:
        call = loss.call

        def noted(*args: Any, **kwargs: Any) -> Any:
            value = call(*args, **kwargs)
            found.append((loss, value))
            return value

        return noted

    each = {id(loss): loss for loss in losses}.values()  # one may serve several outputs
    for loss in each:
        loss.call = noting(loss)
    try:
        yield found
    finally:
        for loss in each:
            del loss.call


class CallScope(keras.StatelessScope):  # type: ignore[misc]
    """Catches the values that a call assigns, so that the variables themselves do not change.

    In TensorFlow no gradient flows through an assignment. The gradient of an assigned variable is the sum of
    the gradients by its value before the call and by the assigned values, each taken as independent.

    Attributes:
        assigned: the values that the call assigns to each trainable variable, by the variable's id.
        num_updates: how often the call assigns each variable, by its id.
        strangers: the paths of assigned variables that have no value here.
    """

    def __init__(
        self,
        mapping: list[tuple[keras.Variable, tf.Tensor]],
        trainable: list[keras.Variable],
        tape: tf.GradientTape | None,
    ) -> None:
        super().__init__(mapping, collect_losses=True)
        self._known = {id(variable) for variable, _ in mapping}
        self._trainable, self._tape = set(map(id, trainable)), tape
        self.assigned: dict[int, list[tf.Tensor]] = {}
        self.num_updates: dict[int, int] = {}
        self.strangers: list[str] = []

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        value = tf.stop_gradient(value)
        self.num_updates[id(variable)] = self.num_updates.get(id(variable), 0) + 1
        if id(variable) not in self._known:
            self.strangers.append(variable.path)
        if self._tape and id(variable) in self._trainable:
            self._tape.watch(value)
            self.assigned.setdefault(id(variable), []).append(value)
        super().add_update((variable, value))
