"""Error against staleness: `python -m tests.bench.staleness` adds the runs that docs/staleness.jsonl lacks.

Each run is the command with `experiment=staleness`: some workers, all equally slow, and so many examples in all that
every run sees the same number. With n of them the staleness is about n - 1; what counts is what the run has measured.
The runs come in an order in which any first part of them gives a figure, and each file of runs goes on where it ended.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tf2dist.config.schema import RunConfig
from tf2dist.errors import NotFiniteError
from tf2dist.launch.launcher import warm_up
from tf2dist.launch.warm_process import lend

Run = dict[str, Any]  # a line of the file
FILE = Path(__file__).parents[2] / "docs/staleness.jsonl"
# A local cluster has at most 64 tasks, two of which are no workers.
FEW, MANY, OTHERS = (1, 3, 9), (33,), (2, 5, 17, 62)
OPTIMIZERS = ("sgd", "momentum", "adam")
# From the largest that is of use without staleness. The first four are tried there, the smaller ones with staleness.
RATES: Mapping[str, Sequence[float]] = {
    "sgd": (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    "momentum": (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001),
    "adam": (0.01, 0.003, 0.001, 0.0003, 0.0001, 0.00003, 0.00001),
}
FIRST_RATES = 4
SEEDS = (0, 1, 2)
ALGORITHMS = ("plain", "staleness_aware")
SYNC = "sync"  # the same workers and examples in mode=sync: no staleness, but fewer updates, of larger batches
# With a factor that is relative to a mean square of the gradients, and with a constant one. Those of published programs
# are 2 with 0.95, and 0.04.
COMPENSATED = tuple(
    f"delay_compensated {options}"
    for options in (
        *("strength=2 mean_square_decay=0.95", "strength=20 mean_square_decay=0.95", "strength=2 mean_square_decay=0"),
        *("strength=0.04", "strength=4", "strength=400"),
    )
)
STEEP = {9: 0.1, 33: 0.03}  # by workers: a rate of SGD at which plain training suffers
EPOCHS = 3
DELAY_SECS = 0.004  # for each worker: so all together could make 250 updates in a second
CHANCE = 0.9  # the error of a model that has become NaN, which says one of ten classes
LOST = 0.7  # with such an error a model has learned nothing worth comparing
TIMEOUT_SECS = 900.0


def delays(workers: int, algorithm: str) -> list[float]:
    """Of each worker, in seconds."""
    return [DELAY_SECS * workers if workers > 1 and algorithm != SYNC else 0.0] * workers


@dataclass(frozen=True)
class Setting:
    """What one run is asked to do."""

    model: str
    data: str
    optimizer: str
    algorithm: str
    workers: int
    learning_rate: float
    seed: int
    epochs: float = EPOCHS

    @classmethod
    def of(cls, run: Run) -> "Setting":
        return cls(**{name: run[name] for name in cls.__dataclass_fields__})

    def options(self) -> list[str]:
        listed = ",".join(f"{delay:g}" for delay in delays(self.workers, self.algorithm))
        kind, *more = self.algorithm.split()  # such as "delay_compensated strength=2"
        chosen = [f"algorithm={kind}", *(f"algorithm.{option}" for option in more)] if kind != SYNC else ["mode=sync"]
        return [
            *("experiment=staleness", f"model={self.model}", f"data={self.data}", f"optimizer={self.optimizer}"),
            *(*chosen, "data.offline=fail"),
            *(f"cluster.num_workers={self.workers}", f"simulate.delay_secs=[{listed}]", f"seed={self.seed}"),
            *(f"optimizer.learning_rate={self.learning_rate:g}", f"train.epochs={self.epochs:g}", "figure=false"),
        ]


class Stage(NamedTuple):
    """Runs that belong together: one of each combination.

    Attributes:
        tuned: whether with the best rate for the point, instead of the best one without staleness.
        rate: of all runs, instead of these; 0 for none.
    """

    model: str
    data: str
    algorithm: str
    workers: Sequence[int]
    tuned: bool
    seeds: Sequence[int] = SEEDS
    optimizers: Sequence[str] = OPTIMIZERS
    rate: float = 0.0


# In this order: model, workers, data and seeds.
FIRST, REST = SEEDS[:1], SEEDS[1:]
ORDER: tuple[tuple[str, tuple[int, ...], str, tuple[int, ...]], ...] = (
    *(("dnn", FEW, "fashion_mnist", SEEDS), ("dnn", FEW, "mnist", SEEDS), ("dnn", MANY, "fashion_mnist", SEEDS)),
    *(("cnn", FEW, "fashion_mnist", SEEDS), ("dnn", OTHERS, "fashion_mnist", FIRST), ("dnn", MANY, "mnist", SEEDS)),
    *(("cnn", FEW, "mnist", FIRST), ("dnn", OTHERS, "fashion_mnist", REST), ("dnn", OTHERS, "mnist", SEEDS)),
    *(("cnn", MANY, "fashion_mnist", FIRST), ("cnn", FEW, "mnist", REST), ("cnn", MANY, "fashion_mnist", REST)),
    *(("cnn", MANY, "mnist", SEEDS), ("cnn", OTHERS, "fashion_mnist", SEEDS), ("cnn", OTHERS, "mnist", SEEDS)),
)


def stages() -> Iterator[Stage]:
    """All that is measured, the most telling first."""
    for model, workers, data, seeds in ORDER:
        for tuned, algorithm in itertools.product((False, True), ALGORITHMS):
            yield Stage(model, data, algorithm, workers, tuned, seeds)
        if workers is not OTHERS:
            yield Stage(model, data, SYNC, workers, True, seeds)
        if (model, workers, data) == ("dnn", FEW, "fashion_mnist"):
            yield from compensated(workers[-1], seeds)
    yield from compensated(MANY[-1], FIRST)
    yield Stage("dnn", "fashion_mnist", SYNC, OTHERS, True, FIRST)  # 62 synchronous workers take minutes


def compensated(workers: int, seeds: Sequence[int]) -> Iterator[Stage]:
    """SGD with each factor, and the first of them where plain training suffers."""
    for algorithm in COMPENSATED:
        yield Stage("dnn", "fashion_mnist", algorithm, (workers,), True, seeds, ("sgd",))
    for algorithm in ("plain", *COMPENSATED[:1]):
        yield Stage("dnn", "fashion_mnist", algorithm, (workers,), False, seeds, ("sgd",), STEEP[workers])


QUICK = [
    Stage("dnn", "fashion_mnist", algorithm, (*FEW, *MANY), False, FIRST, ("sgd", "momentum"))
    for algorithm in ("plain", "staleness_aware")
]


class Results:
    """The runs of a file.

    Args:
        epochs: runs of another length are not looked at.
    """

    def __init__(self, runs: Sequence[Run], epochs: float = EPOCHS) -> None:
        self.runs = [run for run in runs if run["epochs"] == epochs]
        self._epochs = epochs
        self._by_setting = {Setting.of(run): run for run in self.runs}

    def __contains__(self, setting: Setting) -> bool:
        return setting in self._by_setting

    def error(self, setting: Setting, split: str = "test") -> float:
        return float(self._by_setting[setting][f"{split}_error"])

    def first_rates(self, model: str, data: str, optimizer: str) -> list[Setting]:
        """Those that are tried without staleness."""
        rates = RATES[optimizer][:FIRST_RATES]
        return [Setting(model, data, optimizer, "plain", 1, rate, SEEDS[0], self._epochs) for rate in rates]

    def fixed_rate(self, model: str, data: str, optimizer: str) -> float | Setting:
        """The rate that is best without staleness, by the validation set; or a run that is missing to tell it."""
        tried = self.first_rates(model, data, optimizer)
        missing = [one for one in tried if one not in self]
        return missing[0] if missing else min(tried, key=lambda one: self.error(one, "validation")).learning_rate

    def best_rate(self, point: Setting) -> float | Setting:
        """Likewise for a point: from its own rate downward, until the error rises from one of a model that has learned.

        With mode=sync from the largest of all: larger batches may bear more.

        Args:
            point: with the best rate without staleness.
        """
        rates = RATES[point.optimizer]
        first = 0 if point.algorithm == SYNC else rates.index(point.learning_rate)
        best = point = replace(point, seed=SEEDS[0], learning_rate=rates[first])
        for rate in rates[first:]:
            one = replace(point, learning_rate=rate)
            if one not in self:
                return one
            if LOST > self.error(best, "validation") < self.error(one, "validation"):
                break
            best = one
        return best.learning_rate

    def wanted(self, stage: Stage) -> Iterator[Setting]:
        """The runs of a stage that the results so far tell of, also those that are there."""
        for seed in stage.seeds:
            for workers in stage.workers:
                for optimizer in stage.optimizers:
                    yield self.one_of(stage, workers, optimizer, seed)

    def one_of(self, stage: Stage, workers: int, optimizer: str, seed: int) -> Setting:
        """The run of a stage, or one that must come before it to find its rate."""
        rate = self.fixed_rate(stage.model, stage.data, optimizer)
        if isinstance(rate, Setting):
            return rate
        algorithm = stage.algorithm if workers > 1 else "plain"  # without staleness they are the same
        point = Setting(stage.model, stage.data, optimizer, algorithm, workers, rate, seed, self._epochs)
        best = self.best_rate(point) if stage.tuned and workers > 1 else stage.rate or rate
        return best if isinstance(best, Setting) else replace(point, learning_rate=best)

    def next_run(self, wanted: Sequence[Stage]) -> Setting | None:
        """The first run that is missing."""
        return next((one for stage in wanted for one in self.wanted(stage) if one not in self), None)


def read(path: Path) -> list[Run]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def spread_of(counts: Sequence[int]) -> dict[str, int]:
    """Between which two the middle 80 % of all updates have their staleness."""
    shares = np.cumsum(counts) / np.sum(counts)
    return {"p10": int(np.searchsorted(shares, 0.1)), "p90": int(np.searchsorted(shares, 0.9))}


def figures_of(summary: dict[str, Any]) -> Run:
    """What a run that has ended well has measured."""
    staleness = summary.get("staleness")  # not with mode=sync
    if staleness:
        staleness |= spread_of(summary["staleness_counts"]) | {"mean": round(staleness["mean"], 3)}
    return {
        "updates": summary["global_step"],
        "staleness": staleness,
        "validation_error": round(1 - summary["validation_accuracy"], 5),
        "test_error": round(1 - summary["test_accuracy"], 5),
    }


# Its loss became NaN or infinite, which ends a run.
DIVERGED = {"updates": None, "staleness": None, "validation_error": CHANCE, "test_error": CHANCE}


def measure(setting: Setting, *more: str) -> Run:
    """One run of the command, which is lent the warm process of this one. Raises RuntimeError."""
    warm_up(RunConfig(), lambda: None)
    variables, descriptors = lend()
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tf2dist", *setting.options(), f"run_dir={folder}/run", *more],
            env={**os.environ, **variables},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECS,
        )
        if done.returncode not in (0, NotFiniteError.exit_code):
            raise RuntimeError(f"{setting}: code {done.returncode}\n{done.stderr}")
        figures = DIVERGED
        if done.returncode == 0:
            figures = figures_of(json.loads(Path(folder, "run/summary.json").read_text()))
    facts = {"tensorflow": version("tensorflow"), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    return {**asdict(setting), **figures, "secs": round(time.monotonic() - started_at, 1), **facts}


def fill(path: Path, wanted: Sequence[Stage], epochs: float, minutes: float, *more: str) -> None:
    """Runs what the file lacks, one after the other, and begins no run after so many minutes."""
    ends_at = time.monotonic() + 60 * minutes
    while (setting := Results(read(path), epochs).next_run(wanted)) and time.monotonic() < ends_at:
        run = measure(setting, *more)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
        mean = run["staleness"] and run["staleness"]["mean"]
        print(f"{run['secs']:5.1f} s  error {run['test_error']:.4f}  staleness {mean}  {setting}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.staleness", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 runs that show the trend, in a few minutes")
    parser.add_argument("--epochs", type=float, default=EPOCHS, help="passes over the training set in each run")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after so many")
    parser.add_argument("--out", type=Path, default=FILE, help="the file of runs that is filled")
    parser.add_argument("more", nargs="*", help="options of tf2dist for each run, such as data.dir=DIR")
    options = parser.parse_args()
    fill(options.out, QUICK if options.quick else list(stages()), options.epochs, options.minutes, *options.more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
