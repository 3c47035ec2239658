"""Input of workers: batches of the arrays that each has loaded itself, or of its stream, and the numbers of batches.

A worker publishes the examples of its process for the graphs that the coordinator runs in it, and a call asks for its
batches by their numbers; see `passes.NumberedSteps`. A tf.data pipeline of the worker's process gathers them; no
iterator is in the graph of the call, so nothing of an aborted call is left in it. The arrays are mapped from a file
where the data allow it. As a tensor in the graph, they would be copied for each worker.

Asynchronous workers share the batches of arrays: whoever is free takes the next ones, so that each example is seen once
in a pass, however fast its worker is. A stream belongs to one worker, who takes its batches in turn, and who alone
knows where it ends.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import InputFacts
from tf2dist.checkpoint.state import input_facts
from tf2dist.data.arrays import Arrays, Layout
from tf2dist.data.passes import UNKNOWN_STEPS, ExampleOrder, NumberedSteps, Range, Sharding
from tf2dist.data.pipeline import RangePipeline
from tf2dist.data.splits import Splits
from tf2dist.data.stream import Reader
from tf2dist.tf_internals.tensorflow import publish_functions
from tf2dist.training.parameter_server.counters import TOTALS
from tf2dist.training.parameter_server.server import ParameterServer

NAME = "tf2dist"
EVALUATED = ("validation", "test")
BATCHES, COUNT, EVALUATED_BATCHES = "batches", "count of batches", "evaluated batches"
ENDED_SECS = 0.05  # for which a call waits if the data of its worker have ended, and that of others have not
GATHERED_AT_ONCE = 1 << 22  # bytes; with less each batch costs more, and with more a call begins later
Batches = list[list[tf.Tensor]]  # the leaves of each batch, with mode=sync_replicas its share, too
Input = Callable[[tf.Tensor, tf.Tensor], Batches]  # of a worker, int64 [], the batches with these numbers, int64 [n]

# TensorFlow holds Python functions by weak references only, so they would vanish without this.
_published: dict[str, Any] = {}


def publish(splits: Splits, workers: Iterable[int] = (0,)) -> None:
    """Makes the examples of this process readable by `remote_ranges`, and its streams by `remote_batches`.

    Args:
        workers: the indices of the workers in this process; several only in tests.
    """
    pipeline = RangePipeline(splits.train)
    evaluated = [getattr(splits, split) for split in EVALUATED]

    def gather_ranges(ranges: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
        num_examples, seed, shuffle = map(int, order)
        return pipeline.gather(ranges, ExampleOrder(num_examples, seed, bool(shuffle)))

    _published[_token("train")] = gather_ranges

    # The number of the split is an input, so that one graph serves the evaluation of every split.
    def gather(number: np.ndarray, index: np.ndarray) -> list[np.ndarray]:
        arrays: Arrays = evaluated[number]
        return arrays.take(index)

    _published[_token("evaluated")] = gather
    if splits.stream:
        for index in workers:
            splits.stream.batches(index, 0)  # what is wrong with a stream is reported here, not by the first step
        readers = {index: Reader(splits.stream, index) for index in workers}
        _published[_token(BATCHES)] = lambda worker, first, num: readers[int(worker)].read_batches(int(first), int(num))

        def count(worker: np.ndarray, epoch: np.ndarray, first: np.ndarray, num: np.ndarray, waits: np.ndarray) -> Any:
            found = readers[int(worker)].count(int(epoch), int(first), int(num))
            if not found and waits:
                time.sleep(ENDED_SECS)  # in which the other workers have the cores, and take the other calls
            return np.int64(found)

        _published[_token(COUNT)] = count
    if stream := splits.validation_stream:
        stream.dataset(0)
        passes: dict[int, Iterator[list[np.ndarray]]] = {}

        def next_batch(shard: np.ndarray, begins: np.ndarray) -> list[np.ndarray]:
            if begins:
                passes[int(shard)] = stream.one_pass(int(shard))
            return next(passes[int(shard)], stream.no_examples())

        _published[_token(EVALUATED_BATCHES)] = next_batch
    publish_functions(_published)


def remote_ranges(ranges: tf.Tensor, order: ExampleOrder, layout: Layout) -> list[tf.Tensor]:
    """In a graph: the leaves of a batch for each of these ranges, one batch after the other.

    Args:
        ranges: see `passes`; int64 [batches, 2].
    """
    specs = layout.batched(None)
    taken = _call("train", [ranges, tf.constant([int(one) for one in order], tf.int64)], specs)
    sizes = ranges[:, 1] - ranges[:, 0]
    begins = tf.cumsum(sizes, exclusive=True)
    parts = [_parts(leaf, spec, begins, sizes) for leaf, spec in zip(taken, specs, strict=True)]
    return [leaf for batch in zip(*parts, strict=True) for leaf in batch]


def _parts(leaf: tf.Tensor, spec: tf.TensorSpec, begins: tf.Tensor, sizes: tf.Tensor) -> list[tf.Tensor]:
    """Parts of the first dimension. Unlike those of `tf.split`, they are no copies if they begin at 64 bytes."""
    num, rest = begins.shape[0], spec.shape.rank - 1
    begin = tf.unstack(tf.pad(begins[:, None], [[0, 0], [0, rest]]), num)
    size = tf.unstack(tf.pad(sizes[:, None], [[0, 0], [0, rest]], constant_values=-1), num)
    return [tf.ensure_shape(tf.slice(leaf, *limits), spec.shape) for limits in zip(begin, size, strict=True)]


def evaluated_examples(number: tf.Tensor, index: tf.Tensor, layout: Layout) -> list[tf.Tensor]:
    """In a graph: the leaves of the published examples with these indices, an int32 tensor of any shape.

    Args:
        number: the index of the split in `EVALUATED`, int32.
    """
    specs = [tf.TensorSpec(index.shape.concatenate(spec.shape), spec.dtype) for spec in layout.specs]
    return _call("evaluated", [number, index], specs)


def remote_batches(worker: tf.Tensor, first: tf.Tensor, num: int, layout: Layout) -> Batches:
    """In a graph: the leaves of `num` batches of a worker's published stream, from the one with number `first` on."""
    specs = layout.batched(None)
    leaves = iter(_call(BATCHES, [worker, first, tf.constant(num)], specs * num))
    return [[next(leaves) for _ in specs] for _ in range(num)]


