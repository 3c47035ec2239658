"""What `fit` returns and raises, as its user handles it, and what Python itself tells of the package."""

import inspect
import pydoc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tf2dist
from tests.conftest import PAGES
from tf2dist.data import Arrays, Splits
from tf2dist.errors import FailureRecord, LeaderLostError, TaskFailure, TfDistError
from tf2dist.fitting.fit_run import History, OfLeader, Result, as_public_error

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


def test_what_another_host_has_is_no_missing_key() -> None:
    where = "chief-0 at host1:2222 has it, in its run_dir"
    for part in (History.elsewhere(where), OfLeader.elsewhere(where)):
        assert part == {}
        assert part.get("val_mae") is None
        with pytest.raises(
            TfDistError, match=f"val_mae: the result is not on this host: {where}; .*`if result.summary:`"
        ):
            part["val_mae"]
    with pytest.raises(KeyError):
        History()["val_mae"]


def test_a_result_is_shown_in_a_few_lines() -> None:
    steps = [float(step) for step in range(1000)]
    assert repr(Result(History(loss=steps, val_mae=[0.5]), SUMMARY, Path("/runs/one"), None)).splitlines() == [
        "tf2dist.Result",
        "sync (local_sgd) build on arrays: 2 workers, 30 steps at 50/s (3,200 examples/s)",
        "last epoch: loss 999.0000, val_mae 0.5000",
        "/runs/one",
    ]
    assert repr(Result(History(), {}, Path("/runs/one"), None)).splitlines() == ["tf2dist.Result", "/runs/one"]


def test_python_shows_every_public_name() -> None:
    """Also those that are imported on first use; a shell completes what `dir` has."""
    assert set(tf2dist.__all__) <= set(dir(tf2dist))
    assert set(tf2dist.data.__all__) <= set(dir(tf2dist.data))
    text = pydoc.plain(pydoc.render_doc(tf2dist))
    assert "\n    fit(model" in text
    assert [name for name in tf2dist.__all__ if name not in text] == []


@pytest.mark.parametrize("error", ["ConfigError", "TaskFailure", "TaskLostError", "CheckpointError", "LeaderLostError"])
def test_the_docstring_of_fit_has_an_example_and_what_it_raises(error: str) -> None:
    text = inspect.getdoc(tf2dist.fit) or ""
    assert "result = tf2dist.fit(" in text.partition("Args:")[0]
    assert f"\n    {error}: " in text.partition("Raises:")[2]
    assert f".. autoexception:: tf2dist.{error}()" in PAGES["docs/api.md"]


@pytest.mark.parametrize(
    "error",
    [
        *(tf2dist.ConfigError, tf2dist.ClusterError, tf2dist.DataError, tf2dist.CheckpointError),
        *(tf2dist.NotFiniteError, tf2dist.TaskLostError, LeaderLostError),
    ],
)
def test_an_error_of_a_task_has_its_class_here_too(error: type[TfDistError]) -> None:
    record = FailureRecord.of("worker-1", error("what is wrong"))
    public = as_public_error(TaskFailure([record, FailureRecord("chief-0", 1.0, 138, "worker-1 is gone")]))
    assert type(public) is error
    assert str(public) == "worker-1: what is wrong\n  then chief-0: worker-1 is gone"


def test_an_error_of_the_users_code_is_a_failure_of_the_task() -> None:
    failure = TaskFailure([FailureRecord.of("worker-1", LookupError("no such word"))])
    assert as_public_error(failure) is failure


def test_a_data_function_is_told_of_four_splits_only() -> None:
    assert list(inspect.signature(Splits).parameters) == ["train", "validation", "test", "num_classes"]
    splits = Splits(Arrays(np.ones([3, 2]), np.ones([3], int)))
    assert repr(splits).count("=") == repr(splits.train).count("=") + 4
    assert (splits.num_classes, splits.stream, splits.truth, splits.note) == (10, None, None, "")
