"""Runs one command line, from what Hydra has composed to its result and its picture; `fit` shares some of the steps.

The frame of every command that trains handles signals from its very start, shows an error as one line, and exits with
the right code. The steps before the tasks of a run are started and after they have ended are the same for the command
line and for `fit`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from hydra._internal.hydra import Hydra
from omegaconf import DictConfig

from tf2dist.cluster.addresses import check_control_ports, check_not_public, exposure_warning
from tf2dist.cluster.reachability import Wait, check_no_alias, check_own_address, wait_for_own_name
from tf2dist.cluster.sources import find_place, of_engine
from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config import load
from tf2dist.config.compose import ERRORS, Loader, hydra_message
from tf2dist.config.load import run_dir_of, to_config
from tf2dist.config.schema import RunConfig
from tf2dist.data import location
from tf2dist.errors import ConfigError, Interrupted, RequestError, TfDistError, printable
from tf2dist.files import set_keras_home
from tf2dist.hosts.connections import MAX_MESSAGE_BYTES
from tf2dist.hosts.identity import job_key
from tf2dist.launch.console import DRAIN_SECS, Console, Unblocked, prepare_streams, print_result, result_lines
from tf2dist.launch.host_run import HostRun, Session
from tf2dist.launch.host_tasks import run_host
from tf2dist.launch.run_dir import can_go_on, how_to_go_on, locked, make_run_dir
from tf2dist.launch.warm_process import lend
from tf2dist.linux import allow_open_files, child_environment, code_command
from tf2dist.signals import Signals, StopRequest


def run_in_folder(
    config: RunConfig,
    place: Place,
    console: Console,
    started_at: float,
    stop: StopRequest,
    session: Session | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Makes the run directory and runs in it; see `run_host`.

    Returns:
        The run directory and the summary.

    Raises:
        ConfigError: the directory cannot be used.
        Interrupted: by a signal; says how to go on if something was saved.
    """
    run_dir = make_run_dir(config)
    config.run_dir = str(run_dir)  # after a failure `fit` looks here for what the run has left
    try:
        return run_dir, run_host(HostRun(config, place, run_dir, console, started_at, stop, session))
    except Interrupted as error:
        # Only here: a run may be stopped before it knows of the checkpoints of the run that it resumes.
        if not can_go_on(run_dir):
            raise
        advice = f"{error.more}; {how_to_go_on(run_dir, in_python=session is not None)} to go on"
        raise Interrupted(error.signum, advice) from None


def check_config(config: RunConfig, place: Place) -> None:
    """Checks the configuration by itself, without looking at hosts or data. Raises ConfigError."""
    location.check_batch_size(config, place.cluster.num_workers)
    check_simulated(config, place.cluster)
    check_open_files(place.cluster)


def check_local(config: RunConfig) -> None:
    """Checks a configuration with cluster=local by itself. Raises ConfigError."""
    check_config(config, find_place(config, {}))


def check_simulated(config: RunConfig, cluster: Cluster) -> None:
    """Checks that there are as many delays as workers, and that there is the worker that pauses."""
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


def check_open_files(cluster: Cluster) -> None:
    """Checks that tasks may open the files they need. Raises ConfigError."""
    needed = cluster.open_files
    if (limit := allow_open_files(needed)) < needed:
        raise ConfigError(
            f"ulimit -n ({limit}): a process may open too few files for a task; raise it to {needed:,} or more"
        )


def check_place(config: RunConfig, cluster: Cluster, task: Task, console: Console) -> None:
    """Checks what many hosts need: a job token, addresses; waits until this host knows its own task's name."""
    # The peers would drop a longer message as damaged. Half of its bytes are for what a host tells of itself.
    length, longest = len(json.dumps([config.as_tree(), cluster.jobs])), MAX_MESSAGE_BYTES // 2
    if length > longest:
        raise ConfigError(
            f"the configuration, with its host list, has {length:,} bytes: at most {longest:,} can be sent to other "
            "hosts; shorten lists and arguments, a plugin can read a file instead"
        )
    check_control_ports(cluster, config.cluster.control_port_shift)
    job_key(os.environ, cluster, warn=lambda _: None)  # only checked here; the meeting gives its warning
    checked = config.cluster.check_address
    wait_for_own_name(cluster, task, config.startup_timeout_secs, console.note, must_lead_here=checked)
    check_not_public(cluster, task, allow_public=config.cluster.allow_public)
    if checked:
        check_no_alias(cluster, task, config.startup_timeout_secs, console.note)
        check_own_address(cluster, task)


