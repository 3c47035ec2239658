"""Gradients that are zero, which a step must not have where Keras has others."""

from typing import Any

import tensorflow as tf

WAY_OUT = "pass it as an argument to the function that uses it"


def is_zero(gradient: Any) -> bool:
    """Whether a gradient, a symbolic tensor or None for none, is zero whatever the batch is."""
    if gradient is None:
        return True
    if not isinstance(gradient, tf.Tensor):  # of some rows of a table
        return False
    if gradient.op.type == "ZerosLike":
        return True
    value = tf.get_static_value(gradient)
    return value is not None and not value.any()
