"""Entry of the command: reads the request, refuses it in a line or runs it, and exits with the right code."""

import argparse
import contextlib
import io
import os
import shutil
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra import main as hydra_main
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig

from tf2dist import __version__
from tf2dist.cluster import parsing
from tf2dist.cluster.addresses import exposure
from tf2dist.cluster.spec import HostTask
from tf2dist.config import keras_settings
from tf2dist.config.compose import ERRORS, Loader, in_quotes, opened, prepared, setting, what_hydra_says
from tf2dist.config.flags import parse, source_of
from tf2dist.config.help import help_text
from tf2dist.config.load import to_config
from tf2dist.config.paths import expand, is_path
from tf2dist.config.schema import RunConfig
from tf2dist.config.sweeps import is_basic, jobs_of
from tf2dist.config.tree import as_written
from tf2dist.data import location
from tf2dist.errors import ConfigError, Interrupted, RequestError, TfDistError
from tf2dist.launch.command import report, run_command
from tf2dist.launch.console import Console, result_lines
from tf2dist.launch.jobs import finished_summary
from tf2dist.launch.run_dir import locked, make_run_dir, why_not_private
from tf2dist.launch.start import check_alone, check_place, draw_training, run_in_folder
from tf2dist.launch.streams import say
from tf2dist.launch.sweep import OPTION, Failed, JobsFailed, begin, check_same, read_rows
from tf2dist.signals import Signals


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs one command line and exits: see `errors` for the codes."""
    run_command(run, argv)


def run(arguments: list[str], started_at: float, signals: Signals) -> None:
    """Runs the action of one command line: prints what a flag asks for, runs a sweep, or trains."""
    if "--version" in arguments:
        show(f"tf2dist {__version__}\n")
        return
    asked = parse(arguments)
    if asked.help:
        show(help_text(shutil.get_terminal_size((120, 24)).columns))
    elif asked.experimental_rerun is not None:
        rerun(asked.experimental_rerun, started_at, signals)
    else:
        source = source_of(asked)
        with opened(source) as hydra:
            asked.config_name = source.name
            if asked.cfg or asked.info or asked.shell_completion or asked.hydra_help:
                show(shown(hydra, asked))
            else:
                start(hydra, asked, started_at, signals)


def shown(hydra: Hydra, asked: argparse.Namespace) -> str:
    """What Hydra prints for a flag. Raises ConfigError if the command line is wrong."""
    name = asked.config_name
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()) as refusal:
        try:
            if asked.shell_completion:
                hydra.shell_completion(name, asked.overrides)
            elif asked.hydra_help:
                hydra.hydra_help(name, get_args_parser(), asked)
            else:
                overrides = prepared(asked.overrides, os.environ.get("TF_CONFIG") or None)
                if asked.cfg:
                    hydra.show_cfg(name, overrides, asked.cfg, asked.package, asked.resolve)
                else:
                    hydra.show_info(asked.info, name, overrides)
        except SystemExit:  # of --package
            raise ConfigError(" ".join(refusal.getvalue().split())) from None
        except ERRORS as error:
            raise ConfigError(what_hydra_says(error)) from None
    return text.getvalue()


def start(hydra: Hydra, asked: argparse.Namespace, started_at: float, signals: Signals) -> None:
    """Runs what the flags and overrides ask for: once, or in several jobs."""
    tf_config = os.environ.get("TF_CONFIG") or None
    overrides = prepared(asked.overrides, tf_config)
    if asked.multirun or "hydra.mode=MULTIRUN" in overrides:
        run_sweep(hydra, asked.config_name, [*overrides, "hydra.mode=MULTIRUN"], signals)
        return
    composed = hydra.compose_config(asked.config_name, overrides, RunMode.RUN)
    if composed.hydra.mode == RunMode.MULTIRUN:  # by a file
        run_sweep(hydra, asked.config_name, [*overrides, "hydra.mode=MULTIRUN"], signals)
        return
    config, host_task = checked(composed, tf_config)
    config.run_dir = run_dir_of(composed, config)
    console = Console()
    prepare(config, host_task, console)
    # Made before Hydra does, so that it is accessible by its owner alone, and no other run is disturbed.
    run_dir = make_run_dir(config)
    config.run_dir = composed.hydra.run.dir = str(run_dir)
    if host_task is None or host_task.leads:
        with locked(run_dir):
            pass
    cast(Loader, hydra.config_loader).keep(composed)
    begun = []

    def task(_: DictConfig) -> int:
        begun.append(True)
        return train(config, host_task, console, started_at, signals)[1]

    try:
        code = hydra.run(asked.config_name, task, overrides).return_value
    except ERRORS as error:
        if begun:
            raise
        if not isinstance(error, OSError):  # of a callback, for example
            raise ConfigError(what_hydra_says(error)) from None
        raise ConfigError(
            f"run_dir ({run_dir}): .hydra in it cannot be written ({error.strerror}); make room, or name another"
        ) from None
    if code:
        sys.exit(code)


def run_dir_of(composed: DictConfig, config: RunConfig) -> str | None:
    """The directory of a run, which has two names: ours and Hydra's.

    Raises:
        ConfigError: they differ.
    """
    if as_written(composed.hydra.run)["dir"] == "${run_dir}":
        return config.run_dir
    its = setting(composed, "hydra.run.dir")
    if config.run_dir not in (None, its):
        raise ConfigError(f"hydra.run.dir ({its}): is another name of run_dir, which is {config.run_dir}; give one")
    if not is_path(its):
        raise ConfigError(f"hydra.run.dir ({its}): is not a valid name of a directory; leave it out for the default")
    return its


def rerun(pickled: str, started_at: float, signals: Signals) -> None:
    """Runs what Hydra's callback `PickleJobInfoCallback` has saved of a run, in the same directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that other arguments are ignored
        try:
            composed, run_dir = unpickled(pickled)
        except Exception as error:  # unpickling may raise anything
            why = what_hydra_says(error)
            raise ConfigError(
                f"--experimental-rerun ({pickled}): cannot be read ({why}); name a config.pickle"
            ) from None
    config, host_task = checked(composed, os.environ.get("TF_CONFIG") or None)
    config.run_dir = run_dir
    console = Console()
    prepare(config, host_task, console)
    if code := train(config, host_task, console, started_at, signals)[1]:
        sys.exit(code)


