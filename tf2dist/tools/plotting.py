"""training.png, from the metrics.jsonl and the summary.json of a run, and the look that all pictures of runs share.

This module imports matplotlib, so whatever can do without a picture imports it late.
"""

import contextlib
import io
import json
import math
import textwrap
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from tf2dist.files import open_to_read, write_whole
from tf2dist.launch.console import last_evaluation, result_lines
from tf2dist.launch.run_dir import rows_of
from tf2dist.palette import SPLIT_STYLES, Style

WIDTH, ROW_HEIGHT, DPI = 9.0, 2.3, 100  # in inches, and dots an inch: 900 pixels wide
MARGIN_INCHES, TITLE_INCHES, LINE_INCHES = 0.18, 0.24, 0.19  # around the head, and for each of its lines
LEGEND_INCHES, FOOT_INCHES, GAP_INCHES = 0.42, 0.55, 0.85
TITLE_CHARS, LINE_CHARS = 84, 120  # that fit into the width
LABEL_CHARS = 40  # that fit above a panel, with the name of a scale
COLUMNS = ("step", "time", "secs", "task")  # of every row
NO_METRICS = ("loss", "steps_per_sec", "training_secs")
NO_METRIC_BEGINS = ("validation_", "test_", "learning_rate")
GREY, GRID = "#6e7781", "#e4e7ea"
PALE = 0.35  # how much of a colour stays in the curve behind a moving mean
MAX_METRICS = 3  # the pictures of more would not fit on a screen
LOG_FROM = 20.0  # a loss whose largest value is so many times the smallest has a logarithmic axis
FEW_POINTS = 40  # each of so few is marked
MANY_POINTS = 200  # so many are drawn pale, with a moving mean over them
UNITS = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))
SAME_COMMAND_SECS = 1.0  # by which the begin of a command may seem to move while it runs
MOST_UPDATES, MIN_SHOWN, CUT_FROM = 0.995, 10, 1.5  # see `_shown_staleness`


class Series:
    """The values of one name: `steps`, `secs` (of all commands of the run, one after the other) and `values`."""

    def __init__(self) -> None:
        # Eight bytes a number: a run of weeks has a million rows.
        self.steps, self.secs, self.values = array("d"), array("d"), array("d")

    def add(self, step: float, secs: float, value: float) -> None:
        """Adds a point at its place, where it replaces one with the same step."""
        first, end = bisect_left(self.steps, step), bisect_right(self.steps, step)
        if end < len(self.secs):  # an evaluator lags behind the leader, which may have evaluated later steps
            secs = min(secs, self.secs[end])
        for column, number in ((self.steps, step), (self.secs, secs), (self.values, value)):
            column[first:end] = array("d", [number])

    def cut(self, step: float) -> None:
        """Removes the points from a step on."""
        first = bisect_left(self.steps, step)
        for column in (self.steps, self.secs, self.values):
            del column[first:]

    def finite(self) -> np.ndarray:
        values = np.array(self.values)
        return np.asarray(values[np.isfinite(values)])


SeriesByName = dict[str, Series]


def series_of(rows: Iterable[dict[str, Any]]) -> SeriesByName:
    """The series by name, from the rows of metrics.jsonl in order; each command's time counts from its first row on."""
    series: SeriesByName = {}
    began_at, last_secs, last_step = math.nan, 0.0, 0.0  # of the command that wrote the last row
    elapsed_secs = offset_secs = 0.0  # since the first row of all, and what that is more than the command's own
    for row in rows:
        step, time, secs = (row.get(name) for name in COLUMNS[:3])
        if not (isinstance(step, int | float) and isinstance(time, int | float) and isinstance(secs, int | float)):
            continue
        # The evaluator's command began at another time than the leader's, so its rows get the time of the leader's.
        if not str(row.get("task")).startswith("evaluator"):
            # Also false at the first row, whose `began_at` is not a number. The clock of the host may be set.
            is_same = abs(time - secs - began_at) <= SAME_COMMAND_SECS and secs >= last_secs
            offset_secs = offset_secs if is_same else elapsed_secs - secs
            began_at, last_secs, elapsed_secs = time - secs, secs, offset_secs + secs
            if step < last_step:  # started again at a checkpoint, the run takes the steps after it once more
                for curve in series.values():
                    curve.cut(step)
            last_step = step
        for name, value in row.items():
            if name not in COLUMNS and (value is None or isinstance(value, int | float)):
                # JSON has no NaN: the file has null for it.
                series.setdefault(name, Series()).add(step, elapsed_secs, np.nan if value is None else value)
    return series


def metrics_of(series: SeriesByName) -> list[str]:
    """The names to draw: the loss, and the model's metrics, accuracies first; those with a number at least."""
    with_numbers = [name for name, curve in series.items() if len(curve.finite())]
    metric_names = [name for name in with_numbers if name not in NO_METRICS and not name.startswith(NO_METRIC_BEGINS)]
    metric_names.sort(key=lambda name: "accuracy" not in name)
    return [name for name in ("loss",) if name in with_numbers] + metric_names[:MAX_METRICS]


