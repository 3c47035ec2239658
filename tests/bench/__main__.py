"""make bench: all comparisons, contenders taking turns; a table, bench.json, benchmarks.md and bench.png.

Absolute figures drift by a factor of two on a shared machine; ratios of medians do not. The comparisons that are in
bench.json already and are not run again stay there.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import numpy as np
import psutil
import pytest
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table as RichTable

from tests.bench import bandwidth, growth, page, scale
from tests.bench.comparisons import Comparison, Table
from tests.bench.contenders import INSTALL, ContenderError, is_installed
from tests.bench.page import shown, target_of
from tf2dist.config.schema import DataConfig
from tf2dist.palette import BLUE, VERMILLION

FAILURES = (
    *(ContenderError, TimeoutError, subprocess.SubprocessError, psutil.Error, StopIteration, OSError),
    pytest.skip.Exception,  # separate hosts cannot be made here
)


COLOURS = {True: BLUE, False: VERMILLION, None: "tab:gray"}


def save_arrays(folder: str) -> None:
    """MNIST's training set, for all contenders."""
    from tf2dist import data

    train = data.load(DataConfig(offline="fail")).train
    np.save(f"{folder}/images.npy", train.x)
    np.save(f"{folder}/labels.npy", train.y)


def run(comparison: Comparison, rounds: int, console: Console) -> dict[str, Any]:
    """All rounds of one comparison; a contender that fails has no figures."""
    values: dict[str, list[float]] = {name: [] for name in comparison.contenders}
    for number in range(rounds):
        for contender, measure in comparison.contenders.items():
            if not is_installed(contender):
                continue
            try:
                values[contender].append(measure())
            except FAILURES as error:
                failed = f"{comparison.name}, round {number + 1}, {contender}: {error}"
                console.print(failed, style="red", highlight=False, markup=False)
                continue
            figure = f"{values[contender][-1]:,.4g} {comparison.unit}"
            console.print(f"{comparison.name}, round {number + 1}, {contender}: {figure}", highlight=False)
    medians = {name: statistics.median(figures) for name, figures in values.items() if figures}
    ours, other = comparison.ratio
    ratio = medians[ours] / medians[other] if ours in medians and other in medians else None
    return {
        "name": comparison.name,
        "unit": comparison.unit,
        "values": values,
        "medians": medians,
        "ratio_of": list(comparison.ratio),
        "ratio": ratio,
        "target": comparison.target,
        "at_least": comparison.at_least,
        "met": None if ratio is None else comparison.is_met(ratio),
    }


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = RichTable("comparison", "medians", "ratio", "target", "")
    for result in results:
        figures = [f"{name} {shown(value)}" for name, value in result["medians"].items()]
        ratio = "" if result["ratio"] is None else f"{result['ratio']:.2f} {' / '.join(result['ratio_of'])}"
        verdict = {True: "met", False: "[red]missed", None: ""}[result["met"]]
        table.add_row(result["name"], f"{', '.join(figures)} {result['unit']}", ratio, target_of(result), verdict)
    console.print(table)


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Under which a comparison is measured: the values of `page.FACTS`."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": names[0].partition(": ")[2] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "tensorflow": version("tensorflow"),
        "keras": version("keras"),
        "rounds": options.rounds,
        "scale": options.scale,
    }


def write(results: list[dict[str, Any]], folder: Path) -> None:
    """What is known so far: a run of the whole table takes an hour."""
    write_section(folder, "comparisons", results)
    page.update(results, folder)


def read_section(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "bench.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()).get(name, []) if path.exists() else []
    return found


def write_section(folder: Path, name: str, results: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.json"
    others = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(others | {name: results}, indent=2) + "\n")


def merged(folder: Path, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results, after those of other comparisons that a folder has."""
    names = {result["name"] for result in results}
    return [*(result for result in read_section(folder, "comparisons") if result["name"] not in names), *results]


def run_points(
    kind: ModuleType, chosen: list[Any], options: argparse.Namespace, console: Console, update: Callable[..., None]
) -> None:
    """Measures clusters; each becomes an entry of a section of bench.json, in place of an earlier one.

    Args:
        kind: `scale` or `bandwidth`; the section has its name.
        update: writes a page's tables of the section into a folder.
    """
    facts = {name: fact for name, fact in circumstances(options).items() if name in kind.FACTS}
    section = kind.__name__.rpartition(".")[2]
    for setting in chosen:
        points = []
        for number in range(options.rounds):
            try:
                points.append(kind.measure(setting, kind.WINDOW_SECS * options.scale))
            except FAILURES as error:
                console.print(f"{setting}, round {number + 1}: {error}", style="red", highlight=False, markup=False)
        if points:
            point = scale.median_of(points) | facts
            console.print(kind.line_of(point), highlight=False, markup=False, soft_wrap=True)
            earlier = [one for one in read_section(options.out, section) if kind.Setting.of(one) != setting]
            write_section(options.out, section, sorted([*earlier, point], key=kind.order_of))
    if chosen:
        update(read_section(options.out, section), options.out)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Writes the ratios as a PNG: a bar for each, a line for its target."""
    matplotlib.use("Agg")
    shown = [result for result in reversed(results) if result["ratio"] is not None]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.35 * len(shown)))
    names = [f"{result['name']}: {' / '.join(result['ratio_of'])}" for result in shown]
    bars = axes.barh(names, [result["ratio"] for result in shown], color=[COLOURS[result["met"]] for result in shown])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    for height, result in enumerate(shown):
        if result["target"] is not None:
            axes.plot([result["target"]] * 2, [height - 0.4, height + 0.4], color="black")
    axes.set_xlabel("ratio of medians (a line is the target; blue: met, orange: missed)")
    axes.margins(x=0.1)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", default="", help="comparisons whose names begin with one of these, split by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of steps")
    numbers = ",".join(map(str, scale.WORKERS))
    parser.add_argument("--workers", default=numbers, help="of the rows that begin with scale")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    options = parser.parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and the contenders end, too
    with tempfile.TemporaryDirectory() as folder:
        save_arrays(folder)
        wanted = tuple(options.only.split(","))
        chosen = [one for one in Table(folder, options.scale) if one.name.startswith(wanted)]
        sizes = [
            one for one in scale.settings(list(map(int, options.workers.split(",")))) if one.name.startswith(wanted)
        ]
        links = [one for one in bandwidth.settings() if one.name.startswith(wanted)]
        if not chosen and not sizes and not links:
            names = ", ".join(one.name for one in Table(folder))
            parser.error(f"--only ({options.only}): names none of {names}, scale, bandwidth")
        results = []
        for comparison in chosen:
            begun = os.getloadavg()[0]
            result = run(comparison, options.rounds, console) | circumstances(options)
            results.append(result | {"load": round((begun + os.getloadavg()[0]) / 2, 1)})
            write(merged(options.out, results), options.out)
        run_points(scale, sizes, options, console, growth.update)
        run_points(bandwidth, links, options, console, bandwidth.update)
    if not results:
        return 0
    show(results, console)
    for contender, command in INSTALL.items():
        if not is_installed(contender):
            console.print(f"{contender} is not installed and did not take part: {command}", markup=False)
    draw(merged(options.out, results), options.out / "bench.png")
    console.print(f"{options.out}/bench.json, {options.out}/benchmarks.md, {options.out}/bench.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
