"""Counters of one parameter server: all in one variable, so that one atomic operation counts an update.

Of TensorFlow's operations on parts of a variable, only ResourceScatterNdAdd locks the variable exclusively while it
adds. ResourceScatterAdd shares the lock with others of its kind, and would lose counts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import input_position, stream_positions
from tf2dist.data.passes import InputPosition, Sharding

TOTALS_ARRAY, STALENESS_ARRAY = "async_counts", "async_staleness"  # the names of these arrays in a snapshot
MAX_STALENESS = 1023  # the last bin of the histogram counts this staleness and all above
TOTALS = ("steps", "loss", "examples")  # the columns of the totals of each worker
ONES = np.ones(3, np.float32)  # every update adds 1 to the updates, to its bin of the histogram, to its worker's steps


class Counts(NamedTuple):
    """Numbers that have been counted up to one moment.

    Attributes:
        applied: the updates applied in the whole run.
        totals: the sums of each worker, float64 [workers, len(TOTALS)].
        metrics: the sums of the model's metrics over all workers, float64 [metrics]; see `Loop.clear_metrics`.
        staleness: how many updates had each staleness, int64 [MAX_STALENESS + 1]; the staleness of an update is how
            many others were applied between its pull and its push.
    """

    applied: int
    totals: np.ndarray
    metrics: np.ndarray
    staleness: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        """The steps of each worker, int64 [workers]."""
        return self.totals[:, TOTALS.index("steps")].astype(np.int64)

    @property
    def examples(self) -> int:
        """The examples that all workers have seen."""
        return int(self.totals[:, TOTALS.index("examples")].sum())


class Counters:
    """The counters of one ps, on the device under which they are made. A float64 counts exactly up to 2^53.

    The order in the variable: the updates applied, the totals row by row, the metrics, the bins of staleness. With two
    workers and one metric:

        index     0         1 2 3      4 5 6      7        8 9 10 ... 1031
        counted   applied   worker 0   worker 1   metric   staleness 0, 1, 2, ...
        added     1                    1 0.5 50   30           1

    The last row is an update of worker 1 with the loss 0.5, 50 examples, 30 for the metric, and the staleness 2. It
    travels as [1, 1, 1, 0.5, 50, 30], and is added at [0, 8 + 2, 4, 5, 6, 7] by one operation.

    Attributes:
        added: how many numbers an update adds.
    """

    def __init__(self, num_workers: int, num_metrics: int) -> None:
        self._shape = (num_workers, len(TOTALS))
        self._num_totals, self._num_metrics = num_workers * len(TOTALS), num_metrics
        self._head = 1 + self._num_totals + num_metrics  # the size of all that stands before the bins
        self.added = 2 + len(TOTALS) + num_metrics
        # The second of the added numbers is counted in a bin, which its staleness shifts; see `indices` and `add`.
        self._is_bin = np.arange(self.added)[:, None] == 1
        size = self._head + MAX_STALENESS + 1
        self._values = tf.Variable(tf.zeros([size], tf.float64), trainable=False, name="counters")

    def restore(self, counts: Counts) -> None:
        metrics = counts.metrics[: self._num_metrics]
        parts = [np.array([counts.applied]), counts.totals.ravel(), metrics, counts.staleness]
        self._values.assign(np.concatenate(parts))

    def clear_metrics(self) -> None:
        """Sets the sums of metrics that are not finite to 0."""
        cleared = 1 + self._num_totals + np.flatnonzero(~np.isfinite(self.now().metrics))
        self._values.scatter_nd_update(cleared[:, None], np.zeros(len(cleared)))

    def now(self) -> Counts:
        values = self._values.numpy()
        totals, metrics, staleness = np.split(values[1:], [self._num_totals, self._head - 1])
        return Counts(int(values[0]), totals.reshape(self._shape), metrics, staleness.astype(np.int64))

    def indices(self, worker: tf.Tensor) -> tf.Tensor:
        """Where an update of a worker that is not stale is counted, int64 [added, 1]; the same for all its updates."""
        metrics = tf.range(1 + self._num_totals, self._head, dtype=tf.int64)
        return tf.concat([[0, self._head], self._row(worker), metrics], 0)[:, None]

    def add(self, indices: tf.Tensor, staleness: tf.Tensor, added: tf.Tensor) -> None:
        """Counts one update.

        Args:
            indices: what `indices` returns for its worker.
            staleness: how many updates were applied between its pull and it, int64.
            added: float [self.added]: `ONES`, its loss and examples, and the changes of the metrics.
        """
        # Out of its range, the operation would fail or count in another place.
        late = tf.clip_by_value(staleness, 0, MAX_STALENESS)
        self._values.scatter_nd_add(indices + late * self._is_bin, tf.cast(added, tf.float64))

    def _row(self, worker: tf.Tensor) -> tf.Tensor:
        return 1 + worker * len(TOTALS) + tf.range(len(TOTALS), dtype=tf.int64)

    def applied(self) -> tf.Tensor:
        """The updates applied so far, float64."""
        # A read of the whole variable would copy the thousand bins of the histogram in every step.
        return self._values.sparse_read(0)

    def of_worker(self, worker: tf.Tensor) -> tf.Tensor:
        """The totals of one worker, then the updates applied by all, float64 [len(TOTALS) + 1]."""
        return self._values.sparse_read(tf.concat([self._row(worker), [0]], 0))

    def after(self, indices: tf.Tensor) -> tf.Tensor:
        """The numbers that `of_worker` returns, for the worker that is counted there; see `indices`."""
        row = tf.squeeze(indices[2 : 2 + len(TOTALS)], 1)
        return self._values.sparse_read(tf.concat([row, [0]], 0))

    def steps(self) -> tf.Tensor:
        """The steps of each worker, all at the same moment, float64 [workers]."""
        return self._values.sparse_read(1 + TOTALS.index("steps") + len(TOTALS) * tf.range(self._shape[0]))

    def heads(self) -> tf.Tensor:
        """The updates applied, the totals row by row, and the metrics, float64."""
        return self._values.sparse_read(tf.range(self._head))

    def split_heads(self, heads: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Takes apart what `heads` returns: the updates applied, the totals [workers, len(TOTALS)], the metrics."""
        totals, metrics = np.split(heads[1:], [self._num_totals])
        return heads[0], totals.reshape(self._shape), metrics


