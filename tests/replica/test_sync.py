"""Synchronous training on real workers: N of them equal one with N times the batch."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replica.small_runs import run_config, source_and_splits, split_of, sync_loop
from tf2dist.config.schema import RunConfig
from tf2dist.testing import SyncWorker, SyncWorkers, WorkerError


def train(worker: SyncWorker, config: RunConfig, steps: int) -> dict[str, Any]:
    """Trains as configured; returns the weights, losses and counts of the worker."""
    losses = []
    loop = sync_loop(worker, config, report=lambda progress: losses.append(progress.loss))
    loop.train(steps)
    evaluation = loop.evaluate("test")
    return {
        "weights": [variable.numpy() for variable in loop.model.trainable_variables],
        "state": [v.numpy() for v in loop.model.non_trainable_variables if "moving" in v.path],
        "progress": loop.progress,
        "updates": loop.updates_applied(),
        "losses": losses,
        "evaluation": evaluation,
        "predictions": loop.model(source_and_splits(config)[1].test.x).numpy().argmax(-1),
    }


def assert_equal_weights(found: list[np.ndarray], expected: list[np.ndarray], atol: float) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=0)


def case(model: str, optimizer: str, **more: Any) -> RunConfig:
    of_model: dict[str, Any] = {"hidden_units": [30, 20]} if model == "dnn" else {}
    return run_config(model, optimizer, **more, **of_model)


def train_with_each(worker: SyncWorker, configs: list[RunConfig], steps: int) -> list[dict[str, Any]]:
    """Several runs in one life of the workers, which take seconds to start."""
    return [train(worker, config, steps) for config in configs]


@pytest.fixture(scope="module")
def on_three(sync_workers: SyncWorkers) -> Callable[[str, str], list[list[dict[str, Any]]]]:
    """Trains a model on three workers with tf2dist's all-reduce and with TensorFlow's; the results of each worker."""

    @functools.cache
    def trained(model: str, optimizer: str) -> list[list[dict[str, Any]]]:
        configs = [case(model, optimizer, batch_size=50, steps_per_execution=7) for _ in range(2)]
        configs[1].cluster.all_reduce = "tensorflow"
        return sync_workers(train_with_each, num_workers=3, args=(configs, 20))

    return trained


@pytest.mark.parametrize(
    ("model", "optimizer"), [pytest.param("softmax", "sgd", marks=pytest.mark.slow), ("dnn", "adam")]
)
def test_three_workers_equal_one_with_three_times_the_batch(
    sync_workers: SyncWorkers, on_three: Callable[[str, str], list[list[dict[str, Any]]]], model: str, optimizer: str
) -> None:
    """Over 20 steps of 150 of 1,257 examples: two epochs, each with an uneven last step."""
    (single,) = sync_workers(train, num_workers=1, args=(case(model, optimizer, batch_size=150), 20))
    for three in zip(*on_three(model, optimizer), strict=True):
        assert_equal_weights(three[0]["weights"], single["weights"], atol=1e-5)
        for other in three[1:]:
            assert_equal_weights(other["weights"], three[0]["weights"], atol=0)
        for result in (*three, single):
            assert result["progress"].global_step == result["updates"] == 20
            assert result["progress"].examples == single["progress"].examples == 2 * 1257 + 2 * 150


def sum_in_memory(worker: SyncWorker) -> tuple[bool, float]:
    from tf2dist.training.synchronous.workers import Workers

    workers = Workers(worker.cluster, worker.task, worker.strategy)
    all_reduce = workers.make_all_reduce("auto", timeout_secs=30.0)
    assert all_reduce is not None
    total = all_reduce(np.full(1_000_000, 10.0**worker.index, np.float32))
    return all_reduce._memory is not None, float(total.min() + total.max()) / 2


def test_processes_of_one_host_share_memory(sync_workers: SyncWorkers) -> None:
    assert sync_workers(sum_in_memory, num_workers=3) == [(True, 111.0)] * 3


def test_evaluation_counts_every_example_once(on_three: Callable[[str, str], list[list[dict[str, Any]]]]) -> None:
    from tf2dist import data

    results = [first for first, _ in on_three("dnn", "adam")]
    labels = split_of(data.load(run_config().data), "test").y
    for result in results:
        assert result["evaluation"].num_examples == len(labels)
        assert result["evaluation"].metrics["accuracy"] == pytest.approx((result["predictions"] == labels).mean())
    assert results[0]["evaluation"] == results[1]["evaluation"] == results[2]["evaluation"]


def evaluate_at_another_speed(worker: SyncWorker) -> dict[str, Any]:
    import time

    from tf2dist.checkpoint.store import NoSaver
    from tf2dist.messages import Silence, Stalled, ToLauncher
    from tf2dist.process import heartbeat
    from tf2dist.training.driver import Driver, Steps
    from tf2dist.training.report import NoReporter

    messages: list[Any] = []
    loop = sync_loop(worker, run_config())
    loop.evaluate("test")  # traces
    batches = loop._evaluated_batches

    def slow_batches(split: str) -> Any:
        yield from batches(split)
        for _ in range(20 * worker.index):
            time.sleep(0.1)
            heartbeat.progress()

    loop._evaluated_batches = slow_batches
    heartbeat.start(ToLauncher("a worker", messages.append), watchdog_secs=1.0)
    heartbeat.progress()  # the start is over
    began_at = time.monotonic()
    loop.evaluate("test")
    secs = time.monotonic() - began_at
    Driver(loop, NoSaver(), NoReporter(), [], Steps, lambda: None).save()
    allowance_secs = heartbeat._deadline - time.monotonic()
    loop.finish(None)
    silences = [message.secs for message in messages if isinstance(message, Silence)]
    return {
        "has waited": secs > 1.5,
        "stalled": [message for message in messages if isinstance(message, Stalled)],
        "waits for a checkpoint": worker.index == 0 or allowance_secs > heartbeat.START_SECS / 2,
        "waits for a large model": len(silences) == 2 and silences[0] > 3600,
    }


def test_a_worker_that_has_done_its_part_is_not_stalled(sync_workers: SyncWorkers) -> None:
    """It waits for the others, however long they evaluate, or worker 0 writes; each reports progress of its own."""
    expected = {"has waited": True, "stalled": [], "waits for a checkpoint": True, "waits for a large model": True}
    assert sync_workers(evaluate_at_another_speed) == [expected] * 2


@pytest.mark.slow
def test_dropout_and_batch_norm_learn(sync_workers: SyncWorkers) -> None:
    config = run_config("cnn", "adam", dropout=0.3, batch_norm=True)
    config.optimizer["learning_rate"] = 0.001
    results = sync_workers(train, num_workers=2, args=(config, 40))
    assert results[0]["losses"][-1] < 1.0 < results[0]["losses"][0]
    for key in ("weights", "state"):
        assert_equal_weights(results[0][key], results[1][key], atol=0)
    assert all(np.abs(value).max() > 0 for value in results[0]["state"])


def graphs_of_the_step(worker: SyncWorker, configs: list[RunConfig]) -> list[str]:
    return [graph_of_the_step(worker, config) for config in configs]


def graph_of_the_step(worker: SyncWorker, config: RunConfig) -> str:
    import tensorflow as tf

    from tf2dist.training.synchronous.sync_step import SHARED

    loop = sync_loop(worker, config)
    (iterator,) = loop._graphs.feed.iterators
    assert isinstance(iterator, tf.data.Iterator), "one for several devices takes longer to make"
    arguments = tf.constant(1), tf.zeros([SHARED]), iterator
    traced = loop._graphs._run_steps.get_concrete_function(*arguments)
    return str(traced.graph.as_graph_def())


def test_the_graph_of_a_step(sync_workers: SyncWorkers) -> None:
    """Workers communicate once a step, only by our own all-reduce, and XLA compiles the step where it was asked for.

    TensorFlow's input would ask all workers in each step whether it has ended.
    """
    configs = [run_config(), run_config()]
    configs[1].devices.xla = True
    graph, compiled = sync_workers(graphs_of_the_step, 2, (configs,))[0]
    assert "_XlaMustCompile" in compiled
    assert "_XlaMustCompile" not in graph
    assert graph.count('op: "PyFunc"') == 1
    assert "CollectiveReduce" not in graph
    assert "GetNextAsOptional" not in graph


@pytest.mark.slow
def test_every_optimizer_learns(sync_workers: SyncWorkers) -> None:
    names = ["sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop"]
    configs = [run_config(optimizer=name, batch_size=100, steps_per_execution=5) for name in names]
    for name, result in zip(names, sync_workers(train_with_each, 1, (configs, 30))[0], strict=True):
        assert result["losses"][-1] < result["losses"][0], name


def test_the_example_of_the_documentation(sync_workers: SyncWorkers) -> None:
    def total(worker: SyncWorker, value: float) -> float:
        import tensorflow as tf

        strategy = worker.strategy
        return float(strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(value))))

    assert sync_workers(total, num_workers=3, args=(2.0,)) == [6.0, 6.0, 6.0]


def test_an_error_on_one_worker_is_shown(sync_workers: SyncWorkers) -> None:
    def fail(worker: SyncWorker) -> None:
        if worker.index == 1:
            raise RuntimeError("the second worker is broken")
        _ = worker.strategy  # waits for the second

    with pytest.raises(WorkerError, match="the second worker is broken"):
        sync_workers(fail, num_workers=2)


def test_the_first_of_several_errors_is_shown(sync_workers: SyncWorkers, tmp_path: Path) -> None:
    def fail(worker: SyncWorker, came: Path) -> None:
        import time

        class Cause(RuntimeError):
            def __str__(self) -> str:  # called when the record of the failure is written
                came.touch()
                return "the cause"

        if worker.index == 1:
            raise Cause
        while not came.exists():
            time.sleep(0.01)
        time.sleep(0.03)  # the resolution of the times of files
        raise RuntimeError("the consequence")

    with pytest.raises(WorkerError, match="the cause"):
        sync_workers(fail, num_workers=2, args=(tmp_path / "came",))


def test_a_worker_that_is_done_waits_for_the_others(sync_workers: SyncWorkers, tmp_path: Path) -> None:
    """If it left, workers that still read a result from it would fail."""

    def leave(worker: SyncWorker, note: Path) -> bool:
        import os
        import time

        import psutil

        if worker.index == 0:
            note.with_name("part").write_text(str(os.getpid()))
            note.with_name("part").rename(note)
            return True
        while not note.exists():
            time.sleep(0.01)
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(int(note.read_text())).wait(timeout=1)
        return True

    assert sync_workers(leave, num_workers=2, args=(tmp_path / "pid",)) == [True, True]


def test_a_worker_that_dies_is_named(sync_workers: SyncWorkers) -> None:
    def die(worker: SyncWorker) -> None:
        import os

        if worker.index == 0:
            print("last words", flush=True)
            os.kill(os.getpid(), 9)

    with pytest.raises(WorkerError, match=r"worker-0(.|\n)*code -9(.|\n)*last words"):
        sync_workers(die, num_workers=1)


def test_a_worker_that_leaves_without_a_result_is_named(sync_workers: SyncWorkers) -> None:
    def leave(worker: SyncWorker) -> None:
        import os

        if worker.index == 1:
            os._exit(0)

    with pytest.raises(WorkerError, match=r"worker-1(.|\n)*code 0"):
        sync_workers(leave, num_workers=2)


def test_a_worker_that_never_answers_is_named(sync_workers: SyncWorkers) -> None:
    def wait(worker: SyncWorker) -> None:
        import threading

        threading.Event().wait(60)

    with pytest.raises(WorkerError, match=r"no answer in time from run-.*-worker-0"):
        sync_workers(wait, num_workers=1, timeout_secs=3)


def test_workers_import_from_the_strings_in_the_path(
    sync_workers: SyncWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python skips a Path in `sys.path`."""

    def last_entries(worker: SyncWorker) -> list[str]:
        import sys

        return sys.path[-2:]

    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, "here", Path("there"), "elsewhere"])
    assert sync_workers(last_entries, num_workers=1) == [["here", "elsewhere"]]
