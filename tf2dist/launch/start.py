"""The steps before the tasks of a run are started and after they have ended, for the command line and for `fit`."""

import contextlib
import json
import logging
import os
import resource
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tf2dist.cluster.addresses import check_not_public
from tf2dist.cluster.listening import check_control_ports
from tf2dist.cluster.reachability import check_no_alias, check_own_address, wait_for_own_name
from tf2dist.cluster.sources import find_place
from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config.schema import RunConfig
from tf2dist.control.token import job_key
from tf2dist.data import location
from tf2dist.errors import ConfigError, Interrupted, first_line
from tf2dist.interpreter import without_warnings
from tf2dist.launch.console import Console
from tf2dist.launch.forkserver import MAX_PACKET_BYTES
from tf2dist.launch.run_dir import can_go_on, how_to_go_on, make_run_dir
from tf2dist.launch.run_state import Caller
from tf2dist.launch.supervisor import supervise
from tf2dist.signals import StopRequests

MAX_PAYLOAD_BYTES = MAX_PACKET_BYTES - 16 * 1024  # the rest is for names of files
MIN_OPEN_FILES = 64  # with three tasks 30 are enough, and below that they end in many ways
SILENT_SECS = 3.0  # of drawing, after which a line says so; usually it takes one


def run_in_folder(
    config: RunConfig,
    place: Place,
    console: Console,
    started_at: float,
    signals: StopRequests,
    caller: Caller | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Makes the run directory and runs in it; see `supervise`.

    Returns:
        The run directory and the summary.

    Raises:
        ConfigError: the directory cannot be used.
        Interrupted: by a signal; says how to go on if something was saved.
    """
    run_dir = make_run_dir(config)
    config.run_dir = str(run_dir)  # after a failure `fit` looks here for what the run has left
    try:
        return run_dir, supervise(config, run_dir, place, console, started_at, signals, caller)
    except Interrupted as error:
        # Only here: a run may be stopped before it knows of the checkpoints of the run that it resumes.
        if not can_go_on(run_dir):
            raise
        advice = f"{error.more}; {how_to_go_on(run_dir, in_python=caller is not None)} to go on"
        raise Interrupted(error.signum, advice) from None


def check_alone(config: RunConfig, place: Place) -> None:
    """Checks the configuration by itself, without looking at hosts or data. Raises ConfigError."""
    location.check_batch_size(config, place.cluster.num_workers)
    check_simulated(config, place.cluster)
    check_size(config, place.cluster)


def check_local(config: RunConfig) -> None:
    """Checks a configuration with cluster=local by itself. Raises ConfigError."""
    check_alone(config, find_place(config, {}))


def check_simulated(config: RunConfig, cluster: Cluster) -> None:
    """Checks that there are as many delays as workers, and that there is the worker that pauses.

    Raises:
        ConfigError: there are not.
    """
    names = [str(task) for task in cluster.training_tasks]
    delays, pause = config.simulate.delay_secs, config.simulate.parsed_pause
    if delays and len(delays) != len(names):
        listed = f"[{','.join(f'{secs:g}' for secs in delays)}]"
        raise ConfigError(
            f"simulate.delay_secs ({listed}): has {len(delays)} numbers for {len(names)} workers; give each worker one"
        )
    if pause and pause.task not in names:
        raise ConfigError(
            f"simulate.pause ({config.simulate.pause}): there is no worker {pause.task} in this cluster; the workers "
            f"are {names[0]} to {names[-1]}"
        )


def check_size(config: RunConfig, cluster: Cluster) -> None:
    """Checks that the configuration fits into the one packet to a task, and that tasks may open the files they need.

    Raises:
        ConfigError: it would be too long, or they may not.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        raise ConfigError(
            f"ulimit -n ({limit}): a process may open too few files for a task; raise it to {MIN_OPEN_FILES} or more"
        )
    length = len(json.dumps([config.to_yaml(), cluster.jobs]).encode())
    if length > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"the configuration, with its host list, has {length:,} bytes: at most {MAX_PAYLOAD_BYTES:,} can be "
            "passed on to the tasks; shorten lists and arguments, a plugin can read a file instead"
        )


def check_place(config: RunConfig, cluster: Cluster, task: Task, console: Console) -> None:
    """Checks the job token and the addresses of the cluster; waits until this host knows its own task's name.

    Raises:
        ClusterError: this task cannot run here.
        TaskLostError: its name is not known on this host within `startup_timeout_secs`.
    """
    check_control_ports(cluster, config.cluster.control_port_shift)
    job_key(os.environ, cluster, warn=lambda _: None)  # only checked here; the meeting gives its warning
    checked = config.cluster.check_address
    wait_for_own_name(cluster, task, config.startup_timeout_secs, console.note, must_lead_here=checked)
    check_not_public(cluster, task, allow_public=config.cluster.allow_public)
    if checked:
        check_no_alias(cluster, task, config.startup_timeout_secs, console.note)
        check_own_address(cluster, task)


def draw_training(config: RunConfig, place: Place, console: Console) -> None:
    """Draws training.png from what a run has left, whether it is done or not; if that fails, warns and goes on."""
    if not (config.figure and place.leads and config.run_dir and Path(config.run_dir, "metrics.jsonl").exists()):
        return
    note = threading.Timer(SILENT_SECS, console.note, ["drawing training.png"])
    with contextlib.suppress(RuntimeError):  # no thread can be started
        note.start()
    try:
        with quiet_matplotlib():
            from tf2dist.launch import plotting  # importing matplotlib takes longer than all that a run imports before

            plotting.draw_run(Path(config.run_dir))
    except Exception as error:  # a damaged installation of matplotlib may raise anything
        again = shlex.join(["python", "-m", "tf2dist.plot", config.run_dir])
        reason = getattr(error, "strerror", None) or first_line(str(error)) or type(error).__name__
        console.warn(f"training.png could not be drawn ({reason}); {again} draws it")
    finally:
        note.cancel()


@contextlib.contextmanager
def quiet_matplotlib() -> Iterator[None]:
    """Keeps from the user that a font lacks a character, or that matplotlib has no folder for its cache."""
    logger = logging.getLogger("matplotlib")
    with without_warnings():
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
