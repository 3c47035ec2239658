"""Which examples a step takes: a pure function of the seed, of the step's number, and of where the input begins.

The examples of all passes form one endless sequence: those of pass 0, then those of pass 1, each in an order of its
own. A position is a number of examples in it. A run cuts what follows its position into steps, of which none reaches
into the next pass; with mode=async a step is the batch of one worker. So a run goes on exactly where another one of any
mode, number of workers and batch size has ended, and N synchronous workers with batches of b see in a step the examples
of one worker with a batch of N*b.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf

Range = tuple[int, int]  # the first, and the one after the last
UNKNOWN_STEPS = 1 << 40  # stands for the steps of an epoch that ends with the data; beyond those of any run


class ExampleOrder(NamedTuple):
    """The order of the examples in each pass; for the attributes see `Sharding`."""

    num_examples: int
    seed: int
    shuffle: bool

    def of_pass(self, number: tf.Tensor) -> tf.Tensor:
        """The indices of the examples, int32 [num_examples]."""
        order = tf.range(self.num_examples)
        if not self.shuffle:
            return order
        seed = tf.stack([self.seed, tf.cast(number, tf.int32)])
        return tf.random.experimental.stateless_shuffle(order, seed, alg="philox")

    def rows(self, first: int, last: int) -> np.ndarray:
        """The indices of the examples in a range of one pass, int32 [last - first]."""
        number = first // self.num_examples
        begin = number * self.num_examples
        return _order_of_pass(self, number)[first - begin : last - begin]


@functools.lru_cache(maxsize=2)  # a call may reach from one pass into the next
def _order_of_pass(order: ExampleOrder, number: int) -> np.ndarray:
    with tf.device("CPU:0"):
        indices: np.ndarray = order.of_pass(tf.constant(number)).numpy()
    return indices


@dataclass(frozen=True)
class Sharding:
    """How the training set is cut into steps and batches, or how steps over streams are counted.

    Attributes:
        num_examples: of the whole training set; of streams, what the batches of an epoch hold if all of them are full.
        batch_size: of one replica: a worker, or one of the GPUs of a synchronous one.
        num_shards: the number of replicas.
        seed: of the permutations; every pass has its own.
        whole_batch_loss: whether a step is a batch of every replica (sync), over which the loss is the mean, or the
            batch of one worker (async).
        shuffle: whether a pass has a permutation of its own; otherwise it has the order of the arrays.
        replicas_to_aggregate: with mode=sync_replicas, the batches of an update, if they are not one of every worker.
    """

    num_examples: int
    batch_size: int
    num_shards: int
    seed: int
    whole_batch_loss: bool
    shuffle: bool = True
    replicas_to_aggregate: int | None = None

    @property
    def step_size(self) -> int:
        """The examples of a step; the last one of a pass may have fewer."""
        return self.batch_size * (self.num_shards if self.whole_batch_loss else 1)

    @property
    def steps_per_pass(self) -> int:
        """The steps of a pass."""
        return -(-self.num_examples // self.step_size)

    @property
    def updates_per_pass(self) -> int:
        """The updates of the model in a pass."""
        return self.updates_in(self.steps_per_pass)

    @property
    def is_by_worker(self) -> bool:
        """Whether every worker moves on in a part of its own, in which others may be further."""
        # A worker whose gradients come too late falls behind.
        return self.replicas_to_aggregate is not None

    @property
    def ends_with_data(self) -> bool:
        """Whether nobody knows the steps of an epoch before the data has come to its end."""
        return self.steps_per_pass == UNKNOWN_STEPS

    def updates_in(self, steps: int) -> int:
        """The updates of the model in so many steps."""
        return -(-steps * self.num_shards // (self.replicas_to_aggregate or self.num_shards))

    def worker_steps(self) -> list[int]:
        """The steps of every worker in a pass; of asynchronous ones, if they are equally fast."""
        if self.whole_batch_loss:
            return [self.steps_per_pass] * self.num_shards
        steps, rest = divmod(self.steps_per_pass, self.num_shards)
        return [steps + (worker < rest) for worker in range(self.num_shards)]

    @property
    def order(self) -> "ExampleOrder":
        return ExampleOrder(self.num_examples, self.seed, self.shuffle)

    def share(self, first: tf.Tensor, last: tf.Tensor, shard: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The part of a replica in the range of a step: its first example, and how many; of the same type as the range.

        The examples of a step that is not full are divided evenly.
        """
        each, rest = (last - first) // self.num_shards, (last - first) % self.num_shards
        shard = tf.cast(shard, first.dtype)
        return first + shard * each + tf.minimum(shard, rest), each + tf.cast(shard < rest, first.dtype)


