"""The tf.data pipelines that gather batches of arrays; which examples they hold, `passes` says."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Arrays
from tf2dist.data.passes import ExampleOrder, InputPosition, Sharding, ranges_to_pass_end

# AutoGraph's rewriting takes longer than the tracing, and a task that is killed leaves the new source in /tmp.
NO_AUTOGRAPH = tf.autograph.experimental.do_not_convert
ALIGNMENT = 64  # of a tensor's memory, bytes
Gather = Callable[[tf.Tensor], list[tf.Tensor]]  # the leaves of some examples, by their indices


def of_arrays(examples: Arrays) -> Gather:
    """Returns a function that gathers examples, in C++ if possible: Python code would compete with that of the steps.

    Arrays that are mapped from a file are not copied.
    """
    gathers = [_gatherer(leaf) for leaf in examples.leaves]
    return lambda index: [gather(index) for gather in gathers]


def _gatherer(array: np.ndarray) -> Callable[[tf.Tensor], tf.Tensor]:
    tensor = _same_memory(array) if array.dtype.kind in "iuf" else None
    if tensor is None and _is_mapped(array):  # and not aligned, or of strings, so a tensor would be a copy
        dtype = tf.string if array.dtype.kind == "S" else tf.as_dtype(array.dtype)

        def gather_mapped(index: tf.Tensor) -> tf.Tensor:
            taken = tf.numpy_function(lambda i: array.take(i, axis=0), [index], dtype)
            return tf.ensure_shape(taken, index.shape.concatenate(array.shape[1:]))

        return gather_mapped
    rows = tf.constant(array) if tensor is None else tensor
    return lambda index: tf.gather(rows, index)


class _Writable:
    """Shows a read-only array to DLPack, which cannot express that, as writable; TensorFlow only reads it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array  # keeps its memory alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _same_memory(array: np.ndarray) -> tf.Tensor | None:
    """A tensor in the array's own memory, or None: TensorFlow wants that at a multiple of 64 bytes."""
    if array.ctypes.data % ALIGNMENT or not array.flags.c_contiguous or not array.size:
        return None
    return tf.experimental.dlpack.from_dlpack(np.asarray(_Writable(array)).__dlpack__())


def _is_mapped(array: np.ndarray) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return isinstance(base, np.memmap)


def batches(gather: Gather, sharding: Sharding, shard: int, begin: InputPosition) -> tf.data.Dataset:
    """An endless dataset of one replica's steps: the leaves [batch, ...] of its examples, and weights [batch].

    The weights turn a sum over the examples of all replicas into a mean. Places without an example hold other examples
    with weight 0, so that all batches have the same shape. Whole batches are gathered at once, since shuffling single
    elements costs far more.
    """
    size = sharding.num_examples
    unseen, first_pass = ranges_to_pass_end(begin, size)

    @NO_AUTOGRAPH
    def examples(index: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return *gather(index), weights

    @NO_AUTOGRAPH
    def rows(first: tf.Tensor, last: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(rows_and_weights(sharding, first, last, shard))

    passes = tf.data.Dataset.range(first_pass * size, np.iinfo(np.int64).max - size, size)
    ranges = passes.map(NO_AUTOGRAPH(lambda first: (first, first + size)))
    if unseen:
        array = np.array(unseen, np.int64)
        ranges = tf.data.Dataset.from_tensor_slices((array[:, 0], array[:, 1])).concatenate(ranges)
    return ranges.flat_map(rows).map(examples).prefetch(2).with_options(_options())


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF  # they are sharded
    options.autotune.enabled = False  # there is nothing to tune, and its sleeping thread delays an iterator's end
    options.threading.private_threadpool_size = 1
    options.experimental_optimization.apply_default_optimizations = False  # they copy the gathered arrays
    return options


class RangePipeline:
    """Gathers the examples of the ranges that it is asked for."""

    def __init__(self, examples: Arrays) -> None:
        self._examples = examples
        self._rows = np.empty(0, np.int32)  # to be gathered next
        self._lock = threading.Lock()

    def gather(self, ranges: np.ndarray, order: ExampleOrder) -> list[np.ndarray]:
        """The leaves of the examples, those of one range after those of another.

        Args:
            ranges: see `passes`; int64 [ranges, 2].
        """
        with self._lock:
            self._rows = np.concatenate([order.rows(int(first), int(last)) for first, last in ranges])
            return list(next(self._gathered))

    # Not before the first call: connecting to a cluster ends the iterators of the process.
    @functools.cached_property
    def _gathered(self) -> Iterator[tuple[np.ndarray, ...]]:
        with tf.device("CPU:0"):
            gather_rows = of_arrays(self._examples)

            @NO_AUTOGRAPH
            def gather_range(_: tf.Tensor) -> tuple[tf.Tensor, ...]:
                # Neither a queue nor a variable of TensorFlow: a process that connects to one cluster after another,
                # as tests do, loses them, and the iterator would go on with the old one.
                rows = tf.numpy_function(lambda: self._rows, [], tf.int32)
                return tuple(gather_rows(tf.ensure_shape(rows, [None])))

            endless = tf.data.Dataset.range(np.iinfo(np.int64).max)
            return iter(endless.map(gather_range).with_options(_options()).as_numpy_iterator())


def rows_and_weights(sharding: Sharding, first: tf.Tensor, last: tf.Tensor, shard: int) -> tuple[tf.Tensor, tf.Tensor]:
    """A replica's part of each step in a range of one pass: indices, int32 [steps, batch], and their weights."""
    begin = first // sharding.num_examples * sharding.num_examples
    order = sharding.order.of_pass(first // sharding.num_examples)[first - begin : last - begin]
    starts = tf.range(0, last - first, sharding.step_size)
    ends = tf.minimum(starts + sharding.step_size, last - first)
    at, count = sharding.share(starts, ends, tf.constant(shard))
    place = tf.range(sharding.batch_size, dtype=tf.int64)
    rows = tf.gather(order, (at[:, None] + place) % (last - first))
    weights = tf.cast(place < count[:, None], tf.float32) / tf.cast(ends - starts, tf.float32)[:, None]
    return rows, weights
