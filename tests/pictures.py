"""The drawings of README.md and README.zh.md: `python -m tests.pictures` writes them into docs/pictures.

They are SVG with a background of their own, so that they can be read on a light and on a dark page, and follow the
reader's system where the viewer says which of the two it is.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from tests.bench import bandwidth, growth, slowness, staleness, staleness_page, worker_time
from tf2dist.palette import BLUE, GREEN, MODE_STYLES, VERMILLION, Style

DOCS = Path(__file__).parents[1] / "docs"
STYLE = """<style>
  svg { --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --box: #f0f3f6; --edge: #8c959f; --blue: #0969da;
        --orange: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #151b23; --ink: #f0f6fc; --faint: #9198a1; --box: #262c36; --edge: #656c76; --blue: #4493f8;
          --orange: #f0883e }
  }
  text { fill: var(--ink); font: 14px system-ui, "Noto Sans", "Noto Sans CJK SC", sans-serif }
  .title { font-weight: 600 } .small { font-size: 12px; fill: var(--faint) } .middle { text-anchor: middle }
  .end { text-anchor: end } .box { fill: var(--box); stroke: var(--edge) } .paper { fill: var(--paper) }
  .line { stroke: var(--edge); fill: none; stroke-width: 1.5 } .dashed { stroke-dasharray: 4 4 }
  .gradient { stroke: var(--orange) } .variables { stroke: var(--blue) }
  .alike, .variables-tip { fill: var(--blue) } .delayed, .gradient-tip { fill: var(--orange) }
  .dashed-tip { fill: var(--edge) }