def remote_count(worker: tf.Tensor, epoch: tf.Tensor, first: tf.Tensor, num: int, waits: tf.Tensor) -> tf.Tensor:
    """In a graph: how many of `num` batches a worker's published stream has in an epoch from the number `first` on.

    Args:
        waits: whether to wait a little if there are none.
    """
    (count,) = _call(COUNT, [worker, epoch, first, tf.constant(num), waits], [INDEX])
    return count


def evaluated_batch(shard: tf.Tensor, begins: bool, layout: Layout) -> list[tf.Tensor]:
    """In a graph: the leaves of the next batch of a published stream to validate on; without examples at its end.

    Args:
        shard: the part of the data, int32; any worker can read it.
        begins: whether it is the first batch.
    """
    return _call(EVALUATED_BATCHES, [shard, tf.constant(begins)], layout.batched(None))


def _call(name: str, inputs: list[tf.Tensor], specs: list[tf.TensorSpec]) -> list[tf.Tensor]:
    """In a graph: what a published function returns."""
    # The token names a function of the process in which the operation runs, so the graph can come from another one.
    results = tf.raw_ops.PyFunc(input=inputs, token=_token(name), Tout=[spec.dtype for spec in specs])
    return [tf.ensure_shape(one, spec.shape) for one, spec in zip(results, specs, strict=True)]


def _token(split: str) -> str:
    return f"{NAME}.{split}"


