"""Workers that are slowed down on purpose, as a user asks for it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Command, Finished

SMALL = ["data=digits", "model=softmax", "optimizer=sgd"]
PAUSE = ["watchdog_secs=10", "simulate.pause=worker-1 at 20 for 12"]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def summary_of(finished: Finished) -> dict[str, Any]:
    assert finished.code == 0, finished
    summary: dict[str, Any] = json.loads((finished.run_dir / "summary.json").read_text())
    assert summary["global_step"] == summary["updates_applied"] == summary["target_step"]
    return summary


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_pause_is_no_stall(command: Command, mode: str) -> None:
    """It takes longer than the watchdog waits for progress."""
    delays = ["simulate.delay_secs=[0.01,0]", "simulate.distribution=exponential"]
    finished = command(f"mode={mode}", "cluster=local2", *SMALL, "train.steps=100", *delays, *PAUSE)
    summary = summary_of(finished)
    assert summary["restarts"] == 0, finished
    assert summary["simulated"] == {
        "delay_secs": [0.01, 0],
        "distribution": "exponential",
        "pause": "worker-1 at 20 for 12",
    }
    assert ", with simulated delays\n" in finished.stdout
    assert summary["wall_secs"] > 12
    assert finished.logs().count("worker=1, local_step=20: a simulated pause of 12 s") == 1


@pytest.mark.slow
def test_a_delayed_worker_of_a_whole_run(command: Command) -> None:
    summary = summary_of(command("mode=async", *SMALL, "train.steps=600", "simulate.delay_secs=[0,0,0.2]"))
    first, second, late = (worker["local_steps"] for worker in summary["workers"])
    assert 0 < late * 2 < min(first, second)
