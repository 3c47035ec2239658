"""Properties of a call of a model that show when it is traced."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from tf2dist.model.shards import keras_variable, parts_of


class Trace(NamedTuple):
    """Properties of a call of the model in training, which is traced and not run.

    Attributes:
        assigned: the trainable variables that the call assigns.
        draws: how often the call draws from each of its random generators.
        not_additive: the variables of metrics to which a step does more than add.
        foreign: the paths of variables that the call assigns and that do not belong to the model.
        outside: the variables that the call reads and that do not belong to the model.
        bypassed: the paths of the model's variables that the call reads in another way than through Keras.
        decays: of the state that the user's own layers change, by id: the factor of the old value, see `recurrence`.
        from_batch: those of these variables whose change depends on the batch.
        gathers: whether the call or a loss calls `tf2dist.gather`.
    """

    assigned: list[keras.Variable]
    draws: list[int]
    not_additive: list[keras.Variable]
    foreign: list[str]
    outside: list[keras.Variable]
    bypassed: list[str]
    decays: dict[int, float]
    from_batch: list[keras.Variable]
    gathers: bool

    def note_direct_reads(self, traced: Any, known: Sequence[keras.Variable]) -> None:
        """Notes what a call has read by TensorFlow and not through Keras.

        Args:
            traced: a `tf.types.experimental.ConcreteFunction` that has called the model.
            known: the variables of the model.
        """
        paths = {id(part.value.handle): variable.path for variable in known for part in parts_of(variable)}
        self.bypassed.extend(paths[id(tensor)] for tensor in traced.captured_inputs if id(tensor) in paths)
        self.outside.extend(read_directly(traced, [*known, *self.outside]))


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
