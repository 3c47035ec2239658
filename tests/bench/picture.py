"""The ratios as a bar chart."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {True: "tab:green", False: "tab:red", None: "tab:gray"}


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: a bar for each ratio, a line for its target."""
    shown = [result for result in reversed(results) if result["ratio"] is not None]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.35 * len(shown)))
    names = [f"{result['name']}: {' / '.join(result['ratio_of'])}" for result in shown]
    bars = axes.barh(names, [result["ratio"] for result in shown], color=[COLOURS[result["met"]] for result in shown])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    for height, result in enumerate(shown):
        if result["target"] is not None:
            axes.plot([result["target"]] * 2, [height - 0.4, height + 0.4], color="black")
    axes.set_xlabel("ratio of medians (a line is the target; green: met)")
    axes.margins(x=0.1)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
