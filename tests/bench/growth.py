"""How a cluster grows, concluded from 1 to 8 workers: the law, and the tables of docs/scaling.md that it gives.

With parameter servers a batch costs each role the same, however many workers there are, and its share of what the role
does in any case, such as to look at the counters five times a second: a + b / n. A synchronous worker sends a small
array to each of the n - 1 others, and from 8 workers on passes on what is for others. Of a large one it sums a part: so
(n - 1) / n of the array travel each way, twice.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.bench.page import header, line, shown
from tests.bench.scale import CALL, DELAY_SECS, PS, PS_WORKERS, WORKERS
from tf2dist.training.synchronous.all_reduce import MANY_WORKERS, distances

Point = dict[str, Any]  # an entry of the section "scale" in bench.json
FITTED, PREDICTED = (1, 2, 4, 8), (32, 48)  # workers
MODES, MODELS = ("async", "sync_replicas", "sync"), ("softmax", "2 million")
ROLES = {"chief": "coordinator", "ps": "ps", "worker": "worker"}
QUANTITIES = ("cpu_ms", "messages", "kilobytes")
# The steps in a call of the coordinator that tf2dist chooses, if delays are not simulated.
CALLS = {"softmax": 50, "2 million": 10}
# The hosts of the last table.
CORES, LINK, OPEN_FILES = 16, 1.25e9, 4096  # bytes per second each way; the hard limit if nobody has set it


class Term(NamedTuple):
    """What the number of workers does to a quantity."""

    text: str
    value: Callable[[float], float]


ONE, SHARE = Term("", lambda n: 1.0), Term(" / n", lambda n: 1 / n)
# Of a small array: how many messages a worker sends, and how many times the bytes of the array.
SENDS = Term(" m", lambda n: n - 1 if n < MANY_WORKERS else 2 * len(distances(int(n))))
ARRAYS = Term(" k", lambda n: n - 1 if n < MANY_WORKERS else (sum(map(int.bit_count, range(int(n)))) + n - 1) / n)
OTHERS, PARTS = Term(" (n - 1)", lambda n: n - 1), Term(" (n - 1) / n", lambda n: (n - 1) / n)
SYNC_TERMS: dict[str, dict[str, tuple[Term, ...]]] = {
    "softmax": {"cpu_ms": (ONE, SENDS), "messages": (SENDS,), "kilobytes": (ARRAYS,)},
    "2 million": {"cpu_ms": (ONE, PARTS), "messages": (PARTS, OTHERS), "kilobytes": (PARTS,)},
}


def step_of(point: Point) -> float:
    """The seconds of a worker's step."""
    return float((point["workers"] if point["mode"] == "async" else 1) / point["steps_per_sec"])


def per_batch(point: Point, role: str, quantity: str) -> float:
    """Of all tasks of a role together, for the batch of one worker."""
    return float(point["roles"][role][quantity] / (1 if point["mode"] == "async" else point["workers"]))


