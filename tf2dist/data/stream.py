"""Examples that come in batches from a function of the user's, for data that do not fit into memory."""

import functools
import itertools
import re
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Layout, leaves_of
from tf2dist.data.pipeline import NO_AUTOGRAPH
from tf2dist.errors import DataError, first_line, kind_of, reason_of, users_location
from tf2dist.tf_constants import NODES

PARTS = ("x", "y", "sample_weight")
READ_AHEAD = 2  # batches that TensorFlow prepares, beside those that a `Reader` has fetched


@dataclass(frozen=True)
class Shard:
    """The part of the data that one worker reads: what `load` in ``tf2dist.fit(model, data=load)`` is given.

    Attributes:
        index: of the worker, from 0 to `count` - 1.
        count: the number of workers.
        seed: the run's seed, the same on all workers; shuffle with it, so that a resumed run sees the same order.
        batch_size: the examples of a batch that `fit` was asked for.
    """

    index: int
    count: int
    seed: int
    batch_size: int


Load: TypeAlias = Callable[[Shard], tf.data.Dataset]


class Stream:
    """The datasets that a user's function makes, one for each worker.

    Args:
        name: of the function, for messages.
        load: the function.
        count, seed, batch_size: see `Shard`.
        argument: of `fit`, for messages.
        repeats: whether a worker's stream begins again when it ends; otherwise that ends the epoch.
    """

    def __init__(
        self,
        name: str,
        load: Load,
        count: int,
        seed: int,
        batch_size: int,
        argument: str = "data",
        repeats: bool = True,
    ) -> None:
        self.name, self.load, self.repeats = name, load, repeats
        self.count, self.seed, self.batch_size, self.argument = count, seed, batch_size, argument
        self._shown = f"{argument} ({name})"
        self._datasets: dict[int, tf.data.Dataset] = {}

    def __str__(self) -> str:
        return f"batches of {self.layout}"

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of an example, as the dataset of worker 0 describes it.

        Raises:
            DataError: see `dataset`.
        """
        return self._layout_of(self.dataset(0))

    def no_examples(self) -> list[np.ndarray]:
        """The leaves of a batch without examples; dimensions of unknown size are 0, too."""
        types = [bytes if spec.dtype is tf.string else spec.dtype.as_numpy_dtype for spec in self.layout.specs]
        shapes = [(0, *(size or 0 for size in spec.shape.as_list())) for spec in self.layout.specs]
        return [np.empty(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]

    def shown(self, index: int) -> str:
        """A worker's part, for messages."""
        return f"{self._shown}: shard {index} of {self.count}"

    def dataset(self, index: int) -> tf.data.Dataset:
        """The dataset that the function makes for one worker; it is called once for each.

        Raises:
            DataError: it fails, or gives no dataset of batches.
        """
        if index in self._datasets:
            return self._datasets[index]
        try:
            # On a machine with a GPU the constants of a dataset would lie there, and be copied back for each batch.
            with tf.device("CPU:0"):
                dataset = self.load(Shard(index, self.count, self.seed, self.batch_size))
        except Exception as error:  # the user's function may raise anything
            raise DataError(f"{self.shown(index)}: {_told_by(error)}") from error
        if not isinstance(dataset, tf.data.Dataset):
            raise DataError(f"{self._shown}: gives {kind_of(dataset)}, and must give a tf.data.Dataset of batches")
        self._datasets[index] = dataset
        return dataset

    def num_batches(self) -> list[int]:
        """The batches of each worker in a pass; negative if TensorFlow does not know, or there is no end."""
        return [int(self.dataset(index).cardinality()) for index in range(self.count)]

    def batches(self, index: int, first: int) -> tf.data.Dataset:
        """The leaves of one worker's batches from that of the number `first` on, without end if the stream `repeats`.

        A number that is counted over several passes is found without reading whole passes again, if TensorFlow knows
        how many batches a pass has.
        """
        if not self.repeats:
            return self._pass(index).skip(first).prefetch(READ_AHEAD)
        number = int(self.dataset(index).cardinality())
        # Without a known number every batch up to there is read and thrown away.
        position = first % number if number > 0 else first
        return self._pass(index).repeat().skip(position).prefetch(READ_AHEAD)

    def one_pass(self, index: int) -> Iterator[list[np.ndarray]]:
        """The leaves of each batch of one worker."""
        with tf.device("CPU:0"):
            batches = iter(self._pass(index).prefetch(READ_AHEAD).as_numpy_iterator())
        while True:
            try:
                leaves = next(batches, None)
            except Exception as error:
                raise self.unreadable(index, error) from error
            if leaves is None:
                return
            yield list(leaves)

    def unreadable(self, index: int, error: Exception) -> DataError:
        """The error to raise where a batch of a worker cannot be read."""
        traceback.print_exc()  # the log gets everything
        return DataError(f"{self.shown(index)}: {_told_by(error)}")

    def _pass(self, index: int) -> tf.data.Dataset:
        """The leaves of the batches of one worker; raises DataError as `batches` does."""
        dataset = self.dataset(index)
        layout = self._layout_of(dataset)
        # The graphs of all workers are made for the kind that worker 0 has.
        if layout != self.layout:
            raise DataError(f"{self.shown(index)} is {layout}, and shard 0 is {self.layout}; give all the same kind")
        types = [spec.dtype for spec in layout.specs]

        @NO_AUTOGRAPH
        def flat(*element: Any) -> tuple[tf.Tensor, ...]:
            leaves = leaves_of(keras.utils.unpack_x_y_sample_weight(element))
            # numpy's floats are float64, and Keras' float32.
            return tuple(tf.cast(leaf, dtype) for leaf, dtype in zip(leaves, types, strict=True))

        @NO_AUTOGRAPH
        def has_examples(*leaves: tf.Tensor) -> tf.Tensor:
            # The mean of the losses of no examples is NaN.
            return tf.shape(leaves[0])[0] > 0

        return dataset.map(flat).filter(has_examples)

    def _layout_of(self, dataset: tf.data.Dataset) -> Layout:
        """Raises DataError if its elements are not batches of dense arrays of a known number of dimensions."""
        # TensorFlow has a type for None in a dataset, too.
        spec = keras.tree.map_structure(
            lambda leaf: None if leaf.value_type is type(None) else leaf, dataset.element_spec
        )
        try:
            parts = keras.utils.unpack_x_y_sample_weight(spec if isinstance(spec, tuple) else (spec,))
        except ValueError:
            raise DataError(
                f"{self._shown}: its elements have {len(spec)} parts; give (x, y) or (x, y, sample_weight)"
            ) from None
        for name, part in zip(PARTS, parts, strict=True):
            for leaf in leaves_of(part):
                self._check(name, leaf)
        sizes = {leaf.shape[0] for leaf in leaves_of(parts)} - {None}
        if len(sizes) > 1 or not leaves_of(parts[0]):
            raise DataError(f"{self._shown}: its elements are no batches; end with dataset.batch(shard.batch_size)")
        return Layout(keras.tree.map_structure(_as_keras, parts))

    def _check(self, part: str, leaf: Any) -> None:
        if not isinstance(leaf, tf.TensorSpec):
            raise DataError(
                f"{self._shown}: {part} holds {kind_of(leaf)}, and must be dense arrays; use padded_batch, its "
                "to_tensor(), or tf.sparse.to_dense"
            )
        if leaf.shape.rank == 0:
            raise DataError(f"{self._shown}: {part} is no batch; end with dataset.batch(shard.batch_size)")
        if leaf.shape.rank is None:
            raise DataError(
                f"{self._shown}: {part} is of shape {leaf.shape}, and the number of its dimensions must be known; "
                "use tf.ensure_shape, or output_signature of a generator"
            )


