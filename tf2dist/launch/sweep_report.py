"""The report of a sweep: a record of each job, sweep.csv after each, and a table at the end.

The records are files, since a launcher may run the jobs in other processes or on other machines.
"""

import contextlib
import csv
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from tf2dist import files
from tf2dist.config.compose import overrides_of
from tf2dist.config.sweeps import plain
from tf2dist.launch.console import Console, print_result, rate_text, state_text
from tf2dist.launch.run_dir import finished_summary

RECORDS = ".jobs"  # in the folder of the sweep
RESULTS = ("test_accuracy", "test_loss", "steps_per_sec", "wall_secs")
SIGNALLED = (129, 130, 143)  # exit codes of a job that was stopped, and has saved


@dataclass(frozen=True)
class Failed:
    """The value that a job returns to the sweeper instead of its accuracy; an exception would end the sweep."""

    exit_code: int


RunJob = Callable[[DictConfig], float | Failed | None]


@dataclass
class Row:
    """One job of the sweep.

    Attributes:
        varying: its values of the options that the sweep varies.
        state: waiting, running, done, failed or stopped.
        results: the values of `RESULTS`; None before the job is done.
    """

    number: int
    folder: str
    varying: dict[str, str] = field(default_factory=dict)
    state: str = "waiting"
    exit_code: int | None = None
    results: dict[str, Any] | None = None

    def finish(self, summary: dict[str, Any]) -> None:
        self.state, self.exit_code = "done", 0
        self.results = {name: summary.get(name) for name in RESULTS}

    def fail(self, exit_code: int) -> None:
        self.state, self.exit_code = "stopped" if exit_code in SIGNALLED else "failed", exit_code

    @property
    def has_failed(self) -> bool:
        """Whether it has ended and is not done; a signal may have stopped it alone, in a process of its own."""
        return self.state in ("failed", "stopped")

    def write(self, sweep_dir: Path) -> None:
        files.write_whole(sweep_dir / RECORDS / f"{self.number}.json", json.dumps(asdict(self)))

    def __str__(self) -> str:
        return " ".join([f"job {self.number}", *(f"{name}={value}" for name, value in self.varying.items())])


def read_rows(sweep_dir: Path) -> list[Row]:
    """The jobs of a sweep so far, in their order."""
    rows = [Row(**json.loads(path.read_text(encoding="utf-8"))) for path in (sweep_dir / RECORDS).glob("*.json")]
    return sorted(rows, key=lambda row: row.number)


def fixed_options(composed: DictConfig) -> set[str]:
    """The options of the command line that have one value in all jobs."""
    parsed = OverridesParser.create().parse_overrides(overrides_of(composed))
    return {override.get_key_element() for override in parsed if not override.is_sweep_override()}


def recorded(run_job: RunJob, fixed: set[str], composed: DictConfig) -> float | Failed | None:
    """Runs one job of a sweep, and records its state before and after.

    Args:
        fixed: see `fixed_options`.
    """
    hydra = HydraConfig.get()
    sweep_dir, run_dir = Path(hydra.sweep.dir), Path(hydra.runtime.output_dir)
    pairs = (override.split("=", 1) for override in overrides_of(HydraConfig.instance().cfg))
    varying = {key.lstrip("+"): plain(value) for key, value in pairs if key not in fixed}
    row = Row(int(hydra.job.num), str(hydra.sweep.subdir), varying, "running")
    write_rows([row], sweep_dir)
    with contextlib.suppress(OSError):  # some file systems have no modes
        if [path.name for path in run_dir.iterdir()] == [hydra.output_subdir]:
            run_dir.chmod(0o700)  # Hydra has just made it
    done = ": is done already" if finished_summary(run_dir) else ""
    Console().note(f"{row}{done}")
    try:
        result = run_job(composed)
        if isinstance(result, Failed):
            row.fail(result.exit_code)
        elif summary := finished_summary(run_dir):
            row.finish(summary)
        else:
            row.fail(1)
        return result
    except Exception:  # an error in tf2dist itself
        row.fail(1)
        raise
    finally:
        write_rows([row], sweep_dir)
        write_csv(sweep_dir)


