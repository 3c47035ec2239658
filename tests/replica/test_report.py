"""What a run writes to TensorBoard, metrics.jsonl and the screen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.util.tensor_util import make_ndarray

from tests.replica.small_runs import run_config
from tf2dist.cluster.spec import Task
from tf2dist.messages import Note, ToLauncher
from tf2dist.messages import ProgressMessage as Shown
from tf2dist.model.evaluate import Evaluation
from tf2dist.training.loop import Progress
from tf2dist.training.report import Reporter


@pytest.mark.parametrize("schedule", [pytest.param("constant", marks=pytest.mark.slow), "cosine"])
def test_tensorboard_shows_more_than_the_loss(
    async_loop: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setattr("tf2dist.training.report.WRITE_EVERY_SECS", 0.0)
    config = run_config("dnn", hidden_units=[20])
    config.train.steps, config.optimizer["schedule"] = 60, schedule
    loop, sent = async_loop(config), list[Any]()
    with Reporter(tmp_path, Task("chief", 0), ToLauncher("chief-0", sent.append), 0.0) as reporter:
        reporter.follow(loop, config)
        for step in (30, 60):
            loop.train(step)
            reporter.on_progress(loop.progress)
            reporter.on_evaluation("validation", step, loop.evaluate("validation"))
    notes = [message.text for message in sent if isinstance(message, Note)]
    assert len(notes) == 1, "the last evaluation is printed with the result only"
    assert notes[0].startswith("step 30: validation accuracy 0.")

    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert {"loss", "learning_rate", "staleness", "model", "validation_loss"} <= set(read.Tags()["tensors"])
    rates = [event.tensor_proto.float_val[0] for event in read.Tensors("learning_rate")]
    assert rates[0] == pytest.approx(0.01 if schedule == "constant" else 0.0055, rel=0.2)
    assert rates[-1] == pytest.approx(0.01 if schedule == "constant" else 0.0, abs=1e-6)
    assert b"hidden1 (Dense)" in read.Tensors("model")[0].tensor_proto.string_val[0]
    proto = read.SummaryMetadata(metadata.SESSION_START_INFO_TAG)
    hparams = metadata.parse_session_start_info_plugin_data(proto.plugin_data.content).hparams
    assert hparams["optimizer.learning_rate"].number_value == 0.01
    assert hparams["model.name"].string_value == "dnn"
    rows = make_ndarray(read.Tensors("staleness")[-1].tensor_proto)
    assert rows.shape[1] == 3
    assert rows[:, 2].sum() == 60, "every update has a staleness"
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[-2]["learning_rate"] == pytest.approx(rates[-1])
    assert "staleness" not in records[-1]


def test_evaluations_are_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the training stops from the last update before an evaluation to its end."""
    clock = [1000.0]
    monkeypatch.setattr("tf2dist.training.report.time.time", lambda: clock[0])
    evaluation = Evaluation({"loss": 0.5, "accuracy": 0.9}, 100)

    def progress(step: int, secs: float) -> None:
        clock[0] += secs
        reporter.on_progress(Progress(step, (step,), step, 0.5, np.zeros(1)))

    def evaluate(split: str, step: int, secs: float) -> None:
        clock[0] += secs
        reporter.on_evaluation(split, step, evaluation)

    sent: list[Any] = []
    with Reporter(tmp_path, Task("chief", 0), ToLauncher("chief-0", sent.append), 990.0) as reporter:
        reporter.set_target(100)
        monkeypatch.setattr(reporter, "_shown", type("", (), {"since_last": lambda self, now: {"loss": 0.5}})(), False)
        monkeypatch.setattr(reporter, "_filed", reporter._shown, False)
        progress(1, 5.0)
        progress(10, 2.0)
        evaluate("validation", 10, 40.0)
        progress(20, 3.0)
        evaluate("validation", 20, 40.0)
        evaluate("test", 20, 40.0)
        progress(21, 1.0)
        assert reporter.training_secs == pytest.approx(6.0)
        reporter.set_target(21, ended_by="train.until_secs=5")
    shown = [(message.step, message.steps_per_sec) for message in sent if isinstance(message, Shown)]
    assert shown == [(1, None), (10, 4.5), (20, 4.5), (21, 4.5)], "the rate is that of the summary"
    assert sent[-1] == Note("chief-0", "train.until_secs=5 ended the run at step 21 of 100")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["training_secs"] for row in records if "training_secs" in row] == [2.0, 5.0, 5.0]
