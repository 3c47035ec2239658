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
from pathlib import Path
from typing import Any

from tf2dist import files
from tf2dist.config.compose import in_quotes
from tf2dist.errors import ConfigError, Interrupted, TfDistError, first_line
from tf2dist.launch.console import Console, clock_text
from tf2dist.launch.launcher import warm_up
from tf2dist.launch.run_dir import finished_summary, new_names, rows_of
from tf2dist.launch.single_run import run_job
from tf2dist.signals import StopRequest
from tf2dist.tools.comparing.matrix import ContenderRun, Until

OPTION = "compare_dir"
PLAN = "plan.json"
RUNS, LOGS = "runs", "logs"  # in the folder of the comparison
POLL_SECS = 0.5
TAIL_BYTES = 4096  # of metrics.jsonl: several lines


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run.

    Attributes:
        state: done, failed, or stopped by a signal or never begun.
    """

    run: ContenderRun
    state: str
    exit_code: int | None


def new_folder() -> Path:
    """The default folder of a comparison, which does not exist yet."""
    return next(folder for folder in new_names(Path("outputs").absolute(), "compare") if not folder.exists())


def earlier_plan(folder: Path) -> dict[str, list[str]]:
    """The runs of an earlier comparison in the folder, with their command lines; empty if there is none."""
    with files.raising(f"{OPTION} ({folder}): cannot be read", "name another directory"):
        if not folder.is_dir() or not any(folder.iterdir()):
            return {}
    try:
        with files.open_to_read(folder / PLAN) as file:
            plan = json.loads(file.read(1 << 24))["runs"]  # a file that is not ours must not fill the memory
        return {str(name): list(map(str, overrides)) for name, overrides in plan.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"{OPTION} ({folder}): has files, and is not of a comparison; name another directory"
        ) from None


def prepare_folder(folder: Path, runs: list[ContenderRun]) -> None:
    """Makes the folder, or checks that it is one of the same comparison or of a smaller one, and writes the plan."""
    plan = {run.folder: run.overrides for run in runs}
    with files.raising(f"{OPTION} ({folder}): cannot be written", "name another directory"):
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


def run_all(
    runs: list[ContenderRun], folder: Path, flags: list[str], stop: StopRequest, until: Until, console: Console
) -> list[RunOutcome]:
    """Runs what is not done yet, until a signal comes; returns the outcome of each run in the order of `runs`.

    Args:
        flags: of the command line, such as --config-dir, which each run gets too.
        stop: the request to this process.
    """
    done = [run for run in runs if finished_summary(folder / RUNS / run.folder)]
    with console:
        progress = ComparisonProgress(console, runs, done, until)
        return [_run(run, folder, flags, stop, progress) for run in runs]


def _run(
    run: ContenderRun, folder: Path, flags: list[str], stop: StopRequest, progress: "ComparisonProgress"
) -> RunOutcome:
    run_dir = folder / RUNS / run.folder
    if run in progress.done:
        progress.skip(run)
        return RunOutcome(run, "done", 0)
    if stop.signum:
        return RunOutcome(run, "stopped", None)
    progress.begin(run, run_dir)

    def check() -> None:
        progress.poll()
        if stop.signum:
            raise Interrupted(stop.signum)

    code = ConfigError.exit_code
    with files.warning(progress.console.warn, f"{run_dir} cannot be written", "make room, or name another directory"):
        _remove(run_dir)  # left of a comparison that was killed
        with contextlib.suppress(TfDistError, OSError):  # a signal, or an error that the run has, too
            warm_up(run.contender.config, check)
        with os.fdopen(files.open_log(folder / LOGS / f"{run.folder}.log"), "ab") as log:
            code = run_job([*flags, *run.overrides, f"run_dir={in_quotes(str(run_dir))}"], stop, log, progress.poll)
    if stop.signum and code:
        with contextlib.suppress(OSError):
            _remove(run_dir)  # it starts over
        return RunOutcome(run, "stopped", code)
    # A run without a summary has failed, even with exit code 0.
    if code or not finished_summary(run_dir):
        reason = _last_line(folder / LOGS / f"{run.folder}.log")
        progress.console.warn(f"{run} has failed with exit code {code} ({reason}); the others go on")
        return RunOutcome(run, "failed", code or 1)
    progress.end()
    return RunOutcome(run, "done", 0)


def _remove(run_dir: Path) -> None:
    """Removes what an interrupted run has left: our own folder, since the plan names it."""
    if run_dir.is_dir() and not run_dir.is_symlink():
        shutil.rmtree(run_dir)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        with files.open_to_read(log) as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if "error" in line]
        if lines:
            return first_line(lines[-1]).removeprefix("tf2dist: error: ")[:200]
    return f"see {log}"


@dataclass(frozen=True)
class Reading:
    """The last row of metrics.jsonl of a run under way; `rate`: in steps a second."""

    step: int = 0
    rate: float | None = None
    accuracy: float | None = None
    training_secs: float = 0.0


def read_progress(path: Path) -> Reading:
    """The last values in metrics.jsonl, as far as there are any."""
    values: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for row in rows_of(path, TAIL_BYTES):
            values |= row
    rate, accuracy = values.get("steps_per_sec"), values.get("validation_accuracy")
    return Reading(values.get("step", 0), rate, accuracy, values.get("training_secs", 0.0))


class ComparisonProgress:
    """The progress of the present run, and the time that is left for all.

    Attributes:
        done: the runs that were done before.
    """

    def __init__(self, console: Console, runs: list[ContenderRun], done: list[ContenderRun], until: Until) -> None:
        self.console, self.done, self._runs, self._until = console, done, runs, until
        self._number = 0  # of the present run, from 1
        self._metrics = Path()
        self._reading = Reading()
        self._begun_at = self._polled_at = 0.0
        self._secs: dict[str, list[float]] = {}  # that each run took, by its contender

    def skip(self, run: ContenderRun) -> None:
        self._number += 1
        self.console.note(f"run {self._number} of {len(self._runs)}: {run}: is done already")

    def begin(self, run: ContenderRun, run_dir: Path) -> None:
        self._number += 1
        self._metrics, self._reading, self._begun_at = run_dir / "metrics.jsonl", Reading(), time.monotonic()
        self.console.status(f"run {self._number} of {len(self._runs)}: {run}")
        self._show()

    def poll(self) -> None:
        """Called often while a run is under way."""
        now = time.monotonic()
        if now - self._polled_at >= POLL_SECS:
            self._polled_at, self._reading = now, read_progress(self._metrics)
            self._show()

    def end(self) -> None:
        spent, accuracy = time.monotonic() - self._begun_at, read_progress(self._metrics).accuracy
        self._secs.setdefault(self._run.contender.name, []).append(spent)
        result = "" if accuracy is None else f" with a validation accuracy of {accuracy:.4f}"
        left = self._secs_of_others(spent)
        more = f", about {clock_text(left)} left" if left else ""
        self.console.note(f"run {self._number} of {len(self._runs)}: done in {clock_text(spent)}{result}{more}")

    @property
    def _run(self) -> ContenderRun:
        return self._runs[self._number - 1]

    def _show(self) -> None:
        spent, left = time.monotonic() - self._begun_at, self._secs_left()
        part = 0.0 if left is None else spent / max(spent + left, 1.0)
        # The first and the last part are what a narrow terminal shows.
        parts = [f"{self._number}/{len(self._runs)}", self._progress_text(), str(self._run)]
        if left is not None:
            parts.append(f"{clock_text(left + self._secs_of_others(spent + left))} left")
        elif (most := self._most_secs_left()) is not None:
            parts.append(f"at most {clock_text(most)} left of this run")
        self.console.overall(self._number - 1 + part, len(self._runs), parts)

    def _progress_text(self) -> str:
        reading, until = self._reading, self._until
        if reading == Reading():
            return "starting"
        if until.kind == "accuracy" and reading.accuracy is not None:
            return f"accuracy {reading.accuracy:.4f}/{until.value:g}"
        if until.kind == "secs":
            return f"{clock_text(reading.training_secs)}/{clock_text(until.value)}"
        last = f"/{until.value:,g}" if until.kind == "steps" else ""
        return f"step {reading.step:,}{last}"

    def _secs_left(self) -> float | None:
        """Seconds that are left of the present run; None while unknown."""
        if self._until.kind == "secs" and self._reading.rate:
            return max(0.0, self._until.value - self._reading.training_secs)
        if self._until.kind == "steps" and self._reading.rate:
            return self._most_secs_left()
        expected = self._expected(self._run)
        return None if expected is None else max(0.0, expected - (time.monotonic() - self._begun_at))

    def _most_secs_left(self) -> float | None:
        """Until the last step that the present run may take; None while unknown."""
        last, reading = self._run.contender.last_step, self._reading
        return max(0.0, (last - reading.step) / reading.rate) if last and reading.rate else None

    def _expected(self, run: ContenderRun) -> float | None:
        """The seconds of a run, from those of its contender with other seeds or else from all."""
        secs = self._secs.get(run.contender.name) or list(itertools.chain(*self._secs.values()))
        return sum(secs) / len(secs) if secs else None

    def _secs_of_others(self, secs: float) -> float:
        """Seconds of the runs after the present one; `secs`: of a run, while no run is done."""
        others = [run for run in self._runs[self._number :] if run not in self.done]
        return sum(secs if (expected := self._expected(run)) is None else expected for run in others)
