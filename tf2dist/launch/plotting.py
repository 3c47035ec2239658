"""The pictures of a run, from its metrics.jsonl and summary.json, and of what its model predicts.

This module imports matplotlib, so whatever can do without a picture imports it late.
"""

import contextlib
import io
import json
import textwrap
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from tf2dist.errors import ConfigError
from tf2dist.files import open_to_read, write_whole
from tf2dist.launch.console import result_lines

WIDTH, ROW_HEIGHT, DPI = 9.0, 2.3, 100  # in inches, and dots an inch: 900 pixels wide
HEAD_INCHES, FOOT_INCHES, GAP_INCHES = 0.95, 0.5, 0.75
LINE_CHARS = 120  # that fit into the width
COLUMNS = ("step", "time", "secs", "task")  # of every row
NO_METRICS = ("loss", "steps_per_sec", "learning_rate", "training_secs")
SPLITS = {"validation": "#d1702b", "test": "#2f6f4f"}
TRAINING, PALE, GRID = "#2b6ca3", "#a9c6de", "#e4e7ea"
MAX_METRICS = 3  # the pictures of more would not fit on a screen
LOG_FROM = 20.0  # a loss whose largest value is so many times the smallest has a logarithmic axis
FEW_POINTS = 40  # each of so few is marked
MANY_POINTS = 200  # so many are drawn pale, with a moving mean over them
UNITS = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))
IMAGES_A_SIDE = 6  # of predictions.png
RIGHT, WRONG = "#2f6f4f", "#c0392b"
MAX_NUMBERED_CLASSES = 20  # with more the cells of the confusion matrix have no room for a number


class Series:
    """The values of one name: `steps`, `secs` (of all commands of the run, one after the other) and `values`."""

    def __init__(self) -> None:
        # Eight bytes a number: a run of weeks has a million rows.
        self.steps, self.secs, self.values = array("d"), array("d"), array("d")

    def add(self, step: float, secs: float, value: float) -> None:
        # A run that was started again at a checkpoint takes the steps after it once more.
        while self.steps and self.steps[-1] >= step:
            for column in (self.steps, self.secs, self.values):
                column.pop()
        for column, number in ((self.steps, step), (self.secs, secs), (self.values, value)):
            column.append(number)

    def finite(self) -> np.ndarray:
        values = np.array(self.values)
        return np.asarray(values[np.isfinite(values)])


SeriesByName = dict[str, Series]


def series_of(rows: Iterable[dict[str, Any]]) -> SeriesByName:
    """The series by name, from the rows of metrics.jsonl in order."""
    series: SeriesByName = {}
    elapsed_secs = earlier_secs = 0.0
    for row in rows:
        step, secs, task = row.get("step"), row.get("secs"), row.get("task")
        if not isinstance(step, int | float) or not isinstance(secs, int | float) or not isinstance(task, str):
            continue
        # The evaluator's command began at another time than the leader's, so its rows get the time of the leader's.
        if not task.startswith("evaluator"):
            if earlier_secs + secs < elapsed_secs:  # a new command, which counts from its own beginning
                earlier_secs = elapsed_secs
            elapsed_secs = earlier_secs + secs
        for name, value in row.items():
            if name not in COLUMNS and (value is None or isinstance(value, int | float)):
                # JSON has no NaN: the file has null for it.
                series.setdefault(name, Series()).add(step, elapsed_secs, np.nan if value is None else value)
    return series


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics.jsonl; a line that is damaged, or still being written, is left out.

    Raises:
        OSError: it cannot be read.
    """
    with open_to_read(path) as file:
        for line in file:
            with contextlib.suppress(ValueError):  # a full disk has cut it off
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def metrics_of(series: SeriesByName) -> list[str]:
    """The names to draw: the loss, and the model's metrics, accuracies first; those with a number at least."""
    with_numbers = [name for name, curve in series.items() if len(curve.finite())]
    metric_names = [
        name for name in with_numbers if name not in NO_METRICS and not name.startswith(("validation_", "test_"))
    ]
    metric_names.sort(key=lambda name: "accuracy" not in name)
    return [name for name in ("loss",) if name in with_numbers] + metric_names[:MAX_METRICS]


def draw_run(run_dir: Path) -> Path | None:
    """Draws training.png of a run, which may still go on; returns its path, or None if there is nothing to draw.

    Raises:
        OSError: metrics.jsonl cannot be read, or the picture cannot be written.
    """
    series = series_of(rows_of(run_dir / "metrics.jsonl"))
    if not metrics_of(series):
        return None
    # The same look on every machine, whatever the user's matplotlibrc says; a program that calls `fit` keeps its own.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        write_whole(run_dir / "training.png", _png(training_figure(series, *_result(run_dir, series))))
    return run_dir / "training.png"