def draw_run(run_dir: Path) -> Path | None:
    """Draws training.png of a run, which may still go on; returns its path, or None if there is nothing to draw."""
    series = series_of(rows_of(run_dir / "metrics.jsonl"))
    if not metrics_of(series):
        return None
    with own_look():
        write_whole(run_dir / "training.png", as_png(training_figure(series, *_result(run_dir, series))))
    return run_dir / "training.png"


@contextlib.contextmanager
def own_look() -> Iterator[None]:
    """The same look on every machine, whatever its matplotlibrc says; a program that calls `fit` keeps its own."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def _result(run_dir: Path, series: SeriesByName) -> tuple[str, str, list[int]]:
    """The title and the line below it, and how many updates had a staleness of 0, 1, 2, ...; see `training_figure`."""
    name = run_dir.resolve().name
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # not there yet, or edited
        with open_to_read(run_dir / "summary.json") as file:
            summary = json.load(file)
        title = f"{name}: {last_evaluation(summary).strip() or 'not evaluated'}"
        return title, result_lines(summary, "").splitlines()[0], summary.get("staleness_counts", [])
    last_step = max(curve.steps[-1] for curve in series.values())
    return f"{name}: not finished, step {last_step:,.0f}", "", []


def training_figure(series: SeriesByName, title: str, line: str, staleness: Sequence[int]) -> Figure:
    """Loss and metrics against steps and time, a row each, and the staleness of an asynchronous run."""
    names = metrics_of(series)
    num_rows = len(names) + bool(sum(staleness))
    figure, legend_y = _figure(title, line, num_rows)
    secs_per, unit = _unit(max(curve.secs[-1] for curve in series.values()))
    grid = figure.add_gridspec(num_rows, 2)
    for row, name in enumerate(names):
        by_step, by_time = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        curves = _draw_metric(by_step, series, name, 0.0)
        _draw_metric(by_time, series, name, secs_per)
        by_step.set_xlabel("global step")
        by_time.set_xlabel(f"time since the first step ({unit})")
        _set_axes(by_step, by_time)
        scale = _set_scale((by_step, by_time), name, curves)
        shown = name if len(name) <= LABEL_CHARS else f"{name[: LABEL_CHARS - 1]}…"
        set_quantity(by_step, shown + scale)
        by_time.sharey(by_step)
        by_time.tick_params(labelleft=False)
    labels = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    # Above all axes, where it covers no line.
    figure.legend(
        labels.values(), labels, loc="lower right", bbox_to_anchor=(0.98, legend_y), ncols=3, frameon=False, fontsize=9
    )
    if sum(staleness):
        _draw_staleness(figure.add_subplot(grid[num_rows - 1, :]), np.array(staleness))
    return figure


def _figure(title: str, line: str, num_rows: int) -> tuple[Figure, float]:
    """An empty figure with its head, and the height at which the legend stands, in parts of the whole height."""
    lines = textwrap.wrap(title, TITLE_CHARS), textwrap.wrap(line, LINE_CHARS)
    head = MARGIN_INCHES + TITLE_INCHES * len(lines[0]) + LINE_INCHES * len(lines[1]) + LEGEND_INCHES
    total = head + ROW_HEIGHT * num_rows + GAP_INCHES * (num_rows - 1) + FOOT_INCHES
    figure = Figure(figsize=(WIDTH, total))
    # Fixed margins: finding them by layout takes half of the time of drawing.
    figure.subplots_adjust(
        left=0.085,
        right=0.975,
        top=1 - head / total,
        bottom=FOOT_INCHES / total,
        wspace=0.06,
        hspace=GAP_INCHES / ROW_HEIGHT,
    )
    set_head(figure, lines[0], lines[1])
    return figure, 1 - head / total


def set_head(figure: Figure, title: Sequence[str], lines: Sequence[str]) -> None:
    """Writes the title, and the lines below it, at the top left of a figure."""
    total = figure.get_figheight()
    for inches, text, style in (
        (MARGIN_INCHES, "\n".join(title), {"fontsize": 12, "weight": "bold"}),
        (MARGIN_INCHES + TITLE_INCHES * len(title), "\n".join(lines), {"fontsize": 9, "color": "#444444"}),
    ):
        # A name of the user's with dollar signs is no formula.
        figure.text(0.16 / figure.get_figwidth(), 1 - inches / total, text, ha="left", va="top", parse_math=False).set(
            **style
        )


def _unit(secs: float) -> tuple[float, str]:
    """The unit in which a time has a readable number, in seconds, and its name."""
    return next(((size, name) for name, size in UNITS if secs >= 2 * size), (1.0, "seconds"))


def _draw_metric(axes: Axes, series: SeriesByName, name: str, secs_per: float) -> list[np.ndarray]:
    """Draws a metric of all splits against the step, or against the time in units of `secs_per` seconds.

    Returns:
        For each split the finite values of its curve; of the training, which is the first, those of the moving mean.
    """
    curves = []
    for split, style in SPLIT_STYLES.items():
        is_training = split == "training"
        curve = series.get(name if is_training else f"{split}_{name}")
        if curve is None or not len(curve.finite()):
            continue
        x, y = np.array(curve.secs) / secs_per if secs_per else np.array(curve.steps), np.array(curve.values)
        # The others in front of the training, which has more points.
        label, width, height = (split, 1.6, 3) if is_training else (split, 1.4, 4)
        if is_training and len(x) > MANY_POINTS:
            axes.plot(x, y, lw=0.7, color=style.colour, alpha=PALE)
            (x, y), label = _moving_mean(x, y), "training (moving mean)"
        axes.plot(x, y, lw=width, zorder=height, label=label, **_looks(style, len(x)))
        curves.append(y[np.isfinite(y)])
    return curves


def _looks(style: Style, num_points: int) -> dict[str, Any]:
    """The arguments of `plot` for a curve of so many points; a single one has no line, in the legend neither."""
    return {
        "color": style.colour,
        "linestyle": style.dash if num_points > 1 else "none",
        "marker": style.marker if num_points <= FEW_POINTS else "",
        "markersize": 4 if num_points > 1 else 6,
    }


def _moving_mean(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The means of a fiftieth of the points each, [n - window + 1], at the points in the middle of each."""
    window = len(y) // 50 | 1
    # A sum runs on through what is not a number, so each mean has a sum of its own.
    return x[window // 2 : len(x) - window // 2], np.convolve(y, np.full(window, 1 / window), "valid")


def _set_axes(by_step: Axes, by_time: Axes) -> None:
    for axes in (by_step, by_time):
        set_style(axes)
        axes.margins(x=0.02)
        low, high = axes.get_xlim()
        if axes is by_step and high - low < 1:  # a single step
            axes.set_xlim(low - 1, high + 1)
        axes.xaxis.set_major_locator(MaxNLocator(4 if axes is by_step else 6, integer=axes is by_step))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}" if axes is by_time else "{x:,.0f}"))


