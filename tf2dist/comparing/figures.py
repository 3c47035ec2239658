"""The figures of every comparison: accuracy against time and examples, staleness, and the steps of the workers."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

from tf2dist.comparing.look import Look, new_figure, set_legend, set_title
from tf2dist.comparing.options import Until
from tf2dist.comparing.results import Measured, Point, Result, typical_secs

MAX_PANELS = 12
BELOW_TARGET = 0.3  # how much of the accuracy below the target is shown
FAST_STEPS, SLOW_STEPS = 30, 3  # that the time line shows of the fastest and of the slowest worker
MAX_SECS = 3.0
NUM_WINDOWS, BUSY = 60, 0.9
LONG_PART = 0.01  # of the width
AFTER = 0.3  # the part of the recorded time after which the time line begins

Value = Callable[[Point], float]


def ways_of(results: Sequence[Result]) -> list[str]:
    """The names of what is compared, in an order that gives each a colour."""
    return list(dict.fromkeys(one.contender.way for one in results))


def situations_of(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(one.contender.situation for one in results))[:MAX_PANELS]


def has_accuracy(results: Sequence[Result]) -> bool:
    return any(point.accuracy is not None for one in results for run in one.measured for point in run.points)


def draw_accuracy(results: Sequence[Result], until: Until, look: Look) -> Figure:
    """Against the time and against the examples, a row for each situation."""
    names, ways = situations_of(results), ways_of(results)
    columns = 1 if look.is_narrow else 2
    figure, grid = new_figure(look, 2.6, len(names) * 2 // columns, columns)
    flat = [axes for row in grid for axes in row]
    of_y: Value = (
        (lambda point: math.nan if point.accuracy is None else point.accuracy)
        if has_accuracy(results)
        else (lambda point: point.loss)
    )
    for number, name in enumerate(names):
        its = [one for one in results if one.contender.situation == name]
        for axes, label, of_x in (
            (flat[2 * number], "seconds of training", lambda point: point.secs),
            (flat[2 * number + 1], "training examples", lambda point: point.examples),
        ):
            for one in its:
                _draw_line(axes, one, of_x, of_y, look.color(ways.index(one.contender.way)))
            axes.set_xlabel(label)
            axes.set_ylabel("validation accuracy" if has_accuracy(results) else "validation loss")
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(4 if look.is_narrow else 6))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if "examples" in label else "{x:,g}"))
            if until.kind == "accuracy":
                axes.axhline(until.value, color=look.ink, lw=0.8, ls=":")
                axes.set_ylim(max(0.0, until.value - BELOW_TARGET), min(1.0, until.value + 0.04))
            set_title(axes, name, look, columns)
    set_legend(figure, _fullest(flat), look)
    return figure


def _fullest(axes: Sequence[Axes]) -> Axes:
    return max(axes, key=lambda one: len(one.get_legend_handles_labels()[0]))


def _draw_line(axes: Axes, result: Result, of_x: Value, of_y: Value, color: str) -> None:
    """The mean of all runs with their spread, as far as all of them go, and beyond it each run by itself."""
    runs = [run.points for run in result.measured if run.points]
    if not runs:
        return
    common = min(map(len, runs))
    x = np.array([[of_x(point) for point in run[:common]] for run in runs]).mean(axis=0)
    y = np.array([[of_y(point) for point in run[:common]] for run in runs])
    axes.plot(x, y.mean(axis=0), "o-", ms=3, lw=1.6, color=color, label=result.contender.way, zorder=3)
    if len(runs) > 1:
        axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=color, alpha=0.22, lw=0)
    for run in runs:
        rest = run[common - 1 :]
        axes.plot(list(map(of_x, rest)), list(map(of_y, rest)), "-", lw=0.9, color=color, alpha=0.8)


def stale_results(results: Sequence[Result]) -> list[Result]:
    return [one for one in results if sum(one.staleness_counts())][:MAX_PANELS]


def draw_staleness(results: Sequence[Result], look: Look) -> Figure:
    """How many updates had each staleness, for each asynchronous contender."""
    its, ways = stale_results(results), ways_of(results)
    columns = 1 if look.is_narrow or len(its) == 1 else 2
    figure, grid = new_figure(look, 2.3, math.ceil(len(its) / columns), columns)
    flat = [axes for row in grid for axes in row]
    longest = max(len(one.staleness_counts()) for one in its)
    for axes, one in zip(flat, its, strict=False):
        counts = np.array(one.staleness_counts())
        color = look.color(ways.index(one.contender.way))
        axes.stairs(counts, np.arange(len(counts) + 1) - 0.5, fill=True, color=color, baseline=0.7)
        axes.set_yscale("log")
        axes.set_ylim(0.7, counts.max() * 2)
        axes.set_xlim(-0.6, max(longest, 10) - 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(6 if look.is_narrow else 8, integer=True))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("staleness")
        axes.set_ylabel("updates")
        title = f"{one.contender.name}: {np.average(np.arange(len(counts)), weights=counts):.1f} on average"
        set_title(axes, title, look, columns)
    for axes in flat[len(its) :]:
        axes.set_axis_off()
    return figure


def lined_results(results: Sequence[Result]) -> list[tuple[Result, Measured, tuple[float, float]]]:
    """Each contender with the run and the part of it that its time line shows."""
    found = []
    for one in results:
        for run in one.measured:
            if window := _window(run.steps):
                found.append((one, run, window))
                break
    return found[:MAX_PANELS]


def _window(steps: list[list[tuple[float, float]]]) -> tuple[float, float] | None:
    """Begin and end of what the time line shows, as of `time.time()`; None if too little was recorded."""
    if not steps or not all(steps):
        return None
    first, last = max(one[0][0] for one in steps), min(one[-1][1] for one in steps)
    begin = first + AFTER * (last - first)
    typical = [typical_secs([step for step in one if step[0] >= begin]) for one in steps]
    if not all(map(math.isfinite, typical)):
        return None
    secs = min(MAX_SECS, max(FAST_STEPS * min(typical), SLOW_STEPS * max(typical)), last - begin)
    if secs <= 0:
        return None
    # Evaluations interrupt the training: the first window that has nearly as many steps of each worker as any.
    begins = np.linspace(begin, last - secs, NUM_WINDOWS)
    counts = np.array([[sum(at <= start < at + secs for start, _ in one) for one in steps] for at in begins])
    parts = (counts / np.maximum(1, counts.max(axis=0))).min(axis=1)
    at = float(begins[int(np.argmax(parts >= BUSY * parts.max()))])
    return at, at + secs


def draw_timeline(results: Sequence[Result], look: Look) -> Figure:
    """A row for each worker: when it computed, and between its steps when it waited."""
    its, ways = lined_results(results), ways_of(results)
    figure, grid = new_figure(look, 1.5, len(its), 1)
    for (axes,), (one, run, (begin, end)) in zip(grid, its, strict=True):
        color = look.color(ways.index(one.contender.way))
        for worker, steps in enumerate(run.steps):
            shown = [step for step in steps if step[1] > begin and step[0] < end]
            axes.broken_barh([(0, 1000 * (end - begin))], (worker - 0.06, 0.12), color=look.pale, lw=0)
            bars = [(1000 * (start - begin), 1000 * (stop - start)) for start, stop in shown]
            # An edge in the colour of the paper tells a step from the next one, and would cover a short one.
            for is_long in (False, True):
                some = [bar for bar in bars if (bar[1] > LONG_PART * 1000 * (end - begin)) == is_long]
                edge = look.paper if is_long else "none"
                axes.broken_barh(some, (worker - 0.36, 0.72), facecolor=color, edgecolor=edge, lw=0.6 * is_long)
        axes.set_xlim(0, 1000 * (end - begin))
        axes.set_ylim(len(run.steps) - 0.5, -0.5)
        axes.set_yticks(range(len(run.steps)), [f"worker {number}" for number in range(len(run.steps))])
        axes.grid(visible=False)
        axes.set_xlabel("ms")
        set_title(axes, one.contender.name, look)
    return figure