def _result(run_dir: Path, series: SeriesByName) -> tuple[list[str], list[int]]:
    """The lines above the picture, and how many updates had a staleness of 0, 1, 2, ...; empty without summary.json."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # not there yet, or edited
        with open_to_read(run_dir / "summary.json") as file:
            summary = json.load(file)
        return result_lines(summary, "").splitlines(), summary.get("staleness_counts", [])
    last_step = max(curve.steps[-1] for curve in series.values())
    return [f"{run_dir.name}: not finished, step {last_step:,.0f}"], []


def training_figure(series: SeriesByName, lines: Sequence[str], staleness: Sequence[int]) -> Figure:
    """Loss and metrics against steps and time, a row each, and the staleness of an asynchronous run."""
    names = metrics_of(series)
    num_rows = len(names) + bool(sum(staleness))
    figure, legend_y = _figure([part for line in lines for part in textwrap.wrap(line, LINE_CHARS)], num_rows)
    secs_per, unit = _unit(max(curve.secs[-1] for curve in series.values()))
    grid = figure.add_gridspec(num_rows, 2)
    for row, name in enumerate(names):
        by_step, by_time = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        values = _draw_metric(by_step, series, name, 0.0)
        _draw_metric(by_time, series, name, secs_per)
        by_step.set_ylabel(name, parse_math=False)
        by_step.set_xlabel("global step")
        by_time.set_xlabel(f"wall time ({unit})")
        _set_axes(by_step, by_time)
        training = series[name].finite()
        ratio = values.max() / values.min() if values.min() > 0 else 0.0
        # An accuracy that grows stays linear.
        if ratio >= LOG_FROM and (name == "loss" or training[0] > training[-1]):
            _set_log(by_step, ratio)
            _set_log(by_time, ratio)
        by_time.sharey(by_step)
        by_time.tick_params(labelleft=False)
    labels = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    # Above all axes, where it covers no line.
    figure.legend(labels.values(), labels, loc="lower right", bbox_to_anchor=(0.98, legend_y), ncols=3, frameon=False)
    if sum(staleness):
        _draw_staleness(figure.add_subplot(grid[num_rows - 1, :]), np.array(staleness))
    return figure


def _figure(lines: list[str], num_rows: int) -> tuple[Figure, float]:
    """An empty figure with its head, and the height at which the legend stands, in parts of the whole height."""
    head = HEAD_INCHES + 0.17 * len(lines)
    total = head + ROW_HEIGHT * num_rows + GAP_INCHES * (num_rows - 1) + FOOT_INCHES
    figure = Figure(figsize=(WIDTH, total))
    # Fixed margins: finding them by layout takes half of the time of drawing.
    figure.subplots_adjust(
        left=0.1,
        right=0.975,
        top=1 - head / total,
        bottom=FOOT_INCHES / total,
        wspace=0.06,
        hspace=GAP_INCHES / ROW_HEIGHT,
    )
    for inches, text, style in (
        (0.15, "Training", {"fontsize": 15, "weight": "bold"}),
        (0.5, "\n".join(lines), {"fontsize": 9, "color": "#444444", "linespacing": 1.35}),
    ):
        # A name of the user's with dollar signs is no formula.
        figure.text(0.02, 1 - inches / total, text, ha="left", va="top", parse_math=False).set(**style)
    return figure, 1 - head / total


def _unit(secs: float) -> tuple[float, str]:
    """The unit in which a time has a readable number, in seconds, and its name."""
    return next(((size, name) for name, size in UNITS if secs >= 2 * size), (1.0, "seconds"))


def _draw_metric(axes: Axes, series: SeriesByName, name: str, secs_per: float) -> np.ndarray:
    """Draws a metric of all splits against the step, or against the time in units of `secs_per` seconds.

    Returns:
        All finite values that were drawn.
    """
    finite_values = []
    for split, color in (("", TRAINING), *SPLITS.items()):
        curve = series.get(f"{split}_{name}" if split else name)
        if curve is None or not len(curve.finite()):
            continue
        finite_values.append(curve.finite())
        x, y = np.array(curve.secs) / secs_per if secs_per else np.array(curve.steps), np.array(curve.values)
        style = "o-" if len(x) <= FEW_POINTS else "-"
        if split:
            # In front of the training, which has more points.
            axes.plot(x, y, style, ms=4, lw=1.2, color=color, label=split, zorder=4)
        elif len(x) > MANY_POINTS:
            axes.plot(x, y, lw=0.7, color=PALE)
            axes.plot(*_moving_mean(x, y), lw=1.6, color=color, label="training", zorder=3)
        else:
            axes.plot(x, y, style, ms=3, lw=1.6, color=color, label="training")
    return np.concatenate(finite_values)


def _moving_mean(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The means of a fiftieth of the points each, [n - window + 1], at the points in the middle of each."""
    window = len(y) // 50 | 1
    # A sum runs on through what is not a number, so each mean has a sum of its own.
    return x[window // 2 : len(x) - window // 2], np.convolve(y, np.full(window, 1 / window), "valid")


def _set_axes(by_step: Axes, by_time: Axes) -> None:
    for axes in (by_step, by_time):
        _set_style(axes)
        axes.xaxis.set_major_locator(MaxNLocator(4 if axes is by_step else 6, integer=axes is by_step))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}" if axes is by_time else "{x:,.0f}"))
        axes.yaxis.set_major_locator(MaxNLocator(6))