def print_table(sweep_dir: Path) -> None:
    """Prints the results of all jobs, once no job runs any more."""
    rows = read_rows(sweep_dir)
    for row in rows:
        if row.state == "running":  # its end was not reported: a signal came
            row.state = "stopped"
    write_rows(rows, sweep_dir)
    write_csv(sweep_dir)
    if not rows:
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    text = f"{as_table(rows, width)}\n{sweep_dir}"
    print_result(text, Console(), "the table", f"; it is in {sweep_dir}/sweep.csv")


def write_rows(rows: list[Row], sweep_dir: Path) -> None:
    with files.warning(Console().warn, f"{sweep_dir / RECORDS} could not be written", "the sweep goes on"):
        for row in rows:
            row.write(sweep_dir)


def write_csv(sweep_dir: Path) -> None:
    """Writes sweep.csv. After each job: a sweep that is killed leaves the results that it has."""
    with files.warning(Console().warn, "sweep.csv could not be written", "the sweep goes on"):
        files.write_whole(sweep_dir / "sweep.csv", as_csv(read_rows(sweep_dir)))


def as_csv(rows: list[Row]) -> str:
    """One line for each job, after one with the names of the columns."""
    names = _names(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")  # its default is \r\n
    writer.writerow(["job", "folder", *names, "state", "exit_code", *RESULTS])
    for row in rows:
        # With all their digits, since programs read them.
        results = [(row.results or {}).get(key) for key in RESULTS]
        values = [row.varying.get(name) for name in names]
        cells = [row.number, row.folder, *values, row.state, row.exit_code, *results]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


def _names(rows: list[Row]) -> list[str]:
    """The options that vary, in the order of the command line."""
    return list(dict.fromkeys(name for row in rows for name in row.varying))


def as_table(rows: list[Row], width: int | None) -> str:
    """A column for each option that varies and each result; where these do not fit, a few lines for each job.

    Args:
        width: of the terminal, in columns; None for a file or a pipe, whose lines may have any length.
    """
    names = _names(rows)
    head = ["job", *names, "test accuracy", "loss", "steps/s", "wall secs", "state"]
    cells = []
    for row in rows:
        values = (row.varying.get(name, "-") for name in names)
        cells.append([str(row.number), *values, *_formatted(row), state_text(row.state, row.exit_code)])
    widths = [max(len(line[column]) for line in [head, *cells]) for column in range(len(head))]
    if width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        return "\n".join(line for row in rows for line in _stanza(row, width))
    # Text is aligned at its left and numbers at their right, so that digits of equal weight are below each other.
    is_text = [False, *(True for _ in names), False, False, False, False, True]
    lines = []
    for line in [head, *cells]:
        parts = zip(line, widths, is_text, strict=True)
        lines.append("  ".join(cell.ljust(size) if text else cell.rjust(size) for cell, size, text in parts).rstrip())
    return "\n".join(lines)


def _formatted(row: Row) -> list[str]:
    """The results, rounded for the screen."""
    # A loss that has diverged may have thirty digits before the point.
    formats: dict[str, Callable[[float], str]] = {
        "test_accuracy": lambda value: f"{value:.4f}",
        "test_loss": lambda value: f"{value:.4f}" if value < 1e4 else f"{value:.3g}",
        "steps_per_sec": rate_text,
        "wall_secs": lambda value: f"{value:.1f}",
    }
    results = row.results or {}
    return ["-" if (value := results.get(name)) is None else form(value) for name, form in formats.items()]


def _stanza(row: Row, width: int) -> list[str]:
    """One job in lines of at most `width` columns, as far as they can be broken."""
    accuracy, loss, rate, secs = _formatted(row)
    values = " ".join(f"{name}={value}" for name, value in row.varying.items())
    result = f"accuracy {accuracy}, loss {loss}, {rate} steps/s, {secs} s, " if row.results else ""
    # A long value stays whole and sticks out of the line, so that it can still be copied.
    lines = textwrap.wrap(f"{row.number}  {values}", max(width, 20), subsequent_indent="   ", break_long_words=False)
    result += state_text(row.state, row.exit_code)
    return lines + textwrap.wrap(result, max(width, 20), initial_indent="   ", subsequent_indent="   ")
