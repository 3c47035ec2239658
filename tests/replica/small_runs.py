"""Configurations that train in seconds, on the bundled digits."""

import os
from pathlib import Path
from typing import Any

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import DataConfig, RunConfig, TrainConfig
from tf2dist.messages import ToLauncher

# The variable with which synchronous workers do without TensorFlow's optimizer of graphs.
AS_TRACED = "TF2DIST_TEST_GRAPHS_AS_TRACED"


def run_config(
    model: str = "softmax",
    optimizer: str = "sgd",
    batch_size: int = 50,
    steps_per_execution: int | None = 5,
    **more: Any,
) -> RunConfig:
    """A configuration for small tests; `more` are arguments of the model."""
    return RunConfig(
        data=DataConfig(name="digits", num_validation=180),
        model={"name": model, **more},
        optimizer={"name": optimizer, "learning_rate": 0.01},
        train=TrainConfig(batch_size_per_worker=batch_size, steps_per_execution=steps_per_execution),
    )


def context_of(config: RunConfig, cluster: Cluster, task: Task, source: Any = None) -> Any:
    """The context of a task that tells its launcher nothing; without a source that of the configuration."""
    from tf2dist.model.source import RegisteredSource
    from tf2dist.training.setup import TaskContext

    to_launcher = ToLauncher(str(task), lambda message: None)
    source = source or RegisteredSource(config)
    return TaskContext(config, cluster, task, source, Path(config.run_dir or ""), to_launcher, 0.0, None)


def sync_loop(worker: Any, config: RunConfig, source: Any = None, start: Any = None, report: Any = None) -> Any:
    """A loop of mode=sync on a `SyncWorker`; without a source it trains that of the configuration.

    Worker 0 does not wait for the others to leave: they stay until all have their results, and go on to other runs.
    """
    import tensorflow as tf

    from tf2dist.training.synchronous.sync_loop import SyncLoop

    if AS_TRACED in os.environ:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    context = context_of(config, worker.cluster, worker.task, source)
    loop = SyncLoop.build(context, start, report or (lambda progress: None), worker.strategy)
    loop._workers.leave_last = lambda: None  # type: ignore[method-assign]
    return loop


def source_and_splits(config: RunConfig) -> tuple[Any, Any]:
    """The source of the model of a configuration, and the data."""
    from tf2dist.model.source import RegisteredSource

    source = RegisteredSource(config)
    return source, source.load()


def split_of(splits: Any, name: str) -> Any:
    """The examples of a split, which must exist."""
    arrays = getattr(splits, name)
    assert arrays is not None
    return arrays


def part_of(variables: list[Any], make_optimizer: Any, num_workers: int = 1, num_metrics: int = 0) -> Any:
    """These variables as the only part of a model, on this process's CPU."""
    from tf2dist.training.parameter_server.server import PartSpec

    return PartSpec("CPU:0", variables, [], make_optimizer, num_workers, num_metrics)


def server_of(config: RunConfig, *part: Any, **more: Any) -> Any:
    """A ps of one part, see `part_of`, with the algorithm of a configuration."""
    from tf2dist.training.parameter_server.algorithms import algorithm_of
    from tf2dist.training.parameter_server.server import ParameterServer

    return ParameterServer(part_of(*part, **more), algorithm_of(config))


def assert_exact(loop: Any, steps: int) -> None:
    """Asserts that the loop has applied exactly this many updates, and that every ps has counted all of them."""
    assert loop.progress.global_step == steps
    assert loop.updates_applied() == steps
    assert sum(loop.progress.local_steps) == steps
    for server in loop._graphs.servers:
        counts = server.counters.now()
        assert counts.applied == steps
        assert counts.staleness.sum() == steps, "staleness is measured at every update"
