"""The tf.data pipeline that shards, shuffles and batches arrays in memory.

Which examples a worker sees at its step k is a pure function of the seed and of `Sharding`, so
a run can resume at any step without a saved shuffle buffer, and N workers with batches of b see
the examples of one worker with batches of N*b.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Arrays

# AutoGraph's rewriting takes longer than the tracing, and a task that is killed leaves the new source in /tmp.
NO_AUTOGRAPH = tf.autograph.experimental.do_not_convert
ALIGNMENT = 64  # of a tensor's memory, bytes
Take = Callable[[tf.Tensor], list[tf.Tensor]]  # the leaves of some examples, by their indices


@dataclass(frozen=True)
class Sharding:
    """How the training set is cut into batches.

    Attributes:
        num_examples: of the whole training set.
        batch_size: of one replica: a worker, or one of the GPUs of a synchronous one.
        num_shards: the number of replicas.
        seed: of the permutations; every epoch has its own.
        whole_batch_loss: whether the loss is the mean over the batches of all workers (sync) or
            over the worker's own batch (async). They differ in the last, uneven step of an epoch.
        shuffle: whether an epoch has a permutation of its own; otherwise it has the order of the arrays.
    """

    num_examples: int
    batch_size: int
    num_shards: int
    seed: int
    whole_batch_loss: bool
    shuffle: bool = True

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.num_shards

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one replica."""
        return -(-self.num_examples // self.global_batch_size)

    @property
    def updates_per_epoch(self) -> int:
        """Global steps in which the cluster passes over the training set once."""
        return self.steps_per_epoch if self.whole_batch_loss else sum(self.counted_steps())

    def counted_steps(self) -> list[int]:
        """The steps of every replica in an epoch; asynchronous replicas leave out a last step without examples."""
        if self.whole_batch_loss:
            return [self.steps_per_epoch] * self.num_shards
        full_steps, rest = divmod(self.num_examples, self.global_batch_size)
        return [full_steps + (shard < rest) for shard in range(self.num_shards)]

    def epoch_rows(self, epoch: tf.Tensor, shard: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """One epoch of one worker: indices of its examples, int32 [steps, batch], and their weights.

        The weights, float32 [steps, batch], turn a sum over examples into a mean. The
        examples left over after the last full step are divided evenly. Unused places hold other
        examples with weight 0, so that all batches have the same shape.
        """
        n, batch, shards = self.num_examples, self.batch_size, self.num_shards
        order = tf.range(n)
        if self.shuffle:
            order = tf.random.experimental.stateless_shuffle(order, tf.stack([self.seed, epoch]), alg="philox")
        full_steps, rest = divmod(n, self.global_batch_size)
        full = tf.reshape(order[: n - rest], [full_steps, shards, batch])[:, shard]
        scale = self.global_batch_size if self.whole_batch_loss else batch
        weights = tf.fill([full_steps, batch], 1.0 / scale)
        if rest == 0:
            return full, weights
        share = rest // shards + tf.cast(shard < rest % shards, tf.int32)
        first = n - rest + shard * (rest // shards) + tf.minimum(shard, rest % shards)
        last = tf.gather(order, (first + tf.range(batch)) % n)
        count = rest if self.whole_batch_loss else tf.maximum(share, 1)
        last_weights = tf.cast(tf.range(batch) < share, tf.float32) / tf.cast(count, tf.float32)
        return tf.concat([full, last[None]], 0), tf.concat([weights, last_weights[None]], 0)


@dataclass(frozen=True)
class AggregatedSharding(Sharding):
    """How the workers of mode=sync_replicas cut the training set: as synchronous ones, but K batches make a step.

    Attributes:
        replicas_to_aggregate: K; None if it is the number of workers, as it always is for synchronous ones.
    """

    replicas_to_aggregate: int | None = None

    @classmethod
    def of(
        cls, num_examples: int, batch_size: int, num_shards: int, seed: int, shuffle: bool, replicas: int
    ) -> "AggregatedSharding":
        """See `Sharding`; `replicas`: the batches of a step."""
        odd = replicas if replicas != num_shards else None
        return cls(num_examples, batch_size, num_shards, seed, True, shuffle, odd)

    @property
    def updates_per_epoch(self) -> int:
        replicas = self.replicas_to_aggregate or self.num_shards
        return -(-self.steps_per_epoch * self.num_shards // replicas)


def of_arrays(examples: Arrays) -> Take:
    """Returns a function that gathers examples, in C++ if possible: Python code would compete with that of the steps.

    Arrays that are mapped from a file are not copied.
    """
    takes = [_taker(leaf) for leaf in examples.leaves]
    return lambda index: [take(index) for take in takes]


def _taker(array: np.ndarray) -> Callable[[tf.Tensor], tf.Tensor]:
    tensor = _same_memory(array) if array.dtype.kind in "iuf" else None
    if tensor is None and _is_mapped(array):  # and not aligned, or of strings, so a tensor would be a copy
        dtype = tf.string if array.dtype.kind == "S" else tf.as_dtype(array.dtype)

        def take(index: tf.Tensor) -> tf.Tensor:
            taken = tf.numpy_function(lambda i: array.take(i, axis=0), [index], dtype)
            return tf.ensure_shape(taken, index.shape.concatenate(array.shape[1:]))

        return take
    found = tf.constant(array) if tensor is None else tensor
    return lambda index: tf.gather(found, index)


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


def batches(take: Take, sharding: Sharding, shard: int | tf.Tensor, first_step: int | tf.Tensor = 0) -> tf.data.Dataset:
    """An endless dataset of one worker's steps: the leaves [batch, ...] of its examples, and weights [batch].

    It begins at the worker's own step `first_step`. Whole batches are gathered at once, since shuffling single
    elements costs far more.
    """
    return _taken(_rows(sharding, shard, first_step), take)


def blocks(
    take: Take, sharding: Sharding, shard: int | tf.Tensor, size: int, first_step: int | tf.Tensor = 0
) -> tf.data.Dataset:
    """Like `batches` with `size` steps in each element, after the number of the first one, an int64.

    One call of the iterator serves many steps. Where each worker takes its own steps, one without examples is left out
    and not counted, since its update would change nothing.
    """

    @NO_AUTOGRAPH
    def has_examples(index: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        return weights[0] > 0

    rows = _rows(sharding, shard, first_step)
    if not sharding.whole_batch_loss:
        rows = rows.filter(has_examples)
    rows = rows.batch(size, drop_remainder=True)
    numbers = tf.data.Dataset.range(tf.cast(first_step, tf.int64), np.iinfo(np.int64).max, size)
    return tf.data.Dataset.zip(numbers, _taken(rows, take))


def batches_without_padding(element: tuple[tf.Tensor, ...]) -> list[list[tf.Tensor]]:
    """The leaves of the batches of several steps, from leaves and weights `[num_steps, batch_size, ...]`.

    Without the padding that gives all batches one shape, since some layers look at the whole batch; one example stays
    if all is padding. XLA must not compile this: it needs fixed shapes.
    """
    # One operation cuts a leaf for all steps: operations of each step would be optimized one by one when a worker first
    # calls a long function, and a small model takes 3,000 steps a second, of which each costs a microsecond.
    *leaves, weights = element
    counts = tf.maximum(tf.math.count_nonzero(weights, axis=1, dtype=tf.int32), 1)
    # The examples of each batch and then its padding, in turn.
    sizes = tf.reshape(tf.stack([counts, weights.shape[1] - counts], axis=1), [-1])
    cut = [tf.split(tf.reshape(leaf, [-1, *leaf.shape[2:]]), sizes)[::2] for leaf in leaves]
    return [list(batch) for batch in zip(*cut, strict=True)]


def _rows(sharding: Sharding, shard: int | tf.Tensor, first_step: int | tf.Tensor) -> tf.data.Dataset:
    shard, first_step = tf.cast(shard, tf.int32), tf.cast(first_step, tf.int64)

    @NO_AUTOGRAPH
    def epoch_dataset(epoch: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(sharding.epoch_rows(tf.cast(epoch, tf.int32), shard))

    steps_per_epoch = tf.gather(tf.constant(sharding.counted_steps(), tf.int64), shard)
    first_epoch = first_step // steps_per_epoch
    epochs = tf.data.Dataset.range(first_epoch, np.iinfo(np.int32).max)
    return epochs.flat_map(epoch_dataset).skip(first_step % steps_per_epoch)


def _taken(rows: tf.data.Dataset, take: Take) -> tf.data.Dataset:
    @NO_AUTOGRAPH
    def examples(index: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return *take(index), weights

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF  # sharded above
    options.autotune.enabled = False  # there is nothing to tune, and its sleeping thread delays an iterator's end
    options.threading.private_threadpool_size = 1
    options.experimental_optimization.apply_default_optimizations = False  # they copy the gathered arrays
    return rows.map(examples).prefetch(2).with_options(options)