MAX_LINE_CHARS = 300

Run = Callable[[list[str], float, Signals], None]
Draw = Callable[[RunConfig, Place, Console], None]  # training.png, at the end of a run


def run_command(run: Run, argv: list[str] | None = None) -> NoReturn:
    """Runs one command line and exits: see `errors` for the codes.

    Args:
        run: takes the arguments, `time.time()` at the start, and the signals.
        argv: None for those of this process.
    """
    started_at = time.time()
    prepare_streams()
    arguments = sys.argv[1:] if argv is None else argv
    set_keras_home()
    with Signals() as signals:
        try:
            code = run_and_report(run, arguments, started_at, signals)
        except KeyboardInterrupt:  # a signal before there was anything to stop
            code = report(Interrupted(signals.signum))
    sys.exit(code)


def run_and_report(run: Run, arguments: list[str], started_at: float, signals: Signals) -> int:
    """Runs one command line; prints its error, if there is one, and returns the exit code."""
    try:
        run(arguments, started_at, signals)
    except TfDistError as error:
        return report(error)
    return 0


def report(error: TfDistError) -> int:
    """Writes the error's lines for the user; returns its exit code."""
    text = brief(str(error)) if isinstance(error, RequestError) else str(error)
    stream = Unblocked(sys.stderr)
    with contextlib.suppress(OSError):  # nobody can read the error; the exit code remains
        print(printable(f"tf2dist: error: {text}"), file=stream, flush=True)
        stream.drain(DRAIN_SECS)
    return error.exit_code


def brief(text: str) -> str:
    """At most three lines of at most `MAX_LINE_CHARS`, without control characters that a value may hold."""
    lines = text.splitlines()
    if len(lines) > 3:
        lines = [*lines[:2], f"and {len(lines) - 2} more; python -m tf2dist.doctor with the same options shows all"]
    lines = [printable(line) for line in lines]
    half = MAX_LINE_CHARS // 2 - 2  # the option's name is at the beginning, the advice at the end
    return "\n".join(line if len(line) <= MAX_LINE_CHARS else f"{line[:half]}...{line[-half:]}" for line in lines)


def start_run(
    hydra: Hydra, name: str, overrides: list[str], composed: DictConfig, started_at: float, signals: Signals, draw: Draw
) -> None:
    """Checks what Hydra has composed, and runs it once; exits with the code of a run that has failed.

    Args:
        name: of the primary configuration file.
        overrides: of the command line, from which Hydra has composed.
    """
    config, place = checked(composed, os.environ)
    check_engine(config, overrides, os.environ)
    config.run_dir = run_dir_of(composed, config)
    console = Console()
    prepare(config, place, console)
    # Made before Hydra does, so that it is accessible by its owner alone, and no other run is disturbed.
    run_dir = make_run_dir(config)
    config.run_dir = composed.hydra.run.dir = str(run_dir)
    if place.leads:
        with locked(run_dir, wait=Wait(config.startup_timeout_secs, console.note)):
            pass
    cast(Loader, hydra.config_loader).keep(composed)
    begun = []

    def task(_: DictConfig) -> int:
        begun.append(True)
        return train(config, place, console, started_at, signals, draw)[1]

    try:
        code = hydra.run(name, task, overrides).return_value
    except ERRORS as error:
        if begun:
            raise
        if not isinstance(error, OSError):  # of a callback, for example
            raise ConfigError(hydra_message(error)) from None
        raise ConfigError(
            f"run_dir ({run_dir}): .hydra in it cannot be written ({error.strerror}); make room, or name another"
        ) from None
    if code:
        sys.exit(code)


