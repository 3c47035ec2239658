"""compare.json: everything that the report says, for programs."""

import os
import platform
from datetime import datetime
from typing import Any

import psutil

from tf2dist import __version__
from tf2dist.comparing.options import Options
from tf2dist.comparing.results import Measured, Result, Spread
from tf2dist.comparing.verdict import Verdict


def machine() -> dict[str, Any]:
    """The machine of this process, as far as it matters to the figures."""
    return {
        "processors": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2),
    }


def record_of(
    options: Options, arguments: list[str], results: list[Result], verdict: Verdict, left_out: list[str]
) -> dict[str, Any]:
    """The content of compare.json.

    Args:
        arguments: of the command.
        left_out: what the comparison could have shown, and which option it needs.
    """
    some = next((one.summary for result in results for one in result.measured), {})
    return {
        "tf2dist": __version__,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "arguments": arguments,
        "until": str(options.until),
        "workers": options.workers,
        "seeds": options.seeds,
        "data": some.get("data"),
        "optimizer": some.get("optimizer"),
        "machine": machine(),
        "versions": some.get("versions"),
        "verdict": {
            "headline": verdict.headline,
            "situations": [{"situation": name, "sentences": lines} for name, lines in verdict.situations],
            "claims": [{"claim": one.text, "state": one.state, "figures": one.figures} for one in verdict.claims],
        },
        "not_run": left_out,
        "contenders": [_contender(result) for result in results],
    }


def _contender(result: Result) -> dict[str, Any]:
    contender = result.contender
    return {
        "name": contender.name,
        "way": contender.way,
        "mode": contender.mode,
        "delay_secs": contender.delay_secs,
        "backups": contender.backups,
        "options": contender.varying,
        "secs_to_target": _spread(result.secs),
        "examples_to_target": _spread(result.examples),
        "accuracy": _spread(result.accuracy),
        "steps_per_sec": _spread(result.step_rate),
        "examples_per_sec": _spread(result.example_rate),
        "staleness": _spread(result.staleness),
        "dropped": _spread(result.dropped),
        "startup_secs": _spread(result.start),
        "staleness_counts": result.staleness_counts() or None,
        "runs": [
            {"seed": one.run.seed, "folder": f"runs/{one.run.folder}", "state": one.state, "exit_code": one.exit_code}
            | next((_measured(result, done) for done in result.measured if done.run == one.run), {})
            for one in result.outcomes
        ],
    }


def _measured(result: Result, one: Measured) -> dict[str, Any]:
    target = one.reached(result.until)
    return {
        "parameters": one.summary.get("parameters"),
        "global_step": one.summary["global_step"],
        "training_secs": one.secs,
        "secs_to_target": target.secs if target else None,
        "examples_to_target": target.examples if target else None,
        "test_accuracy": one.summary.get("test_accuracy"),
        "wall_secs": one.summary["wall_secs"],
        "workers": one.summary["workers"],
        "evaluations": [
            {"step": p.step, "secs": p.secs, "examples": p.examples, "loss": p.loss, "accuracy": p.accuracy}
            for p in one.points
        ],
    }


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return {"mean": spread.mean, "low": spread.low, "high": spread.high} if spread else None
