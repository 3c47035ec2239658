"""What `fit` returns, as its user handles it."""

from pathlib import Path
from typing import Any

from tf2dist.fitting.fit_run import History, Result

SUMMARY: dict[str, Any] = {
    "mode": "sync",
    "algorithm": "local_sgd",
    "model": "build",
    "data": "arrays",
    "cluster": {"worker": 2, "ps": 0},
    "global_step": 30,
    "steps_per_sec": 50.0,
    "examples_per_sec": 3200.0,
}


def test_the_history_is_found_where_keras_has_it() -> None:
    history = History({"loss": [2.0, 1.0]})
    assert history.history == history == {"loss": [2.0, 1.0]}
    assert history.history["loss"][-1] == 1.0


def test_a_result_is_shown_in_a_few_lines() -> None:
    steps = [float(step) for step in range(1000)]
    assert repr(Result(History(loss=steps, val_mae=[0.5]), SUMMARY, Path("/runs/one"), None)).splitlines() == [
        "tf2dist.Result",
        "sync (local_sgd) build on arrays: 2 workers, 30 steps at 50/s (3,200 examples/s)",
        "last epoch: loss 999.0000, val_mae 0.5000",
        "/runs/one",
    ]
    assert repr(Result(History(), {}, Path("/runs/one"), None)).splitlines() == ["tf2dist.Result", "/runs/one"]
