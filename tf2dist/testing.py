"""Clusters for tests: a pytest plugin, loaded with ``pytest_plugins = ["tf2dist.testing"]``.

    def test_updates_are_counted(ps_cluster):                 # servers in the test's own process
        with ps_cluster.strategy.scope():
            count = tf.Variable(0)
        for _ in range(100):
            ps_cluster.coordinator.schedule(tf.function(lambda: count.assign_add(1)))
        ps_cluster.coordinator.join()
        assert count.numpy() == 100

    def total(worker, value):                                 # runs in a process of its own
        strategy = worker.strategy
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(value))).numpy()

    def test_all_reduce(sync_workers):
        assert sync_workers(total, num_workers=3, args=(2.0,)) == [6.0, 6.0, 6.0]

Importing this module does not import TensorFlow; the first test that uses a fixture does.
"""

import contextlib
import functools
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tf2dist.cluster.sources import local
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import ClusterConfig, DevicesConfig, RunConfig
from tf2dist.errors import TfDistError
from tf2dist.files import write_whole
from tf2dist.launch.launcher import Launcher
from tf2dist.linux import module_path, unused_ports
from tf2dist.messages import Exited, ToLauncher

COORDINATOR = Task("chief", 0)


@dataclass(frozen=True)
class PsCluster:
    """Parameter servers and workers in this process; they last as long as the process.

    TensorFlow connects a process to one cluster at a time: making a strategy for one cluster ends
    the use of another.

    Attributes:
        cluster: the addresses; ``cluster.tf_jobs()`` is what `tf.train.ClusterSpec` takes.
    """

    cluster: Cluster

    @functools.cached_property
    def strategy(self) -> Any:
        """A `tf.distribute.ParameterServerStrategy` of the cluster, with this process as coordinator."""
        from tf2dist.process.strategy import parameter_server_strategy

        return parameter_server_strategy(self.cluster, COORDINATOR)

    @functools.cached_property
    def coordinator(self) -> Any:
        """The `ClusterCoordinator` of `strategy`."""
        import tensorflow as tf

        return tf.distribute.coordinator.ClusterCoordinator(self.strategy)


def start_ps_cluster(num_workers: int = 2, num_ps: int = 1, cpus_per_worker: int = 1) -> PsCluster:
    """Starts the servers of a cluster in this process, on free ports.

    Args:
        num_workers: the number of workers, at least 1.
        num_ps: the number of parameter servers, at least 1.
        cpus_per_worker: TensorFlow's CPU devices; a second one can stand for a GPU.
    """
    import tensorflow as tf

    from tf2dist.process.strategy import start_server

    ports = unused_ports(num_workers + num_ps + 1)
    config = RunConfig(cluster=ClusterConfig(num_workers=num_workers, num_ps=num_ps))
    cluster = local(config, {}).cluster.at_ports(ports)
    for task in cluster.tasks:
        if task != COORDINATOR:
            device_count = {"CPU": cpus_per_worker} if task.job == "worker" else {}
            start_server(cluster, task, tf.compat.v1.ConfigProto(device_count=device_count))
    return PsCluster(cluster)


@pytest.fixture(scope="session")
def ps_cluster() -> PsCluster:
    """A `PsCluster` of two workers and one ps, the same for all tests of a process."""
    return start_ps_cluster()


@dataclass(frozen=True)
class SyncWorker:
    """The first argument of a function that runs on a synchronous worker.

    Attributes:
        cluster: the addresses of all workers.
        task: which of them this is.
    """

    cluster: Cluster
    task: Task

    @property
    def index(self) -> int:
        """The number of the worker, from 0."""
        return self.task.index

    @functools.cached_property
    def strategy(self) -> Any:
        """The `MultiWorkerMirroredStrategy`; every worker must ask for it."""
        from tf2dist.process.strategy import multi_worker_mirrored_strategy

        return multi_worker_mirrored_strategy(self.cluster, self.task, RunConfig().startup_timeout_secs)


class WorkerError(AssertionError):
    """A function failed on a worker, or did not come back; the message has the worker's traceback or log."""


