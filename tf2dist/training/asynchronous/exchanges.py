"""What the steps of a call exchange with the parameter servers if they are executed in a loop.

In messages it is one loop across tasks. TensorFlow then sends every tensor that crosses between two tasks in a message
of its own, in each step: also what is the same in all steps, and what only says that something has ended. Where the
tasks share memory nothing crosses: the worker and each ps have loops of their own, which wait for each other (see
`doorbells`). So a ps has a thread for each worker in a call; see `devices.configure`.

Each object is for one graph of a worker.
"""

import functools
from typing import Any, cast

import tensorflow as tf

from tf2dist.process.tf_internals import as_one_node, in_one_thread
from tf2dist.training.asynchronous.carriers import ByMemory, Room, Tensors, exchange
from tf2dist.training.asynchronous.doorbells import Push
from tf2dist.training.asynchronous.server import ParameterServer
from tf2dist.training.asynchronous.vectors import Parcel


class InMessages:
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
        return server.on_device_later(exchange, server.pushes.specs, order, must_run=False)

    def first(self) -> list[Tensors]:
        """What each ps gives to the first step."""
        return [_on_worker(server.pull()) for server in self._servers]

    def pulled(self, given: list[Tensors]) -> list[Parcel]:
        """The buckets of what each ps has given."""
        return given

    def next(self, pushes: list[Parcel], more: tf.Tensor) -> list[Tensors]:
        """Pushes to each ps; returns what each gives to the next step.

        Args:
            more: whether there is one.
        """
        pairs = zip(self._exchanges, pushes, strict=True)
        return [_on_worker(exchange(push, self._order)) for exchange, push in pairs]

    def end(self, given: list[Tensors]) -> tf.Tensor:
        """What the first ps has counted of this worker, after the last push."""
        with tf.control_dependencies(tf.nest.flatten(given)):
            return self._servers[0].worker_totals(self._worker)


class InMemory:
    """An exchange with the ps of the worker's host; as `InMessages`, whose names it has.

    Args:
        secs: how long a ps may take for an answer.
        one_thread: whether each ps computes in one thread.
    """

    def __init__(
        self,
        servers: list[ParameterServer],
        carrier: ByMemory,
        worker: tf.Tensor,
        indices: tf.Tensor,
        limit: tf.Tensor,
        secs: float,
        one_thread: bool,
    ) -> None:
        self._carrier, self._secs = carrier, secs
        self._served = [Served(server, one_thread) for server in servers]
        self._ticket = carrier.begin(worker)
        order = *self._ticket, indices, limit
        self._first = [_on_worker(served.first(*order)) for served in self._served]
        self._counted = [served.serve(*order) for served in self._served]

    def first(self) -> list[Tensors]:
        self._taken = [served.pulls.take(one)[0] for served, one in zip(self._served, self._first, strict=True)]
        with tf.device("CPU:0"), tf.control_dependencies(tf.nest.flatten(self._first)):
            return [[tf.constant(True)]]

    def pulled(self, given: list[Tensors]) -> list[Parcel]:
        ((answered,),) = given
        pairs = zip(self._served, self._taken, strict=True)
        return [served.pulls.taken_again(answered, taken) for served, taken in pairs]

    def next(self, pushes: list[Parcel], more: tf.Tensor) -> list[Tensors]:
        return [[exchange([served.pushes for served in self._served], pushes, self._ticket, more, self._secs)]]

    def end(self, given: list[Tensors]) -> tf.Tensor:
        with tf.control_dependencies(tf.nest.flatten(given)):
            self._carrier.end(self._ticket, self._counted)
        return self._counted[0]


class Served:
    """What a ps does in a call whose steps are exchanged in memory.

    Attributes:
        pulls, pushes: the ways of both.
        first: ``first(*ticket, indices, limit)``: a pull. A message tells that it is there, and that all that `serve`
            needs has come to the ps: a worker may have one thread only, which sends nothing while it waits for answers.
        serve: ``serve(*ticket, indices, limit)``: answers the pushes of a worker until the last one of its call has
            been applied, and returns what is counted of the worker then.

    Args:
        one_thread: see `InMemory`.
    """

    def __init__(self, server: ParameterServer, one_thread: bool) -> None:
        self._server, self._one_thread = server, one_thread
        self.pulls, self.pushes = cast(Room, server.pulls), cast(Room, server.pushes)
        count = tf.TensorSpec([], tf.int64)
        indices = tf.TensorSpec([server.counters.added, 1], tf.int64)
        order = *server.carrier.ticket_specs, indices, count
        self.first = server.on_device_later(lambda *order: server.pull(*order[:-2]), *order)
        self.serve = server.on_device_later(self._serve, *order)

    def _serve(self, *arguments: tf.Tensor) -> tf.Tensor:
        *ticket, indices, limit = arguments
        buckets, _ = self.pushes.take(ticket)  # every push lies in the same memory

        def admitted(number: tf.Tensor, more: tf.Tensor, *pushed: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([self._server.apply(list(pushed), indices, number)]):
                return self._answered(ticket, more)

        count, flag = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.bool)
        pushed = (tf.TensorSpec(one.shape, one.dtype) for one in buckets)
        apply = self._node(admitted, count, flag, *pushed)
        answer = self._node(functools.partial(self._answered, ticket), flag)

        def step(push: tf.Tensor) -> tf.Tensor:
            number, more = self._server.next_number(), push > Push.LAST
            return tf.cond(number < limit, lambda: apply(number, more, *buckets), lambda: answer(more))

        first = self.pushes.next_push(ticket, tf.constant(True))
        ended = tf.while_loop(lambda push: push > Push.NONE, step, [first], parallel_iterations=1)
        with tf.control_dependencies(ended):
            return self._server.counters.after(indices)

    def _node(self, function: Any, *signature: tf.TensorSpec) -> Any:
        """A function that is executed by a single node."""
        node = as_one_node(function).get_concrete_function(*signature)
        return in_one_thread(node) if self._one_thread else node

    def _answered(self, ticket: Tensors, more: tf.Tensor) -> tf.Tensor:
        """Answers if there are `more` pushes to come; returns the next `Push`, for which it has waited."""
        return self.pushes.next_push(self.pulls.answer(self._server.pieces(), ticket, more), more)


def _on_worker(travelled: Parcel) -> Parcel:
    """In the graph of a worker: what a ps has sent, held by the worker's host.

    Else a loop, or what waits for it, would have the ps hold it, and send it again.
    """
    with tf.device("CPU:0"):
        return [tf.identity(one) for one in travelled]
