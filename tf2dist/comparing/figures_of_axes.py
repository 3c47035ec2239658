"""The figures of comparisons that vary the number of backup workers, or the size of the model."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from tf2dist.comparing.figures import ways_of
from tf2dist.comparing.look import Look, new_figure, set_legend, set_title
from tf2dist.comparing.results import Result, Spread

Cells = dict[tuple[int, float], Result]  # by the parameters of the model and the delay: who is first at the target


def backup_numbers(results: Sequence[Result]) -> list[int]:
    return sorted({one.contender.backups for one in results if one.contender.backups is not None and one.measured})


def draw_backups(results: Sequence[Result], look: Look) -> Figure:
    """The time of a step and the time to the target against the number of backup workers, a line a situation."""
    columns = 1 if look.is_narrow else 2
    figure, grid = new_figure(look, 2.8, 2 // columns, columns)
    by_step, by_target = (axes for row in grid for axes in row)
    its = [one for one in results if one.contender.backups is not None]
    rates = {id(one): one.step_rate for one in its}
    for number, name in enumerate(dict.fromkeys(one.contender.situation for one in its)):
        of_name = sorted(
            (one for one in its if one.contender.situation == name), key=lambda one: one.contender.backups or 0
        )
        times = [
            (one.contender.backups or 0, Spread(tuple(1000 / value for value in rate.values)))
            for one in of_name
            if (rate := rates[id(one)])
        ]
        _draw_spreads(by_step, times, name, look.color(number))
        _draw_spreads(
            by_target,
            [(one.contender.backups or 0, secs) for one in of_name if (secs := one.secs)],
            name,
            look.color(number),
        )
    by_step.set_ylabel("ms a step")
    by_target.set_ylabel("seconds to the target")
    for axes in (by_step, by_target):
        axes.set_xlabel("backup workers")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    set_title(by_step, "Time of a step", look, columns)
    set_title(by_target, "Time to the target", look, columns)
    set_legend(figure, by_step, look)
    return figure


def _draw_spreads(axes: Axes, points: list[tuple[int, Spread]], label: str, color: str) -> None:
    if not points:
        return
    x = [number for number, _ in points]
    axes.plot(x, [spread.mean for _, spread in points], "o-", ms=4, lw=1.6, color=color, label=label)
    axes.vlines(x, [spread.low for _, spread in points], [spread.high for _, spread in points], color=color, lw=1.2)


def first_by_size(results: Sequence[Result]) -> Cells:
    """Who is first for each size of the model and each delay; empty unless both have several values."""
    cells: Cells = {}
    for one in results:
        # All are equally fast if a time is the end; then accuracies are compared, in the words of the report.
        if not one.measured or one.secs is None or one.until.kind == "secs":
            continue
        place = (int(one.measured[0].summary.get("parameters", 0)), one.contender.delay_secs)
        best = cells.get(place)
        if best is None or best.secs is None or one.secs.mean < best.secs.mean:
            cells[place] = one
    sizes, delays = ({place[axis] for place in cells} for axis in (0, 1))
    return cells if len(sizes) > 1 and len(delays) > 1 else {}


def draw_map(results: Sequence[Result], look: Look) -> Figure:
    """The delay of the slowest worker against the size of the model, each cell in the colour of who is first."""
    cells, ways = first_by_size(results), ways_of(results)
    sizes, delays = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    figure, ((axes,),) = new_figure(look, 0.9 * len(sizes) + 0.9, 1, 1)
    for row, size in enumerate(map(int, sizes)):
        for column, delay in enumerate(delays):
            one = cells.get((size, delay))
            # Shapes and not an image, so that the colours can be exchanged for the dark ones.
            color = look.color(ways.index(one.contender.way)) if one else look.pale
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor=look.paper, lw=2))
            text = f"{one.secs.mean:.1f} s" if one and one.secs else "none"
            axes.text(column, row, text, ha="center", va="center", fontsize=10, weight="bold",
                      color=look.paper if one else look.ink)  # fmt: skip
    axes.set_xlim(-0.5, len(delays) - 0.5)
    axes.set_ylim(-0.5, len(sizes) - 0.5)
    axes.grid(visible=False)
    axes.set_xticks(range(len(delays)), [f"{1000 * delay:g} ms" for delay in delays])
    axes.set_yticks(range(len(sizes)), [f"{size:,}" for size in map(int, sizes)])
    axes.set_xlabel("delay of the slowest worker in each step")
    axes.set_ylabel("parameters of the model")
    won = [way for way in ways if any(one.contender.way == way for one in cells.values())]
    set_title(axes, "First at the target", look)
    set_legend(figure, [Patch(color=look.color(ways.index(way)), label=way) for way in won], look)
    return figure
