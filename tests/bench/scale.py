"""How a cluster grows: rate, start and memory, and what one update costs each role, by the number of tasks.

Each step takes DELAY_SECS longer, as if it were computed on a host of its own, so that few cores can run many workers.
Synchronous workers share no memory, as on hosts of their own. The processor time of a task, which says the same on few
cores and on many, is that of the kernel's clock of its process. Its bytes and messages are those of its TCP
connections: `/proc/PID/io` leaves out sockets, and the counters of a network cannot tell its tasks apart. A message is
a TCP segment with data; on the loopback device such a segment holds up to 64 KB.
"""

import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.bench.contenders import ContenderError, our_process
from tests.bench.figures import cluster_of, model_of, pss_mb
from tests.bench.links import SOCKETS

WORKERS = (1, 2, 4, 8, 16, 32, 48)
PS, PS_WORKERS = (1, 2, 4, 8), 8
DELAY_SECS, BATCH_SIZE = 0.1, 32
CALL = 4  # steps, as tf2dist chooses with these delays
LONG_DELAY_SECS = 0.4  # PS_WORKERS workers are measured with this, too
GB_OF_A_WORKER = 0.3  # at most
WINDOW_SECS, WINDOW_UPDATES = 10.0, 40  # what is measured takes at least so long, and has so many updates
TIMEOUT_SECS = 600.0
ROLE = re.compile(r"/(chief|ps|worker)-\d+\.log$")
FACTS = ("date", "processor", "cores", "tensorflow", "rounds")
COUNTERS = re.compile(r"(bytes_acked|bytes_received|data_segs_out|data_segs_in):(\d+)")


@dataclass(frozen=True)
class Setting:
    """The cluster of one measurement."""

    mode: str
    model: str
    workers: int
    ps: int
    delay_secs: float = DELAY_SECS

    def __str__(self) -> str:
        return f"{self.name}, {self.workers} workers, {self.ps} ps, {self.delay_secs:g} s"

    @classmethod
    def of(cls, point: dict[str, Any]) -> "Setting":
        return cls(*(point[name] for name in ("mode", "model", "workers", "ps", "delay_secs")))

    @property
    def name(self) -> str:
        return f"scale {self.mode} {self.model}"

    @property
    def ideal(self) -> float:
        """The updates in a second if a step took nothing but the delay."""
        return (self.workers if self.mode == "async" else 1) / self.delay_secs

    def options(self) -> list[str]:
        delays = ",".join([f"{self.delay_secs:g}"] * self.workers)
        more = [f"plugins=[{SOCKETS}]"] if self.mode == "sync" else [f"cluster.num_ps={self.ps}"]
        if self.ps > 1:
            more.append("cluster.placement=partitioned")  # each ps has a part of each large variable
        return [
            *(f"mode={self.mode}", *model_of(self.model), "optimizer=sgd", *cluster_of(self.workers), *more),
            *(f"simulate.delay_secs=[{delays}]", f"train.steps_per_execution={CALL}", "train.steps=1000000"),
            f"train.batch_size_per_worker={BATCH_SIZE}",
        ]


def settings(workers: Sequence[int]) -> Iterator[Setting]:
    """All that are measured for these numbers of workers."""
    for model in ("softmax", "2 million"):
        for mode in ("async", "sync_replicas", "sync"):
            ps = 0 if mode == "sync" else 1
            yield from (Setting(mode, model, number, ps) for number in workers)
            if PS_WORKERS in workers:
                yield from (Setting(mode, model, PS_WORKERS, number) for number in PS[1:] if ps)
                yield Setting(mode, model, PS_WORKERS, ps, LONG_DELAY_SECS)


@dataclass
class Usage:
    """What the tasks of a role have used since they began, and what the largest of them has open."""

    tasks: int = 0
    cpu_ms: float = 0.0
    messages: float = 0.0
    kilobytes: float = 0.0
    threads: int = 0
    descriptors: int = 0


@dataclass(frozen=True)
class Look:
    """A run soon after a record in metrics.jsonl.

    Attributes:
        at: the time, in seconds.
    """

    record: dict[str, Any]
    at: float
    usage: dict[str, Usage]

    def since(self, earlier: "Look") -> dict[str, Any]:
        """The rate from an earlier look to this one, and the usage of one update in between."""
        steps = self.record["step"] - earlier.record["step"]
        rate = steps / (self.record["training_secs"] - earlier.record["training_secs"])
        updates = rate * (self.at - earlier.at)  # on a busy machine a look may come late
        roles = {}
        for role, now in self.usage.items():
            roles[role] = asdict(now)
            for name in ("cpu_ms", "messages", "kilobytes"):
                roles[role][name] = (getattr(now, name) - getattr(earlier.usage[role], name)) / updates
        return {"updates": steps, "steps_per_sec": rate, "roles": roles}


