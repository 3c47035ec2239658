"""The results of a sweep, as a table for the screen and as CSV."""

import csv
import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tf2dist.launch.console import rate_text

RESULTS = ("test_accuracy", "test_loss", "steps_per_sec", "wall_secs")


@dataclass
class Row:
    """One job of the sweep.

    Attributes:
        varying: its values of the options that the sweep varies.
        state: waiting, done, failed or stopped.
        results: the values of `RESULTS`; None before the job is done.
    """

    number: int
    folder: str
    varying: dict[str, str]
    state: str = "waiting"
    exit_code: int | None = None
    results: dict[str, Any] | None = None

    def finish(self, summary: dict[str, Any] | None, exit_code: int) -> bool:
        """Notes the result of a job that succeeded; returns whether it did."""
        if exit_code or not summary:
            return False
        self.state, self.exit_code = "done", 0
        self.results = {name: summary.get(name) for name in RESULTS}
        return True

    def fail(self, exit_code: int, *, is_stopped: bool) -> None:
        self.state = "stopped" if is_stopped else "failed"
        self.exit_code = exit_code or 1  # a job without a summary has failed, even with exit code 0

    @property
    def outcome(self) -> str:
        return f"failed ({self.exit_code})" if self.state == "failed" else self.state


def as_csv(rows: list[Row]) -> str:
    """One line for each job, after one with the names of the columns."""
    names = list(rows[0].varying)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")  # its default is \r\n
    writer.writerow(["job", "folder", *names, "state", "exit_code", *RESULTS])
    for row in rows:
        results = row.results or {}
        values = [row.varying[name] for name in names]
        code = "" if row.exit_code is None else row.exit_code
        writer.writerow([row.number, row.folder, *values, row.state, code, *(_number(results, key) for key in RESULTS)])
    return text.getvalue()


def _number(results: dict[str, Any], key: str) -> Any:
    value = results.get(key)
    return "" if value is None else value  # with all its digits, since programs read it


def as_table(rows: list[Row], width: int | None) -> str:
    """A column for each option that varies and each result; where these do not fit, a few lines for each job.

    Args:
        width: of the terminal, in columns; None for a file or a pipe, whose lines may have any length.
    """
    names = list(rows[0].varying)
    head = ["job", *names, "test accuracy", "loss", "steps/s", "wall secs", "state"]
    cells = [[str(row.number), *(row.varying[name] for name in names), *_shown(row), row.outcome] for row in rows]
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


def _shown(row: Row) -> list[str]:
    """The results, rounded for the screen."""
    # A loss that has diverged may have thirty digits before the point.
    formats: dict[str, Callable[[float], str]] = {
        "test_accuracy": lambda value: f"{value:.4f}",
        "test_loss": lambda value: f"{value:.4f}" if value < 1e4 else f"{value:.3g}",
        "steps_per_sec": rate_text,
        "wall_secs": lambda value: f"{value:.1f}",
    }
    results = row.results or {}
    return ["-" if (value := results.get(name)) is None else shown(value) for name, shown in formats.items()]


def _stanza(row: Row, width: int) -> list[str]:
    """One job in lines of at most `width` columns, as far as they can be broken."""
    accuracy, loss, rate, secs = _shown(row)
    values = " ".join(f"{name}={value}" for name, value in row.varying.items())
    result = f"accuracy {accuracy}, loss {loss}, {rate} steps/s, {secs} s, " if row.results else ""
    # A long value stays whole and sticks out of the line, so that it can still be copied.
    lines = textwrap.wrap(f"{row.number}  {values}", max(width, 20), subsequent_indent="   ", break_long_words=False)
    return lines + textwrap.wrap(
        f"{result}{row.outcome}", max(width, 20), initial_indent="   ", subsequent_indent="   "
    )
