"""Runs a command's tasks on this host: which ones, with what environment, until what end."""

import contextlib
import functools
import json
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tf2dist import cluster as clusters
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.console import Console
from tf2dist.control import Meeting
from tf2dist.errors import Interrupted, TrainingError
from tf2dist.identity import identity_of
from tf2dist.job_token import job_key
from tf2dist.launcher import Launcher
from tf2dist.watch import Watch

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",  # 1 and below print the cluster's configuration on every task
    "GRPC_FAIL_FAST": "use_caller",  # a call to a task that is gone fails instead of waiting for it
    "KERAS_BACKEND": "tensorflow",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # that of nvidia-smi
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

    def check(self) -> None:
        """Raises `Interrupted` if a signal has come."""
        if self.received:
            raise Interrupted(self.received[0])

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
        TrainingError: the result could not be written, or its weights not be saved.
        Interrupted: by a signal; everything has been saved and stopped in order.
    """
    # What is left when the watch ends has nothing to save.
    launcher = Launcher(run_dir / "logs", isolate=this is None, env=ENVIRONMENT, grace_secs=0.0)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        stack.enter_context(launcher)
        stack.enter_context(console)
        console.status("starting TensorFlow")
        # While TensorFlow is imported, the processes of a cluster of many hosts meet.
        meeting = stack.enter_context(meeting_of(config, *this, console)) if this else None
        begun = functools.partial(note_begin, config, run_dir, console)
        watch = Watch(launcher, console, config, meeting, signals.received, begun)
        if meeting:
            meeting.join(config.startup_timeout_secs, signals.check)
        launcher.wait_ready(signals.check)
        cluster = this[0] if this else local_cluster(config, launcher, 0)
        if not this and not launcher.isolated:
            console.warn("this system allows no private network: other hosts can reach the ports of this cluster")

        def start(name: str, restarts: int) -> None:
            now = this[0] if this else local_cluster(config, launcher, restarts)
            launcher.start(name, "tf2dist.task:main", payload_of(config, now, Task.parse(name), run_dir, started_at))

        names = [str(this[1])] if this else [str(task) for task in cluster.tasks]
        where = f" at {cluster.address(this[1])}" if this else ""
        console.status(f"starting {', '.join(names)}{where}")
        summary = watch.run(names, str(cluster.leader), start)
        if summary:
            write_summary(run_dir, summary)
            check_saved(summary)
        return summary


def payload_of(config: RunConfig, cluster: Cluster, task: Task, run_dir: Path, started_at: float) -> dict[str, Any]:
    """What `task.main` wants to know."""
    return {
        "config": config.to_yaml(),
        "mode": cluster.mode,
        "jobs": cluster.jobs,
        "task": (task.job, task.index),
        "run_dir": str(run_dir),
        "started_at": started_at,
    }


def meeting_of(config: RunConfig, cluster: Cluster, task: Task, console: Console) -> Meeting:
    """The meeting with the launching processes of the cluster's other tasks, not yet begun."""
    key = job_key(os.environ, cluster, console.warn)
    shift = config.cluster.control_port_shift
    return Meeting(
        cluster,
        task,
        identity_of(config, cluster, task),
        key,
        console.note,
        lost_after_secs=config.silence_secs,
        port_shift=shift,
    )


def note_begin(config: RunConfig, run_dir: Path, console: Console) -> None:
    """What the run directory holds from now on is of this run."""
    try:
        (run_dir / "summary.json").unlink(missing_ok=True)
        (run_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    except OSError as error:
        console.warn(f"config.yaml could not be written ({error.strerror}); the training goes on")


def check_saved(summary: dict[str, Any]) -> None:
    """Raises TrainingError if the weights that gave the result are lost."""
    if (step := summary["global_step"]) != summary["saved_step"]:
        raise TrainingError(
            f"step {step} could not be saved: the weights behind the test accuracy of {summary['test_accuracy']:.4f} "
            "are lost; make room, and the same command with run_dir goes on from the checkpoint before"
        )


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json, whole or not at all.

    Raises:
        TrainingError: it cannot be written.
    """
    part = run_dir / "summary.json.part"
    text = json.dumps(summary, indent=2, allow_nan=False)
    try:
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, run_dir / "summary.json")
    except OSError as error:
        part.unlink(missing_ok=True)
        what = f"{run_dir / 'summary.json'}: could not be written ({error.strerror}); it would have said"
        raise TrainingError(f"{what}\n{json.dumps(summary)}") from None
