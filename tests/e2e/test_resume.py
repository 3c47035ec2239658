"""The same command with the same run_dir continues the run; nothing starts over by accident."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Command, wait_until

pytestmark = pytest.mark.timeout(600)  # several runs of some 10 s, each with a limit of its own

SYNC_CNN = [
    *("mode=sync", "cluster=local2", "data=digits", "model=cnn", "model.dropout=0.3", "model.batch_norm=true"),
    *("train.steps=80", "train.batch_size_per_worker=20", "train.log_every_steps=5"),
]


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def arrays(run_dir: Path) -> dict[str, np.ndarray]:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    with np.load(newest / "arrays.npz") as packed:
        return dict(packed)


def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(command: Command) -> None:
    assert command(*SYNC_CNN, run_dir="straight").code == 0
    process = command.start(*SYNC_CNN)
    log = command.folder / "run" / "logs" / "worker-0.log"
    wait_until(lambda: log.exists() and "global_step=" in log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    stopped = command.finish(process)
    assert stopped.code == 143, stopped
    assert "stopped by SIGTERM; saved at step " in stopped.stderr
    assert not (command.folder / "run" / "summary.json").exists()
    resumed = command(*SYNC_CNN)
    assert resumed.code == 0, resumed
    assert "going on at step " in resumed.stderr
    straight, again = arrays(command.folder / "straight"), arrays(command.folder / "run")
    assert straight.keys() == again.keys()
    for name, array in straight.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)
    summaries = [json.loads((command.folder / name / "summary.json").read_text()) for name in ("straight", "run")]
    for key in ("global_step", "updates_applied", "examples_seen", "test_accuracy", "test_loss"):
        assert summaries[0][key] == summaries[1][key], key


@pytest.mark.slow
def test_a_finished_run_goes_on_in_the_other_mode(command: Command) -> None:
    common = ["data=digits", "model=dnn", "optimizer=adam"]
    assert command("mode=async", "cluster=local3", "train.steps=400", *common).code == 0
    again = command("mode=async", "cluster=local3", "train.steps=400", *common)
    assert again.code == 0, "at its end already, it is evaluated once more"
    for step, more in (
        (500, ["mode=sync", "cluster=local2"]),
        (900, ["mode=async", "cluster=local2", "cluster.num_ps=2", "cluster.placement=balanced"]),
    ):
        finished = command(f"train.steps={step}", *more, *common)
        assert finished.code == 0, finished
        summary = json.loads((command.folder / "run" / "summary.json").read_text())
        assert summary["global_step"] == summary["updates_applied"] == summary["target_step"] == step
        examples_per_step = 1257 / (7 if "mode=sync" in more else 14)  # in 14 batches of at most 100
        assert abs(summary["examples_per_sec"] / summary["steps_per_sec"] / examples_per_step - 1) < 0.15
        lines = (command.folder / "run" / "logs" / "worker-0.log").read_text().splitlines()
        own_steps = [int(match[1]) for line in lines if (match := re.search(r"local_step=(\d+)", line))]
        assert own_steps[-1] <= summary["workers"][0]["local_steps"], "its own, not those of the whole run"
    assert summary["test_accuracy"] > 0.9
    log = (command.folder / "run" / "logs" / "chief-0.log").read_text()
    assert re.search(r"^ps-1: [\d,]+ bytes of the model, [\d,]+ with the optimizer's state$", log, re.MULTILINE)
    names = [path.name for path in sorted((command.folder / "run" / "checkpoints").iterdir())]
    assert names == ["step-0000000400", "step-0000000500", "step-0000000900"]


EVERY_WAY = [
    ["mode=async", "cluster.num_ps=2", "cluster.placement=partitioned", "cluster.min_part_bytes=1000"],
    ["mode=sync"],
    ["mode=sync_replicas", "sync_replicas.replicas_to_aggregate=1"],
    ["mode=sync", "algorithm=local_sgd", "algorithm.outer_momentum=0.5"],
    ["mode=sync_replicas", "cluster.num_ps=2", "cluster.placement=balanced"],
    ["mode=async", "algorithm=delay_compensated"],
    ["mode=sync", "algorithm=local_sgd"],
    ["mode=async", "algorithm=staleness_aware"],
    ["mode=sync"],
]


@pytest.mark.slow
def test_a_run_goes_on_in_every_mode_and_with_every_algorithm(command: Command) -> None:
    common = ["cluster=local2", "data=digits", "model=dnn", "optimizer=adam"]
    kernels: list[np.ndarray] = []
    for number, options in enumerate(EVERY_WAY, 1):
        steps = 100 * number
        finished = command(f"train.steps={steps}", *options, *common)
        assert finished.code == 0, finished
        assert number == 1 or f"going on at step {steps - 100}\n" in finished.stderr, finished
        summary = json.loads((command.folder / "run" / "summary.json").read_text())
        assert summary["global_step"] == summary["updates_applied"] == summary["target_step"] == steps
        kernels.append(arrays(command.folder / "run")["model/hidden1/kernel"])
        if number > 1:  # trained from other initial weights, it would be farther away
            assert 0 < np.linalg.norm(kernels[-1] - kernels[-2]) < 0.5 * np.linalg.norm(kernels[-2]), options
        assert number < 3 or summary["test_accuracy"] > 0.8, options


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_nothing_is_lost(command: Command) -> None:
    run_dir = command.folder / "run"
    small = ["data=digits", "model=softmax", "mode=sync", "cluster=local1", "train.steps=20"]
    assert command(*small).code == 0
    before = {path: path.read_bytes() for path in (run_dir / "summary.json", run_dir / "config.yaml")}
    for more, told in (
        ("model=dnn", "is of another model; missing: model/hidden1/bias"),
        ("optimizer=sgd", "is of another optimizer; extra: optimizer/logits/bias/momentums"),
        ("train.steps=10", "train.steps (10): the run in run_dir is at step 20 already"),
    ):
        refused = command(*small, more)
        assert refused.code == 2, refused
        assert told in refused.stderr
        assert "Traceback" not in refused.stderr
        assert {path: path.read_bytes() for path in before} == before
    (run_dir / "checkpoints" / "step-0000000020" / "arrays.npz").write_bytes(b"damaged")
    refused = command(*small)
    assert refused.code == 2, refused
    assert "all 1 checkpoints are damaged" in refused.stderr


@pytest.mark.slow
def test_chosen_layers_of_another_run(command: Command) -> None:
    small = ["data=digits", "mode=sync", "cluster=local1", "train.steps=20"]
    assert command(*small, run_dir="donor").code == 0
    finished = command(*small, "seed=1", f"init_from={command.folder / 'donor'}", "init_layers=hidden[123]")
    assert finished.code == 0, finished
    assert f"weights of hidden1, hidden2, hidden3 from {command.folder / 'donor'}" in finished.stderr
    refused = command(*small, f"init_from={command.folder / 'donor'}", "init_layers=conv.*", run_dir="other")
    assert refused.code == 2
    assert (
        "init_layers (conv.*): matches no layer there; it has hidden1, hidden2, hidden3, hidden4, logits"
        in refused.stderr
    )


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_told(command: Command) -> None:
    small = ["data=digits", "model=softmax", "mode=sync", "cluster=local1"]
    assert command(*small, "train.steps=20", "checkpoint.every_steps=10").code == 0
    (command.folder / "run" / "checkpoints" / "step-0000000020" / "manifest.json").write_text("{")
    finished = command(*small, "train.steps=30")
    assert finished.code == 0, finished
    assert "step-0000000020" in finished.stderr
    assert "going back to the checkpoint before it" in finished.stderr
    assert "going on at step 10" in finished.stderr


SHOWS_KERAS = """
import keras
import tf2dist

