"""Comparisons of invented runs, with the files that real runs would leave."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tf2dist.config.compose import ConfigSource
from tf2dist.tools.comparing.matrix import Contender, Options, contenders_of, runs_of, split
from tf2dist.tools.comparing.results import ContenderResult, results_of
from tf2dist.tools.comparing.running import RUNS, RunOutcome

SecsPerExample = Callable[[Contender, int], float]  # from the contender and the seed
NUM_EXAMPLES = 40_000


@functools.cache  # composing them takes a second, and nobody changes them
def contenders(*arguments: str, source: ConfigSource | None = None) -> tuple[Options, list[Contender]]:
    options, rest = split(list(arguments))
    return options, contenders_of(options, rest, source or ConfigSource())


def compared(
    folder: Path, *arguments: str, secs_per_example: SecsPerExample, failed: tuple[str, ...] = (), **summary: Any
) -> tuple[Options, list[ContenderResult]]:
    """The results of runs that reach an accuracy of 1 - 4000 / examples, after 40,000 examples or the given steps.

    Args:
        arguments: the command line of the comparison.
        failed: the folders of the runs that failed.
        summary: values to add to each summary.json, or to replace there.
    """
    options, all_contenders = contenders(*arguments)
    outcomes = []
    for run in runs_of(all_contenders, options.seeds):
        if run.folder in failed:
            outcomes.append(RunOutcome(run, "failed", 3))
            continue
        outcomes.append(RunOutcome(run, "done", 0))
        secs = secs_per_example(run.contender, run.seed)
        steps = NUM_EXAMPLES // (100 * run.contender.batches)
        if options.until.kind == "steps":
            steps = int(options.until.value)
        _write_run(folder / RUNS / run.folder, run.contender, steps, secs, options.workers, summary)
    return options, results_of(outcomes, folder, options.until)


def _write_run(
    run_dir: Path, contender: Contender, steps: int, secs_per_example: float, workers: int, more: dict[str, Any]
) -> None:
    batch = 100 * contender.batches
    (run_dir / "timeline").mkdir(parents=True)
    summary: dict[str, Any] = {
        "global_step": steps,
        "examples_seen": steps * batch,
        "parameters": 7850 if contender.config.model["name"] == "softmax" else 300_000,
        "data": "mnist",
        "optimizer": "momentum",
        "startup_secs": 5.0,
        "wall_secs": 20.0,
        "test_accuracy": 0.95,
        "workers": [{"index": worker, "local_steps": steps // workers} for worker in range(workers)],
        "versions": {"tensorflow": "2.21.0"},
    }
    if contender.mode == "sync_replicas":
        summary |= {"aggregated": [7] * workers, "dropped": [1] * workers}
    if contender.mode == "async":
        summary |= {"staleness": {"mean": 1.5}, "staleness_counts": [90, 200, 30, 0, 1]}
    (run_dir / "summary.json").write_text(json.dumps(summary | more))
    rows = [
        {
            "step": step,
            "time": 1e9,
            "secs": 5.0 + step,
            "task": "worker-0",
            "validation_loss": 0.5,
            "validation_accuracy": max(0.1, 1 - 4000 / (step * batch)),
            "training_secs": step * batch * secs_per_example,
        }
        for step in range(max(1, steps // 10), steps + 1, max(1, steps // 10))
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gap = batch * secs_per_example
    for worker in range(workers):
        lines = [f"{1e9 + step * gap:.6f},{1e9 + step * gap + (worker + 1) * gap / 4:.6f}\n" for step in range(60)]
        (run_dir / "timeline" / f"worker-{worker}.csv").write_text("".join(lines))


def usual_secs(contender: Contender, seed: int) -> float:
    """Sync is the fastest mode with equal workers and the slowest with a slow one; each seed adds 1 %."""
    secs = {"sync": 1e-4, "async": 2e-4, "sync_replicas": 3e-4}[contender.mode]
    return (secs + (contender.delay_secs / 100 if contender.mode == "sync" else 0.0)) * (1 + seed / 100)
