"""Where the time of a worker goes in each mode, from the timelines of its steps: a part of docs/slowness.json.

The option `timeline` records when each step begins and ends: it begins when all that it needs has come, and ends when
its gradient is there. All workers of one machine have one clock. So two timelines tell how long a worker has waited for
another one, and the rest of the time between two steps is that of the exchange.
"""

import itertools
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.bandwidth import BUCKET
from tests.bench.contenders import our_process
from tests.bench.figures import cluster_of, model_of
from tests.bench.links import SOCKETS
from tests.bench.page import header, line
from tests.bench.scale import next_record
from tests.hosts import hosts
from tests.jobs import Job
from tf2dist.tools.comparing.results import timelines_in

Step = tuple[float, float]  # its begin and its end
MODES = {
    "sync": ("sync", ()),
    "local_sgd": ("sync", ("algorithm=local_sgd",)),
    "sync_replicas, 1 backup": ("sync_replicas", ("sync_replicas.replicas_to_aggregate=3",)),
    "async": ("async", ()),
}
WORKERS, LOCAL_STEPS, REPLICAS = 4, 8, 3
COMMON_SECS, SLOW_SECS, MBIT = 0.05, 0.1, 100
CASES = {"alike": "equal workers", "slow": "one worker 100 ms slower", "link": "links of 100 Mbit/s"}
PARTS = ("computing", "dropped", "waiting", "exchanging")
WARM_UP = 0.25  # of the steps, which are left out
WINDOW_SECS = {"alike": 10.0, "slow": 15.0, "link": 45.0}


@dataclass
class Parts:
    """The seconds of one worker.

    Attributes:
        computing: of the gradients that are used, with the delay that stands for computing.
        dropped: the same of gradients that came too late for their step.
        waiting: for other workers, until the last gradient that is waited for is there.
        exchanging: all else between two steps: sending, updating, receiving, and waiting for the ps.
        steps: the worker's own.
    """

    computing: float = 0.0
    dropped: float = 0.0
    waiting: float = 0.0
    exchanging: float = 0.0
    steps: int = 0

    def add(self, step: Step, next_begin: float, waits_until: float, is_dropped: bool = False) -> None:
        begin, end = step
        waiting = min(max(waits_until - end, 0.0), next_begin - end)
        if is_dropped:
            self.dropped += end - begin
        else:
            self.computing += end - begin
        self.waiting += waiting
        self.exchanging += next_begin - end - waiting
        self.steps += 1


def parts_of(way: str, timelines: Sequence[Sequence[Step]]) -> list[Parts]:
    """Of each worker."""
    if way == "async":
        return [_counted(steps, {}) for steps in timelines]
    if way.startswith("sync_replicas"):
        return _replicas(timelines, REPLICAS)
    return _together(timelines, LOCAL_STEPS if way == "local_sgd" else 1)


def _counted(steps: Sequence[Step], made_at: dict[Step, float], is_late: bool = False) -> Parts:
    """The parts of one worker; `made_at`: of its steps that are used, when the last gradient was there."""
    parts, first = Parts(), round(WARM_UP * len(steps))
    for step, following in itertools.pairwise(steps[first:]):
        parts.add(step, following[0], made_at.get(step, step[1]), is_late and step not in made_at)
    return parts


def _together(timelines: Sequence[Sequence[Step]], length: int) -> list[Parts]:
    """Of workers that wait for all others after every `length` steps, and only update their own copy in between."""
    found, number = [Parts() for _ in timelines], min(map(len, timelines))
    first = round(WARM_UP * number) // length * length
    last = number - 1 - (number - 1 - first) % length  # whole rounds, each with the begin of the next one
    for index in range(first, last):
        ends_round = (index + 1) % length == 0
        latest = max(steps[index][1] for steps in timelines)
        for parts, steps in zip(found, timelines, strict=True):
            (begin, end), next_begin = steps[index], steps[index + 1][0]
            if ends_round:
                parts.add((begin, end), next_begin, latest)
            else:
                parts.add((begin, next_begin), next_begin, next_begin)
    return found


def _replicas(timelines: Sequence[Sequence[Step]], replicas: int) -> list[Parts]:
    """Of workers of which the first gradients make a step: the rule of the ps, replayed.

    A gradient counts that was begun after the last step was made. The last of `replicas` makes the next one.
    """
    made_at: dict[Step, float] = {}
    pending: list[Step] = []
    latest = 0.0
    for step in sorted(itertools.chain(*timelines), key=lambda one: one[1]):
        if step[0] < latest:
            continue
        pending.append(step)
        if len(pending) == replicas:
            latest = step[1]
            made_at |= dict.fromkeys(pending, latest)
            pending = []
    return [_counted(steps, made_at, is_late=True) for steps in timelines]