def unpickled(path: str) -> tuple[DictConfig, str]:
    """The configuration and the directory of a run."""
    found = []

    def take(composed: DictConfig) -> None:
        found.append((composed, str(HydraConfig.get().runtime.output_dir)))

    setup_globals()  # Hydra's resolvers, which it does not make known here
    before = sys.argv
    sys.argv = [before[0], f"--experimental-rerun={path}"]  # where Hydra reads it
    try:
        hydra_main(version_base="1.3", config_path=None)(take)()
    finally:
        sys.argv = before
    return found[0]


def run_sweep(hydra: Hydra, name: str, overrides: list[str], signals: Signals) -> None:
    """Runs all jobs of a sweep by Hydra's launcher; `SweepReport` tells their results.

    Raises:
        RequestError: the command line is wrong; nothing has been made or run.
        JobsFailed: at least one of them failed; all have been tried.
        Interrupted: by a signal; the current job has saved and ended in order.
    """
    if os.environ.get("TF_CONFIG"):
        raise ConfigError("--multirun: a sweep runs on this machine alone; unset TF_CONFIG, or run the jobs one by one")
    composed = hydra.compose_config(name, overrides, RunMode.MULTIRUN)
    jobs = jobs_of(hydra, composed, check_alone)
    folder = sweep_dir_of(composed)
    begin(folder, jobs)
    # Composed again, the time in the name of the folder would be another one.
    overrides = [*overrides, f"{OPTION}={in_quotes(str(folder))}"]
    composed = hydra.compose_config(name, overrides, RunMode.MULTIRUN)
    if text := why_not_private(folder):
        Console().warn(text)
    # A job in this process raises the signal that has stopped it; one in another process is sent the signal.
    passing_on = contextlib.nullcontext() if is_basic(composed, "launcher") else signals.passed_on()
    number = 0
    with locked(folder, OPTION):
        try:
            with passing_on:
                hydra.multirun(name, sweep_job, overrides)
            number = next(iter(signals.received), 0)
        except KeyboardInterrupt as stop:
            number = stop.args[0] if stop.args else signals.received[0]
            Callbacks(composed).on_multirun_end(config=composed, config_name=name)
        except TfDistError:
            raise
        except Exception as error:  # of a launcher or a sweeper
            Callbacks(composed).on_multirun_end(config=composed, config_name=name)
            if not any(row.state == "failed" for row in read_rows(folder)):
                raise ConfigError(f"--multirun: {what_hydra_says(error)}") from error
            Console().warn(f"the sweeper gave up: {what_hydra_says(error)}")
    if number:
        raise Interrupted(number, f"; the same command with {OPTION}={folder} goes on")
    rows = read_rows(folder)
    if any(row.state == "failed" for row in rows):
        raise JobsFailed(rows, folder)


