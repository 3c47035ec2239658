"""Writes the results of a comparison: compare.json, the pictures and report.html."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf2dist.comparing.options import Options
from tf2dist.comparing.record import record_of
from tf2dist.comparing.results import Result
from tf2dist.comparing.verdict import verdict_of
from tf2dist.files import as_json, write_whole

if TYPE_CHECKING:
    from tf2dist.comparing.look import Draw

REPORT, RECORD = "report.html", "compare.json"
Titled = tuple[str, str, str, "Draw"]  # the name of the file, the title, the caption, and what draws it


def write_report(options: Options, arguments: list[str], results: Sequence[Result], folder: Path) -> str:
    """Writes all files; returns the verdict in one sentence.

    Raises:
        OSError: one of them cannot be written.
    """
    # Imported here, since matplotlib takes a while and a wrong request should be answered at once.
    from tf2dist.comparing.look import as_png, as_svgs
    from tf2dist.comparing.page import Picture, page

    its = list(results)
    verdict = verdict_of(its, options.until)
    record = record_of(options, arguments, its, verdict, left_out(options, its))
    write_whole(folder / RECORD, as_json(record, indent=1) + "\n")
    pictures = []
    for name, title, caption, draw in _figures(options, its):
        pictures.append(Picture(title, caption, as_svgs(draw)))
        write_whole(folder / f"{name}.png", as_png(draw))
    # What a program reads of it is what compare.json has, so both come from one record.
    text = page(json.loads(as_json(record)), verdict, its, pictures, how_it_was_measured(options, its))
    write_whole(folder / REPORT, text)
    return verdict.headline


def _figures(options: Options, results: Sequence[Result]) -> list[Titled]:
    """The figures for which there are values."""
    from tf2dist.comparing import figures, figures_of_axes

    seeds = "The band is the range over the seeds. " if options.seeds > 1 else ""
    found: list[Titled] = []
    if any(run.points for one in results for run in one.measured):
        found.append(
            (
                "accuracy",
                "Accuracy against time and examples",
                f"On the validation set, a line for each mode. {seeds}At the left what the clock shows, at the right "
                "what each example was worth. The dotted line is the target.",
                partial(figures.draw_accuracy, results, options.until),
            )
        )
    if figures.lined_results(results):
        found.append(
            (
                "timeline",
                "Who waits for whom",
                "The steps of each worker, in one run of each contender, where there are few pauses for evaluations. A "
                "bar is a step, with its simulated delay; the thin line between two bars is waiting for others, or for "
                "the exchange.",
                partial(figures.draw_timeline, results),
            )
        )
    if figures.stale_results(results):
        found.append(
            (
                "staleness",
                "Staleness of the asynchronous updates",
                "How many updates others applied between a worker's pull and its push, of all runs together. The "
                "number of updates is logarithmic, to show the few late ones.",
                partial(figures.draw_staleness, results),
            )
        )
    if len(figures_of_axes.backup_numbers(results)) > 1:
        found.append(
            (
                "backups",
                "Backup workers",
                "With mode=sync_replicas: the more gradients a step does not wait for, the shorter it is, and "
                "the less it is worth.",
                partial(figures_of_axes.draw_backups, results),
            )
        )
    if figures_of_axes.first_by_size(results):
        found.append(
            (
                "map",
                "Which mode is first",
                "For each size of the model and each delay of the slowest worker: the mode that was first at the "
                "target, and its seconds.",
                partial(figures_of_axes.draw_map, results),
            )
        )
    return found


def left_out(options: Options, results: Sequence[Result]) -> list[str]:
    """What the report could show and does not, with the option that it needs."""
    found = []
    delays = {one.contender.delay_secs for one in results}
    if not any(delays):
        found.append("A slow worker: give delays=[0,0.05].")
    if "async" not in options.modes:
        found.append("Staleness: add async to modes.")
    if "sync_replicas" not in options.modes:
        found.append("Backup workers: add sync_replicas to modes.")
    elif len({one.contender.backups for one in results} - {None}) < 2:
        found.append(
            "Step time and time to the target against the number of backup workers: give several, backups=[0,1]."
        )
    models = {run.summary.get("parameters") for one in results for run in one.measured}
    if options.until.kind == "secs":
        found.append("The map of which mode is first: give an accuracy or a number of steps as until.")
    elif len(delays) < 2 or len(models) < 2:
        found.append(
            "The map of the slowest worker's delay against the size of the model: give several of both, as in "
            "delays=[0,0.02,0.05] model=softmax,dnn,cnn."
        )
    if options.seeds < 2:
        found.append("The spread over seeds, without which no order is certain: give seeds=3.")
    for one in results:
        missing = [outcome.run.seed for outcome in one.outcomes if outcome.state != "done"]
        if missing:
            states = ", ".join(sorted({outcome.state for outcome in one.outcomes} - {"done"}))
            found.append(f"{one.contender.name}: without the runs of seed {', '.join(map(str, missing))} ({states}).")
    return found


def how_it_was_measured(options: Options, results: Sequence[Result]) -> list[str]:
    """The sentences without which the figures could be misunderstood."""
    some: dict[str, Any] = next((run.summary for one in results for run in one.measured), {})
    config = results[0].contender.config
    rate = config.optimizer.get("learning_rate")
    found = [
        "The contenders took turns, every second round in reverse order. Each run is a command of its own; its "
        "directory is in runs/, and its output in logs/.",
        "The clock starts at the first step. Evaluations and the pauses for them are not counted. Rates leave out "
        "the first quarter of the steps.",
        f"All contenders train with {some.get('optimizer', config.optimizer['name'])}, a learning rate of {rate} "
        f"and {config.train.batch_size_per_worker} examples in the batch of a worker. A step of sync is one "
        "update with the batches of all workers; a rate that is tuned for one mode may be too high or too low "
        "for another.",
    ]
    if options.until.kind == "accuracy":
        found.append(
            "The target is reached between two evaluations, where the accuracy is taken as a straight line. They "
            f"are about {_spacing(results)} examples apart."
        )
    if any(one.contender.delay_secs for one in results):
        found.append(
            "The delay is simulated: the last worker sleeps in each of its steps. A worker that sleeps needs no "
            "processor, so where processors are scarce the others compute faster than with equal workers."
        )
    found.append("To record the steps, each of them calls a function of Python twice, in all modes alike.")
    return found


def _spacing(results: Sequence[Result]) -> str:
    points = next((run.points for one in results for run in one.measured if len(run.points) > 1), None)
    return f"{round(points[1].examples - points[0].examples):,}" if points else "so many"
