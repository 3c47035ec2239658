"""Runs the tasks of one command on this host, from the choice of the cluster to summary.json."""

import contextlib
import functools
import json
import os
import re
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config.schema import RunConfig
from tf2dist.errors import Interrupted, Left, TrainingError
from tf2dist.files import as_json, write_whole
from tf2dist.hosts.identity import identity_of, job_key
from tf2dist.hosts.meeting import Meeting
from tf2dist.launch.console import Console, last_evaluation
from tf2dist.launch.launcher import Launcher, environment_of
from tf2dist.launch.monitor import Caller, Monitor, Tasks
from tf2dist.launch.run_dir import Lock, how_to_go_on, locked
from tf2dist.signals import StopRequests


def on_free_ports(cluster: Cluster, launcher: Launcher, restarts: int) -> Cluster:
    """A managed cluster with the ports that it has after this number of restarts of all tasks.

    In a private network no other program can take a port. Elsewhere one may have done so since the ports were
    found to be free, so a restart uses others.
    """
    num_tasks = len(cluster.tasks)
    # Each restart takes the next ports, and begins again with the first when too few are left.
    first = 0 if launcher.isolated else restarts * num_tasks % (len(launcher.ports) - num_tasks + 1)
    return cluster.at_ports(launcher.ports[first:])


def supervise(
    config: RunConfig,
    run_dir: Path,
    place: Place,
    console: Console,
    started_at: float,
    signals: StopRequests,
    caller: Caller | None = None,
) -> dict[str, Any]:
    """Runs all tasks of a managed cluster, or this host's one task, to their end.

    Args:
        caller: of `fit`; None for the command line.

    Returns:
        The summary, which is in summary.json too; empty if the task that makes it runs elsewhere.

    Raises:
        ConfigError: another run uses the directory.
        TaskFailure: a task failed; the message has the first failure in full, and a line for each of the others.
        TaskLostError: the tasks could not be started.
        TrainingError: the result could not be written, or its weights could not be saved, or the run has lost its
            directory to another one.
        Interrupted: by a signal; everything has been saved and stopped in order.
        Left: by a signal that has ended the task of this host alone.
    """
    launcher = Launcher(run_dir / "logs", isolate=place.cluster.is_managed, env=environment_of(config))
    with contextlib.ExitStack() as stack:
        # Only the leader writes checkpoints and results, and on a shared file system all tasks may have one directory.
        lock = stack.enter_context(locked(run_dir)) if place.leads else None
        # Signals are only recorded until the launcher has ended the tasks: a KeyboardInterrupt in the middle of that
        # would leave some of them running.
        received = stack.enter_context(signals.deferred())
        stack.enter_context(console)
        with launcher:
            return run_tasks(config, run_dir, place, launcher, lock, console, started_at, received, caller)


def run_tasks(
    config: RunConfig,
    run_dir: Path,
    place: Place,
    launcher: Launcher,
    lock: Lock | None,
    console: Console,
    started_at: float,
    received: list[int],
    caller: Caller | None,
) -> dict[str, Any]:
    """Runs the tasks of this host to their end, and writes the summary; see `supervise`."""
    with contextlib.ExitStack() as stack:
        console.status("starting TensorFlow")
        # While TensorFlow is imported, the processes of a cluster of many hosts meet.
        meeting = stack.enter_context(meeting_of(config, *place, console, caller)) if place.has_peers else None
        begun = functools.partial(note_begin, config, run_dir, lock, console)
        tasks = tasks_of(config, run_dir, place, started_at, launcher, caller)
        check = functools.partial(check_signals, received, tasks)
        monitor = Monitor(launcher, console, config, meeting, received, begun, caller)
        if meeting:
            meeting.join(config.startup_timeout_secs, check)
        launcher.wait_ready(check)
        if not place.has_address:
            console.note(
                f"{place.task} has no address in the cluster: it follows the checkpoints in {run_dir} to the last "
                f"one, and is not told if {tasks.leader} fails"
            )
        if place.cluster.is_managed and not launcher.isolated:
            console.warn("this system allows no private network: other hosts can reach the ports of this cluster")
        if caller:
            caller.connect(functools.partial(launcher.send_to_task, tasks.leader))
        at_address = f" at {place.cluster.address(place.task)}" if place.has_peers else ""
        console.status(f"starting {', '.join(tasks.names)}{at_address}")
        summary = monitor.run(tasks)
        if summary:
            write_summary(run_dir, lock, summary)
            check_saved(summary, how_to_go_on(run_dir, in_python=caller is not None))
        return summary


