"""What one parameter server counts, all in one variable, so that an update is counted by one atomic operation.

Of TensorFlow's operations on parts of a variable, ResourceScatterNdAdd alone locks the variable
while it adds; ResourceScatterAdd shares the lock with others of its kind, and would lose counts.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

MAX_STALENESS = 1023  # the histogram's last bin holds this and more
TOTALS = ("steps", "loss", "correct", "examples")  # of each worker
ADDED = 2 + len(TOTALS)  # numbers an update adds: to those applied, to a bin of staleness, to its worker's totals
ONES = np.ones(3, np.float32)  # the first of them: it is one of all, one of its bin, one of its worker's
_IS_BIN = np.array([[0], [1], *([[0]] * len(TOTALS))])


class Counts(NamedTuple):
    """What has been counted up to one moment.

    Attributes:
        applied: updates, in the whole run.
        totals: of each worker, float64 [workers, len(TOTALS)].
        staleness: updates by how many others came between their pull and them, int64 [MAX_STALENESS + 1].
    """

    applied: int
    totals: np.ndarray
    staleness: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        """Of each worker, int64 [workers]."""
        return self.totals[:, TOTALS.index("steps")].astype(np.int64)

    @property
    def examples(self) -> int:
        """Of all workers."""
        return int(self.totals[:, TOTALS.index("examples")].sum())


class Counters:
    """Lies on the device under which it is made. A float64 counts exactly up to 2^53."""

    def __init__(self, num_workers: int) -> None:
        self._shape = (num_workers, len(TOTALS))
        size = 1 + num_workers * len(TOTALS) + MAX_STALENESS + 1
        self._values = tf.Variable(tf.zeros([size], tf.float64), trainable=False, name="counters")

    def restore(self, counts: Counts) -> None:
        self._values.assign(np.concatenate([[counts.applied], counts.totals.ravel(), counts.staleness]))

    def now(self) -> Counts:
        values = self._values.numpy()
        totals, staleness = np.split(values[1:], [self._shape[0] * self._shape[1]])
        return Counts(int(values[0]), totals.reshape(self._shape), staleness.astype(np.int64))

    def indices(self, worker: tf.Tensor) -> tf.Tensor:
        """Where the updates of a worker are counted, if none is stale: int64 [ADDED, 1]; made once for many updates."""
        first_bin = 1 + self._shape[0] * self._shape[1]
        return tf.concat([[0, first_bin], self._row(worker)], 0)[:, None]

    def add(self, indices: tf.Tensor, staleness: tf.Tensor, added: tf.Tensor) -> None:
        """Counts one update.

        Args:
            indices: of its worker.
            staleness: how many updates came between its pull and it, int64.
            added: float [ADDED]: `ONES`, and its loss, correct and examples.
        """
        late = tf.clip_by_value(staleness, 0, MAX_STALENESS)
        self._values.scatter_nd_add(indices + late * _IS_BIN, tf.cast(added, tf.float64))

    def _row(self, worker: tf.Tensor) -> tf.Tensor:
        return 1 + worker * len(TOTALS) + tf.range(len(TOTALS), dtype=tf.int64)

    def applied(self) -> tf.Tensor:
        """The updates applied so far, float64; reads no more than it needs."""
        return self._values.sparse_read(0)

    def of_worker(self, worker: tf.Tensor) -> tf.Tensor:
        """One worker's totals and the updates applied by all, float64 [len(TOTALS) + 1]."""
        return self._values.sparse_read(tf.concat([self._row(worker), [0]], 0))

    def heads(self) -> tf.Tensor:
        """The updates applied and the totals row by row, float64."""
        return self._values.sparse_read(tf.range(1 + self._shape[0] * self._shape[1]))
