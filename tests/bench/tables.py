"""Runs with large tables of embeddings: two of any number of rows, in the model of clicks; or 52, in wide-and-deep."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from tests.bench import click_log, links
from tests.bench.contenders import cpu_secs, our_process, our_run, peer
from tests.bench.figures import pss_mb, task_of, wait_for_step
from tests.bench.workload import CLICKS_BATCH_SIZE, COLUMNS, NUM_IMPRESSIONS, TABLE_ROWS
from tf2dist.data.loading import make_impressions

NUM_WORKERS = NUM_PS = 2
WIDE_AND_DEEP = str(Path(__file__).with_name("wide_and_deep.py"))


def options(model: str) -> list[str]:
    """Ours, beside the mode and the cluster."""
    rows = TABLE_ROWS[model]
    return [
        *("data=clicks", f"data.num_users={rows}", f"data.num_items={rows}", f"data.num_impressions={NUM_IMPRESSIONS}"),
        *("model=two_tower", f"model.columns={COLUMNS}", "optimizer=adagrad"),
        f"train.batch_size_per_worker={CLICKS_BATCH_SIZE}",
    ]


def cluster_of(mode: str) -> list[str]:
    ps = [] if mode == "sync" else [f"cluster.num_ps={NUM_PS}", "cluster.placement=partitioned"]
    return [f"mode={mode}", "cluster=local", f"cluster.num_workers={NUM_WORKERS}", *ps]


def our_rate(mode: str, model: str, steps: int) -> float:
    """Global steps per second, after as many steps to warm up."""
    return our_run(*options(model), *cluster_of(mode), f"train.steps={2 * steps}").rate(steps)


def first_step_secs(model: str) -> float:
    """From the command to the first update of an asynchronous run."""
    return our_run(*options(model), *cluster_of("async"), "train.steps=1").first_step_secs()


def worker_mb(model: str, steps: int) -> float:
    """The memory of an asynchronous worker, after `steps` steps and before the last."""
    with our_process(*options(model), *cluster_of("async"), "train.steps=1000000") as (process, run_dir):
        wait_for_step(run_dir, steps)
        return pss_mb(task_of(process.pid, "worker-0").pid)


def sent_mb(model: str, steps: int) -> float:
    """What an asynchronous worker sends and receives in each of its steps."""
    return links.megabytes_of_a_step("async", 1, steps, *options(model), "cluster.placement=partitioned", num_ps=NUM_PS)


def rows_mb(model: str) -> float:
    """What a step has to exchange: the ids of its batch once each, with the rows, and with their gradients.

    The parameters beside the tables are sent, too.
    """
    rows = TABLE_ROWS[model]
    x, _, _ = make_impressions(NUM_IMPRESSIONS, rows, rows)
    of_ids = sum(mean_unique(x[name]) * (x[name].itemsize + 4 * COLUMNS) for name in ("user", "item"))
    layers = 4 * sum((inputs + 1) * COLUMNS for inputs in (COLUMNS + x["context"].shape[1], COLUMNS))
    return float(2 * (of_ids + layers) / 1e6)


def mean_unique(ids: np.ndarray) -> float:
    """How many different ids a batch has."""
    cut = range(CLICKS_BATCH_SIZE, len(ids), CLICKS_BATCH_SIZE)
    return float(np.mean([len(np.unique(batch)) for batch in np.split(ids, cut)[:1000]]))


def more_than(more: float, measure: Callable[[str], float], model: str) -> float:
    """A limit that is `more` above a figure."""
    return measure(model) + more


def wide_and_deep_rate(mode: str, num_workers: int, steps: int) -> float:
    """Examples per second of processor time in all processes; `steps`: batches, after as many to warm up."""
    batches_of_a_step = num_workers if mode == "sync" else 1
    options = [
        *(f"plugins=[{WIDE_AND_DEEP}]", "data=click_log", "model=wide_and_deep", "optimizer=adagrad"),
        *(f"train.batch_size_per_worker={click_log.BATCH_SIZE}", "data.num_validation=0", "train.steps=1000000"),
        *(f"mode={mode}", "cluster=local", f"cluster.num_workers={num_workers}"),
    ]
    steps //= batches_of_a_step
    with our_process(*options) as (process, run_dir):
        first = wait_for_step(run_dir, steps)
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        before = cpu_secs(family)
        last = wait_for_step(run_dir, first + steps)
        used = cpu_secs(family) - before
    return (last - first) * batches_of_a_step * click_log.BATCH_SIZE / used


def old_wide_and_deep_rate(num_workers: int, steps: int) -> float:
    with peer("old", "async", click_log.WIDE_AND_DEEP, num_workers, steps, "") as (found, _):
        return found["timed_steps"] * click_log.BATCH_SIZE / found["cpu_secs"]