</style>"""
# A marker for each colour: not every browser gives a marker the colour of its line.
TIP = """<marker id="{0}-tip" class="{0}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
  orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker>"""


class Words(NamedTuple):
    """The texts of the drawings in one language."""

    async_title: str
    sync_title: str
    chief: str
    worker: str
    ps: str
    pull: str
    push: str
    copy: str
    all_reduce: str
    rates_title: str
    alike: str
    delayed: str
    backup: str
    rates_note: str


ENGLISH = Words(
    async_title="mode=async: each worker at its own pace",
    sync_title="mode=sync: all workers take each step together",
    chief="schedules steps, evaluates, saves",
    worker="computes gradients",
    ps="variables, optimizer, step count",
    pull="pull variables",
    push="push gradients",
    copy="copy of the model",
    all_reduce="all-reduce: the mean of all gradients",
    rates_title="Four workers, thousands of examples a second",
    alike="all equally fast",
    delayed="one takes six times as long",
    backup="with 1 backup",
    rates_note="softmax, batches of 100, each step delayed by 50 ms (the slow worker's by 300 ms)",
)
CHINESE = Words(
    async_title="mode=async：各工作节点按自己的速度训练",
    sync_title="mode=sync：每一步由所有工作节点共同完成",
    chief="分派步骤、评估、保存",
    worker="计算梯度",
    ps="变量、优化器、步数",
    pull="拉取变量",
    push="推送梯度",
    copy="完整的模型副本",
    all_reduce="all-reduce：求所有梯度的平均",
    rates_title="四个工作节点，每秒训练的样本数（千）",
    alike="速度相同",
    delayed="其中一个用时为六倍",
    backup="1 个备用节点",
    rates_note="softmax，批次 100，每步延迟 50 毫秒（慢节点 300 毫秒）",
)


def _svg(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="8"/>'
    tips = [
        TIP.format(kind)
        for kind in ("variables", "gradient", "dashed")
        if any(f"#{kind}-tip" in part for part in parts)
    ]
    lines = [f'{head} role="img">', f"<title>{escape(title)}</title>", STYLE, *tips, paper, *parts, "</svg>"]
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, name: str, says: str) -> str:
    middle = x + width / 2
    rectangle = f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="48" rx="6"/>'
    return rectangle + _text(middle, y + 20, name, "title middle") + _text(middle, y + 38, says, "small middle")


def _line(points: str, kind: str, ends: tuple[str, ...] = ("end",)) -> str:
    tips = " ".join(f'marker-{end}="url(#{kind}-tip)"' for end in ends)
    return f'<polyline points="{points}" class="line {kind}" {tips}/>'


def async_drawing(words: Words) -> str:
    """Workers that pull variables from the ps and push gradients to it, and the chief that schedules them."""
    parts = [_text(16, 26, words.async_title, "title"), _box(80, 44, 250, "chief-0", words.chief)]
    for index, x in enumerate((10, 142, 274)):
        parts.append(_line(f"205,92 205,108 {x + 63},108 {x + 63},124", "dashed"))
        parts.append(_box(x, 126, 126, f"worker-{index}", words.worker))
        parts.append(_line(f"{x + 43},248 {x + 43},178", "variables"))
        parts.append(_line(f"{x + 83},174 {x + 83},244", "gradient"))
    parts.append(_box(10, 248, 390, "ps-0", words.ps))
    for x, name, kind in ((16, words.pull, "variables"), (150, words.push, "gradient")):
        parts.append(_line(f"{x},318 {x + 28},318", kind))
        parts.append(_text(x + 36, 322, name, "small"))
    return _svg(410, 336, words.async_title, parts)


def sync_drawing(words: Words) -> str:
    """Workers that all hold the model and take the mean of their gradients."""
    both = ("start", "end")
    parts = [_text(16, 26, words.sync_title, "title")]
    for index, (x, y) in enumerate(((142, 60), (10, 210), (274, 210))):
        parts.append(_box(x, y, 126, f"worker-{index}", words.copy))
    parts += [_line(points, "gradient", both) for points in ("166,112 96,206", "244,112 314,206", "140,234 270,234")]
    parts += [_line("16,318 44,318", "gradient", both), _text(52, 322, words.all_reduce, "small")]
    return _svg(410, 336, words.sync_title, parts)


def rates(bench: Path) -> dict[str, tuple[float, float]]:
    """By mode, thousands of examples a second of four workers: all alike, and with one that is slower.

    A step trains on a batch of 100 of each worker in sync, of the first three in sync_replicas, of one in async.
    """
    rows = {row["name"]: row["medians"] for row in json.loads(bench.read_text())["comparisons"]}
    batches = {"sync": 4, "sync_replicas": 3, "async": 1}
    medians = {mode: rows[f"straggler {mode}"] for mode in batches}
    return {
        mode: (row["alike"] * batches[mode] / 10, row["delayed"] * batches[mode] / 10) for mode, row in medians.items()
    }


def rates_drawing(words: Words, bench: Path) -> str:
    """Two bars for each mode."""
    parts = [_text(16, 26, words.rates_title, "title")]
    for x, name, kind in ((16, words.alike, "alike"), (170, words.delayed, "delayed")):
        parts.append(f'<rect class="{kind}" x="{x}" y="41" width="12" height="12" rx="2"/>{_text(x + 18, 52, name)}')
    for index, (mode, pair) in enumerate(rates(bench).items()):
        y = 72 + 54 * index
        if mode == "sync_replicas":
            parts += [_text(124, y + 14, mode, "end"), _text(124, y + 30, words.backup, "small end")]
        else:
            parts.append(_text(124, y + 22, mode, "end"))
        for row, (rate, kind) in enumerate(zip(pair, ("alike", "delayed"), strict=True)):
            width = 48 * rate
            parts.append(f'<rect class="{kind}" x="136" y="{y + 20 * row}" width="{width:.1f}" height="17" rx="2"/>')
            parts.append(_text(136 + width + 8, y + 14 + 20 * row, f"{rate:.1f}"))
    parts.append(_text(16, 246, words.rates_note, "small"))
    return _svg(560, 260, words.rates_title, parts)


ROOM = (300, 190)  # of a chart, without its axes
WORKERS = (1, 2, 4, 8, 16, 32, 48)


class Axis(NamedTuple):
    """A logarithmic axis from `first` on: where value + `first` doubles, a step is as long."""

    name: str
    ticks: tuple[float, ...]
    first: float = 0.0

    def share(self, value: float) -> float:
        return math.log2(value + self.first) / math.log2(self.ticks[-1] + self.first)


class LinearAxis(Axis):
    """One from 0 on."""

    def share(self, value: float) -> float:
        return value / self.ticks[-1]


OF_WORKERS = Axis("workers", WORKERS)


class Chart:
    """Curves over an axis.

    Args:
        left: where it begins.
        top: the largest value; a larger one is drawn there.
        axis: that of the workers unless given.
    """

    def __init__(self, left: float, title: str, top: float, ticks: tuple[float, ...], axis: Axis = OF_WORKERS) -> None:
        self._left, self._top, self._axis = left, top, axis
        self.parts = [_text(left, 26, title, "title"), _text(left + ROOM[0], 268, axis.name, "small end")]
        for tick in ticks:
            (_, y) = self._place(1, tick)
            self.parts += [_plain_line(left, y, left + ROOM[0], y), _text(left - 6, y + 4, f"{tick:g}", "small end")]
        self.parts += [_text(self._place(tick, 0)[0], 252, f"{tick:g}", "small middle") for tick in axis.ticks]

    def _place(self, where: float, value: float) -> tuple[float, float]:
        height = min(1.0, value / self._top)
        return self._left + ROOM[0] * self._axis.share(where), 48 + ROOM[1] * (1 - height)

    def range(self, where: float, low: float, high: float, style: Style) -> None:
        (x, y1), (_, y2) = self._place(where, low), self._place(where, high)
        self.parts.append(
            f'<line x1="{x:.1f}" y1="{y1:.1f}" x2="{x:.1f}" y2="{y2:.1f}" stroke="{style.colour}" stroke-width="2"/>'
        )

    def curve(self, values: Mapping[float, float], style: Style) -> None:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self._place(*item) for item in values.items()))
        dashes = {"-": "", "--": "7 4", "-.": "8 3 2 3", ":": "2 3"}[style.dash]
        self.parts.append(
            f'<polyline points="{points}" fill="none" stroke="{style.colour}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/>'
        )

    def marks(self, values: Mapping[float, float], style: Style) -> None:
        places = (self._place(*item) for item in values.items())
        self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{style.colour}"/>' for x, y in places]

    def legend(self, names: dict[str, Style], y: float) -> None:
        for number, (name, style) in enumerate(names.items()):
            x = self._left + 4 + 102 * number
            self.parts.append(f'<rect x="{x:g}" y="{y - 9:g}" width="10" height="10" fill="{style.colour}"/>')
            self.parts.append(_text(x + 15, y, name, "small"))


def _plain_line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:.1f}" x2="{x2:g}" y2="{y2:.1f}" class="line" opacity="0.3"/>'


def growth_drawing(bench: Path) -> str:
    """How much of the ideal rate is reached, and what a batch costs: dots are measured, lines foretold from 1 to 8."""
    points = json.loads(bench.read_text())["scale"]
    rates = Chart(46, "Share of the ideal rate, on two cores", 1.0, (0, 0.25, 0.5, 0.75, 1.0))
    for mode, style in MODE_STYLES.items():
        values = {n: point["efficiency"] for n, point in growth.Law(points, mode, "softmax").measured.items()}
        rates.curve(values, style)
        rates.marks(values, style)
    rates.legend(MODE_STYLES, 286)
    costs = Chart(426, "Processor time of a batch, in ms", 4.0, (0, 1, 2, 3, 4))
    law = growth.Law(points, "async", "softmax")
    styles = {"chief": Style(BLUE, "--", "s"), "ps": Style(VERMILLION, "-", "o"), "worker": Style(GREEN, "-.", "^")}
    for role, style in styles.items():
        costs.curve({n: law.at(n, role, "cpu_ms") for n in WORKERS}, style)
        costs.marks({n: growth.per_batch(point, role, "cpu_ms") for n, point in law.measured.items()}, style)
    costs.legend({growth.ROLES[role]: style for role, style in styles.items()}, 286)
    note = "softmax, 100 ms of computing in each step; right: async, dots measured, lines foretold from 1 to 8 workers"
    return _svg(760, 316, "Scaling from 1 to 48 workers", [*rates.parts, *costs.parts, _text(46, 306, note, "small")])


STALENESS = Axis("mean staleness, in updates", (0, 1, 2, 4, 8, 16, 32, 64), first=1.0)
OPTIMIZER_COLOURS = {"sgd": BLUE, "momentum": VERMILLION, "adam": GREEN}
ALGORITHM_DASHES = {"plain": "-", "staleness_aware": "--", staleness.SYNC: ":"}


def _errors(chart: Chart, runs: list[staleness.Run], tuned: bool) -> None:
    """Curves of the errors on Fashion-MNIST, with the range of the seeds."""
    results = staleness.Results(runs)
    for optimizer, colour in OPTIMIZER_COLOURS.items():
        for algorithm, dash in ALGORITHM_DASHES.items():
            if algorithm == staleness.SYNC and not tuned:
                continue
            points = staleness_page.curve(results, "dnn", "fashion_mnist", optimizer, algorithm, tuned)
            at = {number: staleness_page.measured_staleness(runs, number) for number in points}
            values, style = {at[number]: point.mean for number, point in points.items()}, Style(colour, dash, "o")
            chart.curve(values, style)
            chart.marks(values, style)
            for number, point in points.items():
                chart.range(at[number], min(point.learned), max(point.learned), style)


def staleness_drawing(path: Path) -> str:
    """The test error against the staleness: with one rate for all, and with the best rate for each."""
    runs = staleness.read(path)
    fixed = Chart(46, "Test error in %, one learning rate", 90, (0, 30, 60, 90), STALENESS)
    tuned = Chart(426, "Test error in %, best learning rate", 60, (0, 20, 40, 60), STALENESS)
    _errors(fixed, runs, tuned=False)
    _errors(tuned, runs, tuned=True)
    colours = {
        staleness_page.NAMES[name].split()[0]: Style(colour, "-", "o") for name, colour in OPTIMIZER_COLOURS.items()
    }
    fixed.legend(colours, 290)
    note = (
        "dnn, Fashion-MNIST; solid: plain, dashed: staleness_aware, dotted: as many workers of mode=sync, never stale"
    )
    return _svg(760, 316, "Error against staleness", [*fixed.parts, *tuned.parts, _text(46, 308, note, "small")])


SLOWNESS = LinearAxis("by how many ms a step of one worker takes longer", (0, 10, 50, 100, 200))
GREY = "#7d8590"
WAY_STYLES = {
    "sync": MODE_STYLES["sync"],
    "local_sgd": Style(GREY, "-", "D"),
    "sync_replicas, 1 backup": MODE_STYLES["sync_replicas"],
    "async": MODE_STYLES["async"],
}


def slow_worker_drawing(points: Sequence[slowness.Point]) -> str:
    """The time to an accuracy by how slow one worker is, with the range of the rounds."""
    highest = max(max(point["secs"]) for point in points)
    step = next(step for step in (5, 10, 20, 25, 50) if 4 * step >= highest)
    title = f"Seconds to an accuracy of {slowness.UNTIL:g}"
    chart = Chart(46, title, 4 * step, tuple(range(0, 4 * step + 1, step)), SLOWNESS)
    names = [_text(380, 26, "All alike, and one slow", "title")]
    for number, (way, style) in enumerate(WAY_STYLES.items()):
        own = {point["slow_secs"] * 1e3: point["secs"] for point in points if point["way"] == way}
        medians = {delay: statistics.median(secs) for delay, secs in own.items()}
        chart.curve(medians, style)
        chart.marks(medians, style)
        for delay, secs in own.items():
            chart.range(delay, min(secs), max(secs), style)
        y = 60 + 44 * number
        names += [_text(398, y, way), f'<rect x="380" y="{y - 10}" width="11" height="11" fill="{style.colour}"/>']
        names.append(_text(398, y + 17, f"{medians[0]:.0f} s; {medians[200]:.0f} s with 200 ms more", "small"))
    note = "dnn on MNIST; four workers, whose steps compute for 50 ms; bars: ranges of the rounds"
    return _svg(600, 300, title, [*chart.parts, *names, _text(46, 290, note, "small")])


def slow_network_drawing(points: Sequence[bandwidth.Point]) -> str:
    """The examples in a second on links of two speeds, on a logarithmic axis."""
    title = "Examples per second on slow links"
    parts = [_text(16, 26, title, "title")]
    for x, mbit, kind in ((16, 100, "delayed"), (150, 1000, "alike")):
        parts.append(f'<rect class="{kind}" x="{x}" y="41" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, 52, bandwidth.SPEEDS[mbit]))
    for index, (mode, option) in enumerate(bandwidth.CASES):
        y = 70 + 50 * index
        parts.append(_text(160, y + (16 if option else 22), mode, "end"))
        parts.append(_text(160, y + 32, option.rpartition("=")[2], "small end"))
        for row, (mbit, kind) in enumerate(((100, "delayed"), (1000, "alike"))):
            point = bandwidth.found(points, mode=mode, option=option, mbit=mbit)
            assert point
            width = 150 * math.log10(point["examples_per_sec"] / 10)
            parts.append(f'<rect class="{kind}" x="172" y="{y + 18 * row}" width="{width:.1f}" height="15" rx="2"/>')
            text = f"{point['examples_per_sec']:,.0f}"
            parts.append(_text(172 + width + 8, y + 12 + 18 * row, text, "small"))
    note = "4 workers, 2 million parameters, batches of 100; logarithmic scale"
    return _svg(720, 390, title, [*parts, _text(16, 378, note, "small")])


PART_COLOURS = {"computing": GREEN, "dropped": GREY, "waiting": VERMILLION, "exchanging": BLUE}
PART_NAMES = {"computing": "computing", "dropped": "computing what is dropped", "waiting": "waiting for a worker",
              "exchanging": "exchanging"}  # fmt: skip


CASE_NAMES = {"slow": "One worker 100 ms slower", "link": "Links of 100 Mbit/s"}


def worker_time_drawing(runs: Sequence[dict[str, Any]]) -> str:
    """A bar of all its time for each mode, and with a slow worker one for it and one for the others."""
    title = "Where the time of a worker goes"
    parts, x = [_text(16, 26, title, "title")], 16.0
    for name, colour in PART_COLOURS.items():
        parts.append(f'<rect x="{x:g}" y="41" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 17, 51, PART_NAMES[name], "small"))
        x += 42 + 6.6 * len(PART_NAMES[name])
    y = 62.0
    for case in ("slow", "link"):
        parts.append(_text(16, y + 22, CASE_NAMES[case], "title"))
        y += 34
        for bar, shares in worker_time.bars_of(runs, case).items():
            way, _, slow = bar.partition(": ")
            parts.append(_text(206, y + 12, "the slow one" if slow else way, "small end"))
            left = 214.0
            for name, colour in PART_COLOURS.items():
                width = 430 * shares[name]
                place = f'x="{left:.1f}" y="{y:g}" width="{width:.1f}" height="15"'
                parts.append(f'<rect {place} fill="{colour}"/>')
                left += width
            parts.append(_text(652, y + 12, f"{shares['step']:,.0f} ms", "small"))
            y += 20
    note = "at the right: how long a step of the worker takes, from its begin to the next one"
    return _svg(720, round(y) + 36, title, [*parts, _text(16, y + 22, note, "small")])


def drawings() -> dict[str, str]:
    """By name of the file, its content."""
    bench = DOCS / "bench.json"
    found = {"scaling.svg": growth_drawing(bench), "staleness.svg": staleness_drawing(DOCS / "staleness.jsonl")}
    measured = json.loads((DOCS / slowness.FILE).read_text())
    found["slow_worker.svg"] = slow_worker_drawing(measured["points"])
    found["slow_network.svg"] = slow_network_drawing(json.loads(bench.read_text())["bandwidth"])
    found["worker_time.svg"] = worker_time_drawing(measured["runs"])
    for suffix, words in (("", ENGLISH), (".zh", CHINESE)):
        found[f"async{suffix}.svg"] = async_drawing(words)
        found[f"sync{suffix}.svg"] = sync_drawing(words)
        found[f"stragglers{suffix}.svg"] = rates_drawing(words, bench)
    return found


if __name__ == "__main__":
    for name, content in drawings().items():
        (DOCS / "pictures" / name).write_text(content)
