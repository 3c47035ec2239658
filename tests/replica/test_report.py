"""What a run writes to TensorBoard, metrics.jsonl and the screen."""

import contextlib
import fcntl
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.backend_context import Context as HparamsContext
from tensorboard.util.tensor_util import make_ndarray

from tests.replica.small_runs import run_config
from tf2dist.cluster.spec import Task
from tf2dist.messages import Note, ToLauncher
from tf2dist.messages import ProgressMessage as Shown
from tf2dist.model.evaluation import Evaluation
from tf2dist.training.loop import Progress
from tf2dist.training.report import Reporter
from tf2dist.training.writers import JsonlWriter, RunDescription, TensorBoardWriter


@pytest.mark.parametrize("schedule", [pytest.param("constant", marks=pytest.mark.slow), "cosine"])
def test_tensorboard_shows_more_than_the_loss(
    async_loop: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setattr("tf2dist.training.report.WRITE_EVERY_SECS", 0.0)
    config = run_config("dnn", hidden_units=[20])
    config.train.steps, config.optimizer["schedule"] = 60, schedule
    loop, sent = async_loop(config), list[Any]()
    with Reporter(tmp_path, Task("chief", 0), ToLauncher("chief-0", sent.append), 0.0) as reporter:
        reporter.follow(loop)
        for step in (30, 60):
            loop.train(step)
            reporter.on_progress(loop.progress)
            reporter.on_evaluation("validation", step, loop.evaluate("validation"))
    notes = [message.text for message in sent if isinstance(message, Note)]
    assert len(notes) == 1, "the last evaluation is printed with the result only"
    assert notes[0].startswith("step 30: validation accuracy 0.")

    about, read, validation = (
        EventAccumulator(str(tmp_path / "tensorboard" / run), size_guidance={"tensors": 0}).Reload()
        for run in ("", "train", "validation")
    )
    assert {"loss", "accuracy", "learning_rate", "staleness", "training_secs"} <= set(read.Tags()["tensors"])
    assert set(validation.Tags()["tensors"]) == {"loss", "accuracy"}
    rates = [event.tensor_proto.float_val[0] for event in read.Tensors("learning_rate")]
    assert rates[0] == pytest.approx(0.01 if schedule == "constant" else 0.0055, rel=0.2)
    assert rates[-1] == pytest.approx(0.01 if schedule == "constant" else 0.0, abs=1e-6)
    assert b"hidden1 (Dense)" in about.Tensors("model")[0].tensor_proto.string_val[0]
    proto = about.SummaryMetadata(metadata.SESSION_START_INFO_TAG)
    hparams = metadata.parse_session_start_info_plugin_data(proto.plugin_data.content).hparams
    assert hparams["optimizer.learning_rate"].number_value == 0.01
    assert hparams["model.name"].string_value == "dnn"
    rows = make_ndarray(read.Tensors("staleness")[-1].tensor_proto)
    assert rows.shape[1] == 3
    assert rows[:, 2].sum() == 60, "every update has a staleness"
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[-2]["learning_rate"] == pytest.approx(rates[-1])
    assert "staleness" not in records[-1]


def test_a_metric_that_was_no_number_is_told_anew(
    async_loop: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf2dist.training.report.WRITE_EVERY_SECS", 0.0)
    loop = async_loop(run_config("softmax"), num_ps=2)
    counters = loop._graphs.servers[0].counters
    with Reporter(tmp_path, Task("chief", 0), ToLauncher("chief-0", list[Any]().append), 0.0) as reporter:
        reporter.follow(loop)
        loop.train(30)
        reporter.on_progress(loop.progress)
        assert not loop.clear_metrics()
        counters._values.scatter_nd_update([[counters._head - loop.metrics.size + 2]], [np.nan])
        loop.train(40)
        assert np.isnan(loop.progress.metrics).sum() == 1
        assert loop.clear_metrics()
        reporter.restart_metrics()
        before = loop.progress.metrics
        loop.train(60)
        reporter.on_progress(loop.progress)
        expected = loop.metrics.results(loop.progress.metrics - before)
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["accuracy"] == pytest.approx(expected["accuracy"])
    assert [server.counters.now().applied for server in loop._graphs.servers] == [60, 60]


def test_the_splits_share_a_chart_of_tensorboard(tmp_path: Path) -> None:
    """Read as TensorBoard's own pages read it, of a folder with this run: a chart has the name of a tag."""
    with contextlib.closing(
        TensorBoardWriter(tmp_path / "a/tensorboard", RunDescription("a model", {"seed": 1}))
    ) as writer:
        writer.write(1, {"accuracy": 0.5, "steps_per_sec": 9.0, "f1": 0.1, "test": 0.3})
        writer.write(2, {"validation_accuracy": 0.75, "training_secs": 0.5, "staleness": np.array([3, 1])})
        writer.write(3, {"test_accuracy": 0.875})
    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 0}).AddRunsFromDirectory(str(tmp_path))
    provider = MultiplexerDataProvider(multiplexer.Reload(), str(tmp_path))
    context = RequestContext()
    charts: dict[str, dict[str, Any]] = {}
    for run, tags in provider.list_scalars(context, experiment_id="", plugin_name="scalars").items():
        for tag, series in tags.items():
            charts.setdefault(tag, {})[run.removeprefix("a/tensorboard/")] = series
    assert {tag: sorted(runs) for tag, runs in charts.items()} == {
        "accuracy": ["test", "train", "validation"],
        **{tag: ["train"] for tag in ("steps_per_sec", "f1", "test", "training_secs")},
    }
    read = provider.read_scalars(context, experiment_id="", plugin_name="scalars", downsample=9)
    values = {run.rpartition("/")[2]: tags["accuracy"] for run, tags in read.items() if "accuracy" in tags}
    assert {run: [(one.step, one.value) for one in points] for run, points in values.items()} == {
        "train": [(1, 0.5)],
        "validation": [(2, 0.75)],
        "test": [(3, 0.875)],
    }
    # A chart whose runs differ in this would show one description below the other.
    descriptions = {tag: {series.description for series in runs.values()} for tag, runs in charts.items()}
    assert all(len(found) == 1 and found.pop() for found in descriptions.values())
    assert "from 0 to 1" in charts["accuracy"]["validation"].description
    assert charts["steps_per_sec"]["train"].description.startswith("Global steps per second")
    assert charts["training_secs"]["train"].description.startswith("Seconds")
    # The table of options finds its metrics by the folders.
    hparams = HparamsContext(TBContext(data_provider=provider))
    experiment = hparams.experiment_from_metadata(context, "", True, hparams.hparams_metadata(context, ""), [])
    groups = {(info.name.group, info.name.tag) for info in experiment.metric_infos}
    assert {("train", "accuracy"), ("validation", "accuracy"), ("test", "accuracy")} <= groups


