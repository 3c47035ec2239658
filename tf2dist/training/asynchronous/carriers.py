"""How the buckets of a pull or a push travel between a worker and a ps: in messages, or in memory that they share.

The graphs of both ends put what they send, and take what has come. See `shared_memory`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.model.packing import is_large
from tf2dist.process.shared_files import ALIGNMENT
from tf2dist.training.asynchronous.shared_memory import BEGIN, END, PUT, TAKE, works_here

Tensors = list[tf.Tensor]
SPARE_BYTES = 1 << 16  # after each room: a push is longer than a pull by what it adds to the counters
TICKET = tf.TensorSpec([5], tf.int64)  # see `shared_memory.Ticket`


class Room:
    """The places in the file of a worker for what goes between it and one ps in one direction.

    Attributes:
        specs: the types of what travels in a message: a ticket.
        first, end: where the room lies, in bytes.

    Args:
        specs: the types of the buckets, all of which lie in the file.
        first: see above.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec], first: int) -> None:
        self._buckets, self.specs = list(specs), [TICKET]
        self.first, self.end = first, first
        places = []
        for spec in specs:
            size = spec.shape.num_elements()
            places.append([self.end, size, spec.dtype.as_datatype_enum])
            self.end += -(-size * spec.dtype.size // ALIGNMENT) * ALIGNMENT
        self._places = np.array(places, np.int64)

    def put(self, buckets: Tensors, ticket: Tensors) -> Tensors:
        """In the graph of the sender: what travels."""
        with tf.device("CPU:0"):
            written = tf.raw_ops.PyFunc(input=[*ticket, self._places, *buckets], token=PUT, Tout=[tf.int64])
        return [tf.ensure_shape(written[0], TICKET.shape)]

    def take(self, travelled: Tensors) -> tuple[Tensors, Tensors]:
        """In the graph of the receiver: the buckets, and the ticket that came in their place."""
        types = [spec.dtype for spec in self._buckets]
        with tf.device("CPU:0"):
            taken = tf.raw_ops.PyFunc(input=[*travelled, self._places], token=TAKE, Tout=types)
            buckets = [tf.reshape(one, spec.shape) for one, spec in zip(taken, self._buckets, strict=True)]
        return buckets, travelled

    def take_again(self, travelled: Tensors, taken: Tensors) -> Tensors:
        """In the graph of a receiver: the buckets, where `take` has taken earlier ones in the same call.

        They lie in the same memory, which `take` has not copied, so nothing but the time of reading it is new. Only a
        function that is not inlined may take them: TensorFlow would compute a cast of them before what they wait for.
        """
        with tf.device("CPU:0"), tf.control_dependencies(travelled):
            return [tf.identity(one) for one in taken]


class Messages:
    """What travels in messages of TensorFlow; as `Room`, with an empty ticket."""

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self.specs = list(specs)

    def put(self, buckets: Tensors, ticket: Tensors) -> Tensors:
        return buckets

    def take(self, travelled: Tensors) -> tuple[Tensors, Tensors]:
        return travelled, []

    def take_again(self, travelled: Tensors, taken: Tensors) -> Tensors:
        return travelled


class ByMessage:
    """How buckets travel between ps and workers of different hosts, and those of small models everywhere.

    Attributes:
        ticket_specs: the types of the ticket.
    """

    ticket_specs: tuple[tf.TensorSpec, ...] = ()

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

    def joined(self, pushed: Tensors, order: tf.Tensor, is_last: tf.Tensor) -> Tensors:
        """In the graph of a worker: a push as it travels with its order, in as few tensors as can be.

        Args:
            order: int64 [n].
            is_last: whether the answer to the push need not hold anything.
        """
        return [*pushed, order]

    def parted(self, joined: Tensors) -> tuple[Tensors, tf.Tensor]:
        """In the graph of a ps: a push as it travels, and its order, from what `joined` has returned."""
        return joined[:-1], joined[-1]

    def joined_specs(self, pushed: Sequence[tf.TensorSpec], size: int) -> list[tf.TensorSpec]:
        """The types of what `joined` returns, of a push of these types with an order of `size` numbers."""
        return [*pushed, tf.TensorSpec([size], tf.int64)]

    def end(self, ticket: Tensors, done: Iterable[tf.Tensor]) -> None:
        """In the graph of a worker: the call ends when all these tensors are known."""

    def kept(self, taken: tf.Tensor) -> tf.Tensor:
        """In the graph of a receiver: what it has taken, as a tensor that a variable may keep."""
        return taken


class ByMemory(ByMessage):
    """How they travel between a ps and workers of one host; see `ByMessage`.

    Attributes:
        size: of the file of each worker, in bytes.
    """

    ticket_specs = (TICKET,)

    def __init__(self) -> None:
        self.size = 0

    def way(self, specs: Sequence[tf.TensorSpec], back: Messages | Room | None = None) -> Room:
        # In place of what has come, if it fits: another room would take as much memory as the model.
        if isinstance(back, Room) and (over := Room(specs, back.first)).end <= back.end + SPARE_BYTES:
            return over
        room = Room(specs, self.size)
        self.size = room.end + SPARE_BYTES
        return room

    def begin(self, worker: tf.Tensor) -> Tensors:
        size = tf.constant(self.size, tf.int64)
        with tf.device("CPU:0"):
            (ticket,) = tf.raw_ops.PyFunc(input=[worker, size], token=BEGIN, Tout=[tf.int64])
        return [tf.ensure_shape(ticket, TICKET.shape)]

    def kept(self, taken: tf.Tensor) -> tf.Tensor:
        # To assign a tensor that nobody else reads, TensorFlow makes its memory that of the variable, and the sender
        # writes there again.
        return tf.raw_ops.DeepCopy(x=taken)

    def joined(self, pushed: Tensors, order: tf.Tensor, is_last: tf.Tensor) -> Tensors:
        (ticket,) = pushed
        with tf.device("CPU:0"):
            return [tf.concat([ticket[:-1], tf.cast(is_last, tf.int64)[None], order], 0)]

    def parted(self, joined: Tensors) -> tuple[Tensors, tf.Tensor]:
        (both,) = joined
        size = TICKET.shape.num_elements()
        return [both[:size]], both[size:]

    def joined_specs(self, pushed: Sequence[tf.TensorSpec], size: int) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([TICKET.shape.num_elements() + size], tf.int64)]

    def end(self, ticket: Tensors, done: Iterable[tf.Tensor]) -> None:
        with tf.device("CPU:0"):
            tf.raw_ops.PyFunc(input=[*ticket, *done], token=END, Tout=[tf.int64])


def carrier_of(config: RunConfig, buckets: Sequence[tf.TensorSpec]) -> ByMessage:
    """What suits the cluster of a run.

    Args:
        buckets: the types of those that are pulled.
    """
    # All tasks of a local cluster are alike and see each other's processes, so it works between them if it works here.
    shares_memory = config.cluster.kind == "local" and any(map(is_large, buckets)) and works_here()
    return ByMemory() if shares_memory else ByMessage()
