"""The variables of an optimizer that differ between workers after local steps."""

import keras

from tf2dist.checkpoint.state import COUNTERS


def slots_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """All of its variables but the number of its steps and its learning rate, which are the same everywhere."""
    return [variable for variable in optimizer.variables if variable.name not in COUNTERS]
