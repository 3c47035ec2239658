"""What a call of a model reads and assigns and what its losses return, caught while the call is traced."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.process.parts import keras_variable, parts_of


@contextlib.contextmanager
def recording(losses: list[keras.losses.Loss]) -> Iterator[list[tuple[keras.losses.Loss, tf.Tensor]]]:
    """Records what the losses return in the block, before Keras reduces it to a number."""
    values: list[tuple[keras.losses.Loss, tf.Tensor]] = []

    def record_call(loss: keras.losses.Loss) -> Any:
        call = loss.call

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            value = call(*args, **kwargs)
            values.append((loss, value))
            return value

        return wrapper

    # One object may serve several outputs; wrapped twice, it would be recorded twice.
    unique_losses = {id(loss): loss for loss in losses}.values()
    for loss in unique_losses:
        # Python looks up `call` on the object first, but `__call__`, which reduces the values, on the class alone.
        loss.call = record_call(loss)
    try:
        yield values
    finally:
        for loss in unique_losses:
            del loss.call  # the method of the class shows again


class CallScope(keras.StatelessScope):  # type: ignore[misc]
    """Catches the values that a call assigns, so that the variables themselves do not change.

    In TensorFlow no gradient flows through an assignment. The gradient of an assigned variable is the sum of
    the gradients by its value before the call and by the assigned values, each taken as independent.

    Attributes:
        trainable_ids: the ids of the trainable variables.
        assigned: the values that the call assigns to each trainable variable, by the variable's id; needs a tape.
        num_updates: how often the call assigns each variable, by its id.
        foreign: the paths of assigned variables that have no value here.
        outside: the other variables that the call reads and that have no value here, in the order of the first reads.

    Args:
        tables: those that have rows instead of a value; see `lookups`.
    """

    def __init__(
        self,
        mapping: list[tuple[keras.Variable, tf.Tensor]],
        trainable: list[keras.Variable],
        tape: tf.GradientTape | None,
        tables: Sequence[keras.Variable] = (),
    ) -> None:
        # Without a scope that collects them, layers drop what the call gives to `add_loss`.
        super().__init__(mapping, collect_losses=True)
        self._known = {id(variable) for variable, _ in mapping}
        self.trainable_ids, self._tape = set(map(id, trainable)), tape
        self._tables = set(map(id, tables))
        self.assigned: dict[int, list[tf.Tensor]] = {}
        self.num_updates: dict[int, int] = {}
        self.foreign: list[str] = []
        self.outside: list[keras.Variable] = []

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Keras calls this in place of each read; None for a variable whose own value is meant."""
        if id(variable) in self._tables:  # its rows alone are here, and a gradient for the whole would be lost
            raise ConfigError(f"model: {variable.path} is read as a whole in one call, and only looked up in others")
        if id(variable) not in self._known and all(variable is not outside for outside in self.outside):
            self.outside.append(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Keras calls this in place of each assignment."""
        variable, value = update
        # Here the value is an ordinary tensor, through which a gradient would flow to what it was computed from.
        value = tf.stop_gradient(value)
        self.num_updates[id(variable)] = self.num_updates.get(id(variable), 0) + 1
        if id(variable) not in self._known:
            self.foreign.append(variable.path)
        if self._tape and id(variable) in self.trainable_ids:
            self._tape.watch(value)
            self.assigned.setdefault(id(variable), []).append(value)
        super().add_update((variable, value))


def read_directly(traced: Any, known: Sequence[keras.Variable]) -> list[keras.Variable]:
    """The variables of TensorFlow that a function reads and that Keras does not know, in the order of the first reads.

    Args:
        traced: the function, a `tf.types.experimental.ConcreteFunction`.
        known: variables of Keras, which are left out.
    """
    of_known = {id(part.value.handle) for variable in known for part in parts_of(variable)}
    # What a function reads it has as an argument more; its list of variables is in no order.
    order = {id(tensor): number for number, tensor in enumerate(traced.captured_inputs)}
    variables = [variable for variable in traced.variables if id(variable.handle) not in of_known]
    variables.sort(key=lambda variable: order.get(id(variable.handle), len(order)))
    return [keras_variable(variable) for variable in variables]
