"""Measurements of the runs of a comparison, read from their directories."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from tf2dist import files
from tf2dist.launch.run_dir import finished_summary, rows_of
from tf2dist.tools.comparing.matrix import Contender, ContenderRun, Until
from tf2dist.tools.comparing.running import RUNS, RunOutcome

WARM_UP = 0.25  # the part of the training, in steps, that is not counted for the rate
MIN_STEPS = 5  # of a worker, for its time line
TIMELINE = "timeline"  # the folder in a run directory


@dataclass(frozen=True)
class Point:
    """One evaluation on the validation set.

    Attributes:
        secs: of training before it: without the start, the evaluations and the pauses for them.
        examples: that the updates before it have used.
        accuracy: None for a model without one.
    """

    step: int
    secs: float
    examples: float
    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class CommonGoal:
    """The goal at which the contenders of a scenario are compared: an accuracy, or the loss of a model without one."""

    metric: str
    value: float

    def __str__(self) -> str:
        return f"{'an accuracy' if self.metric == 'accuracy' else 'a loss'} of {self.value:.4g}"

    @property
    def _sign(self) -> int:
        return 1 if self.metric == "accuracy" else -1  # of a loss less is better

    def of(self, point: Point) -> float:
        """The metric, more of which is better."""
        return self._sign * ((point.accuracy or 0.0) if self.metric == "accuracy" else point.loss)

    def is_met(self, point: Point) -> bool:
        return self.of(point) >= self._sign * self.value

    def between(self, before: Point, after: Point) -> Point:
        """The point on the straight line between two evaluations at which it is met."""
        low, high = self.of(before), self.of(after)
        part = (self._sign * self.value - low) / (high - low)
        secs = before.secs + part * (after.secs - before.secs)
        examples = before.examples + part * (after.examples - before.examples)
        return Point(round(before.step + part * (after.step - before.step)), secs, examples, after.loss, after.accuracy)


@dataclass(frozen=True)
class Measurement:
    """One run that is done.

    Attributes:
        points: in order of their steps.
        steps: of each worker's time line: when each began and ended, in seconds of the host's clock.
    """

    run: ContenderRun
    summary: dict[str, Any]
    points: list[Point]
    steps: list[list[tuple[float, float]]]

    @property
    def secs(self) -> float:
        """The training, in seconds."""
        return self.points[-1].secs if self.points else math.nan

    @property
    def rates(self) -> tuple[float, float]:
        """Global steps and examples a second, after the warm-up; not numbers if there were too few evaluations."""
        if not self.points:
            return math.nan, math.nan
        last = self.points[-1]
        first = next((point for point in self.points if point.step >= WARM_UP * last.step), last)
        secs = last.secs - first.secs
        if secs <= 0:
            return math.nan, math.nan
        return (last.step - first.step) / secs, (last.examples - first.examples) / secs

    def reached(self, goal: CommonGoal | None) -> Point | None:
        """The point at which the goal was reached.

        Between two evaluations the metric is taken as a straight line. Otherwise the one of two equal contenders would
        be first whose evaluations happen to lie better.
        """
        first = next((point for point in self.points if goal and goal.is_met(point)), None)
        before = [point for point in self.points if first and point.step < first.step and math.isfinite(point.loss)]
        return goal.between(before[-1], first) if goal and first and before else first

    def end(self, until: Until) -> Point | None:
        """The last evaluation within the steps or the seconds."""
        within = [point for point in self.points if until.kind != "secs" or point.secs <= until.value]
        return within[-1] if within else None

    @property
    def best_accuracy(self) -> float:
        return max((point.accuracy for point in self.points if point.accuracy is not None), default=math.nan)


@dataclass(frozen=True)
class Spread:
    """The same measurement of several runs.

    Attributes:
        is_bound: whether the true values may be smaller.
    """

    values: tuple[float, ...]
    is_bound: bool = False

    @classmethod
    def of(cls, values: Iterator[float] | list[float], is_bound: bool = False) -> "Spread | None":
        finite = tuple(value for value in values if math.isfinite(value))
        return cls(finite, is_bound) if finite else None

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass
class ContenderResult:
    """All runs of one contender.

    Attributes:
        outcomes: of all its runs.
        measured: those that are done.
        goal: of its scenario; None if nothing was evaluated.
        secs, examples: to the goal; None unless all runs that are done have reached it.
        accuracy: the best of each run, or that at the end of the steps or seconds.
        step_rate: global steps a second, after the warm-up.
        staleness: the mean of each run; None for modes without.
    """

    contender: Contender
    until: Until
    outcomes: list[RunOutcome] = field(default_factory=list)
    measured: list[Measurement] = field(default_factory=list)
    goal: CommonGoal | None = None

    def _at_goal(self) -> list[Point | None]:
        return [run.reached(self.goal) for run in self.measured]

    def ends(self) -> list[Point]:
        """The last evaluation of each run."""
        return [point for run in self.measured if (point := run.end(self.until))]

    @property
    def secs(self) -> Spread | None:
        points = self._at_goal()
        return Spread.of([point.secs for point in points if point], self._is_bound) if all(points) else None

    @property
    def examples(self) -> Spread | None:
        points = self._at_goal()
        return Spread.of([point.examples for point in points if point], self._is_bound) if all(points) else None

    @property
    def _is_bound(self) -> bool:
        """True if the goal was met at a first evaluation, and so perhaps long before."""
        return any(run.points[:1] == [point] for run, point in zip(self.measured, self._at_goal(), strict=True))

    @property
    def num_reached(self) -> int:
        return sum(point is not None for point in self._at_goal())

    @property
    def accuracy(self) -> Spread | None:
        if self.until.kind == "accuracy":
            return Spread.of([run.best_accuracy for run in self.measured])
        return Spread.of([point.accuracy for point in self.ends() if point.accuracy is not None])

    @property
    def step_rate(self) -> Spread | None:
        return Spread.of([run.rates[0] for run in self.measured])

    @property
    def staleness(self) -> Spread | None:
        return Spread.of([run.summary["staleness"]["mean"] for run in self.measured if run.summary.get("staleness")])

    @property
    def dropped(self) -> Spread | None:
        """The part of the gradients that came too late, with mode=sync_replicas."""
        dropped_parts = []
        for run in self.measured:
            if dropped := run.summary.get("dropped"):
                dropped_parts.append(sum(dropped) / max(1, sum(dropped) + sum(run.summary["aggregated"])))
        return Spread.of(dropped_parts)

    def staleness_counts(self) -> list[int]:
        """Counts of the staleness 0, 1, 2, ... in all runs together; empty for modes without."""
        counts: list[int] = []
        for run in self.measured:
            run_counts = run.summary.get("staleness_counts", [])
            counts += [0] * (len(run_counts) - len(counts))
            for number, count in enumerate(run_counts):
                counts[number] += count
        return counts


def secs_text(spread: Spread) -> str:
    return spread_text(spread, lambda value: f"{value:.2f}" if value < 9.995 else f"{value:,.1f}")


def count_text(spread: Spread) -> str:
    return spread_text(spread, lambda value: f"{round(value):,}")


def spread_text(spread: Spread, form: Callable[[float], str]) -> str:
    """The mean, with the lowest and highest of several runs, as in 3.2 (3.0 to 3.4)."""
    low, high = form(spread.low), form(spread.high)
    return form(spread.mean) + (f" ({low} to {high})" if low != high else "")


def mean_rate_text(spread: Spread) -> str:
    """The mean of a rate, with three digits at least where it has them."""
    return f"{spread.mean:,.0f}" if spread.mean >= 99.5 else f"{spread.mean:.1f}"


def mean_text(spread: Spread) -> str:
    return f"{spread.mean:.1f}"


@dataclass(frozen=True)
class Column:
    """A column of the report, and of compare.json if it has a key there.

    Attributes:
        value: by which it is sorted: a number, a spread, a text, or None if it was not measured.
        format: the text of a value that is not None.
    """

    title: str
    value: Callable[[Any], Any]
    format: Callable[[Any], str] = str
    is_number: bool = True
    key: str = ""

    def text(self, row: Any) -> str:
        value = self.value(row)
        return "" if value is None else self.format(value)


SECS = Column("seconds to the goal", lambda result: result.secs, secs_text, key="secs_to_goal")
EXAMPLES = Column("examples to the goal", lambda result: result.examples, count_text, key="examples_to_goal")
ACCURACY = Column("accuracy", lambda result: result.accuracy, lambda spread: f"{spread.mean:.4f}", key="accuracy")
MEASURES = (
    SECS,
    EXAMPLES,
    ACCURACY,
    Column("steps/s", lambda result: result.step_rate, mean_rate_text, key="steps_per_sec"),
    Column("examples/s", lambda result: Spread.of([run.rates[1] for run in result.measured]), mean_rate_text,
           key="examples_per_sec"),
    Column("staleness in updates", lambda result: result.staleness, mean_text, key="staleness"),
    Column("dropped gradients in %", lambda result: result.dropped, lambda spread: f"{100 * spread.mean:.0f}",
           key="dropped"),
    Column("seconds to the first step",
           lambda result: Spread.of([run.summary["startup_secs"] for run in result.measured]), mean_text,
           key="startup_secs"),
)  # fmt: skip


def results_of(outcomes: list[RunOutcome], folder: Path, until: Until) -> list[ContenderResult]:
    """The results of all contenders, in the order of their first runs."""
    results: dict[str, ContenderResult] = {}
    for outcome in outcomes:
        contender = outcome.run.contender
        result = results.setdefault(contender.name, ContenderResult(contender, until))
        result.outcomes.append(outcome)
        run_dir = folder / RUNS / outcome.run.folder
        if outcome.state == "done" and (summary := finished_summary(run_dir)):
            result.measured.append(measure(outcome.run, run_dir, summary))
    for scenario in {result.contender.scenario for result in results.values()}:
        set_goal([result for result in results.values() if result.contender.scenario == scenario], until)
    return list(results.values())


def set_goal(results: list[ContenderResult], until: Until) -> None:
    """Sets the goal of one scenario: the accuracy that ends the runs, or the best that every run has reached.

    After equal steps or seconds each contender has seen another number of examples; the time to the same accuracy
    takes account of both.
    """
    runs = [points for result in results for run in result.measured
            if (points := [point for point in run.points if math.isfinite(point.loss)])]  # fmt: skip
    goal = CommonGoal("accuracy", until.value) if until.kind == "accuracy" else None
    if runs and not goal:
        has_accuracy = all(point.accuracy is not None for points in runs for point in points)
        goal = CommonGoal("accuracy" if has_accuracy else "loss", 0.0)
        worst = min(max(map(goal.of, points)) for points in runs)
        goal = replace(goal, value=worst if has_accuracy else -worst)
    for result in results:
        result.goal = goal


def measure(run: ContenderRun, run_dir: Path, summary: dict[str, Any]) -> Measurement:
    """Reads what a run has left; a file that is missing or damaged leaves out what it would tell."""
    per_step = summary["examples_seen"] / max(1, summary["global_step"])
    return Measurement(
        run, summary, list(_points(run_dir / "metrics.jsonl", per_step)), timelines_in(run_dir / TIMELINE)
    )


def _points(path: Path, examples_per_step: float) -> Iterator[Point]:
    last_step = -1
    with contextlib.suppress(OSError):
        for row in rows_of(path):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # edited
                if "validation_loss" not in row or "training_secs" not in row or row["step"] <= last_step:
                    continue
                last_step, accuracy = int(row["step"]), row.get("validation_accuracy")
                secs, loss = float(row["training_secs"]), row["validation_loss"]
                yield Point(
                    last_step, secs, last_step * examples_per_step, math.nan if loss is None else loss, accuracy
                )


def timelines_in(folder: Path) -> list[list[tuple[float, float]]]:
    """The steps of each worker, in the order of their numbers; fewer workers if a file is missing."""
    timelines = []
    with contextlib.suppress(OSError):
        names = sorted(folder.glob("worker-*.csv"), key=lambda path: int(path.stem.removeprefix("worker-")))
        for path in names:
            steps = []
            with files.open_to_read(path) as file:
                for line in file.read().decode(errors="replace").splitlines():
                    with contextlib.suppress(ValueError):  # the process was killed while it wrote
                        begun_at, ended_at = line.split(",")
                        steps.append((float(begun_at), float(ended_at)))
            timelines.append(sorted(steps))
    return timelines


def typical_secs(steps: list[tuple[float, float]]) -> float:
    """The median time from the begin of a step to the begin of the next one; not a number if there are too few."""
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(steps)]
    return median(gaps) if len(gaps) >= MIN_STEPS else math.nan