AT_THE_TOP = keras.config.image_data_format(), keras.config.epsilon()


@tf2dist.register_model("shows")
def shows(input_shape, num_classes):
    print("keras:", AT_THE_TOP, keras.config.image_data_format(), keras.config.epsilon(), keras.config.floatx())
    scaled = [keras.Input(input_shape), keras.layers.Rescaling(1 / 255)]
    return keras.Sequential([*scaled, keras.layers.Flatten(), keras.layers.Dense(num_classes)])
"""


@pytest.mark.slow
def test_other_settings_of_keras_do_not_go_on(command: Command) -> None:
    """They come from a file of each host, and make another model of the same code and weights."""
    (command.folder / "shows.py").write_text(SHOWS_KERAS)
    common = ["mode=sync", "cluster=local1", "data=digits", "plugins=[shows.py]", "model=shows", "train.steps=20"]
    for name, settings in (("first", {"image_data_format": "channels_first", "epsilon": 0.001}), ("none", {})):
        (command.folder / name).mkdir()
        if settings:
            (command.folder / name / "keras.json").write_text(json.dumps(settings))
    made = command(*common, env={"KERAS_HOME": str(command.folder / "first")})
    assert made.code == 0, made
    assert "keras.image_data_format is channels_first, as in " in made.stderr
    assert "image_data_format: channels_first" in (made.run_dir / "config.yaml").read_text()
    again = command(*common, env={"KERAS_HOME": str(command.folder / "none")})
    assert again.code == 2, again
    assert "was trained with keras.image_data_format=channels_first, and it is channels_last now" in again.stderr
    # Given as options they count in every task, whatever its file says.
    arguments = ["keras.image_data_format=channels_first", "keras.epsilon=0.001"]
    once_more = command(*common, *arguments, env={"KERAS_HOME": str(command.folder / "none")})
    assert once_more.code == 0, once_more
    expected = "keras: ('channels_first', 0.001) channels_first 0.001 float32"
    log = (made.run_dir / "logs" / "worker-0.log").read_text()
    assert log.count(expected) == 4, "in both runs, for the training and for model.keras"
