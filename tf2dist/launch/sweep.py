"""A sweep: its directory, its jobs by Hydra's launcher, and each job in the process that the launcher gives it."""

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from tf2dist import files
from tf2dist.config.compose import hydra_message, in_quotes, setting
from tf2dist.config.decode import flatten, from_yaml
from tf2dist.config.schema import RunConfig
from tf2dist.config.sweeps import Job, is_basic, jobs_of
from tf2dist.errors import ConfigError, Interrupted, RequestError, SomeFailed, TfDistError
from tf2dist.files import expand, is_path
from tf2dist.launch.console import Console
from tf2dist.launch.run_dir import finished_summary, in_shell, locked
from tf2dist.launch.single_run import Draw, check_local, checked, engine_around, prepare, report, train
from tf2dist.launch.sweep_report import RECORDS, Failed, Row, RunJob, fixed_options, print_table, read_rows, recorded
from tf2dist.signals import Signals

OPTION = "hydra.sweep.dir"


def run_sweep(hydra: Hydra, name: str, overrides: list[str], run_job: RunJob, signals: Signals) -> None:
    """Runs all jobs of a sweep by Hydra's launcher, and prints the table of their results.

    Args:
        run_job: `sweep_job` with what it needs, under a name by which another process can import it.

    Raises:
        RequestError: the command line is wrong; nothing has been made or run.
        SomeFailed: at least one of them failed; all have been tried.
        Interrupted: by a signal; the current job has saved and ended in order.
    """
    if os.environ.get("TF_CONFIG"):
        raise ConfigError("--multirun: a sweep runs on this machine alone; unset TF_CONFIG, or run the jobs one by one")
    if engine_around(overrides, os.environ):
        raise ConfigError(
            "--multirun: an engine has started this process as one of several, each of which would run the whole "
            "sweep; start one process, or add cluster=local if that is meant"
        )
    composed = hydra.compose_config(name, overrides, RunMode.MULTIRUN)
    jobs = jobs_of(hydra, composed, check_local)
    folder = sweep_dir_of(composed)
    # Composed again, the time in the name of the folder would be another one.
    overrides = [*overrides, f"{OPTION}={in_quotes(str(folder))}"]
    composed = hydra.compose_config(name, overrides, RunMode.MULTIRUN)
    with sweep_dir(folder, jobs):
        job = functools.partial(recorded, run_job, fixed_options(composed))
        number = launch(hydra, name, composed, overrides, folder, job, signals)
        print_table(folder)
    if number:
        raise Interrupted(number, f"; the same command with {in_shell(OPTION, folder)} goes on")
    rows = read_rows(folder)
    if failed := [(f"job {row.number}", row.exit_code) for row in rows if row.has_failed]:
        raise SomeFailed(failed, f"{len(rows)} jobs", in_shell(OPTION, folder))


def launch(
    hydra: Hydra,
    name: str,
    composed: DictConfig,
    overrides: list[str],
    folder: Path,
    run_job: RunJob,
    signals: Signals,
) -> int | None:
    """Runs the jobs until the last one ends, or until a signal ends those that run; returns that signal."""
    # A job in this process raises the signal that has stopped it; one in another process is sent the signal.
    passing_on = contextlib.nullcontext() if is_basic(composed, "launcher") else signals.passed_on()
    try:
        with passing_on:
            hydra.multirun(name, run_job, overrides)
        return signals.signum or None
    except TfDistError:
        raise
    except KeyboardInterrupt as stop:
        return stop.args[0] if stop.args else signals.signum
    except Exception as error:  # of a launcher or a sweeper
        if not any(row.has_failed for row in read_rows(folder)):
            raise ConfigError(f"--multirun: {hydra_message(error)}") from error
        Console().warn(f"the sweeper gave up: {hydra_message(error)}")
        return None


def sweep_dir_of(composed: DictConfig) -> Path:
    text = setting(composed, OPTION)
    path = expand(text)
    if not is_path(text) or path is None:
        raise ConfigError(f"{OPTION} ({text}): is not a valid name of a directory; leave it out for the default")
    return path.absolute()


@contextlib.contextmanager
def sweep_dir(folder: Path, jobs: list[Job]) -> Iterator[None]:
    """Makes and locks the folder of a sweep, with a record of each job that is known already.

    The folder is accessible by its owner alone.
    """
    for job in jobs:
        check_same(folder / job.folder, job.config, f"{OPTION} ({folder}): {job.folder} in it", False)
    with contextlib.ExitStack() as stack:
        with files.raising(f"{OPTION} ({folder}): cannot be written", "name another directory"):
            if (folder / "config.yaml").exists():
                raise ConfigError(f"{OPTION} ({folder}): is the directory of one run; name another directory")
            files.make_private(folder)
            stack.enter_context(locked(folder, OPTION))
            files.make_private(folder / RECORDS)
            for path in (folder / RECORDS).glob("*.json"):
                path.unlink()
            for job in jobs:
                Row(job.number, job.folder, job.varying).write(folder)
        yield


def check_same(run_dir: Path, config: RunConfig, name: str, has_data: bool) -> None:
    """Checks that a job whose folder holds a run would only go on with it.

    Args:
        name: of the folder, for the message.
        has_data: whether it has been decided which data is used.
    """
    try:
        with files.open_to_read(run_dir / "config.yaml") as file:
            existing = from_yaml(file.read(1 << 24).decode())  # a file that is not ours must not fill the memory
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, ConfigError):
        raise ConfigError(f"{name} has a config.yaml that cannot be read; name another directory") from None
    old, new = dict(flatten(existing.as_tree())), dict(flatten(config.as_tree()))
    for key in [*new, *old]:
        # The folder may have been moved or be named in another way.
        is_compared = key != "run_dir" and (has_data or not key.startswith("data."))
        if is_compared and old.get(key) != new.get(key):
            raise ConfigError(
                f"{name} is of another sweep ({key}={old.get(key)} there, {new.get(key)} here); give the same "
                "command, or another directory"
            )


_stopped_by: list[int] = []  # the signal that has stopped a job of this process, which then begins no other


def sweep_job(composed: DictConfig, draw: Draw) -> float | Failed | None:
    """Runs one job of a sweep, in this process or in one of a launcher; returns what a sweeper compares.

    A job that is done already returns at once.
    """
    if _stopped_by:
        return Failed(128 + _stopped_by[0])
    started_at = time.time()
    run_dir, is_here = Path(HydraConfig.get().runtime.output_dir), is_basic(HydraConfig.instance().cfg, "launcher")
    with Signals() as signals:
        try:
            console = Console()
            # With hydra.job.chdir=true this is the folder of the job, and relative paths are those of the command line.
            with contextlib.chdir(HydraConfig.get().runtime.cwd):
                config, place = checked(composed, {})
                config.run_dir = str(run_dir)
                prepare(config, place, console)
            check_same(run_dir, config, f"{OPTION} ({run_dir.parent}): {run_dir.name} in it", True)
            summary, code = finished_summary(run_dir) or {}, 0
            if not summary:
                summary, code = train(config, place, console, started_at, signals, draw)
        except KeyboardInterrupt:
            code = report(Interrupted(signals.signum))
        except RequestError as error:
            code = report(error)
    if signals.signum:
        if is_here:
            raise KeyboardInterrupt(signals.signum)
        _stopped_by.append(signals.signum)
    return Failed(code) if code else compared_value(summary)


def compared_value(summary: dict[str, Any]) -> float | None:
    """The validation accuracy, or of a model without one the validation loss; None if nothing was validated."""
    value: float | None = summary.get("validation_accuracy", summary.get("validation_loss"))
    return value