def test_the_evaluator_writes_into_a_folder_of_its_own(tmp_path: Path) -> None:
    """Of several files in one folder TensorBoard reads the newest only, so the leader's would be lost, or its own."""
    for task in (Task("chief", 0), Task("evaluator", 0)):
        with Reporter(tmp_path, task, ToLauncher(str(task), list[Any]().append), 0.0) as reporter:
            reporter.on_evaluation("validation", 5, Evaluation({"loss": 0.5, "accuracy": 0.9}, 100))
    folders = {path.parent.relative_to(tmp_path / "tensorboard") for path in tmp_path.rglob("events.*")}
    assert folders == {Path("validation"), Path("evaluator-0/validation")}


def test_a_line_is_written_under_a_lock_that_is_not_waited_for_without_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with contextlib.closing(JsonlWriter(path, "worker-0", 0.0)) as writer, open(path, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        length_at_release = []

        def release() -> None:
            length_at_release.append(path.stat().st_size)
            fcntl.flock(other, fcntl.LOCK_UN)

        threading.Timer(0.05, release).start()
        writer.write(1, {})
        assert length_at_release == [0], "it has waited"
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again
        writer.write(2, {})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_evaluations_are_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the training stops from the last update before an evaluation to its end."""
    clock = [1000.0]
    monkeypatch.setattr("tf2dist.training.report.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("tf2dist.training.report.time.time", lambda: 5000.0)  # it may be set at any time
    evaluation = Evaluation({"loss": 0.5, "accuracy": 0.9}, 100)

    def progress(step: int, secs: float) -> None:
        clock[0] += secs
        reporter.on_progress(Progress(step, (step,), step, 0.5, np.zeros(1)))

    def evaluate(split: str, step: int, secs: float) -> None:
        clock[0] += secs
        reporter.on_evaluation(split, step, evaluation)

    sent: list[Any] = []
    with Reporter(tmp_path, Task("chief", 0), ToLauncher("chief-0", sent.append), 4990.0) as reporter:
        reporter.set_target(100)
        monkeypatch.setattr(reporter, "_shown", type("", (), {"read": lambda self, now: {"loss": 0.5}})(), False)
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
    assert shown == [(1, None), (10, 4.5), (20, 3.8), (21, 3.33)], "the rate is that of the summary"
    assert sent[-1] == Note("train.until_secs=5 ended the run at step 21 of 100", task="chief-0")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["training_secs"] for row in records if "training_secs" in row] == [2.0, 2.0, 5.0, 5.0, 5.0, 6.0]
    rates = [(row["step"], row["steps_per_sec"], row["training_secs"]) for row in records if "steps_per_sec" in row]
    assert rates == [(10, 4.5, 2.0), (20, pytest.approx(3.8), 5.0), (21, pytest.approx(20 / 6), 6.0)]
