"""Runs the jobs of a sweep one after the other, each as a command of its own, and reports their results.

A job that fails, even one that the system kills, does not affect the others. The same sweep in the same directory is
resumed: jobs that are done are not run again, and one that was stopped goes on from its checkpoint.
"""

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tf2dist import files
from tf2dist.config.schema import RunConfig
from tf2dist.config.sweeps import Job, Sweep, new_folder
from tf2dist.config.tree import from_yaml
from tf2dist.errors import ConfigError, Interrupted, TfDistError
from tf2dist.launch.console import Console
from tf2dist.launch.jobs import finished_summary, run_job
from tf2dist.launch.run_dir import locked
from tf2dist.launch.streams import say
from tf2dist.launch.sweep_table import Row, as_csv, as_table
from tf2dist.signals import Signals

OPTION = "hydra.sweep.dir"
OVERRIDES = ".hydra/overrides.yaml"  # in the folder of each job, as Hydra has them
CONFIG = ".hydra/config.yaml"
MAX_NAMED = 8


class JobsFailed(TfDistError):
    """Some jobs of a sweep failed; the exit code is that of the first of them."""

    def __init__(self, rows: list[Row], folder: Path) -> None:
        failed = [row for row in rows if row.state == "failed"]
        which = ", ".join(f"job {row.number} (exit code {row.exit_code})" for row in failed[:MAX_NAMED])
        which += ", ..." if len(failed) > MAX_NAMED else ""
        super().__init__(
            f"{len(failed)} of {len(rows)} jobs failed: {which}; "
            f"the same command with {OPTION}={folder} tries them again"
        )
        self.exit_code = failed[0].exit_code or 1


def run_sweep(sweep: Sweep, flags: list[str], signals: Signals) -> None:
    """Runs all jobs; writes `sweep.csv` after each, and a table to the standard output at the end.

    Args:
        flags: the flags of the command line that each job gets too.

    Raises:
        ConfigError: the directory cannot be used, or has jobs of another sweep; nothing has been made or run.
        JobsFailed: at least one of them failed; all have been tried.
        Interrupted: by a signal; the current job has saved and ended in order.
    """
    folder = sweep.folder or new_folder()
    for job in sweep.jobs:
        _check_folder(folder / job.folder, job)
    _make(folder)
    console = Console()
    with locked(folder, OPTION), signals.held() as received:
        running = _Running(sweep, folder, flags, received, console)
        for job in sweep.jobs:
            if not received:
                running.run(job)
    running.print_table()
    if received:
        raise Interrupted(received[0], f"; the same command with {OPTION}={folder} goes on")
    if any(row.state == "failed" for row in running.rows):
        raise JobsFailed(running.rows, folder)


@dataclass
class _Running:
    """A sweep and the state of its jobs."""

    sweep: Sweep
    folder: Path
    flags: list[str]
    received: list[int]
    console: Console
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [Row(job.number, job.folder, job.varying) for job in self.sweep.jobs]

    def run(self, job: Job) -> None:
        """Runs one job, unless it is done already."""
        row = self.rows[job.number]
        place = self.folder / job.folder
        count = f"{job} ({job.number + 1} of {len(self.rows)})"
        if row.finish(finished_summary(place), 0):
            self.console.note(f"{count}: is done already")
        else:
            self.console.note(count)
            code = self._run_command(job, place)
            if not row.finish(finished_summary(place), code):
                row.fail(code, is_stopped=bool(self.received))
        # Written after each job: a sweep that is killed leaves the results that it has.
        try:
            files.write_whole(self.folder / "sweep.csv", as_csv(self.rows))
        except OSError as error:
            self.console.warn(f"sweep.csv could not be written ({error.strerror}); the sweep goes on")

    def _run_command(self, job: Job, place: Path) -> int:
        """Runs the job's command to its end, passing signals on; returns its exit code."""
        try:
            files.make_private(place)
            (place / CONFIG).parent.mkdir(mode=0o700, exist_ok=True)
            files.write_whole(place / CONFIG, job.config.to_yaml())
            files.write_whole(place / OVERRIDES, yaml.safe_dump(list(job.overrides)))
        except OSError as error:
            self.console.warn(f"{place} cannot be written ({error.strerror}); make room, or name another directory")
            return ConfigError.exit_code
        return run_job([*self.flags, *job.overrides, f"run_dir={place}"], self.received)

    def print_table(self) -> None:
        """Prints the results of all jobs."""
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        try:
            say(f"{as_table(self.rows, width)}\n{self.folder}", sys.stdout)
        except BrokenPipeError:
            pass  # the reader has left; the exit code still says how the jobs went
        except OSError as error:
            self.console.warn(f"the table could not be printed ({error.strerror}); it is in {self.folder}/sweep.csv")


def _check_folder(place: Path, job: Job) -> None:
    """Raises ConfigError if the folder of a job holds another job, or a run that belongs to no sweep."""
    shown = f"{OPTION} ({place.parent}): {place.name} in it"
    try:
        with files.open_to_read(place / CONFIG) as file:
            before = from_yaml(file.read(1 << 24).decode())  # a file that is not ours must not fill the memory
    except FileNotFoundError:
        if (place / "config.yaml").exists():
            raise ConfigError(f"{shown} has a run that is of no sweep; name another directory") from None
        return
    except NotADirectoryError:  # `_make` gives the error
        return
    except (OSError, ValueError, ConfigError):
        raise ConfigError(f"{shown} cannot be read; name another directory") from None
    if differing := _differences(before, job.config):
        raise ConfigError(f"{shown} is of another sweep ({differing}); give the same command, or another directory")


def _differences(before: RunConfig, now: RunConfig) -> str:
    """The first option that has changed, with both values; "" if none has."""
    old, new = _leaves(before.as_tree()), _leaves(now.as_tree())
    for name in [*new, *old]:
        # The sweep chooses the run_dir of each job, and its directory may have been moved or be named in another way.
        if name != "run_dir" and old.get(name) != new.get(name):
            return f"{name}={old.get(name)} there, {new.get(name)} here"
    return ""


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _make(folder: Path) -> None:
    """Creates the sweep's directory, accessible by its owner alone. Raises ConfigError if it cannot be written."""
    try:
        if (folder / "config.yaml").exists():
            raise ConfigError(f"{OPTION} ({folder}): is the directory of one run; name another directory")
        files.make_private(folder)
        # A directory that was there before keeps its mode, so it may be read-only.
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ConfigError(
            f"{OPTION} ({folder}): cannot be written ({error.strerror}); name another directory"
        ) from None