class Law:
    """What a batch costs by the number of workers, with one ps.

    Args:
        points: of all clusters.
        fitted: the numbers of workers from which it is concluded.
    """

    def __init__(self, points: Sequence[Point], mode: str, model: str, fitted: Sequence[int] = FITTED) -> None:
        self.mode, self.model, self._fitted = mode, model, fitted
        both = [one for one in points if (one["mode"], one["model"]) == (mode, model)]
        own = [one for one in both if one["delay_secs"] == DELAY_SECS]
        self._long = next((one for one in both if one["delay_secs"] > DELAY_SECS), None)
        self.measured = {one["workers"]: one for one in own if one["ps"] <= 1}
        self.by_ps = {one["ps"]: one for one in own if one["workers"] == PS_WORKERS}
        self.roles = [role for role in ROLES if role in own[0]["roles"]]

    def terms(self, quantity: str) -> tuple[Term, ...]:
        return SYNC_TERMS[self.model][quantity] if self.mode == "sync" else (ONE, SHARE)

    def constants(self, role: str, quantity: str) -> list[float]:
        """The factors of the terms."""
        points = [self.measured[n] for n in self._fitted if n in self.measured]
        values = {self._place(one["workers"], step_of(one)): per_batch(one, role, quantity) for one in points}
        return fit({place: value for place, value in values.items() if value}, self.terms(quantity))

    def _place(self, workers: int, step_secs: float) -> float:
        """Where a cluster stands in the law: with fewer steps a second, what is done in any case is shared by fewer."""
        return workers if self.mode == "sync" else workers * DELAY_SECS / step_secs

    def idle(self) -> float:
        """Milliseconds that each second costs a worker, whatever it does; found with steps that take longer."""
        if not self._long:
            return 0.0
        role, quantity, step_secs = "worker", "cpu_ms", step_of(self._long)
        more = per_batch(self._long, role, quantity) - self._without_idle(PS_WORKERS, role, quantity, step_secs)
        return max(0.0, more / (step_secs - DELAY_SECS))

    def _without_idle(self, workers: int, role: str, quantity: str, step_secs: float) -> float:
        place, terms = self._place(workers, step_secs), self.terms(quantity)
        pairs = zip(self.constants(role, quantity), terms, strict=True)
        return sum(constant * term.value(place) for constant, term in pairs)

    def at(self, workers: int, role: str, quantity: str, step_secs: float = DELAY_SECS) -> float:
        """What a batch costs if a worker's step takes so long."""
        more = self.idle() * (step_secs - DELAY_SECS) if (role, quantity) == ("worker", "cpu_ms") else 0.0
        return self._without_idle(workers, role, quantity, step_secs) + more

    def text(self, role: str, quantity: str) -> str:
        """For example "0.24 + 2.7 / n"."""
        text = ""
        for constant, term in zip(self.constants(role, quantity), self.terms(quantity), strict=True):
            sign = " - " if constant < 0 else " + "
            text += f"{sign if text or constant < 0 else ''}{digits(abs(constant))}{term.text}" if constant else ""
        return text.strip()

    def split(self) -> tuple[float, float]:
        """Milliseconds of the ps for a batch: of each call, and of all bytes, which several ps share."""
        costs = {float(ps): per_batch(point, "ps", "cpu_ms") for ps, point in self.by_ps.items()}
        per_byte, per_call = fit(costs, (ONE, Term("", lambda ps: ps)))
        return per_call, per_byte

    def open_files(self, role: str, workers: int) -> int:
        """Descriptors of a task on a host of its own."""
        few, many = 2, 8
        first, last = (self.measured[n]["roles"][role]["descriptors"] for n in (few, many))
        return int(last + round((last - first) / (many - few)) * (workers - many))


def fit(values: dict[float, float], terms: Sequence[Term]) -> list[float]:
    """The factors of terms of n, by least squares of the relative errors; `values`: by n.

    What grows with n costs nothing at least: where it is lost in the noise its factor is 0.
    """
    rows = np.array([[term.value(n) / value for term in terms] for n, value in values.items()])
    factors = [float(factor) for factor in np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]]
    if terms[-1] in (OTHERS, SENDS) and factors[-1] < 0:
        return [*fit(values, terms[:-1]), 0.0]
    return factors


def laws(points: Sequence[Point]) -> Iterator[Law]:
    return (Law(points, mode, model) for model in MODELS for mode in MODES)


def of_all_sizes(points: Sequence[Point], law: Law) -> Law:
    """The law concluded from all clusters: what a message costs is too little to be found with 8 workers."""
    return Law(points, law.mode, law.model, WORKERS)


def measured_table(points: Sequence[Point]) -> list[str]:
    """Rates and starts, on the machine where they were measured."""
    sizes = sorted({point["workers"] for point in points})
    lines = header("mode", "model", "", *map(str, sizes))
    for law in laws(points):
        rows: dict[str, Callable[[Point], str]] = {
            "steps/s": lambda one: shown(float(f"{one['steps_per_sec']:.3g}")),
            "of the ideal": lambda one: f"{one['efficiency']:.2f}",
            "start, s": lambda one: f"{one['start_secs']:.0f}",
            "memory of all, GB": lambda one: f"{one['used_gb']:.1f}",
        }
        for name, text in rows.items():
            cells = [text(law.measured[n]) if n in law.measured else "" for n in sizes]
            lines.append(line(law.mode, law.model, name, *cells))
    return lines


def costs_table(points: Sequence[Point]) -> list[str]:
    """What a batch costs each role, and what one core takes."""
    lines = header("mode", "model", "role", "processor, ms", "messages", "KB", "batches/s of one core")
    found = list(laws(points))
    found += [of_all_sizes(points, law) for law in found if law.mode == "sync"]
    for law in found:
        for role in law.roles:
            texts = [law.text(role, quantity) for quantity in QUANTITIES]
            at_most = 1000 / law.at(PS_WORKERS, role, "cpu_ms")
            name = ROLES[role] + (f", from 1 to {WORKERS[-1]}" if law in found[len(MODES) * len(MODELS) :] else "")
            lines.append(line(law.mode, law.model, name, *texts, f"{at_most:,.0f}"))
    return lines


def digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"


def servers_table(points: Sequence[Point]) -> list[str]:
    """What a batch costs all ps together, by their number."""
    lines = header("mode", "model", "", *(f"{ps} ps" for ps in PS))
    for law in laws(points):
        if law.mode == "sync":
            continue
        for name, quantity in (("processor, ms", "cpu_ms"), ("messages", "messages"), ("KB", "kilobytes")):
            cells = [digits(per_batch(law.by_ps[ps], "ps", quantity)) if ps in law.by_ps else "" for ps in PS]
            lines.append(line(law.mode, law.model, name, *cells))
    return lines