def _as_keras(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
    """With floats of Keras' type, as it converts arrays."""
    if spec is None or not spec.dtype.is_floating:
        return spec
    return tf.TensorSpec(spec.shape, keras.config.floatx())


def _told_by(error: BaseException) -> str:
    """The class, the reason and the user's line of an exception, in one line."""
    if not isinstance(error, tf.errors.OpError):
        return f"{type(error).__name__}: {reason_of(error)}{users_location(error)}"
    # Behind the nodes may come the user's error.
    line = first_line(NODES.sub("", str(error)))
    is_users = re.match(r"\w+(Error|Exception|Interrupt)\b: ", line)
    return ("" if is_users else f"{type(error).__name__}: ") + line + users_location(error)


class Reader:
    """Gives one worker's batches by their numbers, and fetches the next ones meanwhile.

    What was given is kept until a later batch is asked for: the updates of asynchronous workers may be refused, and
    then the same batches are asked for again. An earlier number is reached by reading from the start and skipping.

    Unless the stream repeats, the numbers are those of an epoch, and each epoch is a new pass.
    """

    def __init__(self, stream: Stream, index: int) -> None:
        self._stream, self._index = stream, index
        self._lock = threading.Lock()
        self._kept: deque[list[np.ndarray]] = deque()
        self._first = 0  # the number of the first that is kept
        self._iterator: Iterator[Any] | None = None
        self._error: DataError | None = None  # after what is kept comes nothing more
        self._has_ended = False  # likewise, since the pass is over
        self._last: list[np.ndarray] = []  # the leaves of the last batch that is not kept any more
        self._epoch = 0
        self._ahead: threading.Thread | None = None

    def read_batches(self, first: int, num: int) -> list[np.ndarray]:
        """The leaves of `num` batches, one batch after the other; the first has the number `first`.

        Raises:
            DataError: they cannot be read, or the data has come to an end.
        """
        with self._lock:
            self._wait()
            self._move_to(first)
            if not self._fetch(num) and self._error:
                raise self._error
            batches = list(itertools.islice(self._kept, num))
            if len(batches) < num:  # what a call computes from the last batch again, beyond the end, counts for nothing
                batches += [self._last_batch()] * (num - len(batches))
            leaves = [leaf for batch in batches for leaf in batch]
            # A daemon: a generator of the user's that hangs must not keep the process from ending.
            self._ahead = threading.Thread(target=self._fetch, args=(num + max(num, 2),), name="input", daemon=True)
            self._ahead.start()
            return leaves

    def count(self, epoch: int, first: int, num: int) -> int:
        """How many of `num` batches an epoch has from the number `first` on.

        Raises:
            DataError: as `read_batches`.
        """
        with self._lock:
            self._wait()
            if epoch != self._epoch:
                self._epoch, self._iterator = epoch, None
            self._move_to(first)
            if not self._fetch(num) and self._error:
                raise self._error
            return min(num, len(self._kept))

    def size(self, epoch: int, number: int) -> int:
        """How many examples a batch has that is not before the last one given.

        Returns:
            0 if it cannot be read, and -1 if the epoch has come to its end before it.
        """
        with self._lock:
            if self._iterator is None or epoch != self._epoch:
                self._wait()
                self._epoch, self._iterator = epoch, None
                self._move_to(number)
            index = number - self._first
            if len(self._kept) <= index:
                self._wait()
            if self._fetch(index + 1):
                return len(self._kept[index][0])
            return -1 if self._has_ended else 0

    def _wait(self) -> None:
        if self._ahead:
            self._ahead.join()

    def _move_to(self, first: int) -> None:
        # A dataset cannot go back.
        if self._iterator is None or first < self._first:
            self._kept.clear()
            self._first, self._error, self._has_ended = first, None, False
            try:
                with tf.device("CPU:0"):
                    self._iterator = iter(self._stream.batches(self._index, first).as_numpy_iterator())
            except DataError as error:
                self._iterator, self._error = iter(()), error
        while self._first < first and self._fetch(1):
            self._last = self._kept.popleft()
            self._first += 1

    def _last_batch(self) -> list[np.ndarray]:
        """The leaves of the last batch that was read; of a pass that was skipped to its end those of its first."""
        if self._kept:
            return self._kept[-1]
        self._last = self._last or next(self._stream.one_pass(self._index))
        return self._last

    def _fetch(self, num: int) -> bool:
        """Reads until `num` batches are kept; returns whether they are."""
        assert self._iterator
        while len(self._kept) < num and not self._error and not self._has_ended:
            try:
                self._kept.append(list(next(self._iterator)))
            except StopIteration:
                self._has_ended = not self._stream.repeats and (self._first > 0 or len(self._kept) > 0)
                if self._has_ended:
                    break
                self._error = DataError(
                    f"{self._stream.shown(self._index)} gives no batch in a pass over it; give every worker a batch at "
                    "least, and a generator that begins again at each call"
                )
            except Exception as error:
                self._error = self._stream.unreadable(self._index, error)
        return len(self._kept) >= num
