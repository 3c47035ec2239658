"""The tables of docs/staleness.md about error against staleness, made from docs/staleness.jsonl."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.bench import growth
from tests.bench.page import header, line
from tests.bench.staleness import (
    ALGORITHMS,
    COMPENSATED,
    FEW,
    FILE,
    MANY,
    OPTIMIZERS,
    OTHERS,
    RATES,
    SEEDS,
    SYNC,
    Results,
    Run,
    Setting,
    read,
)

COMMAND = "python -m tests.bench.staleness_page"
NAMES = {"sgd": "SGD", "momentum": "momentum 0.9", "adam": "Adam"}
DATA = {"fashion_mnist": "Fashion-MNIST", "mnist": "MNIST"}
SAME_CLASS = 88.6  # the least error in percent of a model that says the same for all: 11.35 % of MNIST's digits are a 1
WORKERS = sorted((*FEW, *MANY, *OTHERS))


class Point(NamedTuple):
    """The runs of all seeds at one point.

    Attributes:
        rate: the learning rate.
        errors: of the test, in percent.
    """

    rate: float
    errors: list[float]

    @property
    def learned(self) -> list[float]:
        """The errors of the runs that have not diverged; those of all if none has learned anything."""
        return [error for error in self.errors if error <= SAME_CLASS] or self.errors

    @property
    def mean(self) -> float:
        return statistics.mean(self.learned)

    def __str__(self) -> str:
        """The mean, and the range of several seeds."""
        diverged = sum(error > SAME_CLASS for error in self.errors)
        texts = []
        if diverged < len(self.errors):
            spread = f" ({min(self.learned):.1f} to {max(self.learned):.1f})" if len(self.learned) > 1 else ""
            texts.append(f"{self.mean:.1f}{spread}")
        if diverged:
            texts.append("diverged" if len(self.errors) == 1 else f"diverged ({diverged} of {len(self.errors)})")
        return ", ".join(texts)


def point_of(results: Results, setting: Setting, tuned: bool) -> Point | None:
    """The point with all its seeds; None if it has not been measured, or its rate is not known.

    Args:
        setting: a run with the rate that is best without staleness.
    """
    rate = results.best_rate(setting) if tuned and setting.workers > 1 else setting.learning_rate
    if isinstance(rate, Setting):
        return None
    settings = [replace(setting, learning_rate=rate, seed=seed) for seed in SEEDS]
    errors = [100 * results.error(one) for one in settings if one in results]
    return Point(rate, errors) if errors else None


def curve(results: Results, model: str, data: str, optimizer: str, algorithm: str, tuned: bool) -> dict[int, Point]:
    """By number of workers the points that have been measured."""
    rate = results.fixed_rate(model, data, optimizer)
    if isinstance(rate, Setting):
        return {}
    points = {}
    for workers in WORKERS:
        own = algorithm if workers > 1 else "plain"
        setting = Setting(model, data, optimizer, own, workers, rate, SEEDS[0])
        if point := point_of(results, setting, tuned):
            points[workers] = point
    return points


def measured_staleness(runs: Iterable[Run], workers: int) -> float:
    """The mean of all runs with so many workers."""
    means = [run["staleness"]["mean"] for run in runs if run["workers"] == workers and run["staleness"]]
    return statistics.mean(means) if means else workers - 1.0


def staleness_table(runs: Sequence[Run]) -> list[str]:
    lines = header("workers", "runs", "mean staleness, with its range over the runs", "middle 80 % of the updates")
    for workers in WORKERS:
        own = [run["staleness"] for run in runs if run["workers"] == workers and run["staleness"]]
        if own:
            means = [one["mean"] for one in own]
            middle = [round(statistics.median(one[name] for one in own)) for name in ("p10", "p90")]
            spread = f"{statistics.mean(means):.1f} ({min(means):.1f} to {max(means):.1f})"
            lines.append(line(str(workers), str(len(own)), spread, f"{middle[0]} to {middle[1]}"))
    return lines


def error_table(runs: Sequence[Run], tuned: bool) -> list[str]:
    """A row for each curve, and a column for each staleness that at least one of them has."""
    results = Results(runs)
    rows = {
        (model, data, optimizer, algorithm): curve(results, model, data, optimizer, algorithm, tuned)
        for model in ("dnn", "cnn")
        for data in DATA
        for optimizer in OPTIMIZERS
        for algorithm in (*ALGORITHMS, *([SYNC] if tuned else []))
    }
    workers = [number for number in WORKERS if any(number in points for points in rows.values())]
    lines = header(
        "model, data",
        "optimizer",
        "algorithm",
        "",
        *(f"staleness {measured_staleness(runs, number):.1f}" for number in workers),
    )
    for (model, data, optimizer, algorithm), points in rows.items():
        if set(points) - {1}:
            shown = [points.get(number) for number in workers]
            cells = [_cell(point, tuned) for point in shown]
            rate = "best rate" if tuned else f"rate {next(iter(points.values())).rate:g}"
            way = "`mode=sync`" if algorithm == SYNC else algorithm
            lines.append(line(f"{model}, {DATA[data]}", NAMES[optimizer], way, rate, *cells))
    return lines


def _cell(point: Point | None, tuned: bool) -> str:
    if point is None:
        return ""
    return f"{point}, rate {point.rate:g}" if tuned else str(point)


def compensated_table(runs: Sequence[Run]) -> list[str]:
    """SGD with each factor, at each rate that was tried."""
    results = Results(runs)
    rates = [rate for rate in RATES["sgd"] if any(_compensated(runs, rate))]
    found = sorted({run["workers"] for rate in rates for run in _compensated(runs, rate)})
    lines = header("workers", "algorithm", "options", *(f"rate {rate:g}" for rate in rates))
    for workers in found:
        for algorithm in (*ALGORITHMS, *COMPENSATED):
            kind, *options = algorithm.split()
            point = Setting("dnn", "fashion_mnist", "sgd", algorithm, workers, 0.0, SEEDS[0])
            cells = [point_of(results, replace(point, learning_rate=rate), False) for rate in rates]
            if any(cells):
                texts = [str(cell) if cell else "" for cell in cells]
                lines.append(line(str(workers), kind, " ".join(f"`algorithm.{one}`" for one in options), *texts))
    return lines


def _compensated(runs: Sequence[Run], rate: float) -> Iterable[Run]:
    return [run for run in runs if run["algorithm"] in COMPENSATED and run["learning_rate"] == rate]


TABLES = {
    "staleness": staleness_table,
    "errors at the same rate": lambda runs: error_table(runs, tuned=False),
    "errors at the best rate": lambda runs: error_table(runs, tuned=True),
    "delay_compensated": compensated_table,
}


def update(page: Path, runs: Sequence[Run]) -> None:
    """Writes the tables into the page."""
    page.write_text(growth.page_of(page.read_text(), runs, TABLES, COMMAND))


if __name__ == "__main__":
    update(FILE.with_suffix(".md"), read(FILE))
