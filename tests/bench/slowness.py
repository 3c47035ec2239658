"""Time to an accuracy by how slow one worker is, and where the time goes: `python -m tests.bench.slowness`.

Every step waits for COMMON_SECS, as if it were computed on a host of its own, so that few cores suffice; those of the
last worker wait longer. Each mode has the learning rate that is best for it when all workers are alike. The runs to an
accuracy are those of `tf2dist.compare`, in rounds, so that a machine that becomes slower or faster favours no mode;
`worker_time` has the others. The results are docs/slowness.json; docs/staleness.md has the tables that are made of it,
and tests/pictures.py draws it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench import growth, worker_time
from tests.bench.page import header, line
from tf2dist.errors import NotFiniteError

Point = dict[str, Any]  # an entry of "points" in slowness.json
FILE, COMMAND = "slowness.json", "python -m tests.bench.slowness"
WORKERS, COMMON_SECS = worker_time.WORKERS, worker_time.COMMON_SECS
UNTIL = 0.95
SLOW_SECS = (0.0, 0.01, 0.05, 0.1, 0.2)
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
# By name in the tables: the options of `compare` that make it the only contender.
WAYS = {
    "sync": ["modes=[sync]"],
    "local_sgd": ["modes=[sync]", "algorithm=local_sgd"],
    "sync_replicas, 1 backup": ["modes=[sync_replicas]", "backups=[1]"],
    "async": ["modes=[async]"],
}
EVAL_EVERY_EXAMPLES = 4000
QUICK_SECS = (0.0, 0.1)  # with the rates that were found before
TIMEOUT_SECS = 3 * 3600.0


def options_of(way: str, slow_secs: Sequence[float], rates: Sequence[float], seeds: int) -> list[str]:
    """The options of `compare`."""
    delays, of_rates = (",".join(f"{value:g}" for value in values) for values in (slow_secs, rates))
    return [
        *(*WAYS[way], f"delays=[{delays}]", f"common_delay={COMMON_SECS:g}", f"workers={WORKERS}", f"seeds={seeds}"),
        *("data=mnist", "data.offline=fail", "model=dnn", "optimizer=sgd", f"optimizer.learning_rate={of_rates}"),
        *(f"until={UNTIL:g}", f"eval_every_examples={EVAL_EVERY_EXAMPLES}", "train.epochs=10"),
    ]


def compared(folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """The content of compare.json of a comparison, which goes on if it has been begun in the folder.

    A run that has diverged makes its exit code that of `NotFiniteError`; the others are there.
    """
    command = [sys.executable, "-m", "tf2dist.compare", f"compare_dir={folder}", *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=TIMEOUT_SECS)
    if done.returncode not in (0, NotFiniteError.exit_code):
        raise subprocess.CalledProcessError(done.returncode, command)
    record: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return record


def found_rates(folder: Path, rates: Sequence[float]) -> list[dict[str, Any]]:
    """For each mode and learning rate the time to the accuracy with equal workers; None if it was not reached."""
    found = []
    for way in WAYS:
        load = os.getloadavg()[0]
        record = compared(folder / f"rates-{way.split(',')[0]}", options_of(way, (0.0,), rates, 1))
        for contender, rate in zip(record["contenders"], rates, strict=True):
            (run,) = contender["runs"]
            found.append({"way": way, "rate": rate, "secs": rounded(run.get("secs_to_goal")), "load": load})
    return found


def best_rates(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    reached = sorted((one for one in found if one["secs"] is not None), key=lambda one: one["secs"], reverse=True)
    return {one["way"]: one["rate"] for one in reached}  # of equal keys the last one stays


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def points_of(way: str, rate: float, record: dict[str, Any], loads: Sequence[float]) -> Iterator[Point]:
    """A point for each slowness; `loads`: of the machine before each round."""
    for contender in record["contenders"]:
        runs = [run for run in contender["runs"] if run["state"] == "done"]
        staleness, dropped = (contender[name] and rounded(contender[name]["mean"]) for name in ("staleness", "dropped"))
        yield {
            "way": way,
            "slow_secs": contender["delay_secs"],
            "rate": rate,
            "secs": [rounded(run["secs_to_goal"]) for run in runs],
            "examples": [rounded(run["examples_to_goal"]) for run in runs],
            "updates": [run["global_step"] for run in runs],
            "staleness": staleness,
            "dropped": dropped,
            "loads": list(loads),
        }


def measure(
    folder: Path, rates: dict[str, float], slow_secs: Sequence[float], seeds: int
) -> Iterator[tuple[list[Point], dict[str, Any]]]:
    """After each round all points so far, and compare.json of one comparison."""
    loads: dict[str, list[float]] = {way: [] for way in rates}
    for number in range(1, seeds + 1):
        points: list[Point] = []
        for way, rate in rates.items():
            loads[way].append(round(os.getloadavg()[0], 1))
            record = compared(folder / way.split(",")[0], options_of(way, slow_secs, (rate,), number))
            points += points_of(way, rate, record, loads[way])
        yield points, record


# The tables.


def median_and_range(values: Sequence[float], form: str = ".3g") -> str:
    """As in 17.2 (16.9 to 18.0); a run that has not reached the accuracy leaves nothing to tell."""
    if not values or any(value is None for value in values):
        return "not reached"
    low, middle, high = (f"{value:{form}}" for value in (min(values), statistics.median(values), max(values)))
    return middle + (f" ({low} to {high})" if low != high else "")


def secs_table(points: Sequence[Point]) -> list[str]:
    slow_secs = sorted({one["slow_secs"] for one in points})
    lines = header("mode", "learning rate", *(f"{1000 * secs:g} ms slower" for secs in slow_secs))
    for way in WAYS:
        own = {one["slow_secs"]: one for one in points if one["way"] == way}
        rates = {one["rate"] for one in own.values()}
        cells = [median_and_range(own[secs]["secs"]) for secs in slow_secs]
        lines.append(line(worker_time.in_code(way), *(f"{rate:g}" for rate in rates), *cells))
    return lines


# By the entry of the file.
TABLES: dict[str, dict[str, Callable[[Sequence[Point]], list[str]]]] = {
    "points": {"one slow worker": secs_table},
    "runs": {"where the time goes": worker_time.table},
}


def write(content: dict[str, Any], folder: Path) -> None:
    """Writes what has been measured beside the other parts of the file, and the tables of a page in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path, page = folder / FILE, folder / "staleness.md"
    whole = (json.loads(path.read_text()) if path.exists() else {}) | content
    path.write_text(text_of(whole))
    if page.exists():
        page.write_text(page_of(page.read_text(), whole))


