"""Writes the results of a comparison: compare.json, the pictures and report.html."""

import os
import platform
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from tf2dist import __version__
from tf2dist.config.schema import RunConfig
from tf2dist.files import as_json
from tf2dist.tools.comparing.matrix import Options
from tf2dist.tools.comparing.results import MEASURES, ContenderResult, Measurement, Spread
from tf2dist.tools.comparing.verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from tf2dist.tools.comparing.figures import Draw

REPORT, RECORD = "report.html", "compare.json"
TitledFigure = tuple[str, str, str, "Draw"]  # the name of the file, the title, the caption, and what draws it


def report_of(
    options: Options, arguments: list[str], results: list[ContenderResult]
) -> tuple[str, dict[str, str | bytes]]:
    """The verdict in a sentence or two, and the content of all files by name."""
    # Imported here, since matplotlib takes a while and a wrong request should be answered at once.
    from tf2dist.tools.comparing.figures import as_png, as_svgs
    from tf2dist.tools.comparing.page import page

    verdict = verdict_of(results, options.until)
    record = record_of(options, arguments, results, verdict, left_out(options, results))
    figures = _figures(options, results)
    pictures = [(title, caption, as_svgs(draw)) for _, title, caption, draw in figures]
    return verdict.headline, {
        RECORD: as_json(record, indent=1) + "\n",
        **{f"{name}.png": as_png(draw) for name, _, _, draw in figures},
        REPORT: page(record, verdict, results, pictures, how_it_was_measured(options, results)),
    }


def _figures(options: Options, results: Sequence[ContenderResult]) -> list[TitledFigure]:
    """The figures for which there are values."""
    from tf2dist.tools.comparing import figures

    seeds = "The band is the range over the seeds. " if options.seeds > 1 else ""
    has_goal = any(result.goal for result in results)
    goal = " The dotted line is the goal, to which the contenders are compared." if has_goal else ""
    candidates: list[tuple[Any, str, str, str, Draw]] = [
        (
            any(run.points for result in results for run in result.measured),
            "accuracy",
            "Accuracy against time and examples",
            f"On the validation set, a line for each mode. {seeds}The seconds tell what the clock shows, the "
            f"examples what each of them was worth.{goal}",
            partial(figures.draw_accuracy, results, options.until),
        ),
        (
            figures.timeline_results(results),
            "timeline",
            "Who waits for whom",
            "The steps of each worker, in one run of each contender, where there are few pauses for evaluations, "
            "all on the same axis of time. A bar is a step, with its simulated delay; the thin line between two "
            "bars is waiting for others, or for the exchange.",
            partial(figures.draw_timeline, results),
        ),
        (
            figures.stale_results(results),
            "staleness",
            "Staleness of the asynchronous updates",
            "How many updates others applied between a worker's pull and its push, of all runs together. The "
            "number of updates is logarithmic, to show the few late ones.",
            partial(figures.draw_staleness, results),
        ),
        (
            len(figures.backup_numbers(results)) > 1,
            "backups",
            "Backup workers",
            "With mode=sync_replicas: the more gradients a step does not wait for, the shorter it is, and "
            "the less it is worth.",
            partial(figures.draw_backups, results),
        ),
        (
            figures.first_by_size(results),
            "map",
            "Which mode is first",
            "For each size of the model and each delay of the slowest worker: the mode that was first at the "
            "goal, and its seconds.",
            partial(figures.draw_map, results),
        ),
    ]
    return [(name, title, caption, draw) for has_values, name, title, caption, draw in candidates if has_values]


def left_out(options: Options, results: Sequence[ContenderResult]) -> list[str]:
    """Hints at what the report could show and does not, with the option that it needs."""
    hints = []
    delays = {result.contender.delay_secs for result in results}
    if not any(delays):
        hints.append("A slow worker: give delays=[0,0.05].")
    if "async" not in options.modes:
        hints.append("Staleness: add async to modes.")
    if "sync_replicas" not in options.modes:
        hints.append("Backup workers: add sync_replicas to modes.")
    elif len({result.contender.backups for result in results} - {None}) < 2:
        hints.append(
            "Step time and time to the goal against the number of backup workers: give several, backups=[0,1]."
        )
    models = {run.summary.get("parameters") for result in results for run in result.measured}
    if options.until.kind != "accuracy":
        hints.append("The map of which mode is first: give an accuracy as until.")
    elif len(delays) < 2 or len(models) < 2:
        hints.append(
            "The map of the slowest worker's delay against the size of the model: give several of both, as in "
            "delays=[0,0.02,0.05] model=softmax,dnn,cnn."
        )
    if options.seeds < 2:
        hints.append("The spread over seeds, without which no order is certain: give seeds=3.")
    for result in results:
        missing = [outcome.run.seed for outcome in result.outcomes if outcome.state != "done"]
        if missing:
            states = ", ".join(sorted({outcome.state for outcome in result.outcomes} - {"done"}))
            hints.append(
                f"{result.contender.name}: without the runs of seed {', '.join(map(str, missing))} ({states})."
            )
    return hints


