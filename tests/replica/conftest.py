"""Fixtures: an asynchronous cluster in the process of the tests, and small real data."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tensorflow as tf

from tests.conftest import slowness
from tests.replica.small_runs import AS_TRACED, context_of, run_config
from tf2dist.checkpoint.snapshot import Snapshot, Weights
from tf2dist.config.schema import RunConfig
from tf2dist.linux import unused_ports
from tf2dist.testing import COORDINATOR, PsCluster, start_ps_cluster


def pytest_configure(config: pytest.Config) -> None:
    """Has synchronous workers leave their graphs as `_graphs_as_traced` does, unless slow tests may be among these."""
    if "not slow" in config.option.markexpr:
        os.environ[AS_TRACED] = "1"


@pytest.fixture(scope="session")
def cluster() -> PsCluster:
    """Four workers with two CPU devices and three ps, with the digits published for their graphs."""
    from tf2dist import data
    from tf2dist.training.parameter_server.batches import publish

    made = start_ps_cluster(num_workers=4, num_ps=3, cpus_per_worker=2)
    publish(data.load(run_config().data))
    return made


@pytest.fixture
def async_loop(cluster: PsCluster) -> Iterator[Callable[..., Any]]:
    """Yields a function that makes an `AsyncLoop` with the first `num_workers` workers and `num_ps` ps."""
    from tf2dist.training.parameter_server.async_loop import AsyncLoop

    yield from made_by(AsyncLoop.build, "async", cluster)


@pytest.fixture
def replicas_loop(cluster: PsCluster) -> Iterator[Callable[..., Any]]:
    """Yields a function that makes a `SyncReplicasLoop`, as `async_loop` does."""
    from tf2dist.training.parameter_server.sync_replicas import SyncReplicasLoop

    yield from made_by(SyncReplicasLoop.build, "sync_replicas", cluster)


@functools.lru_cache(maxsize=1)
def coordinator_address(num_workers: int, num_ps: int) -> str:
    """The coordinator's address in a cluster of this size.

    For the cluster that it is connected to TensorFlow goes on with the coordinator's server. For another one it starts
    another server, and the earlier one keeps its port, some 40 MB and 90 threads.
    """
    return f"localhost:{unused_ports(1)[0]}"


def made_by(build: Callable[..., Any], mode: str, cluster: PsCluster) -> Iterator[Callable[..., Any]]:
    """Yields a function that makes loops of a mode; at the end waits for the work of the last loop."""
    loops: list[Any] = []

    def make(
        config: RunConfig,
        num_workers: int = 2,
        num_ps: int = 2,
        start: Snapshot | Weights | None = None,
        source: Any = None,
    ) -> Any:
        settle(loops)
        sizes = {"chief": 1, "ps": num_ps, "worker": num_workers}
        jobs = {job: cluster.cluster.jobs[job][:size] for job, size in sizes.items()}
        jobs["chief"] = (coordinator_address(num_workers, num_ps),)
        part, config.mode = replace(cluster.cluster, mode=mode, jobs=jobs), mode
        loops.append(build(context_of(config, part, COORDINATOR, source), start, lambda progress: None))
        return loops[-1]

    yield make
    settle(loops)


@pytest.fixture
def publishing(cluster: PsCluster) -> Iterator[Callable[..., None]]:
    """Publishes other data for workers of this process, of which the first is the default, until the test ends."""
    from tf2dist import data
    from tf2dist.training.parameter_server.batches import publish

    yield publish
    publish(data.load(run_config().data))


def settle(loops: list[Any]) -> None:
    """Waits for the calls in flight of the newest loop; until then TensorFlow cannot connect another coordinator."""
    for loop in loops[-1:]:
        # In a thread, since the limit of the test does not end this if the test itself was ended by it.
        joining = threading.Thread(target=_join, args=[loop._coordinator], daemon=True)
        joining.start()
        joining.join(100 * slowness())
        assert not joining.is_alive(), "a call does not end"


def _join(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
    with contextlib.suppress(Exception):  # an error that the test caused
        coordinator.join()


@pytest.fixture(autouse=True)
def _graphs_as_traced(request: pytest.FixtureRequest) -> None:
    """TensorFlow's optimizer of graphs takes a quarter of the time of these tests; slow tests have it, and commands."""
    is_slow = request.node.get_closest_marker("slow") is not None
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not is_slow})