def sweep_dir_of(composed: DictConfig) -> Path:
    text = setting(composed, OPTION)
    path = expand(text)
    if not is_path(text) or path is None:
        raise ConfigError(f"{OPTION} ({text}): is not a valid name of a directory; leave it out for the default")
    return path.absolute()


_stopped_by: list[int] = []  # the signal that has stopped a job of this process, which then begins no other


def sweep_job(composed: DictConfig) -> float | Failed | None:
    """Runs one job of a sweep, in this process or in one of a launcher; returns its validation accuracy, if it has one.

    A job that is done already returns at once.
    """
    if _stopped_by:
        return Failed(128 + _stopped_by[0])
    started_at = time.time()
    run_dir, is_here = Path(HydraConfig.get().runtime.output_dir), is_basic(HydraConfig.instance().cfg, "launcher")
    with Signals() as signals:
        try:
            config, _ = checked(composed, None)
            config.run_dir = str(run_dir)
            console = Console()
            prepare(config, None, console)
            check_same(run_dir, config, f"{OPTION} ({run_dir.parent}): {run_dir.name} in it", True)
            summary, code = finished_summary(run_dir) or {}, 0
            if not summary:
                summary, code = train(config, None, console, started_at, signals)
        except KeyboardInterrupt:
            code = report(Interrupted(signals.received[0]))
        except RequestError as error:
            code = report(error)
    if signals.received:
        if is_here:
            raise KeyboardInterrupt(signals.received[0])
        _stopped_by.append(signals.received[0])
    return Failed(code) if code else summary.get("validation_accuracy")


def show(text: str) -> None:
    """Prints a text to the standard output; a reader that leaves early is no error.

    Raises:
        TfDistError: it cannot be written, for example because of a full disk.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again at its exit
        if isinstance(error, BrokenPipeError):
            return
        raise TfDistError(f"the standard output cannot be written ({error.strerror})") from None


def checked(composed: DictConfig, tf_config: str | None) -> tuple[RunConfig, HostTask | None]:
    """The configuration, and the task of this process in a cluster of many hosts. Raises RequestError."""
    config = to_config(composed, tf_config)
    return config, None if config.cluster.kind == "local" else parsing.from_config(config, tf_config)


def prepare(config: RunConfig, host_task: HostTask | None, console: Console) -> None:
    """Checks the request as far as possible without creating anything, and finds or downloads the data.

    Raises:
        RequestError: it cannot be run.
    """
    # What the configuration alone shows, before anything is looked up or downloaded.
    check_alone(config, host_task)

    # The place of this task in a cluster of many hosts.
    if host_task and host_task.has_address:
        check_place(config, *host_task, console)
    for text in keras_settings.notes(config.keras):
        console.note(text)
    if host_task:
        if host_task.has_address and (text := exposure(*host_task)):
            console.warn(text)
        # Each host sees its own data only. Either all hosts fall back to other data or none does, so none may.
        config.data = replace(config.data, offline="fail")

    # The data, which a ps does not read.
    if host_task is None or host_task.task.job != "ps":
        config.data = location.resolve(config.data, console.warn)
    check_alone(config, host_task)  # again: it may be another data set now


def train(
    config: RunConfig, host_task: HostTask | None, console: Console, started_at: float, signals: Signals
) -> tuple[dict[str, Any], int]:
    """Runs, tells an error, and draws the picture after all that the user waits for; returns summary and exit code."""
    summary: dict[str, Any] = {}
    code = 0
    try:
        run_dir, summary = run_in_folder(config, host_task, console, started_at, signals)
        if summary:
            show_result(summary, run_dir, console)
    except TfDistError as error:
        code = report(error)
        if isinstance(error, RequestError):  # nothing was trained
            return summary, code
    with contextlib.suppress(KeyboardInterrupt):
        draw_training(config, host_task, console)
    return summary, code


def show_result(summary: dict[str, Any], run_dir: Path, console: Console) -> None:
    try:
        say(result_lines(summary, str(run_dir)), sys.stdout)
    except BrokenPipeError:
        pass  # the reader has left; the run has ended well all the same
    except OSError as error:
        console.warn(f"the result could not be printed ({error.strerror}); it is in {run_dir}/summary.json")