def process_secs(pid: int) -> float:
    """The processor time of all threads of a process, also of those that have ended."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) makes it


def roles_of(launcher: int) -> dict[int, str]:
    """The role of each task by its process: a task is a fork, so only the file of its output shows which it is."""
    roles = {}
    for process in psutil.Process(launcher).children(recursive=True):
        if found := ROLE.search(os.readlink(f"/proc/{process.pid}/fd/1")):
            roles[process.pid] = found[1]
    return roles


def look_at(launcher: int, record: dict[str, Any]) -> Look:
    roles = roles_of(launcher)
    usage: dict[str, Usage] = {role: Usage() for role in roles.values()}
    at = time.monotonic()
    for pid, role in roles.items():
        usage[role].cpu_ms += 1e3 * process_secs(pid)
    command = ["nsenter", "--target", str(next(iter(roles))), "--net", "ss", "-tinpHO"]
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        owner = re.search(r"pid=(\d+)", line)
        if owner and int(owner[1]) in roles:
            counted, one = dict(COUNTERS.findall(line)), usage[roles[int(owner[1])]]
            one.kilobytes += (int(counted.get("bytes_acked", 0)) + int(counted.get("bytes_received", 0))) / 1e3
            one.messages += int(counted.get("data_segs_out", 0)) + int(counted.get("data_segs_in", 0))
    for pid, role in roles.items():
        process, one = psutil.Process(pid), usage[role]
        one.tasks += 1
        one.threads = max(one.threads, process.num_threads())
        one.descriptors = max(one.descriptors, process.num_fds())
    return Look(record, at, usage)


def next_record(process: subprocess.Popen[str], run_dir: Path, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The next record of the training as soon as it is written, so that all looks come equally late."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + TIMEOUT_SECS
    while time.monotonic() < deadline:
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        if lines and lines[-1].endswith("\n"):
            record: dict[str, Any] = json.loads(lines[-1])
            if "training_secs" in record and (earlier is None or record["step"] > earlier["step"]):
                return record
        if process.poll() is not None:
            raise ContenderError(f"ended with code {process.returncode}: {process.stdout and process.stdout.read()}")
        time.sleep(0.02)
    raise TimeoutError(f"no record in {TIMEOUT_SECS:.0f} s")


def measure(setting: Setting, secs: float = WINDOW_SECS) -> dict[str, Any]:
    """One run: its start, half of `secs` to warm up, and `secs` that are measured."""
    room_gb = psutil.virtual_memory().available / 1e9
    if room_gb < GB_OF_A_WORKER * setting.workers:
        raise ContenderError(f"{setting.workers} workers need more memory than the {room_gb:.1f} GB that are free")
    load, started_at = os.getloadavg()[0], time.time()
    with our_process(*setting.options()) as (process, run_dir):
        record = next_record(process, run_dir, None)
        first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
        looks: list[Look] = []
        for length in (secs / 2, secs):
            begin = record
            while record["time"] - begin["time"] < length or record["step"] - begin["step"] < WINDOW_UPDATES:
                record = next_record(process, run_dir, record)
            looks.append(look_at(process.pid, record))
        used_gb = pss_mb(process.pid) / 1e3
    measured = looks[1].since(looks[0])
    return {
        **asdict(setting),
        **measured,
        "efficiency": measured["steps_per_sec"] / setting.ideal,
        "start_secs": first["time"] - started_at,
        "used_gb": used_gb,
        "load": load,
    }


def median_of(rounds: Sequence[Any]) -> Any:
    """Of numbers the median, with five digits; of dictionaries that of each entry; of anything else the first."""
    first = rounds[0]
    if isinstance(first, dict):
        return {name: median_of([one[name] for one in rounds]) for name in first}
    return float(f"{statistics.median(rounds):.5g}") if isinstance(first, float) else first


def order_of(point: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(point[name] for name in ("mode", "model", "delay_secs", "ps", "workers"))


def line_of(point: dict[str, Any]) -> str:
    """For the terminal."""
    roles = point["roles"].items()
    costs = [
        f"{role} {use['cpu_ms']:.2f} ms {use['messages']:.1f} messages {use['kilobytes']:.0f} KB" for role, use in roles
    ]
    rate = f"{point['steps_per_sec']:.4g} steps/s ({point['efficiency']:.2f}), start {point['start_secs']:.1f} s"
    return f"{Setting.of(point)}: {rate}, {point['used_gb']:.1f} GB; of an update {', '.join(costs)}"
