"""How the figures of a comparison look: light or dark, for a screen or for a phone."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from tf2dist.palette import MODE_STYLES, Style

INK, GRID, PALE, PAPER = "#24292f", "#e4e7ea", "#d3d8de", "#ffffff"
# Of several contenders of the same mode: darker by so much, and with markers that no mode has.
SHADES, MARKERS = (0.0, 0.4, 0.65, 0.2), ("v", "D", "P", "X", "*")
IN_THE_DARK = {INK: "#d7dce1", GRID: "#333b44", PALE: "#4a535d", PAPER: "#161b22"}
PNG_DPI = 110
WIDE_CHARS, NARROW_CHARS = 96, 34  # of a title
Draw = Callable[[bool], Figure]  # takes whether the figure is narrow, for a phone, with the parts below each other


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


# In the dark a contender that is darker than its mode is lighter than that.
IN_THE_DARK |= {
    _mixed(style.colour, "#000000", shade): _mixed(style.colour, "#ffffff", 0.3 + 0.6 * shade)
    for style in MODE_STYLES.values()
    for shade in SHADES
}


def ink_on(colour: str) -> str:
    """Of the paper's colour and black that which can be read on another one."""
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
        axes.set_facecolor(PAPER)
        axes.grid(color=GRID, lw=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(PALE)
        axes.tick_params(labelsize=9, colors=INK, which="both")
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
    # The same on every machine and at each time, whatever the user's matplotlibrc says.
    matplotlib.rcdefaults()
    for name, is_narrow in (("wide", False), ("narrow", True)):
        with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "tf2dist"}), io.BytesIO() as buffer:
            draw(is_narrow).savefig(buffer, format="svg", metadata={"Date": None})
            svgs[f"{name} light"] = buffer.getvalue()
        svgs[f"{name} dark"] = _darkened(svgs[f"{name} light"])
    return svgs


def _darkened(svg: bytes) -> bytes:
    """The same figure in dark colours: drawing it again would take ten times as long."""
    changes = {light.encode(): dark.encode() for light, dark in IN_THE_DARK.items()}
    return re.sub(rb"#[0-9a-f]{6}", lambda match: changes.get(match[0], match[0]), svg)


def as_png(draw: Draw) -> bytes:
    matplotlib.rcdefaults()
    with io.BytesIO() as buffer:
        draw(False).savefig(buffer, format="png", dpi=PNG_DPI)
        return buffer.getvalue()
