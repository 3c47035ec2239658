"""Runs the tasks of one command on this host, from the choice of the cluster to summary.json.

`monitor` watches them and starts them again, by the policy in `failures`.
"""

import contextlib
import functools
import json
import os
import re
import resource
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tf2dist.cluster.reachability import Wait
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import Interrupted, TaskLeft, TrainingError, brief_reason
from tf2dist.files import as_json, warning, write_whole
from tf2dist.hosts.identity import identity_of, job_key
from tf2dist.hosts.meeting import Meeting
from tf2dist.launch.console import last_evaluation
from tf2dist.launch.host_run import HostRun
from tf2dist.launch.launcher import Launcher, environment_of
from tf2dist.launch.monitor import Monitor, Tasks
from tf2dist.launch.run_dir import Lock, how_to_go_on, locked


def on_free_ports(cluster: Cluster, launcher: Launcher, restarts: int) -> Cluster:
    """A managed cluster with the ports that it has after this number of restarts of all tasks.

    In a private network no other program can take a port. Elsewhere one may have done so since the ports were
    found to be free, so a restart uses others.
    """
    num_tasks = len(cluster.tasks)
    # Each restart takes the next ports, and begins again with the first when too few are left.
    first = 0 if launcher.isolated else restarts * num_tasks % (len(launcher.ports) - num_tasks + 1)
    return cluster.at_ports(launcher.ports[first:])


def run_host(run: HostRun) -> dict[str, Any]:
    """Runs all tasks of a managed cluster, or this host's one task, to their end.

    Returns:
        The summary, which is in summary.json too; empty if the task that makes it runs elsewhere.

    Raises:
        ConfigError: another run uses the directory.
        TaskFailure: a task failed; the message has the first failure in full, and a line for each of the others.
        TaskLostError: the tasks could not be started, or a process of another host has locked the directory.
        TrainingError: the result could not be written, or its weights could not be saved, or the run has lost its
            directory to another one.
        Interrupted: by a signal; everything has been saved and stopped in order.
        TaskLeft: by a signal that has ended the task of this host alone.
    """
    launcher = Launcher(run.run_dir / "logs", isolate=run.place.cluster.is_managed, env=environment_of(run.config))
    with contextlib.ExitStack() as stack:
        # Only the leader writes checkpoints and results, and on a shared file system all tasks may have one directory.
        lock = stack.enter_context(locked_for(run)) if run.place.leads else None
        # Signals are only recorded until the launcher has ended the tasks: a KeyboardInterrupt in the middle of that
        # would leave some of them running.
        stack.enter_context(run.stop.deferred())
        stack.enter_context(run.console)
        with launcher:
            return run_tasks(run, launcher, lock)


def locked_for(run: HostRun) -> contextlib.AbstractContextManager[Lock]:
    """The run directory, locked; waits for another host's lock, unless this process is asked to stop."""
    wait = Wait(run.config.startup_timeout_secs, run.console.note)
    return locked(run.run_dir, wait=wait, check=functools.partial(check_stop, run))


def run_tasks(run: HostRun, launcher: Launcher, lock: Lock | None) -> dict[str, Any]:
    """Runs the tasks of this host to their end, and writes the summary; see `run_host`."""
    place, console, session = run.place, run.console, run.session
    with contextlib.ExitStack() as stack:
        console.status("starting TensorFlow")
        # While TensorFlow is imported, the processes of a cluster of many hosts meet.
        meeting = stack.enter_context(meeting_of(run)) if place.has_peers else None
        tasks = tasks_of(run, launcher)
        check = functools.partial(check_stop, run)
        monitor = Monitor(run, launcher, meeting, functools.partial(note_begin, run, lock))
        if meeting:
            meeting.join(run.config.startup_timeout_secs, check)
        launcher.wait_ready(check)
        if not place.has_address:
            console.note(
                f"{place.task} has no address in the cluster: it follows the checkpoints in {run.run_dir} to the last "
                f"one, and is not told if {tasks.leader} fails"
            )
        if place.cluster.is_managed and not launcher.isolated:
            console.warn("this system allows no private network: other hosts can reach the ports of this cluster")
        if session:
            session.connect(functools.partial(launcher.send_to_task, tasks.leader))
        at_address = f" at {place.cluster.address(place.task)}" if place.has_peers else ""
        console.status(f"starting {', '.join(tasks.names)}{at_address}")
        summary = monitor.run(tasks)
        if summary:
            if lock:
                restore_config(run, lock)
            write_summary(run.run_dir, lock, summary)
            check_saved(summary, how_to_go_on(run.run_dir, in_python=session is not None))
        return summary