def checked(composed: DictConfig, environ: Mapping[str, str]) -> tuple[RunConfig, Place]:
    """The configuration, and the place of this process in the cluster. Raises RequestError."""
    config = to_config(composed, environ.get("TF_CONFIG"))
    return config, find_place(config, environ)


def check_engine(config: RunConfig, overrides: list[str], environ: Mapping[str, str]) -> None:
    """Refuses a local cluster in each task of an engine, unless the command line asks for it. Raises ConfigError."""
    if config.cluster.kind == "local" and (engine := engine_around(overrides, environ)):
        raise ConfigError(
            "cluster (local): an engine has started this process as one of several, each of which would train alone; "
            f"add cluster={engine}, or cluster=local if that is meant"
        )


def engine_around(overrides: list[str], environ: Mapping[str, str]) -> str | None:
    """The engine that has started this process as one of several, unless the command line chooses a cluster."""
    return None if any(override.startswith("cluster=") for override in overrides) else of_engine(environ)


def prepare(config: RunConfig, place: Place, console: Console) -> None:
    """Checks the request as far as possible without creating anything, and finds or downloads the data.

    Raises:
        RequestError: it cannot be run.
    """
    # What the configuration alone shows, before anything is looked up or downloaded.
    check_config(config, place)

    # The place of this task among those of other commands.
    if place.has_peers:
        check_place(config, *place, console)
    for text in load.notes(config.keras):
        console.note(text)
    if place.has_peers and (text := exposure_warning(*place)):
        console.warn(text)
    # Each command sees its host's data only. Either all fall back to other data or none does, so none may.
    if not place.cluster.is_managed:
        config.data = replace(config.data, offline="fail")

    # The data, which a ps does not read.
    if place.task.job != "ps":
        config.data = location.resolve(config.data, console.warn)
    check_config(config, place)  # again: it may be another data set now


def train(
    config: RunConfig, place: Place, console: Console, started_at: float, signals: Signals, draw: Draw
) -> tuple[dict[str, Any], int]:
    """Runs, tells an error, and draws the picture after all that the user waits for; returns summary and exit code."""
    summary: dict[str, Any] = {}
    code = 0
    try:
        run_dir, summary = run_in_folder(config, place, console, started_at, signals)
        if summary:
            lines = result_lines(summary, str(run_dir))
            print_result(lines, console, "the result", f"; it is in {run_dir}/summary.json")
    except TfDistError as error:
        code = report(error)
        if isinstance(error, RequestError):  # nothing was trained
            return summary, code
    with contextlib.suppress(KeyboardInterrupt):
        draw(config, place, console)
    return summary, code


JOB_POLL_SECS = 0.1
JOB_STOP_SECS = 2.0  # for a job to end what it has started
# The command of a job. If its parent is killed, the kernel sends the job SIGTERM, and the warm process that it was lent
# ends its fork server.
RUN_JOB = (
    "from tf2dist import linux; linux.die_with_parent(int(sys.argv.pop(1)), linux.signal.SIGTERM)\n"
    "from tf2dist.__main__ import main; main()"
)


def run_job(
    arguments: list[str], stop: StopRequest, output: IO[bytes], while_it_runs: Callable[[], None] = lambda: None
) -> int:
    """Runs a command of tf2dist to its end, or until a signal comes, which ends it at once; returns its exit code.

    Args:
        arguments: of the command.
        stop: the request to this process, which may come while it runs.
        output: a file for what it prints.
        while_it_runs: called ten times a second.
    """
    if stop.signum:
        return 128 + stop.signum
    command = code_command(RUN_JOB, str(os.getpid()), *arguments)
    lent, descriptors = lend()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=child_environment() | lent,
        pass_fds=descriptors,
    )
    while not stop.signum:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(JOB_POLL_SECS)
            # A shell gives the same code for a process that a signal has killed.
            return code if code >= 0 else 128 - code
        while_it_runs()
    # Ctrl-C on a terminal has reached the job, too, which begins to save. Two different signals ask for an end at once,
    # see `signals.is_impatient`. What the kernel kills then leaves nothing behind, but is not waited for.
    process.send_signal(signal.SIGINT)
    for end in (process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(JOB_STOP_SECS)
            break
    return 128 + stop.signum
