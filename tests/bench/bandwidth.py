"""Which mode on which link: 4 workers on hosts of their own, whose links are limited, and a table of docs/scaling.md.

The hosts are network namespaces on one machine, and each task has one: in the modes with parameter servers the
coordinator and the ps, too. The limit is a token bucket (`tc ... tbf`) on both ends of each host's cable, so that it
holds for what a host sends and for what it receives. Delays are those of the queues alone.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench import growth
from tests.bench.contenders import ContenderError
from tests.bench.figures import model_of
from tests.bench.links import SOCKETS
from tests.bench.page import header, line
from tests.bench.scale import next_record, process_secs
from tests.hosts import Hosts, hosts
from tests.jobs import Job

Point = dict[str, Any]  # an entry of the section "bandwidth" in bench.json
SPEEDS = {100: "100 Mbit/s", 1000: "1 Gbit/s"}  # of the links that are measured, each way
LINKS = {**SPEEDS, 10_000: "10 Gbit/s"}
MBIT = tuple(SPEEDS)
CASES = (
    *(("async", ""), ("async", "cluster.transfer_dtype=bfloat16"), ("sync_replicas", "")),
    *(("sync", ""), ("sync", "cluster.transfer_dtype=bfloat16"), ("sync", "algorithm=local_sgd")),
)
WORKERS, MODEL = 4, "2 million"
BATCH_SIZE, LARGE_BATCH_SIZE = 100, 1000
# A bucket of 10 ms holds a whole packet of 64 KB, which the kernel would otherwise cut at a price. The queue is 6 MB at
# 1 Gbit/s, as much as a switch may have for a port. TCP gets 0.95 of the rate with both.
BUCKET = {"burst_ms": 10, "queue_ms": 50}
WINDOW_SECS, WINDOW_UPDATES = 30.0, 8  # what is measured takes at least so long, and has so many updates
FACTS = ("date", "processor", "cores", "tensorflow", "rounds")


@dataclass(frozen=True)
class Setting:
    """The cluster of one measurement, and its links."""

    mode: str
    option: str
    batch: int
    mbit: int

    def __str__(self) -> str:
        return f"{self.name}, batches of {self.batch}, {self.mbit} Mbit/s"

    @classmethod
    def of(cls, point: Point) -> "Setting":
        return cls(*(point[name] for name in ("mode", "option", "batch", "mbit")))

    @property
    def name(self) -> str:
        return f"bandwidth {self.mode} {self.option}".rstrip()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The leader first, each on a host of its own."""
        workers = tuple(f"worker-{index}" for index in range(WORKERS))
        return workers if self.mode == "sync" else ("chief-0", "ps-0", *workers)

    @property
    def batches(self) -> int:
        """Those of an update."""
        return 1 if self.mode == "async" else WORKERS

    def options(self) -> list[str]:
        return [
            *(*model_of(MODEL), *([self.option] if self.option else []), f"train.batch_size_per_worker={self.batch}"),
            *("data=mnist", "data.offline=fail", "optimizer=sgd", "figure=false", "train.steps=1000000"),
            # Six processes may need a minute to import TensorFlow on a busy machine.
            *(f"plugins=[{SOCKETS}]", "startup_timeout_secs=300"),
        ]


def settings() -> Iterator[Setting]:
    for mbit in MBIT:
        for mode, option in CASES:
            yield Setting(mode, option, BATCH_SIZE, mbit)
        for mode in ("async", "sync"):
            yield Setting(mode, "", LARGE_BATCH_SIZE, mbit)


@dataclass(frozen=True)
class Look:
    """A run soon after a record in metrics.jsonl.

    Attributes:
        at: the time, in seconds.
        ways: the bytes that each host has received, and that each has sent.
        cpu_secs: of all tasks.
    """

    record: dict[str, Any]
    at: float
    ways: list[int]
    cpu_secs: float

    @classmethod
    def now(cls, record: dict[str, Any], made: Hosts, count: int) -> "Look":
        at, machines = time.monotonic(), [made[index] for index in range(count)]
        ways = [way for machine in machines for way in machine.received_and_sent()]
        return cls(record, at, ways, sum(process_secs(pid) for machine in machines for pid in machine.pids()))

    def since(self, earlier: "Look", setting: Setting) -> Point:
        """The rate from an earlier look to this one, and what one update cost in between."""
        steps = self.record["step"] - earlier.record["step"]
        rate = steps / (self.record["training_secs"] - earlier.record["training_secs"])
        secs = self.at - earlier.at
        busiest = max(now - before for now, before in zip(self.ways, earlier.ways, strict=True))
        cpu_secs = self.cpu_secs - earlier.cpu_secs
        return {
            "updates": steps,
            "examples_per_sec": rate * setting.batches * setting.batch,
            "megabytes": busiest / 1e6 / (rate * secs),
            "link_share": busiest / secs / (setting.mbit * 125_000),
            "cpu_ms": 1e3 * cpu_secs / (rate * secs),
            "used_cores": cpu_secs / secs,
        }