def gathered_batches(ranges: tf.Tensor, sharding: Sharding, layout: Layout) -> Batches:
    """In the graph of a call: batches of the published arrays, of the examples in these ranges, int64 [steps, 2].

    A call asks for them a few at a time, so that the next ones are gathered while it computes. They depend on nothing
    but their numbers: a call that ends early leaves nothing behind that another one could take for its own.
    """
    num_steps, specs = ranges.shape[0], layout.specs
    batch = sharding.batch_size * sum(spec.dtype.size * spec.shape.num_elements() for spec in specs)
    num = max(1, GATHERED_AT_ONCE // max(1, batch))
    leaves: list[tf.Tensor] = []
    for first in range(0, num_steps, num):
        with tf.control_dependencies(leaves[-1:]):  # in turn, or those of the first steps would come late
            leaves += remote_ranges(ranges[first : first + num], sharding.order, layout)
    following = iter(leaves)
    return [[next(following) for _ in specs] for _ in range(num_steps)]


INDEX = tf.TensorSpec([], tf.int64)
OPEN = np.int64(-1)  # in place of the end of data that goes on


class BatchNumbers:
    """Gives each call of a worker the numbers of its batches."""

    def next_batches(self, worker: tf.Tensor, num: int) -> tf.Tensor:
        """In the graph of a call: the steps that the ps have counted for the worker, the number of the first batch of
        the call, and how many batches it has, at most `num`; int64 [3]."""
        raise NotImplementedError

    def open(self, count: int) -> None:
        """Lets the workers take so many batches; to be called after `close`, or for the first time."""

    def close(self) -> None:
        """Lets the workers take no more; what no update has used comes first when they may again."""

    def facts(self, steps: np.ndarray) -> InputFacts:
        """The position of the input, while none can be taken; `steps`: of each worker, as the ps have counted them."""
        raise NotImplementedError

    # Of an epoch that ends with the data.

    def look(self, steps: np.ndarray) -> tuple[int, int]:
        """How many steps calls had too much, and how many batches are left; UNKNOWN_STEPS while that is not known."""
        return 0, UNKNOWN_STEPS

    def begin_epoch(self, steps: np.ndarray) -> None:
        """Begins a new pass over the data, while none can be taken; `steps`: see `facts`."""

    def repeat_last(self, repeats: bool) -> None:
        """Lets workers whose data have ended take their last batch again, or not any more."""


class SharedNumbers(BatchNumbers):
    """Numbers of batches that the first ps hands out, each to one call; see `BatchNumbers`.

    The steps that the ps counts for a worker say how many batches of its last call are done. A worker that was lost
    begins with the others when it is back. If it does not come back, they are handed out again after all other calls.

    With two workers, calls of three batches, and `open(8)`:

        worker 0 begins a call        it gets 0, 1, 2
        worker 1 begins a call        it gets 3, 4, 5, and is lost when the ps has counted one step of it
        worker 0 has done its steps   it gets 6, 7, and then nothing
        worker 1 is back              it gets 4, 5; otherwise `close` finds them left, and `open` hands them out first
    """

    def __init__(self, server: ParameterServer, steps: NumberedSteps, sharding: Sharding) -> None:
        self._counters, self._steps, self._sharding = server.counters, steps, sharding
        self._left: list[Range] = []
        self._next = 0  # while it is closed, no update has used this number or a later one
        with tf.device(server.device):
            # What no call has taken; and of each worker's last call the numbers, and the steps that were counted for
            # the worker before it.
            free, taken = np.zeros((sharding.num_shards + 1, 2), np.int64), np.zeros((sharding.num_shards, 3), np.int64)
            self._free = tf.Variable(free, trainable=False, name="free_batches")
            self._handed_out = tf.Variable(taken, trainable=False, name="handed_out_batches")
            self._lock = tf.CriticalSection()
        self._request = server.on_device(self._locked(self._hand_out), INDEX, INDEX)
        self._exchange = server.on_device(self._locked(self._replace), tf.TensorSpec(free.shape, tf.int64))

    def _locked(self, act: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        return lambda *args: self._lock.execute(lambda: act(*args))

    def next_batches(self, worker: tf.Tensor, num: int) -> tf.Tensor:
        return self._request(worker, tf.constant(num, tf.int64))

    def _hand_out(self, worker: tf.Tensor, num: tf.Tensor) -> tf.Tensor:
        steps = tf.cast(self._counters.of_worker(worker)[TOTALS.index("steps")], tf.int64)
        free, own = self._free.read_value(), tf.gather(self._handed_out.read_value(), worker)
        first, last, before = tf.unstack(own)
        first += steps - before  # the first one of its last call that is not done
        is_done = first >= last

        place = tf.argmax(free[:, 0] < free[:, 1])  # the first range that is not empty, or any if all are
        begin, end = tf.unstack(tf.gather(free, place))
        end = tf.minimum(end, begin + num)
        is_taken = tf.logical_and(is_done, tf.range(free.shape[0], dtype=tf.int64) == place)
        left = self._free.assign(tf.stack([tf.where(is_taken, end, free[:, 0]), free[:, 1]], 1))

        first, last = tf.where(is_done, begin, first), tf.where(is_done, end, last)
        taken = self._handed_out.scatter_nd_update(tf.reshape(worker, [1, 1]), tf.stack([first, last, steps])[None])
        with tf.control_dependencies([left, taken]):  # the lock is held until what is returned is known
            return tf.stack([steps, first, last - first])

    def _replace(self, ranges: tf.Tensor) -> tf.Tensor:
        """Hands out these numbers from now on; returns those of before that no update has used; int64 [ranges, 2]."""
        steps = tf.cast(self._counters.steps(), tf.int64)
        first, last, before = tf.unstack(self._handed_out.read_value(), axis=1)
        left = tf.concat([tf.stack([first + steps - before, last], 1), self._free.read_value()], 0)
        with tf.control_dependencies([left]):
            replaced = [self._free.assign(ranges), self._handed_out.assign(tf.zeros_like(self._handed_out))]
        with tf.control_dependencies(replaced):
            return tf.identity(left)

    def open(self, count: int) -> None:
        ranges = []
        for _ in range(self._free.shape[0]):
            first, last = self._left.pop(0) if self._left else (self._next, self._next + count)
            end = min(last, first + count)
            ranges.append((first, end))
            count, self._next = count - (end - first), max(self._next, end)
            if end < last:
                self._left.insert(0, (end, last))
        self._exchange(tf.constant(ranges, tf.int64))

    def close(self) -> None:
        ranges = self._exchange(tf.zeros(self._free.shape, tf.int64)).numpy()
        unfinished = [(int(first), int(last)) for first, last in ranges if first < last]
        self._left = sorted([*unfinished, *self._left])
        # What nothing follows was not begun. It may be as long as the run; listing its passes would take seconds.
        while self._left and self._left[-1][1] == self._next:
            self._next = self._left.pop()[0]

    def facts(self, steps: np.ndarray) -> InputFacts:
        return input_facts(self._sharding, self._steps.position(self._next, tuple(self._left)))


class WorkerNumbers(BatchNumbers):
    """Numbers of batches of which each worker has its own; see `BatchNumbers`.

    They follow from the updates that were applied, so no batch is lost with an update that is refused.

    Args:
        offsets: for each worker, the number of its next batch less the steps that the ps have counted for it.
    """

    def __init__(self, server: ParameterServer, offsets: list[int], sharding: Sharding) -> None:
        self._server, self._offsets, self._sharding = server, offsets, sharding

    def next_batches(self, worker: tf.Tensor, num: int) -> tf.Tensor:
        steps = tf.cast(self._server.worker_totals(worker)[TOTALS.index("steps")], tf.int64)
        return tf.stack([steps, own_number(self._offsets, worker, steps), num])

    def facts(self, steps: np.ndarray) -> InputFacts:
        return input_facts(self._sharding, positions=(self._offsets + steps).tolist())


class EndingNumbers(WorkerNumbers):
    """Numbers of the batches in an epoch that ends when all workers' data have ended; see `WorkerNumbers`.

    A call asks the stream of its worker how many batches are left, and tells the ps where the stream has ended. The
    coordinator knows the end of the epoch when all have.
    """

    def __init__(self, server: ParameterServer, offsets: list[int], sharding: Sharding) -> None:
        super().__init__(server, offsets, sharding)
        count = sharding.num_shards
        with tf.device(server.device):
            # The numbers less the steps that the ps count; the number of the first batch that is missing, or `OPEN`.
            self._shifts = tf.Variable(offsets, dtype=tf.int64, trainable=False, name="batch_offsets")
            self._ends = tf.Variable([OPEN] * count, dtype=tf.int64, trainable=False, name="ends_of_data")
            self._unused = tf.Variable(0, dtype=tf.int64, trainable=False, name="unused_steps")
            self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False, name="epoch")
            self._repeats = tf.Variable(0, dtype=tf.int64, trainable=False, name="repeats_last_batch")
        self._begin = server.on_device(self._begun, INDEX)
        self._record = server.on_device(self._recorded, INDEX, INDEX, INDEX, INDEX)

    def next_batches(self, worker: tf.Tensor, num: int) -> tf.Tensor:
        steps, first, epoch, others_go_on, repeats = tf.unstack(self._begin(worker))
        count = remote_count(worker, epoch, first, num, others_go_on)
        end = tf.where(count < num, first + count, OPEN)
        self._record(worker, epoch, end, num - count)
        return tf.stack([steps, first, tf.maximum(count, repeats * num)])

    def _begun(self, worker: tf.Tensor) -> tf.Tensor:
        """On the ps: what a call of the worker needs."""
        steps = tf.cast(self._server.counters.of_worker(worker)[TOTALS.index("steps")], tf.int64)
        ends, shifts = self._ends.read_value(), self._shifts.read_value()
        others_go_on = tf.reduce_any((ends == OPEN) & (tf.range(len(self._offsets), dtype=tf.int64) != worker))
        number = steps + tf.gather(shifts, worker)
        return tf.stack([steps, number, self._epoch, tf.cast(others_go_on, tf.int64), self._repeats])

    def _recorded(self, worker: tf.Tensor, epoch: tf.Tensor, end: tf.Tensor, unused: tf.Tensor) -> tf.Tensor:
        """On the ps: records where the worker's data end, and the steps that its call had too much."""
        # A worker that was given up may still be in a call of an earlier epoch.
        is_now = tf.cast(epoch == self._epoch, tf.int64)
        before = tf.gather(self._ends.read_value(), worker)
        self._ends.scatter_nd_update(tf.reshape(worker, [1, 1]), [before + (end - before) * is_now])
        return self._unused.assign_add(unused * is_now)

    def facts(self, steps: np.ndarray) -> InputFacts:
        return input_facts(self._sharding, positions=(self._shifts.numpy() + steps).tolist())

    def look(self, steps: np.ndarray) -> tuple[int, int]:
        unused, ends = int(self._unused), self._ends.numpy()
        if (ends == OPEN).any() or int(self._repeats):
            return unused, UNKNOWN_STEPS
        return unused, int(np.maximum(ends - self._shifts.numpy() - steps, 0).sum())

    def begin_epoch(self, steps: np.ndarray) -> None:
        self._shifts.assign(-steps)
        self._ends.assign(np.full(len(steps), OPEN))
        self._epoch.assign_add(1)

    def repeat_last(self, repeats: bool) -> None:
        self._repeats.assign(int(repeats))


def own_number(offsets: list[int], worker: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
    """The number of a worker's next batch, int64; for `offsets` see `WorkerNumbers`."""
    return tf.gather(tf.constant(offsets, tf.int64), worker) + tf.cast(steps, tf.int64)
