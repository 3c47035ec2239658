"""How the buckets of a pull or a push travel between a worker and a ps: in messages, or in memory that they share.

The graphs of both ends put what they send, and take what has come. See `shared_memory`.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.model.packing import is_large
from tf2dist.process.placement import PACKET
from tf2dist.process.shared_files import ALIGNMENT
from tf2dist.training.asynchronous import shared_memory
from tf2dist.training.asynchronous.shared_memory import works_here

Tensors = list[tf.Tensor]
SPARE_BYTES = 1 << 16  # after each room: a push is longer than a pull by what it adds to the counters
TICKET = tf.TensorSpec([4], tf.int64)  # see `shared_memory.Ticket`


class Room:
    """The places in the file of a worker for what goes between it and one ps in one direction.

    Attributes:
        ps: the number of the ps.
        specs: the types of what travels in a message: a ticket.
        first, end: where the room lies, in bytes.
        places: where each bucket lies, see `shared_memory.File.arrays`.

    Args:
        specs: the types of the buckets, all of which lie in the file.
        ps, first: see above.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec], ps: int, first: int) -> None:
        self._buckets, self.ps, self.specs = list(specs), ps, [TICKET]
        self.first, self.end = first, first
        places = []
        for spec in specs:
            size = spec.shape.num_elements()
            places.append([self.end, size, spec.dtype.as_datatype_enum])
            self.end += -(-size * spec.dtype.size // ALIGNMENT) * ALIGNMENT
        self.places = np.array(places, np.int64)

    def put(self, buckets: Tensors, ticket: Tensors) -> Tensors:
        """In the graph of the sender: what travels."""
        return _called(shared_memory.PUT, [*ticket, self.places, *buckets])

    def take(self, travelled: Tensors) -> tuple[Tensors, Tensors]:
        """In the graph of the receiver: the buckets, and the ticket that came in their place."""
        types = [spec.dtype for spec in self._buckets]
        with tf.device("CPU:0"):
            taken = tf.raw_ops.PyFunc(input=[*travelled, self.places], token=shared_memory.TAKE, Tout=types)
            buckets = [tf.reshape(one, spec.shape) for one, spec in zip(taken, self._buckets, strict=True)]
        return buckets, travelled

    # In a loop, see `exchanges`. Both ends know the ticket, and tell each other when they have written.

    def answer(self, buckets: list[Tensors], ticket: Tensors, more: tf.Tensor) -> Tensors:
        """In the graph of a ps: tells the worker, unless it has nothing `more` to push; returns the ticket.

        Args:
            buckets: each as the vectors that make it up.
        """
        vectors = [vector for bucket in buckets for vector in bucket]
        return _called(shared_memory.ANSWER, [*ticket, self.ps, more, self._places_of(buckets), *vectors])

    def next_push(self, ticket: Tensors, more: tf.Tensor) -> tf.Tensor:
        """In the graph of a ps: waits if there are `more`; returns int64 [], see `shared_memory.Push`."""
        with tf.device("CPU:0"):
            inputs = [*ticket, self.ps, more]
            (push,) = tf.raw_ops.PyFunc(input=inputs, token=shared_memory.AWAIT_PUSH, Tout=[tf.int64])
        return tf.ensure_shape(push, [])

    def taken_again(self, answered: tf.Tensor, taken: Tensors) -> Tensors:
        """In the graph of a receiver: what has come since it has `taken` what came first.

        It lies in the same memory, which was not copied, so nothing but the time of reading it is new. Only a function
        that is not inlined may take it: TensorFlow would compute a cast of it before what it waits for.

        Args:
            answered: known when it has come.
        """
        with tf.device("CPU:0"), tf.control_dependencies([answered]):
            return [tf.identity(one) for one in taken]

    def _places_of(self, buckets: list[Tensors]) -> np.ndarray:
        """Where vectors go that make up each bucket."""
        places = []
        for (first, _, dtype), vectors in zip(self.places, buckets, strict=True):
            for vector in vectors:
                size = vector.shape.num_elements()
                places.append([first, size, dtype])
                first += size * vector.dtype.size
        return np.array(places, np.int64)


class Messages:
    """What travels in messages of TensorFlow; as `Room`, with an empty ticket."""

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self.specs = list(specs)

    def put(self, buckets: Tensors, ticket: Tensors) -> Tensors:
        return buckets

    def take(self, travelled: Tensors) -> tuple[Tensors, Tensors]:
        return travelled, []


class ByMessage:
    """How buckets travel between ps and workers of different hosts, and those of small models everywhere.

    Attributes:
        ticket_specs: the types of the ticket.
        line: of the vector of small tensors, see `packing.Packing`.
    """

    ticket_specs: tuple[tf.TensorSpec, ...] = ()
    line = 1

    def way(self, specs: Sequence[tf.TensorSpec], back: "Messages | Room | None" = None) -> "Messages | Room":
        """The way of buckets of these types between a ps and each worker, in one direction.

        Args:
            back: the way in the other direction, if nothing that has come there is needed when something is put here,
                and the other way round.
        """
        return Messages(specs)

    def begin(self, worker: tf.Tensor) -> Tensors:
        """In the graph of a worker: the ticket of a call that begins."""
        return []

    def end(self, ticket: Tensors, done: Iterable[tf.Tensor]) -> None:
        """In the graph of a worker: the call ends when all these tensors are known."""

    def kept(self, taken: tf.Tensor) -> tf.Tensor:
        """In the graph of a receiver: what it has taken, as a tensor that a variable may keep."""
        return taken


class ByMemory(ByMessage):
    """How they travel between a ps and workers of one host; see `ByMessage`.

    Attributes:
        size: of the file of each worker, in bytes.
        num_ps: with which a worker shares it.
    """

    ticket_specs = (TICKET,)
    line = PACKET  # what has come is read where it lies, and small tensors in it as well

    def __init__(self) -> None:
        self.size, self.num_ps = 0, 0

    def way(self, specs: Sequence[tf.TensorSpec], back: Messages | Room | None = None) -> Room:
        # In place of what has come, if it fits: another room would take as much memory as the model.
        if isinstance(back, Room) and (over := Room(specs, back.ps, back.first)).end <= back.end + SPARE_BYTES:
            return over
        room = Room(specs, back.ps if isinstance(back, Room) else self.num_ps, self.size)
        self.size, self.num_ps = room.end + SPARE_BYTES, max(self.num_ps, room.ps + 1)
        return room

    def begin(self, worker: tf.Tensor) -> Tensors:
        return _called(shared_memory.BEGIN, [worker, self.size, self.num_ps])

    def kept(self, taken: tf.Tensor) -> tf.Tensor:
        # To assign a tensor that nobody else reads, TensorFlow makes its memory that of the variable, and the sender
        # writes there again.
        return tf.raw_ops.DeepCopy(x=taken)

    def end(self, ticket: Tensors, done: Iterable[tf.Tensor]) -> None:
        with tf.device("CPU:0"):
            tf.raw_ops.PyFunc(input=[*ticket, *done], token=shared_memory.END, Tout=[tf.int64])


def exchange(
    rooms: Sequence[Room], pushes: Sequence[Tensors], ticket: Tensors, more: tf.Tensor, secs: float
) -> tf.Tensor:
    """In the graph of a worker: tells each ps what is pushed, and waits for the answers if there are `more` to come.

    Returns True when all have come. It fails if one takes longer than `secs`.

    Args:
        rooms: for the push to each ps.
        pushes: the buckets for each.
    """
    places = np.concatenate([room.places for room in rooms])
    buckets = [bucket for push in pushes for bucket in push]
    answered = _flag(shared_memory.EXCHANGE, [*ticket, more, secs, places, *buckets])
    wait = functools.partial(_flag, shared_memory.AWAIT_ANSWERS, [*ticket, secs])
    with tf.device("CPU:0"):
        # TensorFlow ends a loop if the call is cancelled. It could not end a function that waits.
        (answered,) = tf.while_loop(tf.logical_not, lambda _: [wait()], [answered], parallel_iterations=1)
    return answered


def _flag(token: str, inputs: Sequence[Any]) -> tf.Tensor:
    """The flag that a function of `shared_memory` returns."""
    with tf.device("CPU:0"):
        (flag,) = tf.raw_ops.PyFunc(input=inputs, token=token, Tout=[tf.bool])
    return tf.ensure_shape(flag, [])


def _called(token: str, inputs: Sequence[Any]) -> Tensors:
    """The ticket that a function of `shared_memory` returns."""
    with tf.device("CPU:0"):
        (ticket,) = tf.raw_ops.PyFunc(input=inputs, token=token, Tout=[tf.int64])
    return [tf.ensure_shape(ticket, TICKET.shape)]


def carrier_of(config: RunConfig, buckets: Sequence[tf.TensorSpec]) -> ByMessage:
    """What suits the cluster of a run.

    Args:
        buckets: the types of those that are pulled.
    """
    # All tasks of a local cluster are alike and see each other's processes, so it works between them if it works here.
    shares_memory = config.cluster.kind == "local" and any(map(is_large, buckets)) and works_here()
    return ByMemory() if shares_memory else ByMessage()
