"""Where workers wait on a parameter server until the step moves on."""

import uuid
from collections.abc import Callable

import tensorflow as tf

Look = Callable[[], tuple[tf.Tensor, tf.Tensor]]  # the step, and whether a worker has to wait in it


class Gate:
    """Wakes the workers that wait for the end of a step; to be made under the device of the ps.

    A waiting worker takes a token from a queue, which costs no thread and no time, and then looks again. Tokens say
    no more than "look": one too many does no harm. Should one be missing, because the call of a lost worker has taken
    it, `wake` gives more; the coordinator calls it whenever the step makes no progress.

    Args:
        num_workers: that may wait at once.
    """

    def __init__(self, num_workers: int) -> None:
        # Two, used in turn: the tokens of a step would otherwise be taken by workers that are a step further.
        # Not `tf.queue.FIFOQueue`, whose Python object destroys the queue when it is collected, and crashes the process
        # if the cluster is gone by then. These stay as long as the ps, and are some bytes.
        self._queues = [
            tf.raw_ops.FIFOQueueV2(component_types=[tf.int32], shapes=[[]], shared_name=f"gate-{uuid.uuid4()}")
            for _ in range(2)
        ]
        self._num_tokens = 2 * num_workers  # calls of lost workers may wait here, too

    def wait(self, look: Look) -> tf.Tensor:
        """In a graph: returns the step once `look` finds that there is nothing to wait for."""

        def wait_and_look(step: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            token = self._of_step(step, self._take)
            with tf.control_dependencies([token]):
                return look()

        # The queue is that of the step which the look has seen: its tokens come after the step has moved on.
        return tf.while_loop(lambda _, must_wait: must_wait, wait_and_look, look())[0]

    def open(self, step: tf.Tensor) -> tf.Tensor:
        """In a graph: wakes the workers that wait in `step`, which is over."""
        return self._of_step(step, self._fill)

    def wake(self) -> None:
        """In a graph: makes all waiting workers look again."""
        for queue in self._queues:
            self._fill(queue)

    def _take(self, queue: tf.Tensor) -> tf.Tensor:
        (token,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int32])
        return token

    def _fill(self, queue: tf.Tensor) -> tf.Tensor:
        # Tokens that nobody takes would otherwise become more with every step.
        missing = tf.maximum(0, self._num_tokens - tf.raw_ops.QueueSizeV2(handle=queue))
        filled = tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[tf.zeros(missing[None], tf.int32)])
        with tf.control_dependencies([filled]):
            return tf.constant(0)

    def _of_step(self, step: tf.Tensor, act: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        even, odd = self._queues
        return tf.cond(step % 2 == 0, lambda: act(even), lambda: act(odd))
