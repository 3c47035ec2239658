"""Functions that run on a ps."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf2dist.process.tf_internals import as_one_node


def on_device(device: str, function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
    """Traces a function whose call is one node, placed on the device with all that it does."""
    with tf.device(device):
        concrete = as_one_node(function).get_concrete_function(*signature)

    def call(*args: Any) -> Any:
        with tf.device(device):  # of the node: on the worker it would call back for each operation
            return concrete(*args)

    return call