def _set_scale(both: tuple[Axes, Axes], name: str, curves: list[np.ndarray]) -> str:
    """Makes the vertical axes logarithmic where that shows more; returns what their title says of it."""
    values, training = np.concatenate(curves), curves[0]
    if not len(values):
        return ""
    ratio = values.max() / values.min() if values.min() > 0 else 0.0
    is_growing = len(training) and training[-1] > training[0]
    if ratio < LOG_FROM or (is_growing and name != "loss"):
        return ""
    for axes in both:
        _set_log(axes)
    return " (log scale)"


def _set_log(axes: Axes) -> None:
    """Makes the vertical axis logarithmic, with readable ticks."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,), numticks=12))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def set_quantity(axes: Axes, text: str) -> None:
    """Names what the vertical axis shows, above it: beside it a long name or wide numbers would have no room."""
    axes.set_title(text, loc="left", fontsize=10, parse_math=False)


def set_style(axes: Axes) -> None:
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, which="both")


def draw_counts(axes: Axes, counts: np.ndarray, colour: str, num_places: int, num_ticks: int) -> None:
    """Draws how many updates had each staleness; the number of updates is logarithmic, to show the few late ones.

    Args:
        num_places: how many counts there is room for; it is at least `MIN_SHOWN`.
    """
    axes.stairs(counts, np.arange(len(counts) + 1) - 0.5, fill=True, color=colour, baseline=0.7)
    axes.set_yscale("log")
    axes.set_ylim(0.7, counts.max() * 2)
    axes.set_xlim(-0.6, max(num_places, MIN_SHOWN) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(num_ticks, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_staleness(axes: Axes, counts: np.ndarray) -> None:
    set_style(axes)
    num_shown = _shown_staleness(counts)
    draw_counts(axes, counts[:num_shown], GREY, num_shown, 12)
    set_quantity(axes, "updates (log scale)")
    label = "staleness: updates of others between a worker's pull and its push"
    if left := counts[num_shown:].sum():
        label += f"; {left:,} beyond this axis, up to {np.flatnonzero(counts)[-1]:,}"
    axes.set_xlabel(label)


def _shown_staleness(counts: np.ndarray) -> int:
    """The number of counts that are drawn: a few updates far behind all others would squeeze these together."""
    num_counts = int(np.flatnonzero(counts)[-1]) + 1
    usual = int(np.searchsorted(counts.cumsum(), MOST_UPDATES * counts.sum())) + 1
    num_shown = max(MIN_SHOWN, round(CUT_FROM * usual))
    return num_shown if num_counts > CUT_FROM * num_shown else num_counts


def as_png(figure: Figure) -> bytes:
    # In memory: `savefig` on a path would follow a link and leave half a file on a full disk.
    with io.BytesIO() as buffer:
        figure.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()
