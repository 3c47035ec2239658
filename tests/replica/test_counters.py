"""The counters of a ps, and how they are read."""

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.test_saving import facts
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.data.passes import Sharding
from tf2dist.training.parameter_server.counters import (
    MAX_STALENESS,
    ONES,
    STALENESS_ARRAY,
    TOTALS_ARRAY,
    AsyncOrigin,
    Counters,
    Counts,
)

NUM_WORKERS, NUM_METRICS = 3, 2


def add(counters: Counters, worker: int, staleness: int, sums: list[float]) -> None:
    """Counts an update with these sums: the loss, the examples, the metrics."""
    indices = counters.indices(tf.constant(worker, tf.int64))
    counters.add(indices, tf.constant(staleness, tf.int64), tf.constant([*ONES, *sums]))


def test_an_update_is_counted_for_its_worker_and_staleness() -> None:
    counters = Counters(NUM_WORKERS, NUM_METRICS)
    add(counters, 0, 0, [2.5, 100.0, 90.0, 7.0])
    add(counters, 2, 7, [0.5, 57.0, 40.0, -1.0])
    add(counters, 2, MAX_STALENESS + 5, [0.25, 1.0, 1.0, 0.5])
    add(counters, 2, -1, [0.25, 1.0, 1.0, 0.5])  # cannot occur; without a check it would fail or change another counter
    now = counters.now()
    assert now.applied == 4
    assert now.totals.tolist() == [[1, 2.5, 100], [0] * 3, [3, 1.0, 59]]
    assert now.metrics.tolist() == [132, 7], "metrics are summed over all workers"
    assert {int(bin): int(now.staleness[bin]) for bin in now.staleness.nonzero()[0]} == {0: 2, 7: 1, MAX_STALENESS: 1}
    assert float(counters.applied()) == 4
    assert counters.of_worker(tf.constant(2, tf.int64)).numpy().tolist() == [3, 1.0, 59, 4]
    heads = counters.heads().numpy()
    assert heads.tolist() == [4, *now.totals.ravel(), *now.metrics]
    applied, totals, metrics = counters.split_heads(heads)
    assert (applied, totals.tolist(), metrics.tolist()) == (4, now.totals.tolist(), now.metrics.tolist())


def test_the_example_of_the_counters() -> None:
    """An update of worker 1 with the staleness 2 changes these places of the variable alone."""
    counters = Counters(num_workers=2, num_metrics=1)
    assert counters.indices(tf.constant(1, tf.int64)).numpy().ravel().tolist() == [0, 8, 4, 5, 6, 7]
    add(counters, 1, 2, [0.5, 50.0, 30.0])
    values = counters._values.numpy()
    assert {int(place): values[place] for place in values.nonzero()[0]} == {0: 1, 4: 1, 5: 0.5, 6: 50, 7: 30, 10: 1}


def test_counters_continue_where_another_run_ended() -> None:
    counters = Counters(NUM_WORKERS, NUM_METRICS)
    begun = Counts(2**40 + 1, np.arange(9.0).reshape(3, 3), np.array([5.0, 2.0**50]), np.arange(MAX_STALENESS + 1))
    counters.restore(begun)
    add(counters, 1, 3, [0.0, 0.0, 0.0, 1.0])
    now = counters.now()
    assert now.applied == 2**40 + 2, "a float64 counts exactly"
    assert (now.totals - begun.totals).tolist() == [[0] * 3, [1, 0, 0], [0] * 3]
    assert (now.metrics - begun.metrics).tolist() == [0, 1]
    assert np.flatnonzero(now.staleness - begun.staleness).tolist() == [3]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_resumed_run_counts_on_unless_it_has_other_workers(num_workers: int) -> None:
    totals, staleness = np.array([[4, 1.0, 20], [2, 0.5, 10]]), np.arange(MAX_STALENESS + 1)
    start = Snapshot(6, {TOTALS_ARRAY: totals, STALENESS_ARRAY: staleness}, facts(6))
    origin = AsyncOrigin.of(start, Sharding(1257, 5, num_workers, 0, False), NUM_METRICS)
    goes_on = num_workers == len(totals)
    assert (origin.step, origin.examples, origin.counts.applied) == (6, 60, 6)
    assert (origin.earlier_steps, origin.earlier_examples) == ((0, 30) if goes_on else (6, 60))
    assert origin.counts.totals.tolist() == (totals.tolist() if goes_on else [[0] * 3] * num_workers)
    assert origin.counts.staleness.tolist() == (staleness * goes_on).tolist()


def test_an_update_is_counted_by_one_operation_under_an_exclusive_lock() -> None:
    """With a shared lock, concurrent updates lose a count too rarely for a test with real updates to notice."""
    counters = Counters(NUM_WORKERS, NUM_METRICS)
    indices, scalar = tf.TensorSpec([counters.added, 1], tf.int64), tf.TensorSpec([], tf.int64)
    added = tf.TensorSpec([counters.added], tf.float32)
    graph = tf.function(counters.add, autograph=False).get_concrete_function(indices, scalar, added).graph
    assert [op.type for op in graph.get_operations() if op.op_def.is_stateful] == ["ResourceScatterNdAdd"]
