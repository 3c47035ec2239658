"""The figures of a comparison, and how they look; as SVG in light and dark colours, for wide and narrow screens."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from tf2dist.palette import MODE_STYLES, Style
from tf2dist.tools.comparing.matrix import Until
from tf2dist.tools.comparing.results import ContenderResult, Measurement, Point, Spread, typical_secs
from tf2dist.tools.plotting import GRID, draw_counts, own_look, set_style

MAX_PANELS = 12
BELOW_GOAL = 0.3  # how much of the accuracy below the goal is shown
FAST_STEPS, SLOW_STEPS = 30, 3  # that the time line shows of the fastest and of the slowest worker
MAX_SECS = 3.0
NUM_WINDOWS, BUSY = 60, 0.9
LONG_PART = 0.01  # of the width
TIMELINE_START = 0.3  # the part of the recorded time after which the time line begins
INK, PALE, PAPER = "#24292f", "#d3d8de", "#ffffff"
# Of several contenders of the same mode: darker by so much, and with markers that no mode has.
SHADES, MARKERS = (0.0, 0.4, 0.65, 0.2), ("v", "D", "P", "X", "*")
PNG_DPI = 110
WIDE_CHARS, NARROW_CHARS = 96, 34  # of a title
Draw = Callable[[bool], Figure]  # takes whether the figure is narrow, for a phone, with the parts below each other
Value = Callable[[Point], float]
# The contender that is first at the goal, by the number of the model's parameters and the delay.
Cells = dict[tuple[int, float], ContenderResult]


def styles_of(results: Sequence[ContenderResult]) -> dict[str, Style]:
    """The looks of those that are compared, by their mode labels."""
    modes = {result.contender.mode_label: result.contender.mode for result in results}
    return {
        label: variant(mode, [other for other in modes if modes[other] == mode].index(label))
        for label, mode in modes.items()
    }


def scenarios_of(results: Sequence[ContenderResult]) -> list[str]:
    return list(dict.fromkeys(result.contender.scenario for result in results))[:MAX_PANELS]


def has_accuracy(results: Sequence[ContenderResult]) -> bool:
    return any(point.accuracy is not None for result in results for run in result.measured for point in run.points)


def draw_accuracy(results: Sequence[ContenderResult], until: Until, is_narrow: bool) -> Figure:
    """Draws accuracies against the time and against the examples, a row for each scenario."""
    names, styles = scenarios_of(results), styles_of(results)
    columns = 1 if is_narrow else 2
    figure, grid = new_figure(is_narrow, 2.6, len(names) * 2 // columns, columns)
    flat = [axes for row in grid for axes in row]
    of_y: Value = (
        (lambda point: math.nan if point.accuracy is None else point.accuracy)
        if has_accuracy(results)
        else (lambda point: point.loss)
    )
    for number, name in enumerate(names):
        scenario_results = [result for result in results if result.contender.scenario == name]
        for axes, label, of_x in (
            (flat[2 * number], "seconds of training", lambda point: point.secs),
            (flat[2 * number + 1], "training examples", lambda point: point.examples),
        ):
            for result in scenario_results:
                _draw_line(axes, result, of_x, of_y, styles[result.contender.mode_label])
            axes.set_xlabel(label)
            axes.set_ylabel("validation accuracy" if has_accuracy(results) else "validation loss")
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(4 if is_narrow else 6))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if "examples" in label else "{x:,g}"))
            if goal := scenario_results[0].goal:
                axes.axhline(goal.value, color=INK, lw=1.2, ls=":")
            if until.kind == "accuracy":
                low = min([until.value - BELOW_GOAL, *(spread.low for result in scenario_results
                                                       if (spread := result.accuracy))])  # fmt: skip
                axes.set_ylim(max(0.0, low), min(1.0, until.value + 0.04))
            set_title(axes, name, is_narrow, columns)
    with_most_labels = max(flat, key=lambda panel: len(panel.get_legend_handles_labels()[0]))
    set_legend(figure, with_most_labels, is_narrow)
    return figure


def _draw_line(axes: Axes, result: ContenderResult, of_x: Value, of_y: Value, style: Style) -> None:
    """The mean of all runs with their spread, as far as all of them go, and beyond it each run by itself."""
    runs = [run.points for run in result.measured if run.points]
    if not runs:
        return
    common = min(map(len, runs))
    x = np.array([[of_x(point) for point in run[:common]] for run in runs]).mean(axis=0)
    y = np.array([[of_y(point) for point in run[:common]] for run in runs])
    look: dict[str, Any] = {"color": style.colour, "ls": style.dash}
    axes.plot(x, y.mean(axis=0), marker=style.marker, ms=4, lw=1.6, label=result.contender.mode_label, zorder=3, **look)
    if len(runs) > 1:
        axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=style.colour, alpha=0.22, lw=0)
    for run in runs:
        rest = run[common - 1 :]
        axes.plot(list(map(of_x, rest)), list(map(of_y, rest)), lw=0.9, alpha=0.8, **look)


def stale_results(results: Sequence[ContenderResult]) -> list[ContenderResult]:
    return [result for result in results if sum(result.staleness_counts())][:MAX_PANELS]


def draw_staleness(results: Sequence[ContenderResult], is_narrow: bool) -> Figure:
    """Draws how many updates had each staleness, for each asynchronous contender."""
    stale, styles = stale_results(results), styles_of(results)
    columns = 1 if is_narrow or len(stale) == 1 else 2
    figure, grid = new_figure(is_narrow, 2.3, math.ceil(len(stale) / columns), columns)
    flat = [axes for row in grid for axes in row]
    longest = max(len(result.staleness_counts()) for result in stale)
    for axes, result in zip(flat, stale, strict=False):
        counts = np.array(result.staleness_counts())
        draw_counts(axes, counts, styles[result.contender.mode_label].colour, longest, 6 if is_narrow else 8)
        axes.set_xlabel("staleness in updates")
        axes.set_ylabel("updates")
        title = f"{result.contender.name}: {np.average(np.arange(len(counts)), weights=counts):.1f} on average"
        set_title(axes, title, is_narrow, columns)
    for axes in flat[len(stale) :]:
        axes.set_axis_off()
    return figure


def timeline_results(
    results: Sequence[ContenderResult],
) -> list[tuple[ContenderResult, Measurement, tuple[float, float]]]:
    """Each contender with the run and the part of it that its time line shows, of the same length for all."""
    recorded = [(result, run, span) for result in results
                if (found := next(((run, span) for run in result.measured if (span := _recorded(run.steps))), None))
                for run, span in [found]]  # fmt: skip
    selected = recorded[:MAX_PANELS]
    typical = [_typical(run.steps, begin) for _, run, (begin, _) in selected]
    secs = (
        min(MAX_SECS, max(FAST_STEPS * min(map(min, typical)), SLOW_STEPS * max(map(max, typical)))) if typical else 0
    )
    return [(result, run, _window(run.steps, span, secs)) for result, run, span in selected]


def _typical(steps: list[list[tuple[float, float]]], begin: float) -> list[float]:
    """The seconds of a step of each worker."""
    return [typical_secs([step for step in worker_steps if step[0] >= begin]) for worker_steps in steps]


def _recorded(steps: list[list[tuple[float, float]]]) -> tuple[float, float] | None:
    """Begin and end of the time in which all workers trained; None if too little was recorded."""
    if not steps or not all(steps):
        return None
    first, last = max(worker_steps[0][0] for worker_steps in steps), min(worker_steps[-1][1] for worker_steps in steps)
    begin = first + TIMELINE_START * (last - first)
    return (begin, last) if begin < last and all(map(math.isfinite, _typical(steps, begin))) else None


def _window(steps: list[list[tuple[float, float]]], span: tuple[float, float], secs: float) -> tuple[float, float]:
    """Begin and end of what the time line shows, as of `time.time()`; `secs`: how long it is if that was recorded."""
    begin, last = span
    secs = min(secs, last - begin)
    # Evaluations interrupt the training: the first window that has nearly as many steps of each worker as any.
    begins = np.linspace(begin, last - secs, NUM_WINDOWS)
    counts = np.array(
        [[sum(at <= start < at + secs for start, _ in worker_steps) for worker_steps in steps] for at in begins]
    )
    parts = (counts / np.maximum(1, counts.max(axis=0))).min(axis=1)
    at = float(begins[int(np.argmax(parts >= BUSY * parts.max()))])
    return at, at + secs


def draw_timeline(results: Sequence[ContenderResult], is_narrow: bool) -> Figure:
    """A row for each worker: when it computed, and between its steps when it waited."""
    timelines, styles = timeline_results(results), styles_of(results)
    longest = 1000 * max(end - begin for _, _, (begin, end) in timelines)  # in milliseconds
    figure, grid = new_figure(is_narrow, 1.5, len(timelines), 1)
    for (axes,), (result, run, (begin, end)) in zip(grid, timelines, strict=True):
        color = styles[result.contender.mode_label].colour
        for worker, steps in enumerate(run.steps):
            visible = [step for step in steps if step[1] > begin and step[0] < end]
            axes.broken_barh([(0, 1000 * (end - begin))], (worker - 0.06, 0.12), color=PALE, lw=0)
            bars = [(1000 * (start - begin), 1000 * (stop - start)) for start, stop in visible]
            # An edge in the colour of the paper tells a step from the next one, and would cover a short one.
            for is_long in (False, True):
                length_bars = [bar for bar in bars if (bar[1] > LONG_PART * longest) == is_long]
                edge = PAPER if is_long else "none"
                axes.broken_barh(length_bars, (worker - 0.36, 0.72), facecolor=color, edgecolor=edge, lw=0.6 * is_long)
        axes.set_xlim(0, longest)
        axes.set_ylim(len(run.steps) - 0.5, -0.5)
        axes.set_yticks(range(len(run.steps)), [f"worker {number}" for number in range(len(run.steps))])
        axes.grid(visible=False)
        axes.set_xlabel("milliseconds")
        set_title(axes, result.contender.name, is_narrow)
    return figure


def backup_numbers(results: Sequence[ContenderResult]) -> list[int]:
    return sorted(
        {result.contender.backups for result in results if result.contender.backups is not None and result.measured}
    )


def draw_backups(results: Sequence[ContenderResult], is_narrow: bool) -> Figure:
    """The time of a step and the time to the goal against the number of backup workers, a line a scenario."""
    columns = 1 if is_narrow else 2
    figure, grid = new_figure(is_narrow, 2.8, 2 // columns, columns)
    by_step, by_goal = (axes for row in grid for axes in row)
    with_backups = [result for result in results if result.contender.backups is not None]
    rates = {id(result): result.step_rate for result in with_backups}
    for number, name in enumerate(dict.fromkeys(result.contender.scenario for result in with_backups)):
        scenario_results = sorted(
            (result for result in with_backups if result.contender.scenario == name),
            key=lambda result: result.contender.backups or 0,
        )
        times = [
            (result.contender.backups or 0, Spread(tuple(1000 / value for value in rate.values)))
            for result in scenario_results
            if (rate := rates[id(result)])
        ]
        style = variant("sync_replicas", number)
        _draw_spreads(by_step, times, name, style)
        _draw_spreads(
            by_goal,
            [(result.contender.backups or 0, secs) for result in scenario_results if (secs := result.secs)],
            name,
            style,
        )
    by_step.set_ylabel("milliseconds")
    by_goal.set_ylabel("seconds")
    for axes in (by_step, by_goal):
        axes.set_xlabel("backup workers")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    set_title(by_step, "Time of a step", is_narrow, columns)
    set_title(by_goal, "Time to the goal", is_narrow, columns)
    set_legend(figure, by_step, is_narrow)
    return figure


def _draw_spreads(axes: Axes, points: list[tuple[int, Spread]], label: str, style: Style) -> None:
    if not points:
        return
    x = [number for number, _ in points]
    axes.plot(x, [spread.mean for _, spread in points], color=style.colour, ls=style.dash, marker=style.marker, ms=5,
              lw=1.6, label=label)  # fmt: skip
    lows, highs = [spread.low for _, spread in points], [spread.high for _, spread in points]
    axes.vlines(x, lows, highs, color=style.colour, lw=1.2)


def first_by_size(results: Sequence[ContenderResult]) -> Cells:
    """The first contender for each size of the model and each delay; empty unless both have several values."""
    cells: Cells = {}
    for result in results:
        # Otherwise each model has another goal.
        if not result.measured or result.secs is None or result.until.kind != "accuracy":
            continue
        cell = (int(result.measured[0].summary.get("parameters", 0)), result.contender.delay_secs)
        best = cells.get(cell)
        if best is None or best.secs is None or result.secs.mean < best.secs.mean:
            cells[cell] = result
    sizes, delays = ({cell[axis] for cell in cells} for axis in (0, 1))
    return cells if len(sizes) > 1 and len(delays) > 1 else {}


def draw_map(results: Sequence[ContenderResult], is_narrow: bool) -> Figure:
    """The delay of the slowest worker against the size of the model, each cell in the colour of who is first."""
    cells, styles = first_by_size(results), styles_of(results)
    sizes, delays = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    figure, ((axes,),) = new_figure(is_narrow, 0.9 * len(sizes) + 0.9, 1, 1)
    for row, size in enumerate(map(int, sizes)):
        for column, delay in enumerate(delays):
            winner = cells.get((size, delay))
            # Shapes and not an image, so that the colours can be exchanged for the dark ones.
            color = styles[winner.contender.mode_label].colour if winner else PALE
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor=PAPER, lw=2))
            text = f"{winner.secs.mean:.1f} s" if winner and winner.secs else "none"
            axes.text(column, row, text, ha="center", va="center", fontsize=10, weight="bold",
                      color=ink_on(color) if winner else INK)  # fmt: skip
    axes.set_xlim(-0.5, len(delays) - 0.5)
    axes.set_ylim(-0.5, len(sizes) - 0.5)
    axes.grid(visible=False)
    axes.set_xticks(range(len(delays)), [f"{1000 * delay:g} ms" for delay in delays])
    axes.set_yticks(range(len(sizes)), [f"{size:,}" for size in map(int, sizes)])
    axes.set_xlabel("delay of the slowest worker in each step")
    axes.set_ylabel("parameters of the model")
    won = {winner.contender.mode_label for winner in cells.values()}
    set_title(axes, "First at the goal", is_narrow)
    patches = [Patch(color=style.colour, label=label) for label, style in styles.items() if label in won]
    set_legend(figure, patches, is_narrow)
    return figure


def variant(mode: str, number: int) -> Style:
    """The style of a mode's contender of this number: that of the mode itself for the first."""
    style = MODE_STYLES[mode]
    shade = SHADES[number % len(SHADES)]
    return (
        replace(style, colour=_mixed(style.colour, "#000000", shade), marker=MARKERS[number % len(MARKERS) - 1])
        if number
        else style
    )


