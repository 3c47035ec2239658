"""What a ps counts, and how it is read."""

import numpy as np
import tensorflow as tf

from tf2dist.training.asynchronous.counters import ADDED, MAX_STALENESS, ONES, Counters, Counts

NUM_WORKERS = 3


def add(counters: Counters, worker: int, staleness: int, sums: list[float]) -> None:
    indices = counters.indices(tf.constant(worker, tf.int64))
    counters.add(indices, tf.constant(staleness, tf.int64), tf.constant([*ONES, *sums]))


def test_an_update_is_counted_in_its_place() -> None:
    counters = Counters(NUM_WORKERS)
    add(counters, 0, 0, [2.5, 90.0, 100.0])
    add(counters, 2, 7, [0.5, 40.0, 57.0])
    add(counters, 2, MAX_STALENESS + 5, [0.25, 1.0, 1.0])
    add(counters, 2, -1, [0.25, 1.0, 1.0])  # cannot be; it would count elsewhere, or fail
    now = counters.now()
    assert now.applied == 4
    assert now.totals.tolist() == [[1, 2.5, 90, 100], [0] * 4, [3, 1.0, 42, 59]]
    assert {int(bin): int(now.staleness[bin]) for bin in now.staleness.nonzero()[0]} == {0: 2, 7: 1, MAX_STALENESS: 1}
    assert float(counters.applied()) == 4
    assert counters.of_worker(tf.constant(2, tf.int64)).numpy().tolist() == [3, 1.0, 42, 59, 4]
    assert counters.heads().numpy().tolist() == [4, *now.totals.ravel()]


def test_they_go_on_where_another_run_ended() -> None:
    counters = Counters(NUM_WORKERS)
    begun = Counts(2**40 + 1, np.arange(12.0).reshape(3, 4), np.arange(MAX_STALENESS + 1))
    counters.restore(begun)
    add(counters, 1, 3, [0.0, 0.0, 0.0])
    now = counters.now()
    assert now.applied == 2**40 + 2, "a float64 counts on exactly"
    assert (now.totals - begun.totals).tolist() == [[0] * 4, [1, 0, 0, 0], [0] * 4]
    assert np.flatnonzero(now.staleness - begun.staleness).tolist() == [3]


def test_an_update_is_counted_by_one_operation_that_locks() -> None:
    """Two that meet in an operation that shares its lock lose a count too rarely for a test to see it."""
    counters = Counters(NUM_WORKERS)
    indices, scalar = tf.TensorSpec([ADDED, 1], tf.int64), tf.TensorSpec([], tf.int64)
    added = tf.TensorSpec([ADDED], tf.float32)
    graph = tf.function(counters.add, autograph=False).get_concrete_function(indices, scalar, added).graph
    assert [op.type for op in graph.get_operations() if op.op_def.is_stateful] == ["ResourceScatterNdAdd"]