def text_of(content: dict[str, Any]) -> str:
    """JSON with a line for each entry of a list."""
    parts = []
    for name, value in content.items():
        whole = json.dumps(value)
        if isinstance(value, list):
            whole = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        parts.append(f"{json.dumps(name)}: {whole}")
    return "{" + ",\n".join(parts) + "}\n"


def page_of(text: str, content: dict[str, Any]) -> str:
    """The page with its tables of what has been measured."""
    for name, tables in TABLES.items():
        if name in content:
            text = growth.page_of(text, content[name], tables, COMMAND)
    return text


def facts_of(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": record["written"][:10],
        "cores": record["machine"]["processors"],
        "versions": record["versions"],
        "workers": WORKERS,
        "common_secs": COMMON_SECS,
        "until": UNTIL,
        "command": " ".join(["python -m tf2dist.compare", *record["arguments"][1:]]),  # without the folder
    }


def measure_points(options: argparse.Namespace) -> None:
    known = Path(__file__).parents[2] / "docs" / FILE
    is_known = options.quick and known.exists()
    found = json.loads(known.read_text())["rates"] if is_known else found_rates(options.folder, RATES)
    slow_secs = QUICK_SECS if options.quick else SLOW_SECS
    for points, record in measure(options.folder, best_rates(found), slow_secs, options.rounds):
        write({"facts": facts_of(record), "rates": found, "points": points}, options.out)
        print("\n".join(secs_table(points)), flush=True)


def measure_runs(options: argparse.Namespace) -> None:
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for case in ("slow",) if options.quick else worker_time.CASES:
            for way in WAYS:
                runs.append({"round": number, **worker_time.measure(way, case)})
                print(worker_time.line_of(runs[-1]), flush=True)
        write({"runs": runs}, options.out)


PARTS = {"points": measure_points, "runs": measure_runs}


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of two delays, in a few minutes")
    parser.add_argument("--rounds", type=int, help="each with another seed: 3, or 1 with --quick; 10 take the night")
    parser.add_argument("--only", choices=PARTS, help="the times to an accuracy, or where the time of a worker goes")
    parser.add_argument("--folder", type=Path, default="outputs/slowness", help="of the runs, which go on there")
    parser.add_argument("--out", type=Path, default="outputs/bench", help=f"where {FILE} is written")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.rounds = options.rounds or (1 if options.quick else 3)
    for name, run in PARTS.items():
        if options.only in (None, name):
            run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