@dataclass(frozen=True)
class InputPosition:
    """The part of the sequence of examples that is still to be seen.

    Attributes:
        next: all examples from this one on.
        unseen: ranges before it, in their order: batches that were handed out, and that no update has used.
    """

    next: int = 0
    unseen: tuple[Range, ...] = ()


class NumberedSteps:
    """The steps of a run by their numbers, from 0 where its input begins.

    First come those of the ranges that are still to be seen of passes under way, then those of whole passes.

    Attributes:
        to_pass_end: how many steps come before the first whole pass.
    """

    def __init__(self, sharding: Sharding, begin: InputPosition) -> None:
        self._sharding, size, num_examples = sharding, sharding.step_size, sharding.num_examples
        self._ranges, self._pass = ranges_to_pass_end(begin, num_examples)
        counts = [-(-(last - first) // size) for first, last in self._ranges]
        self._numbers = np.cumsum([0, *counts]).tolist()  # of the first step of each range, then of the whole passes
        self.to_pass_end: int = self._numbers[-1]

    def ranges(self, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """In a graph: the ranges of examples of these steps; all are int64 [steps]."""
        size, num_examples = self._sharding.step_size, self._sharding.num_examples
        number = numbers - self.to_pass_end
        begin = (self._pass + number // self._sharding.steps_per_pass) * num_examples
        first = begin + number % self._sharding.steps_per_pass * size
        last = tf.minimum(first + size, begin + num_examples)
        if not self._ranges:
            return first, last
        numbers_of, ranges = tf.constant(self._numbers[:-1], tf.int64), tf.constant(self._ranges, tf.int64)
        index = tf.searchsorted(numbers_of, numbers, side="right") - 1
        unseen = tf.gather(ranges[:, 0], index) + (numbers - tf.gather(numbers_of, index)) * size
        unseen_last = tf.minimum(unseen + size, tf.gather(ranges[:, 1], index))
        is_unseen = number < 0
        return tf.where(is_unseen, unseen, first), tf.where(is_unseen, unseen_last, last)

    def examples(self, first: int, last: int) -> list[Range]:
        """The examples of the steps from number `first` up to `last`, not including it."""
        size, num_examples, num_steps = (
            self._sharding.step_size,
            self._sharding.num_examples,
            self._sharding.steps_per_pass,
        )
        ranges = []

        def add(begin: int, end: int, number: int, count: int) -> None:
            low, high = max(first - number, 0), min(last - number, count)
            if low < high:
                ranges.append((begin + low * size, min(begin + high * size, end)))

        for (begin, end), number, following in zip(self._ranges, self._numbers, self._numbers[1:], strict=False):
            add(begin, end, number, following - number)
        passes = range(max(first - self.to_pass_end, 0) // num_steps, -(-(last - self.to_pass_end) // num_steps))
        for number in passes:
            begin = (self._pass + number) * num_examples
            add(begin, begin + num_examples, self.to_pass_end + number * num_steps, num_steps)
        return ranges

    def position(self, next_number: int, left: tuple[Range, ...] = ()) -> InputPosition:
        """The position at which the steps from `next_number` on are to be seen, and before it the ranges `left`."""
        num_steps = self._sharding.steps_per_pass
        passes = -(-max(0, next_number - self.to_pass_end) // num_steps)  # that have been begun
        end = (self._pass + passes) * self._sharding.num_examples
        numbers = [*left, (next_number, self.to_pass_end + passes * num_steps)]
        unseen: list[Range] = []
        for first, last in sorted(one for numbers_of in numbers for one in self.examples(*numbers_of)):
            if unseen and unseen[-1][1] == first:
                unseen[-1] = (unseen[-1][0], last)
            else:
                unseen.append((first, last))
        # What reaches the end of the last pass that was begun is followed by all other examples.
        if unseen and unseen[-1][1] == end:
            return InputPosition(unseen.pop()[0], tuple(unseen))
        return InputPosition(end, tuple(unseen))

    def steps_to(self, position: int) -> int:
        """How many steps see all examples before a position."""
        size, num_examples = self._sharding.step_size, self._sharding.num_examples
        unseen = sum(-(-max(0, min(last, position) - first) // size) for first, last in self._ranges)
        whole, rest = divmod(max(0, position - self._pass * num_examples), num_examples)
        return unseen + whole * self._sharding.steps_per_pass + -(-rest // size)


def ranges_to_pass_end(begin: InputPosition, num_examples: int) -> tuple[list[Range], int]:
    """The ranges to be seen before the first whole pass, in one pass each; and the number of that pass."""
    whole = -(-begin.next // num_examples)
    ranges = []
    for first, last in [*begin.unseen, (begin.next, whole * num_examples)]:
        limits = list(range((first // num_examples + 1) * num_examples, last, num_examples))
        ranges += [part for part in zip([first, *limits], [*limits, last], strict=True) if part[0] < part[1]]
    return ranges, whole