class SyncWorkers:
    """Runs functions on synchronous workers: processes forked from one that has TensorFlow loaded."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder, self._runs, self._next = launcher, folder, 0, 0

    def __call__(
        self,
        function: Callable[..., Any],
        num_workers: int = 2,
        args: tuple[Any, ...] = (),
        timeout_secs: float = 120.0,
    ) -> list[Any]:
        """Calls ``function(worker, *args)`` on every worker and returns what each returned, in order.

        Args:
            function: is called with a `SyncWorker`; sent by cloudpickle, as are its arguments and what it returns.
            num_workers: the number of workers, at least 1.
            args: the same for every worker.
            timeout_secs: for all of it, with the start of the workers.

        Raises:
            WorkerError: the first worker that failed, or those that were not done in time.
        """
        self._runs += 1
        deadline = time.monotonic() + timeout_secs
        while not self._launcher.ready:
            self._follow(deadline, "the fork server")
        first = self._next if self._next + num_workers <= len(self._launcher.ports) else 0
        self._next = first + num_workers  # the next call takes other ports: a used one is not free again at once
        ports = self._launcher.ports[first:]
        cluster = Cluster("sync", {"worker": tuple(f"127.0.0.1:{port}" for port in ports[:num_workers])}, True)
        call = self._folder / f"call-{self._runs}.pickle"
        call.write_bytes(cloudpickle.dumps((function, cluster, args)))
        names = [f"run-{self._runs}-worker-{index}" for index in range(num_workers)]
        for index, name in enumerate(names):
            payload = {"call": str(call), "index": index, "names": names}
            self._launcher.start(name, "tf2dist.testing:call_on_worker", payload, sys_path=module_path())
        try:
            while set(names) & set(self._launcher.tasks):
                self._follow(deadline, ", ".join(set(names) & set(self._launcher.tasks)))
                if any(path.exists() for path in map(self._error_file, names)):
                    break
        finally:
            with contextlib.suppress(TfDistError):  # the exception that is being raised tells more
                self._launcher.kill_all()
        failed = [path for path in map(self._error_file, names) if path.exists()]
        if failed:
            first_error = min(failed, key=lambda path: path.stat().st_mtime_ns)
            raise WorkerError(f"{first_error.stem}:\n{first_error.read_text()}")
        return [pickle.loads((self._folder / f"{name}.result").read_bytes()) for name in names]

    def _error_file(self, name: str) -> Path:
        return self._folder / f"{name}.error"

    def _follow(self, deadline: float, awaited: str) -> None:
        """Takes the launcher's events; writes an error file for a worker that ended without a result or an error."""
        for event in self._launcher.events(0.1):
            if not isinstance(event, Exited) or self._error_file(event.task).exists():
                continue
            if not (self._folder / f"{event.task}.result").exists():
                log = self._launcher.log_of(event.task)
                text = f"ended with code {event.code}; its log ends with\n{log[-3000:]}"
                write_whole(self._error_file(event.task), text)
        if time.monotonic() > deadline:
            logs = "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in self._folder.glob("*.log"))
            raise WorkerError(f"no answer in time from {awaited}\n{logs}")


def call_on_worker(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Entry of a worker's process.

    The process lasts until all workers have their results: another one may still be reading sums from this one.
    """
    import tensorflow as tf

    from tf2dist.process.devices import claim_gpus

    call, names = Path(payload["call"]), payload["names"]
    name = names[payload["index"]]
    function, cluster, args = cloudpickle.loads(call.read_bytes())
    try:
        task = Task("worker", payload["index"])
        claim_gpus(DevicesConfig(), cluster, task, tf.compat.v1.ConfigProto())
        result = function(SyncWorker(cluster, task), *args)
        write_whole(call.with_name(f"{name}.result"), cloudpickle.dumps(result))
    except BaseException:
        write_whole(call.with_name(f"{name}.error"), traceback.format_exc())
        return 1
    while not all(call.with_name(f"{other}.result").exists() for other in names):
        time.sleep(0.01)  # between two checks; the launcher stops all if one fails
    return 0


@pytest.fixture(scope="session")
def sync_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncWorkers]:
    """`SyncWorkers`, to be called as in ``sync_workers(function, num_workers=2, args=(1,))``."""
    from tf2dist.launch.launcher import environment_of

    folder = tmp_path_factory.mktemp("sync_workers")
    with Launcher(folder, isolate=True, env=environment_of(RunConfig())) as launcher:
        yield SyncWorkers(launcher, folder)
