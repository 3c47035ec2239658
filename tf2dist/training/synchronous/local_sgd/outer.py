"""The outer optimizer: it takes the way from the last weights to their new mean for a gradient, as DiLoCo does."""

import keras
import numpy as np

from tf2dist.checkpoint.state import Named, assign, named_variables, values
from tf2dist.config.algorithms import AlgorithmConfig
from tf2dist.model.step import ModelStep

PREFIX = "outer/"  # of its momenta in a snapshot


class Outer:
    """Keras' SGD with Nesterov momentum; a learning rate of 1 without momentum gives the mean itself.

    Args:
        step: of the model whose trainable variables it moves.
    """

    def __init__(self, algorithm: AlgorithmConfig, step: ModelStep) -> None:
        rate, momentum = algorithm.outer_learning_rate, algorithm.outer_momentum
        self.optimizer = keras.optimizers.SGD(rate, momentum=momentum, nesterov=True)
        self.optimizer.build(step.trainable)
        slots = named_variables(step.model, step.variables, [self.optimizer])
        of_optimizer = "optimizer/"
        self._named: Named = {
            f"{PREFIX}{name.removeprefix(of_optimizer)}": variables
            for name, variables in slots.items()
            if name.startswith(of_optimizer)
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The momenta by name, for a snapshot."""
        return values(self._named)

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores the momenta; those that a snapshot of another mode or algorithm lacks remain zero."""
        assign(self._named, {name: arrays[name] for name in self._named if name in arrays})