def _mixed(colour: str, other: str, part: float) -> str:
    pairs = zip(to_rgb(colour), to_rgb(other), strict=True)
    return to_hex([(1 - part) * one + part * two for one, two in pairs])


# A contender that is darker than its mode is lighter than that in the dark.
IN_THE_DARK = {INK: "#d7dce1", GRID: "#333b44", PALE: "#4a535d", PAPER: "#161b22"} | {
    _mixed(style.colour, "#000000", shade): _mixed(style.colour, "#ffffff", 0.3 + 0.6 * shade)
    for style in MODE_STYLES.values()
    for shade in SHADES
}


def ink_on(colour: str) -> str:
    """The colour of paper or black, whichever can be read on another one."""
    return max((PAPER, "#000000"), key=lambda text: contrast(text, colour))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, from 1 to 21, as WCAG 2 defines it."""
    light, dark = sorted((_luminance(colour) + 0.05 for colour in (one, other)), reverse=True)
    return light / dark


def _luminance(colour: str) -> float:
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def new_figure(is_narrow: bool, height: float, rows: int, columns: int) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    """An empty figure and its axes, [rows][columns]; `height`: of a row, in inches."""
    figure = Figure(
        figsize=(3.7 if is_narrow else 9.0, height * rows + 0.35),
        layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.06),
        facecolor=PAPER,
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        set_style(axes)
        axes.set_facecolor(PAPER)
        axes.spines[["bottom", "left"]].set_color(PALE)
        axes.tick_params(colors=INK, which="both")
        axes.xaxis.label.set(color=INK, fontsize=9)
        axes.yaxis.label.set(color=INK, fontsize=9)
    return figure, grid.tolist()


def set_title(axes: Axes, text: str, is_narrow: bool, columns: int = 1) -> None:
    """A title at the left, on as many lines as it needs beside others; names with dollar signs are no formulas."""
    folded = _folded(text, NARROW_CHARS if is_narrow else WIDE_CHARS // columns)
    axes.set_title(folded, loc="left", fontsize=10, color=INK, parse_math=False)


def _folded(text: str, chars: int) -> str:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) >= chars and lines[-1]:
            lines.append(word[:chars])
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()[:chars]
    return "\n".join(lines[:3])


def set_legend(figure: Figure, source: Axes | Sequence[Patch], is_narrow: bool) -> None:
    """The legend of one of the axes, or of patches with labels, below all axes, where it covers nothing."""
    handles: Sequence[Artist] = source.get_legend_handles_labels()[0] if isinstance(source, Axes) else source
    labels = [str(handle.get_label()) for handle in handles]
    legend = figure.legend(
        handles, labels, loc="outside lower left", ncols=1 if is_narrow else 3, frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set(color=INK, parse_math=False)


def as_svgs(draw: Draw) -> dict[str, bytes]:
    """The figure as SVG, wide and narrow, light and dark; its letters are shapes, since a phone has other fonts."""
    svgs = {}
    for name, is_narrow in (("wide", False), ("narrow", True)):
        svg = matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "tf2dist"})
        with own_look(), svg, io.BytesIO() as buffer:
            draw(is_narrow).savefig(buffer, format="svg", metadata={"Date": None})
            svgs[f"{name} light"] = buffer.getvalue()
        svgs[f"{name} dark"] = _darkened(svgs[f"{name} light"])
    return svgs


def _darkened(svg: bytes) -> bytes:
    """The same figure in dark colours: drawing it again would take ten times as long."""
    changes = {light.encode(): dark.encode() for light, dark in IN_THE_DARK.items()}
    return re.sub(rb"#[0-9a-f]{6}", lambda match: changes.get(match[0], match[0]), svg)


def as_png(draw: Draw) -> bytes:
    with own_look(), io.BytesIO() as buffer:
        draw(False).savefig(buffer, format="png", dpi=PNG_DPI)
        return buffer.getvalue()
