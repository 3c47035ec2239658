"""Functions that run on a ps."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf2dist.process.tf_internals import as_one_node, config_of_calls


def on_device(device: str, function: Callable[..., Any], *signature: Any, must_run: bool = True) -> Callable[..., Any]:
    """Traces a function whose call is one node, placed on the device with all that it does.

    Args:
        must_run: whether a graph waits for the end of each call, as for all that has effects. If not, only what takes
            the result waits for it, and without that there would be no call.
    """
    with tf.device(device):
        concrete = as_one_node(function).get_concrete_function(*signature)

    def call(*args: Any) -> Any:
        with tf.device(device):  # of the node: on the worker it would call back for each operation
            if must_run:
                return concrete(*args)
            inputs, types = [*tf.nest.flatten(args), *concrete.captured_inputs], [one.dtype for one in concrete.outputs]
            outputs = tf.raw_ops.PartitionedCall(args=inputs, Tout=types, f=concrete, config_proto=config_of_calls())
            return tf.nest.pack_sequence_as(concrete.structured_outputs, outputs)

    return call