def _set_log(axes: Axes, ratio: float) -> None:
    """Makes the vertical axis logarithmic, with ticks for values of which the largest is `ratio` times the smallest."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio < 1e3 else (1.0,), numticks=12))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _set_style(axes: Axes) -> None:
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _draw_staleness(axes: Axes, counts: np.ndarray) -> None:
    """Draws how many updates had each staleness; the number of updates is logarithmic, to show the few late ones."""
    _set_style(axes)
    axes.stairs(counts, np.arange(len(counts) + 1) - 0.5, fill=True, color=TRAINING, baseline=0.7)
    axes.set_yscale("log")
    axes.set_ylim(0.7, counts.max() * 1.6)
    axes.set_xlim(-0.6, max(len(counts), 10) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("staleness (updates of others between a worker's pull and its push)")
    axes.set_ylabel("updates")


def are_images(x: np.ndarray) -> bool:
    """Whether an array [n, ...] has the shape of images."""
    return x.ndim == 3 or (x.ndim == 4 and x.shape[-1] in (1, 3, 4))


def draw_predictions(
    run_dir: Path, images: np.ndarray, true: np.ndarray, predicted: np.ndarray, confidence: np.ndarray
) -> Path:
    """Draws the first 36 images into predictions.png, with class and probability; the wrong ones in a red frame.

    Args:
        images: [n, height, width] or [n, height, width, channels].
        true, predicted: class numbers, [n].
        confidence: the probability of the predicted class, [n].
    """
    figure = Figure(figsize=(9, 10), layout="constrained")
    for number, axes in enumerate(figure.subplots(IMAGES_A_SIDE, IMAGES_A_SIDE).flat):
        axes.set(xticks=[], yticks=[])
        if number >= len(images):
            axes.set_axis_off()
            continue
        image = images[number]
        # matplotlib clips floats above 1.
        if image.dtype.kind == "f" and image.max() > 1:
            image = image / 255
        is_grey = image.ndim == 2 or image.shape[-1] == 1
        axes.imshow(image.reshape(image.shape[:2]) if is_grey else image, cmap="gray" if is_grey else None)
        is_right = true[number] == predicted[number]
        text = f"{predicted[number]}  {confidence[number]:.0%}" + ("" if is_right else f"\nis {true[number]}")
        axes.set_title(text, fontsize=10, color=RIGHT if is_right else WRONG)
        for spine in axes.spines.values():
            spine.set(color=RIGHT if is_right else WRONG, linewidth=1 if is_right else 3)
    return _save(figure, run_dir / "predictions.png")


def draw_confusion(run_dir: Path, counts: np.ndarray) -> Path:
    """Draws the confusion matrix into confusion.png, each row coloured by its shares."""
    num_classes = len(counts)
    # Shares, since the colours of counts would hide rare classes. A class without examples is divided by 1.
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure = Figure(figsize=(7, 6.2), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted class", ylabel="true class")
    figure.colorbar(drawn, ax=axes, label="share of the true class")
    if num_classes <= MAX_NUMBERED_CLASSES:
        axes.set(xticks=range(num_classes), yticks=range(num_classes))
        for (row, column), count in np.ndenumerate(counts):
            if count:
                # Readable on the dark half of the colours, too.
                color = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=8, color=color)
    return _save(figure, run_dir / "confusion.png")


def draw_regression(run_dir: Path, x: np.ndarray, y: np.ndarray, predicted: np.ndarray) -> Path:
    """Draws the points (x, y) and the model's curve through (x, predicted), all [n], into regression.png."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(x, y, s=12, color="#7a8793", label="test points")
    order = x.argsort()
    axes.plot(x[order], predicted[order], color=WRONG, linewidth=2.5, label="the model")
    axes.set(xlabel="x", ylabel="y")
    axes.legend()
    return _save(figure, run_dir / "regression.png")


def _save(figure: Figure, path: Path) -> Path:
    """Writes the picture whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, _png(figure))
    except OSError as error:
        raise ConfigError(
            f"RUN_DIR ({path.parent}): {path.name} cannot be written ({error.strerror}); make room"
        ) from None
    return path


def _png(figure: Figure) -> bytes:
    # In memory: `savefig` on a path would follow a link and leave half a file on a full disk.
    with io.BytesIO() as buffer:
        figure.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()
