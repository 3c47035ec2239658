"""Runs a command's tasks on this host: which ones, with what environment, until what end."""

import signal
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tf2dist import cluster as clusters
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.console import Console
from tf2dist.launcher import Launcher
from tf2dist.watch import Watch, write_summary

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",  # 1 and below print the cluster's configuration on every task
    "GRPC_FAIL_FAST": "use_caller",  # a call to a task that is gone fails instead of waiting for it
    "KERAS_BACKEND": "tensorflow",
    "http_proxy": "",  # gRPC would ask a proxy for the way to the next process
    "https_proxy": "",
}


class Signals:
    """Collects SIGTERM and Ctrl-C for a loop that looks at them."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def local_cluster(config: RunConfig, launcher: Launcher, restarts: int) -> Cluster:
    """The cluster of this host, after so many restarts of all tasks.

    In a private network the ports are its own. Elsewhere another program may have taken one since
    they were found to be free: a restart takes others.
    """
    num_tasks = len(clusters.local(config.mode, config.cluster, launcher.ports).tasks)
    first = 0 if launcher.isolated else restarts * num_tasks % (len(launcher.ports) - num_tasks + 1)
    return clusters.local(config.mode, config.cluster, launcher.ports[first:])


def supervise(
    config: RunConfig, run_dir: Path, this: tuple[Cluster, Task] | None, console: Console, started_at: float
) -> dict[str, Any]:
    """Runs a whole local cluster, or this host's one task, to its end.

    Args:
        this: the cluster and this process's task in it; None for a local cluster.

    Returns:
        The summary, which is in summary.json too; empty if the task that makes it runs elsewhere.

    Raises:
        TaskFailure: a task failed; it tells the first failure whole and the others in a line each.
        TaskLostError: the tasks could not be started.
        Interrupted: by a signal; everything has been saved and stopped in order.
    """

    def on_begun() -> None:
        (run_dir / "summary.json").unlink(missing_ok=True)  # not the result of what runs now
        (run_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")

    # What is left when the watch ends has nothing to save.
    launcher = Launcher(run_dir / "logs", isolate=this is None, env=ENVIRONMENT, grace_secs=0.0)
    with Signals() as signals, launcher, console:
        console.status("starting TensorFlow")
        watch = Watch(launcher, console, config, this is None, signals.received, on_begun)
        watch.wait_ready()
        if this:
            cluster, tasks = this[0], [this[1]]
        else:
            cluster = local_cluster(config, launcher, 0)
            tasks = cluster.tasks
            if not launcher.isolated:
                console.warn("this system allows no private network: other hosts can reach the ports of this cluster")

        def start(name: str, restarts: int) -> None:
            cluster = this[0] if this else local_cluster(config, launcher, restarts)
            job, _, index = name.rpartition("-")
            payload = {
                "config": config.to_yaml(),
                "mode": cluster.mode,
                "jobs": cluster.jobs,
                "task": (job, int(index)),
                "run_dir": str(run_dir),
                "started_at": started_at,
            }
            launcher.start(name, "tf2dist.task:main", payload)

        where = f" at {cluster.address(this[1])}" if this else ""
        console.status(f"starting {', '.join(map(str, tasks))}{where}")
        summary = watch.run([str(task) for task in tasks], str(cluster.leader), start)
        if summary:
            write_summary(run_dir, summary)
        return summary
