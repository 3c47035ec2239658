"""The columns of the report's tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tf2dist.comparing.results import Measured, Result
from tf2dist.comparing.running import Outcome
from tf2dist.comparing.verdict import count_text, rate_text, secs_text

Row = tuple[Result, Outcome]


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        value: by which it is sorted: a number, a spread, a text, or None if it was not measured.
        shown: the text of a value that is not None.
    """

    title: str
    value: Callable[[Any], Any]
    shown: Callable[[Any], str] = str
    is_number: bool = True

    def text(self, row: Any) -> str:
        value = self.value(row)
        return "" if value is None else self.shown(value)


def contender_columns(results: Sequence[Result]) -> list[Column]:
    """Of a table with a row for each `Result`."""
    until = results[0].until
    target = f"{until.value:g}" if until.kind == "accuracy" else "the end"
    return [
        Column("mode", lambda one: one.contender.way, is_number=False),
        Column("situation", lambda one: one.contender.situation, is_number=False),
        Column(f"seconds to {target}", lambda one: one.secs, secs_text),
        Column(f"examples to {target}", lambda one: one.examples, count_text),
        Column("accuracy", lambda one: one.accuracy, lambda value: f"{value.mean:.4f}"),
        Column("steps/s", lambda one: one.step_rate, rate_text),
        Column("examples/s", lambda one: one.example_rate, rate_text),
        Column("staleness", lambda one: one.staleness, lambda value: f"{value.mean:.1f}"),
        Column("dropped", lambda one: one.dropped, lambda value: f"{100 * value.mean:.0f} %"),
        Column("seconds to the first step", lambda one: one.start, lambda value: f"{value.mean:.1f}"),
    ]


def run_columns() -> list[Column]:
    """Of a table with a row for each run."""

    def of(value: Callable[[Measured], Any]) -> Callable[[Row], Any]:
        return lambda row: next((value(one) for one in row[0].measured if one.run == row[1].run), None)

    def to_target(row: Row) -> float | None:
        point = of(lambda one: one.reached(row[0].until))(row)
        return point.secs if point else None

    return [
        Column("mode", lambda row: row[0].contender.way, is_number=False),
        Column("situation", lambda row: row[0].contender.situation, is_number=False),
        Column("seed", lambda row: row[1].run.seed),
        Column("state", _state, is_number=False),
        Column("steps", of(lambda one: one.summary["global_step"]), lambda value: f"{value:,}"),
        Column("seconds to the target", to_target, lambda value: f"{value:.2f}"),
        Column("test accuracy", of(lambda one: one.summary.get("test_accuracy")), lambda value: f"{value:.4f}"),
        Column("steps of each worker", of(_shares), is_number=False),
    ]


def _state(row: Row) -> str:
    outcome = row[1]
    return f"failed ({outcome.exit_code})" if outcome.state == "failed" else outcome.state


def _shares(one: Measured) -> str:
    names = ("local_steps", "aggregated")
    found = [next((each[name] for name in names if name in each), 0) for each in one.summary["workers"]]
    return " / ".join(f"{value:,}" for value in found)