def measure(setting: Setting, secs: float = WINDOW_SECS) -> Point:
    """One run: half of `secs` to warm up, and `secs` that are measured.

    Raises:
        ContenderError: the run has failed; the message has its output.
    """
    load, count = os.getloadavg()[0], len(setting.tasks)
    with hosts(count) as made, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made.limit(setting.mbit * 125_000, **BUCKET)
        job = Job(made, Path(folder), setting.mode, setting.tasks)
        try:
            job.start(*setting.options())
            process, run_dir = job.leader.process, job.leader.run_dir
            record, looks = next_record(process, run_dir, None), []
            for length in (secs / 2, secs):
                begin = record
                while record["time"] - begin["time"] < length or record["step"] - begin["step"] < WINDOW_UPDATES:
                    record = next_record(process, run_dir, record)
                looks.append(Look.now(record, made, count))
        except (ContenderError, TimeoutError) as error:
            raise ContenderError(f"{error}\n{job}") from None
        finally:
            job.close()
    return {**asdict(setting), **looks[1].since(looks[0], setting), "load": load}


def order_of(point: Point) -> tuple[Any, ...]:
    return point["batch"], CASES.index((point["mode"], point["option"])), point["mbit"]


def line_of(point: Point) -> str:
    """For the terminal."""
    link = f"{point['megabytes']:.3g} MB of an update on the busiest link, {point['link_share']:.0%} of which is used"
    return f"{Setting.of(point)}: {point['examples_per_sec']:,.0f} examples/s, {link}; {point['used_cores']:.2f} cores"


def found(points: Sequence[Point], **wanted: Any) -> Point | None:
    """The point with these values, of the plain batch size unless they say another."""
    wanted = {"batch": BATCH_SIZE, **wanted}
    return next((one for one in points if all(one[name] == value for name, value in wanted.items())), None)


def core_rate(points: Sequence[Point]) -> float:
    """The examples that one core computes in a second, from the processor time of two batch sizes."""
    few, many = (found(points, mode="sync", option="", mbit=MBIT[-1], batch=n) for n in (BATCH_SIZE, LARGE_BATCH_SIZE))
    assert few
    assert many
    return 1e3 * WORKERS * (LARGE_BATCH_SIZE - BATCH_SIZE) / float(many["cpu_ms"] - few["cpu_ms"])


def link_secs(points: Sequence[Point], point: Point) -> float:
    """How long a step of each worker lasts without its computing, on a link of 1 Mbit/s."""
    computing = point["batch"] / core_rate(points)
    return float((WORKERS * point["batch"] / point["examples_per_sec"] - computing) * point["mbit"])


def rounded(value: float) -> str:
    """Two digits."""
    number = float(f"{value:.2g}")
    return f"{number:,.0f}" if number >= 10 else f"{number:g}"


def case(mode: str, option: str) -> list[str]:
    """The first cells of a row."""
    return [mode, f"`{option}`" if option else ""]


def rates_table(points: Sequence[Point]) -> list[str]:
    columns = [f"{cell} {name}" for name in SPEEDS.values() for cell in ("examples/s at", "used of")]
    lines = header("mode", "option", "batch", "MB of an update", *columns, "cores used at 1 Gbit/s")
    for batch in (BATCH_SIZE, LARGE_BATCH_SIZE):
        for mode, option in CASES:
            own = [found(points, mode=mode, option=option, batch=batch, mbit=mbit) for mbit in MBIT]
            measured = [one for one in own if one]
            if len(measured) < len(MBIT):
                continue
            cells = [
                cell for one in measured for cell in (f"{one['examples_per_sec']:,.0f}", f"{one['link_share']:.0%}")
            ]
            size, cores = f"{measured[0]['megabytes']:.2g}", f"{measured[-1]['used_cores']:.1f}"
            lines.append(line(*case(mode, option), f"{batch:,}", size, *cells, cores))
    return lines


def batches_table(points: Sequence[Point]) -> list[str]:
    lines = header("mode", "option", *(f"{cell} {name}" for name in LINKS.values() for cell in ("s at", "batch at")))
    for mode, option in CASES:
        point = found(points, mode=mode, option=option, mbit=MBIT[0])
        assert point
        secs = [link_secs(points, point) / mbit for mbit in LINKS]
        cells = [rounded(one) for value in secs for one in (value, value * core_rate(points))]
        lines.append(line(*case(mode, option), *cells))
    return lines


TABLES = {"rates on links": rates_table, "batches for links": batches_table}


def update(points: Sequence[Point], folder: Path) -> None:
    """Writes the tables into the page if it is in the folder, and all that they need has been measured."""
    path = folder / "scaling.md"
    if path.exists() and {Setting.of(one) for one in points} == set(settings()):
        path.write_text(growth.page_of(path.read_text(), points, TABLES))