def staleness_of(histogram: np.ndarray) -> dict[str, float]:
    """The mean, two quantiles and the largest of a histogram of staleness, int64 [MAX_STALENESS + 1]."""
    bins = np.arange(MAX_STALENESS + 1)
    total = max(1, histogram.sum())  # a run that is stopped before its first update has a mean of 0
    quantiles = {f"p{q}": int(np.searchsorted(histogram.cumsum(), total * q / 100)) for q in (50, 99)}
    largest = int(bins[histogram > 0].max(initial=0))
    return {"mean": float((histogram * bins).sum() / total), **quantiles, "max": largest}


@dataclass(frozen=True)
class PsOrigin:
    """Where a run begins.

    Attributes:
        step, examples: those of the run so far.
        begin: the position of the input.
        offsets: for each worker, the number of its next batch less the steps that the ps count for it, if every worker
            has batches of its own.
    """

    step: int
    examples: int
    begin: InputPosition
    offsets: list[int]


@dataclass(frozen=True)
class AsyncOrigin(PsOrigin):
    """Where a run of mode=async begins.

    Attributes:
        counts: the first values of the ps's counters; the totals are 0 if the snapshot has none for as many workers.
    """

    counts: Counts

    @classmethod
    def of(cls, start: Snapshot | None, sharding: Sharding, num_metrics: int) -> "AsyncOrigin":
        step, examples = (start.step, start.facts.examples) if start else (0, 0)
        totals = np.zeros((sharding.num_shards, len(TOTALS)))
        staleness = np.zeros(MAX_STALENESS + 1, np.int64)
        # The snapshot of another number of workers, or of another mode, does not say which worker took which step.
        shapes = {TOTALS_ARRAY: totals.shape, STALENESS_ARRAY: staleness.shape}
        if start and all(start.arrays.get(name, np.empty(0)).shape == shape for name, shape in shapes.items()):
            totals, staleness = start.arrays[TOTALS_ARRAY], start.arrays[STALENESS_ARRAY]
        # The sums of the metrics begin at 0 in every process; an epoch that is cut keeps its own in the snapshot.
        counts = Counts(step, totals, np.zeros(num_metrics), staleness)
        offsets = np.array(stream_positions(start, sharding)) - counts.steps
        return cls(step, examples, input_position(start, sharding), list(map(int, offsets)), counts)

    @property
    def earlier_steps(self) -> int:
        """The steps of the run that the totals do not contain."""
        return self.step - int(self.counts.steps.sum())

    @property
    def earlier_examples(self) -> int:
        """The examples of the run that the totals do not contain."""
        return self.examples - self.counts.examples
