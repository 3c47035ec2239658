"""What an optimizer on a ps takes for its counter of iterations."""

from typing import Any

import keras
import tensorflow as tf


class UpdateNumber(keras.Variable):
    """An optimizer's iteration counter that reads as the number of the update being applied.

    A Keras counter is read, added to and assigned, which loses counts when workers push at once;
    Adam's bias correction and learning rate schedules would follow the wrong number.
    """

    def __init__(self) -> None:
        super().__init__(0, dtype="int64", trainable=False, name="iteration", aggregation="only_first_replica")
        self._current: list[tf.Tensor] = []

    def set_current(self, number: tf.Tensor) -> None:
        self._current[:] = [number]

    @property
    def value(self) -> Any:
        return self._current[0] if self._current else super().value

    def assign_add(self, value: Any) -> None:
        """Nothing: `ParameterServer` counts."""