def predictions(points: Sequence[Point]) -> Iterator[tuple[Law, str, str, float, float]]:
    """Each quantity of a large cluster, as the small ones foretell it for the steps a second that it reached, and real.

    In the order of the columns of the table.
    """
    for law in laws(points):
        for role in law.roles:
            for quantity in QUANTITIES:
                for n in PREDICTED:
                    if one := law.measured.get(n):
                        expected = law.at(n, role, quantity, step_of(one))
                        yield law, role, quantity, expected, per_batch(one, role, quantity)


def predictions_table(points: Sequence[Point]) -> list[str]:
    """By mode, model and role a row: foretold and measured, and their ratio."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for law, role, _, expected, real in predictions(points):
        mark = "" if is_close(expected, real) else "**"
        text = f"{digits(expected)}, {digits(real)} ({mark}{expected / real:.2f}{mark})"
        cells.setdefault((law.mode, law.model, ROLES[role]), []).append(text)
    names = [f"{name} at {n}" for name in ("ms", "messages", "KB") for n in PREDICTED]
    return header("mode", "model", "role", *names) + [line(*key, *row) for key, row in cells.items()]


def is_close(foretold: float, real: float) -> bool:
    return abs(foretold / real - 1) <= 0.15


class Limits(NamedTuple):
    """How many workers use up a part of an asynchronous cluster with one ps."""

    coordinator: float
    ps_core: float
    ps_link: float


def limits(law: Law, step_secs: float, bytes_per_sec: float, steps_per_call: int) -> Limits:
    """Of one core of the coordinator, of one core of the ps, and of the ps's link."""

    chief_ms, ps_ms = (law.constants(role, "cpu_ms")[0] for role in ("chief", "ps"))
    link = bytes_per_sec / (law.constants("ps", "kilobytes")[0] * 1000 / 2) * step_secs
    return Limits(1000 / (chief_ms * CALL / steps_per_call) * step_secs, 1000 / ps_ms * step_secs, link)


def limits_table(points: Sequence[Point]) -> list[str]:
    """How many asynchronous workers a part can serve."""
    parts = "coordinator's core", "a core of the ps", "its link of 1 Gbit/s", "of 10 Gbit/s"
    lines = header("model", "a step computes for", *parts)
    for model in MODELS:
        law = Law(points, "async", model)
        for secs in (0.01, 0.1, 1.0):
            core, ps, slow = limits(law, secs, LINK / 10, CALLS[model])
            workers = [digits(float(f"{number:.2g}")) for number in (core, ps, slow, 10 * slow)]
            lines.append(line(model, f"{secs * 1000:,.0f} ms", *workers))
    return lines


class Forecast(NamedTuple):
    """A cluster on hosts of its own, each with CORES cores and a LINK.

    Attributes:
        steps_per_sec: global steps.
        shares: of each part, how much of its limit is used at the rate that the workers could reach; 1 is the limit.
    """

    ps: int
    steps_per_sec: float
    staleness: int
    shares: dict[str, float]

    @property
    def first(self) -> list[tuple[str, float]]:
        """The parts beyond their limits, or else the one closest to its own."""
        parts = sorted(self.shares.items(), key=lambda item: -item[1])
        return [item for item in parts if item[1] > 1] or parts[:1]


def forecast(law: Law, workers: int, step_secs: float = DELAY_SECS) -> Forecast:
    return {"async": forecast_async, "sync_replicas": forecast_sync_replicas, "sync": forecast_sync}[law.mode](
        law, workers, step_secs
    )


def expected_step(law: Law, workers: int, step_secs: float) -> float:
    """The seconds of a worker's step that waits for no other: its own work, that of the ps for it, and its bytes."""
    busy = sum(law.at(workers, role, "cpu_ms") for role in law.roles if role != "chief") / 1000
    one_way = law.at(workers, "worker", "kilobytes") * 1000 / 2
    # Synchronous workers send and receive at the same time, others push and then pull.
    return step_secs + busy + one_way * (1 if law.mode == "sync" else 2) / LINK


def forecast_async(law: Law, workers: int, step_secs: float) -> Forecast:
    step = expected_step(law, workers, step_secs)
    one = limits(law, step, LINK, CALLS[law.model])
    per_call, shared = law.split() if law.model != "softmax" else (1000 / one.ps_core * step, 0.0)
    ps = math.ceil(workers / one.ps_link)
    shares = {
        "coordinator's core": workers / one.coordinator,
        "cores of a ps": workers / step * (per_call + shared / ps) / 1000 / CORES,
        "link of a ps": workers / one.ps_link / ps,
        "open files of a ps": law.open_files("ps", workers) / OPEN_FILES,
    }
    rates = [share for part, share in shares.items() if not part.startswith("open")]
    return Forecast(ps, workers / step / max(1.0, *rates), workers - 1, shares)


