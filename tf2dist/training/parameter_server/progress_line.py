"""The line that a worker prints into its own log, in the format of the old program."""

import tensorflow as tf


def print_progress(
    worker: tf.Tensor,
    steps_per_epoch: list[int],
    global_step: tf.Tensor,
    local_step: tf.Tensor,
    before: tf.Tensor,
    loss: tf.Tensor,
    every: int,
) -> None:
    """In a graph: prints the line if the worker has passed a multiple of `every` of its own steps.

    Args:
        steps_per_epoch: of each worker.
        local_step, before: the worker's own steps now, and before the call.
    """
    steps = tf.gather(tf.constant(steps_per_epoch, tf.int64), worker)
    epoch = tf.maximum(local_step - 1, 0) // steps
    numbers = {"worker": worker, "epoch": epoch, "global_step": global_step, "local_step": local_step}
    texts = [f"{name}=" for name in numbers], [tf.as_string(number) for number in numbers.values()]
    parts = [part for pair in zip(*texts, [", "] * len(numbers), strict=True) for part in pair]
    line = tf.strings.join([*parts, "loss=", tf.as_string(loss, precision=4)])
    tf.cond(local_step // every != before // every, lambda: tf.print(line), tf.no_op)