def tasks_of(run: HostRun, launcher: Launcher) -> Tasks:
    """The tasks to run on this host: all of a managed cluster, or the one of this command."""
    cluster, task = run.place

    def start(name: str, restarts: int) -> None:
        # Fixed at each start: a managed cluster uses other ports after a restart.
        current = on_free_ports(cluster, launcher, restarts) if cluster.is_managed else cluster
        payload = payload_of(run, current, Task.parse(name))
        launcher.start(name, "tf2dist.task:main", payload, sys_path=run.session.sys_path if run.session else None)

    tasks = cluster.tasks if cluster.is_managed else [task]
    return Tasks([str(each) for each in tasks], str(cluster.leader), start)


def check_stop(run: HostRun) -> None:
    """Raises Interrupted if this process was asked to stop, or TaskLeft if its task may leave."""
    if run.may_leave and run.stop.signum == signal.SIGTERM:
        raise TaskLeft(str(run.place.task))
    if run.stop.signum:
        raise Interrupted(run.stop.signum)


def payload_of(run: HostRun, cluster: Cluster, task: Task) -> dict[str, Any]:
    """The payload of a task, for `task.main`."""
    # It is sent as JSON, so it holds no objects.
    return {
        "config": run.config.as_tree(),
        "cluster": asdict(cluster),
        "task": (task.job, task.index),
        "run_dir": str(run.run_dir),
        "started_at": run.started_at,
        "job": str(run.session.job) if run.session else None,
    }


def meeting_of(run: HostRun) -> Meeting:
    """The meeting with the launching processes of the cluster's other tasks; it begins with its `with` block."""
    cluster, task = run.place
    return Meeting(
        cluster,
        task,
        identity_of(run.config, cluster, task, run.session.identity if run.session else None),
        job_key(os.environ, cluster, run.console.warn),
        run.console.note,
        lost_after_secs=run.config.silence_secs,
        port_shift=run.config.cluster.control_port_shift,
    )


def note_begin(run: HostRun, lock: Lock | None) -> None:
    """Writes this run's configuration into the run directory, and removes an earlier run's summary and picture.

    Called once training can begin: a run that fails before that leaves the earlier result alone.
    """
    if lock:
        lock.check()
    with warning(run.console.warn, "config.yaml could not be written", "the training goes on"):
        for name in ("summary.json", "training.png"):
            (run.run_dir / name).unlink(missing_ok=True)
        write_whole(run.run_dir / "config.yaml", run.config.to_yaml())


def restore_config(run: HostRun, lock: Lock) -> None:
    """Writes config.yaml again if the run directory was removed, and then made again for the next checkpoint.

    Without it the result could be neither used for predictions nor gone on with.
    """
    if lock.is_gone and not (run.run_dir / "config.yaml").exists():
        run.console.warn(
            f"run_dir ({run.run_dir}): was removed or moved during the run; what was in it before is not in it now, "
            "such as its metrics and logs"
        )
        with warning(run.console.warn, "config.yaml could not be written", "tf2dist.predict will refuse the directory"):
            (run.run_dir / "logs").mkdir(mode=0o700, exist_ok=True)  # by which the next run knows the directory
            write_whole(run.run_dir / "config.yaml", run.config.to_yaml())


def check_saved(summary: dict[str, Any], advice: str) -> None:
    """Raises TrainingError if the weights behind the result could not be saved."""
    if lost := lost_weights(summary):
        is_limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
        room = "raise ulimit -f or make room" if is_limited else "make room"
        raise TrainingError(f"{lost}; {room}, and {advice} to go on from the checkpoint before")


def lost_weights(summary: dict[str, Any]) -> str:
    """The words for weights that could not be saved; "" if they were, or if there are none."""
    if (step := summary.get("global_step")) == summary.get("saved_step"):  # a prediction has none
        return ""
    result = last_evaluation(summary).strip()
    return f"step {step} could not be saved: the weights behind the result ({result}) are lost"


def write_summary(run_dir: Path, lock: Lock | None, summary: dict[str, Any]) -> None:
    """Writes summary.json, whole or not at all."""
    # A list of counts, which may have a thousand, on one line. Texts hold no line breaks in JSON.
    text = re.sub(r"\[\n[\d,\s]+\]", lambda counts: as_json(json.loads(counts[0])), as_json(summary, indent=2))
    try:
        if lock:
            lock.check()
        write_whole(run_dir / "summary.json", text + "\n")
    except (OSError, TrainingError) as error:
        lost = f", and {words}" if (words := lost_weights(summary)) else ""
        message = (
            f"{run_dir / 'summary.json'}: could not be written ({brief_reason(error)}){lost}; its content would be"
        )
        raise TrainingError(f"{message}\n{as_json(summary)}") from None
