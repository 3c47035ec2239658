"""How synchronous workers put together the changes of a variable: its `aggregation` in Keras.

none, mean            the mean of the changes, weighted by the workers' shares of the examples
sum                   the sum of what the workers add
only_first_replica    the change on the first replica
"""

import keras
import tensorflow as tf


def contribution(
    variable: keras.Variable, decay: float, new: tf.Tensor, old: tf.Tensor, share: tf.Tensor, replica: tf.Tensor
) -> tf.Tensor:
    """What a replica adds to the change of a variable, float32.

    Args:
        decay: the constant factor of the old value in the new one, see `recurrence`.
        share: of the replica's batch in the step; 0 if it is padding.
    """
    if variable.aggregation == "sum":
        term = new - tf.cast(decay, new.dtype) * old if decay else new
        return tf.where(share > 0, tf.cast(term, tf.float32), 0.0)
    change = tf.cast(new - old, tf.float32)
    if variable.aggregation == "only_first_replica":
        return tf.where(replica == 0, change, 0.0)
    return change * share


def apply(variable: keras.Variable, decay: float, total: tf.Tensor) -> None:
    """Changes a variable by the sum of all contributions."""
    value = variable.value
    if variable.aggregation == "sum" and decay != 1:
        value.assign(tf.cast(decay, value.dtype) * value + total if decay else total)
    else:
        value.assign_add(total)