def options_of(way: str, case: str) -> list[str]:
    mode, more = MODES[way]
    delays = [COMMON_SECS] * (WORKERS - 1) + [COMMON_SECS + (SLOW_SECS if case == "slow" else 0.0)]
    own = [f"plugins=[{SOCKETS}]", "startup_timeout_secs=300"] if case == "link" else cluster_of(WORKERS)
    return [
        *(f"mode={mode}", *more, *own, "data=mnist", "data.offline=fail", "optimizer=sgd", "figure=false"),
        *(model_of("2 million") if case == "link" else ["model=dnn"]),
        *(f"simulate.delay_secs=[{','.join(f'{secs:g}' for secs in delays)}]", "timeline=true", "train.steps=1000000"),
    ]


@contextmanager
def running(way: str, case: str) -> Iterator[tuple[Any, Path, list[Path]]]:
    """A run: the leader's process, its folder, and the folders of the timelines of all workers."""
    options = options_of(way, case)
    if case != "link":
        with our_process(*options) as (process, run_dir):
            yield process, run_dir, [run_dir / "timeline"]
        return
    workers = tuple(f"worker-{index}" for index in range(WORKERS))
    tasks = workers if MODES[way][0] == "sync" else ("chief-0", "ps-0", *workers)
    with hosts(len(tasks)) as made, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made.limit(MBIT * 125_000, **BUCKET)
        job = Job(made, Path(folder), MODES[way][0], tasks)
        try:
            job.start(*[option for option in options if not option.startswith("mode=")])
            places = [job.names.index(name) for name in workers]
            yield job.leader.process, job.leader.run_dir, [Path(folder, f"host{place}", "timeline") for place in places]
        finally:
            job.close()


def measure(way: str, case: str, secs: float | None = None) -> dict[str, Any]:
    """The parts of all workers in one run, of which `secs` are measured."""
    load = round(os.getloadavg()[0], 1)
    with running(way, case) as (process, run_dir, folders):
        begin = record = next_record(process, run_dir, None)
        while record["time"] - begin["time"] < (secs or WINDOW_SECS[case]):
            record = next_record(process, run_dir, record)
        timelines = [steps for folder in folders for steps in timelines_in(folder)]
    return {
        "way": way,
        "case": case,
        "load": load,
        "workers": [rounded(asdict(parts)) for parts in parts_of(way, timelines)],
    }


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


# What is made of it.


def in_code(way: str) -> str:
    """The name of a mode in a table."""
    mode, *more = way.split(",")
    return ",".join([f"`{mode}`", *more])


def bars_of(runs: Sequence[dict[str, Any]], case: str) -> dict[str, dict[str, float]]:
    """By the name of a bar the share of each part in the time of a worker: the median of the rounds.

    With a slow worker each mode has two bars: the mean of the others, and the slow one.
    """
    bars = {}
    for way in MODES:
        own = [run["workers"] for run in runs if (run["way"], run["case"]) == (way, case)]
        groups = {way: [workers[:-1] for workers in own], f"{way}: slow": [workers[-1:] for workers in own]}
        if case != "slow":
            groups = {way: own}
        for name, rounds in groups.items():
            if rounds:
                bars[name] = medians_of([shares_of(workers) for workers in rounds])
    return bars


def shares_of(workers: Sequence[dict[str, float]]) -> dict[str, float]:
    """The shares of the parts in the time of these workers together; `step`: the milliseconds of a step."""
    sums = {name: sum(one[name] for one in workers) for name in PARTS}
    whole = sum(sums.values())
    return {name: value / whole for name, value in sums.items()} | {
        "step": 1e3 * whole / sum(one["steps"] for one in workers)
    }


def medians_of(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of all shares, which are then made to add up to 1."""
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    whole = sum(medians[name] for name in PARTS)
    return {name: value / whole if name in PARTS else value for name, value in medians.items()}


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    lines = header("case", "mode", "worker", "a step takes, ms", *PARTS)
    for case, name in CASES.items():
        for bar, shares in bars_of(runs, case).items():
            way, _, who = bar.partition(": ")
            worker = (who or "the others") if case == "slow" else "all"
            cells = [f"{shares[part]:.0%}" for part in PARTS]
            lines.append(line(name, in_code(way), worker, f"{shares['step']:,.0f}", *cells))
    return lines


def line_of(run: dict[str, Any]) -> str:
    """For the terminal."""
    shares = [shares_of([worker]) for worker in run["workers"]]
    parts = [f"{name} " + "/".join(f"{one[name]:.0%}" for one in shares) for name in PARTS]
    return f"{run['way']}, {run['case']}: {', '.join(parts)}"
