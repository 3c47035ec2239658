"""Runs the contenders one after the other, and shows how far the whole comparison is.

A run that fails does not affect the others. The same comparison in the same folder is resumed: runs that are done are
not run again. One that was interrupted starts over, since the times of a run in two parts cannot be compared.
"""

import contextlib
import itertools
import json
import os
import shutil
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tf2dist import files
from tf2dist.comparing.matrix import ContenderRun
from tf2dist.config.compose import in_quotes
from tf2dist.errors import ConfigError, first_line
from tf2dist.launch.console import Console
from tf2dist.launch.jobs import finished_summary, run_job

OPTION = "compare_dir"
PLAN = "plan.json"
RUNS, LOGS = "runs", "logs"  # in the folder of the comparison
POLL_SECS = 0.5
ALMOST = 0.95  # of a run, until it has ended
TAIL_BYTES = 4096  # of metrics.jsonl: several lines


@dataclass(frozen=True)
class Outcome:
    """How a run has ended.

    Attributes:
        state: done, failed, or stopped by a signal or never begun.
    """

    run: ContenderRun
    state: str
    exit_code: int | None


def new_folder() -> Path:
    """The default folder of a comparison, which does not exist yet."""
    first = Path("outputs").absolute() / f"{datetime.now():%Y%m%d_%H%M%S}-compare"
    names = itertools.chain([first], (first.with_name(f"{first.name}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def earlier_plan(folder: Path) -> dict[str, list[str]]:
    """The runs of an earlier comparison in the folder, with their command lines; empty if there is none.

    Raises:
        ConfigError: there is something else in it.
    """
    try:
        return _read_plan(folder) if folder.is_dir() and any(folder.iterdir()) else {}
    except OSError as error:
        raise ConfigError(f"{OPTION} ({folder}): cannot be read ({error.strerror}); name another directory") from None


def prepare_folder(folder: Path, runs: list[ContenderRun]) -> None:
    """Makes the folder, or checks that it is one of the same comparison or of a smaller one, and writes the plan.

    Raises:
        ConfigError: it cannot be used.
    """
    plan = {run.folder: run.overrides for run in runs}
    try:
        if earlier := earlier_plan(folder):
            for name, overrides in earlier.items():
                if name in plan and plan[name] != overrides:
                    here = " ".join(sorted(set(plan[name]) - set(overrides))) or "nothing"
                    there = " ".join(sorted(set(overrides) - set(plan[name]))) or "nothing"
                    raise ConfigError(
                        f"{OPTION} ({folder}): is of another comparison ({there} there, {here} here); give the same "
                        "options, or name another directory"
                    )
            plan = earlier | plan
        for directory in (folder, folder / RUNS, folder / LOGS):
            files.make_private(directory)
        files.write_whole(folder / PLAN, json.dumps({"runs": plan}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{OPTION} ({folder}): cannot be written ({error.strerror}); name another directory"
        ) from None


def _read_plan(folder: Path) -> dict[str, list[str]]:
    """The runs of a comparison with their command lines, from the file in its folder. Raises ConfigError."""
    try:
        with files.open_to_read(folder / PLAN) as file:
            plan = json.loads(file.read(1 << 24))["runs"]  # a file that is not ours must not fill the memory
        return {str(name): list(map(str, overrides)) for name, overrides in plan.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"{OPTION} ({folder}): has files, and is not of a comparison; name another directory"
        ) from None


def run_all(
    runs: list[ContenderRun], folder: Path, flags: list[str], received: list[int], console: Console
) -> list[Outcome]:
    """Runs what is not done yet, until a signal comes; returns the outcome of each run in the order of `runs`.

    Args:
        flags: of the command line, such as --config-dir, which each run gets too.
        received: the signals to this process.
    """
    with console:
        progress = ComparisonProgress(console, len(runs))
        return [_run(run, folder, flags, received, progress) for run in runs]


def _run(
    run: ContenderRun, folder: Path, flags: list[str], received: list[int], progress: "ComparisonProgress"
) -> Outcome:
    run_dir = folder / RUNS / run.folder
    if finished_summary(run_dir):
        progress.skip(run)
        return Outcome(run, "done", 0)
    if received:
        return Outcome(run, "stopped", None)
    progress.begin(run, run_dir)
    try:
        # What an interrupted run has left: our own folder, since the plan names it.
        if run_dir.is_dir() and not run_dir.is_symlink():
            shutil.rmtree(run_dir)
        with os.fdopen(files.open_log(folder / LOGS / f"{run.folder}.log"), "ab") as log:
            code = run_job([*flags, *run.overrides, f"run_dir={in_quotes(str(run_dir))}"], received, log, progress.poll)
    except OSError as error:
        progress.console.warn(f"{run_dir} cannot be written ({error.strerror}); make room, or name another directory")
        code = ConfigError.exit_code
    # A run without a summary has failed, even with exit code 0.
    is_done = code == 0 and finished_summary(run_dir) is not None
    if not (is_done or received):
        reason = _last_line(folder / LOGS / f"{run.folder}.log")
        progress.console.warn(f"{run} has failed with exit code {code} ({reason}); the others go on")
    progress.end(is_done)
    return Outcome(run, "done" if is_done else "stopped" if received else "failed", 0 if is_done else code or 1)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        with files.open_to_read(log) as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if "error" in line]
        if lines:
            return first_line(lines[-1]).removeprefix("tf2dist: error: ")[:200]
    return f"see {log}"


class ComparisonProgress:
    """How far the whole comparison is: a bar on a terminal, a line for each run elsewhere."""

    def __init__(self, console: Console, num_runs: int) -> None:
        self.console, self._num_runs = console, num_runs
        self._number = 0  # of the present run, from 1
        self._text, self._run_dir = "", Path()
        self._begun_at = self._polled_at = 0.0
        self._secs: list[float] = []  # that each run took

    def skip(self, run: ContenderRun) -> None:
        self._number += 1
        self.console.note(f"run {self._number} of {self._num_runs}: {run}: is done already")

    def begin(self, run: ContenderRun, run_dir: Path) -> None:
        self._number += 1
        self._text, self._run_dir = str(run), run_dir
        self._begun_at = time.monotonic()
        self.console.status(f"run {self._number} of {self._num_runs}: {run}")
        self._show("")

    def poll(self) -> None:
        """Called often while a run is under way."""
        now = time.monotonic()
        if now - self._polled_at >= POLL_SECS:
            self._polled_at = now
            self._show(_last_accuracy(self._run_dir / "metrics.jsonl"))

    def end(self, is_done: bool) -> None:
        if is_done:
            self._secs.append(time.monotonic() - self._begun_at)

    def _show(self, suffix: str) -> None:
        mean = sum(self._secs) / len(self._secs) if self._secs else 0.0
        spent = time.monotonic() - self._begun_at
        part = min(ALMOST, spent / mean) if mean else 0.0
        done = self._number - 1 + part
        minutes, seconds = divmod(round(mean * (self._num_runs - done)), 60)
        left = f"  about {minutes}:{seconds:02} left" if mean else ""
        # The numbers first: a narrow terminal cuts off the end.
        self.console.overall(done, self._num_runs, [f"{self._number}/{self._num_runs}{left}{suffix}", self._text])


def _last_accuracy(path: Path) -> str:
    """The last validation accuracy in metrics.jsonl, as the end of a line; "" while there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        with files.open_to_read(path) as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[1:]
        for line in reversed(lines):
            if '"validation_accuracy"' in line and line.endswith("}"):
                return f"  accuracy {json.loads(line)['validation_accuracy']:.4f}"
    return ""