def tasks_of(
    config: RunConfig,
    run_dir: Path,
    place: Place,
    started_at: float,
    launcher: Launcher,
    caller: Caller | None,
) -> Tasks:
    """The tasks to run on this host: all of a managed cluster, or the one of this command."""
    cluster = place.cluster

    def start(name: str, restarts: int) -> None:
        # Fixed at each start: a managed cluster uses other ports after a restart.
        current = on_free_ports(cluster, launcher, restarts) if cluster.is_managed else cluster
        payload = payload_of(config, current, Task.parse(name), run_dir, started_at, caller)
        launcher.start(name, "tf2dist.task:main", payload, sys_path=caller.sys_path if caller else None)

    tasks = cluster.tasks if cluster.is_managed else [place.task]
    may_leave = config.task.on_term == "leave" and place.has_peers and cluster.can_lose(place.task)
    return Tasks([str(task) for task in tasks], str(cluster.leader), start, may_leave)


def check_signals(received: list[int], tasks: Tasks) -> None:
    """Raises Interrupted if this process has got a signal, or Left if its task may leave."""
    if tasks.may_leave and received[:1] == [signal.SIGTERM]:
        raise Left(tasks.names[0])
    if received:
        raise Interrupted(received[0])


def payload_of(
    config: RunConfig, cluster: Cluster, task: Task, run_dir: Path, started_at: float, caller: Caller | None
) -> dict[str, Any]:
    """The payload of a task, for `task.main`."""
    # It is sent as JSON, so it holds text and lists instead of objects.
    return {
        "config": config.to_yaml(),
        "cluster": asdict(cluster),
        "task": (task.job, task.index),
        "run_dir": str(run_dir),
        "started_at": started_at,
        "job": str(caller.job) if caller else None,
    }


def meeting_of(config: RunConfig, cluster: Cluster, task: Task, console: Console, caller: Caller | None) -> Meeting:
    """The meeting with the launching processes of the cluster's other tasks; it begins with its `with` block."""
    key = job_key(os.environ, cluster, console.warn)
    shift = config.cluster.control_port_shift
    return Meeting(
        cluster,
        task,
        identity_of(config, cluster, task, caller.identity if caller else None),
        key,
        console.note,
        lost_after_secs=config.silence_secs,
        port_shift=shift,
    )


def note_begin(config: RunConfig, run_dir: Path, lock: Lock | None, console: Console) -> None:
    """Writes this run's configuration into the run directory, and removes an earlier run's summary and picture.

    Called once training can begin: a run that fails before that leaves the earlier result alone.

    Raises:
        TrainingError: another run has the directory now, and the summary may be that one's.
    """
    if lock:
        lock.check()
    try:
        for name in ("summary.json", "training.png"):
            (run_dir / name).unlink(missing_ok=True)
        write_whole(run_dir / "config.yaml", config.to_yaml())
    except OSError as error:
        console.warn(f"config.yaml could not be written ({error.strerror}); the training goes on")


def check_saved(summary: dict[str, Any], advice: str) -> None:
    """Raises TrainingError if the weights behind the result could not be saved."""
    if (step := summary.get("global_step")) != summary.get("saved_step"):  # a prediction has none
        raise TrainingError(
            f"step {step} could not be saved: the weights behind the result ({last_evaluation(summary).strip()}) "
            f"are lost; make room, and {advice} to go on from the checkpoint before"
        )


def write_summary(run_dir: Path, lock: Lock | None, summary: dict[str, Any]) -> None:
    """Writes summary.json, whole or not at all.

    Raises:
        TrainingError: it cannot be written, or another run has the directory now.
    """
    # A list of counts, which may have a thousand, on one line. Texts hold no line breaks in JSON.
    text = re.sub(r"\[\n[\d,\s]+\]", lambda counts: as_json(json.loads(counts[0])), as_json(summary, indent=2))
    try:
        if lock:
            lock.check()
        write_whole(run_dir / "summary.json", text + "\n")
    except (OSError, TrainingError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{run_dir / 'summary.json'}: could not be written ({reason}); its content would be"
        raise TrainingError(f"{message}\n{as_json(summary)}") from None