def forecast_sync_replicas(law: Law, workers: int, step_secs: float) -> Forecast:
    """A ps takes the gradients of a step one after the other, on one core."""
    per_call, shared = law.split() if law.model != "softmax" else (law.constants("ps", "cpu_ms")[0], 0.0)
    kilobytes = law.constants("worker", "kilobytes")[0]

    def secs(ps: int) -> dict[str, float]:
        one_by_one = workers * (per_call + shared / ps) / 1000
        return {"a core of a ps": one_by_one, "link of a ps": workers * kilobytes * 1000 / LINK / ps}

    counts = (1, *(count for count in (*PS[1:], 16, 32) if law.model != "softmax"))
    ps = min(counts, key=lambda count: max(secs(count).values()))
    step = step_secs + law.constants("worker", "cpu_ms")[0] / 1000 + max(secs(ps).values())
    shares = {part: busy / step for part, busy in secs(ps).items()}
    shares["coordinator's core"] = workers * law.constants("chief", "cpu_ms")[0] / 1000 / step
    return Forecast(ps, 1 / step, 0, shares | {"open files of a ps": law.open_files("ps", workers) / OPEN_FILES})


def forecast_sync(law: Law, workers: int, step_secs: float) -> Forecast:
    step = expected_step(law, workers, step_secs)
    shares = {
        "link of a worker": law.at(workers, "worker", "kilobytes") * 1000 / 2 / LINK / step,
        "open files of a worker": law.open_files("worker", workers) / OPEN_FILES,
    }
    return Forecast(0, 1 / step, 0, shares)


REMEDIES = {
    "coordinator's core": "longer calls: `train.steps_per_execution=50`",
    "open files of a ps": "a higher `ulimit -Hn`",
    "open files of a worker": "a higher `ulimit -Hn`",
    "cores of a ps": "larger batches, hosts with more cores",
    "a core of a ps": "fewer gradients in a step: `sync`",
    "link of a ps": "`cluster.transfer_dtype=bfloat16`",
    "link of a worker": "`cluster.transfer_dtype=bfloat16`",
}


def forecast_table(points: Sequence[Point]) -> list[str]:
    lines = header(
        *("mode", "model", "workers", "ps", "steps/s", "of the ideal", "staleness", "messages/s of a ps or worker"),
        *("closest to its limit", "what helps"),
    )
    for law in (of_all_sizes(points, law) if law.mode == "sync" else law for law in laws(points)):
        for workers in (100, 1000):
            found = forecast(law, workers)
            batches = found.steps_per_sec * (1 if law.mode == "async" else workers)
            ideal = workers / DELAY_SECS
            of_a_worker = law.at(workers, "worker", "messages") * batches / workers
            messages = of_a_worker if law.mode == "sync" else law.constants("ps", "messages")[0] * batches / found.ps
            numbers = [digits(float(f"{number:.2g}")) for number in (found.steps_per_sec, messages)]
            cells = [str(found.ps or ""), numbers[0], f"{batches / ideal:.2f}", f"{found.staleness:,}", numbers[1]]
            parts = ", ".join(f"{part} {share:.0%}" for part, share in found.first)
            helps = "; ".join(REMEDIES[part] for part, share in found.first if share > 0.4)
            lines.append(line(law.mode, law.model, f"{workers:,}", *cells, parts, helps))
    return lines


TABLES = {
    "measured": measured_table,
    "costs": costs_table,
    "servers": servers_table,
    "predictions": predictions_table,
    "limits": limits_table,
    "forecast": forecast_table,
}


def page_of(
    text: str,
    points: Sequence[Point],
    tables: Mapping[str, Callable[[Sequence[Point]], list[str]]] = TABLES,
    command: str = "make bench",
) -> str:
    """The page with its tables made anew; each stands between two comments, which name the command."""
    for name, table in tables.items():
        body = "\n".join(table(points))
        begin, end = f"<!-- {name}: written by `{command}` -->\n", "\n<!-- end -->"
        before, mark, rest = text.partition(begin)
        if mark:
            _, _, after = rest.partition(end)
            text = f"{before}{begin}\n{body}\n{end}{after}"
    return text


def update(points: Sequence[Point], folder: Path) -> None:
    """Writes the tables into the page if it is in the folder, and all that they need has been measured."""
    path = folder / "scaling.md"
    if path.exists():
        path.write_text(page_of(path.read_text(), points))
