"""What the steps of a call exchange with the parameter servers if they are executed in a loop.

It is one loop across tasks. TensorFlow then sends every tensor that crosses between two tasks in a message of its own,
in each step: also what is the same in all steps, and what only says that something has ended.
"""

from typing import Any

import tensorflow as tf

from tf2dist.training.asynchronous.server import ParameterServer
from tf2dist.training.asynchronous.vectors import Parcel


class Exchange:
    """An exchange across tasks.

    Args:
        worker, indices: that executes the call, and where its updates are counted.
        limit: the updates above which those of the call are refused.
    """

    def __init__(self, servers: list[ParameterServer], worker: tf.Tensor, indices: tf.Tensor, limit: tf.Tensor) -> None:
        self._servers, self._worker = servers, worker
        with tf.device("CPU:0"):
            self._order = tf.concat([limit[None], tf.squeeze(indices, 1)], 0)
        self._exchanges = [self._exchange_with(server) for server in servers]

    @staticmethod
    def _exchange_with(server: ParameterServer) -> Any:
        """``exchange(pushed, order)``: a push and the next pull; the order: a limit, then where the push is counted."""

        def exchange(pushed: Parcel, order: tf.Tensor) -> Parcel:
            return server.push_and_pull(pushed, order[1:, None], order[0])

        # That the function has ended would be told to the worker in a message of its own, beside that with the result.
        order = tf.TensorSpec([1 + server.counters.added], tf.int64)
        return server.on_device_later(exchange, server.push_specs, order, must_run=False)

    def first(self) -> list[Parcel]:
        """What each ps gives to the first step."""
        return [_on_worker(server.pull()) for server in self._servers]

    def pulled(self, given: list[Parcel]) -> list[Parcel]:
        """The buckets of what each ps has given."""
        return given

    def next(self, pushes: list[Parcel], more: tf.Tensor) -> list[Parcel]:
        """Pushes to each ps; returns what each gives to the next step.

        Args:
            more: whether there is one.
        """
        pairs = zip(self._exchanges, pushes, strict=True)
        return [_on_worker(exchange(push, self._order)) for exchange, push in pairs]

    def end(self, given: list[Parcel]) -> tf.Tensor:
        """What the first ps has counted of this worker, after the last push."""
        with tf.control_dependencies(tf.nest.flatten(given)):
            return self._servers[0].worker_totals(self._worker)


def _on_worker(travelled: Parcel) -> Parcel:
    """In the graph of a worker: what a ps has sent, held by the worker's host.

    Else a loop, or what waits for it, would have the ps hold it, and send it again.
    """
    with tf.device("CPU:0"):
        return [tf.identity(one) for one in travelled]
