"""Functions that run on a ps."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf2dist.process.tf_internals import as_one_node


def on_device(
    device: str, function: Callable[..., Any], *signature: Any, is_ordered: bool = True
) -> Callable[..., Any]:
    """Traces a function whose call is one node, placed on the device with all that it does.

    Args:
        is_ordered: whether a graph that calls it waits for its end, and calls those that use the same variables one
            after the other. If not, only what takes the result waits for it.
    """
    with tf.device(device):
        concrete = as_one_node(function).get_concrete_function(*signature)

    def call(*args: Any) -> Any:
        with tf.device(device):  # of the node: on the worker it would call back for each operation
            if is_ordered:
                return concrete(*args)
            inputs, types = [*tf.nest.flatten(args), *concrete.captured_inputs], [one.dtype for one in concrete.outputs]
            outputs = tf.raw_ops.PartitionedCall(args=inputs, Tout=types, f=concrete)
            return tf.nest.pack_sequence_as(concrete.structured_outputs, outputs)

    return call