def how_it_was_measured(options: Options, results: Sequence[ContenderResult]) -> list[str]:
    """The sentences without which the figures could be misunderstood."""
    shared = _shared([result.contender.config for result in results])
    sentences = [
        "The contenders took turns, every second round in reverse order. Each run is a command of its own; its "
        "directory is in runs/, and its output in logs/.",
        "The clock starts at the first step. Evaluations and the pauses for them are not counted. Rates leave out "
        "the first quarter of the steps.",
        *([f"All contenders train with {' and with '.join(shared)}."] if shared else []),
        "A step of sync is one update with the batches of all workers; a learning rate that is tuned for one mode may "
        "be too high or too low for another.",
    ]
    if options.until.kind != "accuracy":
        sentences.append(
            f"After {options.until.value:,g} {'steps' if options.until.kind == 'steps' else 'seconds'} each contender "
            "has seen another number of examples. So in each scenario the goal is the best accuracy that all its runs "
            "have reached, or the best loss of a model without an accuracy."
        )
    sentences.append(
        "The goal is reached between two evaluations, where the accuracy is taken as a straight line. They are about "
        f"{_spacing(results)} examples apart."
    )
    if any(result.contender.delay_secs for result in results):
        sentences.append(
            "The delay is simulated: the last worker sleeps in each of its steps. A worker that sleeps needs no "
            "processor, so where processors are scarce the others compute faster than with equal workers."
        )
    if options.common_delay:
        sentences.append(
            f"Every worker sleeps for {1000 * options.common_delay:g} ms in each of its steps, as if it computed for "
            "so long on a host of its own."
        )
    sentences.append("To record the steps, each of them calls a function of Python twice, in all modes alike.")
    return sentences


def _shared(configs: Sequence[RunConfig]) -> list[str]:
    """What all contenders have in common and others might vary."""
    of_each = [
        [
            f"the optimizer {config.optimizer['name']}",
            f"a learning rate of {config.optimizer.get('learning_rate')}",
            f"batches of {config.train.batch_size_per_worker} examples for each worker",
        ]
        for config in configs
    ]
    return [texts[0] for texts in zip(*of_each, strict=True) if len(set(texts)) == 1]


def _spacing(results: Sequence[ContenderResult]) -> str:
    points = next((run.points for result in results for run in result.measured if len(run.points) > 1), None)
    return f"{round(points[1].examples - points[0].examples):,}" if points else "so many"


def machine() -> dict[str, Any]:
    """The machine of this process, as far as it matters to the figures."""
    return {
        "processors": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2),
    }


def record_of(
    options: Options, arguments: list[str], results: list[ContenderResult], verdict: Verdict, left_out: list[str]
) -> dict[str, Any]:
    """The content of compare.json.

    Args:
        arguments: of the command.
        left_out: what the comparison could have shown, and which option it needs.
    """
    summaries = [run.summary for result in results for run in result.measured]
    data, optimizer = (", ".join(sorted({each[name] for each in summaries})) or None for name in ("data", "optimizer"))
    return {
        "tf2dist": __version__,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "arguments": arguments,
        "until": str(options.until),
        "workers": options.workers,
        "common_delay_secs": options.common_delay,
        "seeds": options.seeds,
        "data": data,
        "optimizer": optimizer,
        "machine": machine(),
        "versions": next((each.get("versions") for each in summaries), None),
        "verdict": {
            "headline": verdict.headline,
            "situations": [{"situation": name, "sentences": lines} for name, lines in verdict.scenarios],
            "claims": [
                {"claim": claim.text, "state": claim.state, "figures": claim.figures} for claim in verdict.claims
            ],
        },
        "not_run": left_out,
        "contenders": [_contender(result) for result in results],
    }


def _contender(result: ContenderResult) -> dict[str, Any]:
    contender = result.contender
    return {
        "name": contender.name,
        "way": contender.mode_label,
        "mode": contender.mode,
        "delay_secs": contender.delay_secs,
        "backups": contender.backups,
        "options": contender.varying,
        "goal": {result.goal.metric: result.goal.value} if result.goal else None,
        **{measure.key: _spread(measure.value(result)) for measure in MEASURES},
        "staleness_counts": result.staleness_counts() or None,
        "runs": [
            {
                "seed": outcome.run.seed,
                "folder": f"runs/{outcome.run.folder}",
                "state": outcome.state,
                "exit_code": outcome.exit_code,
            }
            | next((_measured(result, run) for run in result.measured if run.run == outcome.run), {})
            for outcome in result.outcomes
        ],
    }


def _measured(result: ContenderResult, measurement: Measurement) -> dict[str, Any]:
    goal = measurement.reached(result.goal)
    return {
        "parameters": measurement.summary.get("parameters"),
        "global_step": measurement.summary["global_step"],
        "training_secs": measurement.secs,
        "secs_to_goal": goal.secs if goal else None,
        "examples_to_goal": goal.examples if goal else None,
        "test_accuracy": measurement.summary.get("test_accuracy"),
        "wall_secs": measurement.summary["wall_secs"],
        "workers": measurement.summary["workers"],
        "evaluations": [
            {"step": p.step, "secs": p.secs, "examples": p.examples, "loss": p.loss, "accuracy": p.accuracy}
            for p in measurement.points
        ],
    }


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return {"mean": spread.mean, "low": spread.low, "high": spread.high} if spread else None
