"""The command as a user types it: real processes, real strategies, real data."""

import json
import math
import os
import platform
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BLOCKS, PAGES, Command, Finished
from tests.e2e.test_quiet import assert_asked_for_no_name, recording_names
from tests.shown import is_as_shown

SUMMARY_KEYS = {
    *("mode", "model", "data", "seed", "cluster", "target_step", "global_step", "updates_applied", "examples_seen"),
    *("test_accuracy", "test_loss", "test_examples", "validation_accuracy", "steps_per_sec", "examples_per_sec"),
    *("startup_secs", "wall_secs", "workers", "restarts", "versions"),
}
# What the page has a row for; metrics of any name have one together.
FILES = PAGES["docs/results.md"].partition("### summary.json")[2]
ROWS = re.findall(r"^\| `(.*?)` \|", FILES, re.MULTILINE)
DOCUMENTED_KEYS = {key for row in ROWS for key in row.split("`, `")}
SHOWN_RUN_DIR = "/home/me/runs/a"
# What the README shows of its command; test_page_commands.py runs the whole page.
(SHOWN,) = [
    block.text.partition("\n")[2]
    for block in BLOCKS
    if block.page == "README.md" and block.text.startswith("$ python -m tf2dist mode=async cluster=local3 run_dir=")
]
(SHOWN_FILES,) = [
    re.findall(r"^  (\S+)", block.text, re.MULTILINE)
    for block in BLOCKS
    if block.page == "README.md" and block.text.startswith("runs/a/\n")
]
SHOWN_KEYS = set(re.findall(r'^  "(\w+)":', FILES, re.MULTILINE))  # in the example, which is shortened


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def summary_of(finished: Finished) -> dict[str, Any]:
    """The summary of a run that must have gone well, with everything in it that can be checked in any run."""
    assert finished.code == 0, finished
    summary: dict[str, Any] = json.loads((finished.run_dir / "summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS
    assert {re.sub("^(test|validation)_(?!examples).+", r"\1_METRIC", key) for key in summary} <= DOCUMENTED_KEYS
    assert summary["global_step"] == summary["updates_applied"] == summary["target_step"]
    local_steps = [worker["local_steps"] for worker in summary["workers"]]
    assert len(local_steps) == summary["cluster"]["worker"]
    if summary["mode"] == "async":
        assert sum(local_steps) == summary["global_step"]
        assert set(summary["staleness"]) == {"mean", "p50", "p99", "max"}
        assert sum(summary["staleness_counts"]) == summary["updates_applied"]
        assert len(summary["staleness_counts"]) == summary["staleness"]["max"] + 1
    else:
        assert set(local_steps) == {summary["global_step"]}
    assert summary["test_examples"] == {"mnist": 10_000, "digits": 360}[summary["data"]]
    return summary


@pytest.mark.parametrize(
    ("mode", "data"),
    [
        ("async", "real"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("async", "digits"), ("sync", "real"))),
    ],
)
def test_the_main_command(
    cold_command: Command, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, mode: str, data: str
) -> None:
    """The command of the README, on real data, with everything that it leaves behind; it looks up no name."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")  # it is quiet without it
    real_data = request.getfixturevalue("real_data") if data == "real" else data
    options = [f"mode={mode}", "cluster=local3", f"data={real_data}", "train.eval_every_steps=400", "figure=true"]
    finished = cold_command(*options, env=recording_names(cold_command.folder))
    summary = summary_of(finished)
    assert_asked_for_no_name(cold_command.folder)
    if (mode, real_data) == ("async", "mnist"):
        printed = (finished.stderr + finished.stdout).replace(str(finished.run_dir), SHOWN_RUN_DIR)
        assert is_as_shown(SHOWN, printed), finished
    assert summary["mode"] == mode
    assert summary["cluster"] == {"worker": 3, "ps": 1 if mode == "async" else 0}
    if mode == "async":
        assert set(summary) - SHOWN_KEYS == {"startup_secs", "wall_secs"}
        assert set(summary) >= SHOWN_KEYS
    assert summary["test_accuracy"] >= {"mnist": 0.96, "digits": 0.95}[real_data], finished
    assert f"test accuracy {summary['test_accuracy']:.4f}" in finished.stdout
    assert len(finished.stdout.splitlines()) == 3

    run_dir = finished.run_dir
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    jobs = ["chief-0", "ps-0"] if mode == "async" else []
    for task in [*jobs, "worker-0", "worker-1", "worker-2"]:
        assert (run_dir / "logs" / f"{task}.log").exists()
    for index in range(3):
        lines = (run_dir / "logs" / f"worker-{index}.log").read_text()
        assert re.search(rf"worker={index}, epoch=\d+, global_step=\d+, local_step=", lines), lines
        assert f"worker={index}, final accuracy={summary['test_accuracy']:.4f}" in lines
    assert list((run_dir / "tensorboard").iterdir())
    assert all((run_dir / name).exists() for name in SHOWN_FILES)
    assert f"mode: {mode}" in (run_dir / "config.yaml").read_text()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all({"step", "time", "secs", "task"} < set(record) for record in records)
    assert (run_dir / "training.png").read_bytes().startswith(b"\x89PNG")
    evaluated = [record["step"] for record in records if "validation_accuracy" in record]
    target = summary["target_step"]
    assert evaluated == [*range(400, target, 400), target]
    assert records[-1]["test_accuracy"] == summary["test_accuracy"]
    output = [
        line for line in finished.stderr.splitlines() if line.startswith("step ") and "validation accuracy" in line
    ]
    assert len(output) == len(evaluated) - 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_digits_are_learned(command: Command, mode: str) -> None:
    summary = summary_of(command(f"mode={mode}", "data=digits", "model=dnn"))
    assert summary["test_accuracy"] >= 0.95


@pytest.mark.slow
def test_two_ps_and_more_workers_than_cores(command: Command) -> None:
    cores, size = os.sched_getaffinity(0), ["cluster=local", "cluster.num_workers=5", "cluster.num_ps=2"]
    os.sched_setaffinity(0, sorted(cores)[:2])  # what is started from here has no more
    try:
        summary = summary_of(command(*size, "data=digits", "optimizer=momentum", "train.steps=777"))
    finally:
        os.sched_setaffinity(0, cores)
    assert summary["cluster"] == {"worker": 5, "ps": 2}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_fewer_steps_than_workers(command: Command, mode: str, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    finished = command(f"mode={mode}", "data=digits", "train.steps=1", env={"TMPDIR": str(temporary)})
    assert summary_of(finished)["target_step"] == 1
    assert list(temporary.iterdir()) == [], "TensorFlow's autograph would leave what it has generated"


def profile_after(folder: Path, secs: float) -> str:
    """The option by which the profile begins then, however fast the machine."""
    plugin = folder / "after.py"
    plugin.write_text(f"import tf2dist.process.profiling\n\ntf2dist.process.profiling.AFTER_SECS = {secs}\n")
    return f"plugins=[{plugin}]"


@pytest.mark.slow
def test_a_profile_of_each_kind_of_task(command: Command, tmp_path: Path) -> None:
    steps = ["train.steps=4000", "train.steps_per_execution=10"]
    finished = command("data=digits", "profile=true", *steps, profile_after(tmp_path, 0.5))
    assert summary_of(finished)["global_step"] == 4000
    profiles = {path.relative_to(finished.run_dir / "tensorboard").parts[0] for path in finished.run_dir.rglob("*.pb")}
    assert profiles == {"chief-0", "worker-0", "ps-0"}


@pytest.mark.slow
def test_a_run_that_is_too_short_for_a_profile(command: Command, tmp_path: Path) -> None:
    finished = command("mode=sync", "data=digits", "profile=true", "train.steps=1", profile_after(tmp_path, 600.0))
    assert summary_of(finished)["global_step"] == 1
    assert "profile: not made, since the training took less than" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "precision"), [("async", "bfloat16"), ("sync", "bfloat16"), ("sync", "float16")])
def test_xla_and_mixed_precision(command: Command, mode: str, precision: str) -> None:
    summary = summary_of(
        command(f"mode={mode}", "data=digits", "train.steps=200", "devices.xla=true", f"devices.precision={precision}")
    )
    assert summary["test_accuracy"] > 0.6


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="TensorFlow has this choice on x86 processors alone")
@pytest.mark.parametrize("wanted", ["true", "false"])
def test_one_dnn(command: Command, tmp_path: Path, wanted: str) -> None:
    """Tasks compute with oneDNN or without it, whatever TensorFlow chooses for the processor."""
    plugin = tmp_path / "plugin.py"
    found_out = "from tensorflow.python.util import _pywrap_util_port as port"
    plugin.write_text(f"{found_out}\nprint('oneDNN:', port.IsMklEnabled())")
    finished = command("data=digits", "train.steps=5", f"devices.onednn={wanted}", f"plugins=[{plugin}]")
    assert f"oneDNN: {wanted.title()}" in (finished.run_dir / "logs" / "worker-0.log").read_text()


PLUGIN = """
import keras
import numpy as np
import tf2dist
from tf2dist.data import Arrays, Splits

@tf2dist.register_model("wide")
def wide(input_shape, num_classes, width=8, act="relu"):
    return Wide(width, num_classes, act)

class Wide(keras.Model):
    def __init__(self, width, num_classes, act):
        super().__init__()
        self.scaled, self.hidden = keras.layers.Rescaling(1 / 255), keras.layers.Dense(width, act)
        self.logits = keras.layers.Dense(num_classes)

    def call(self, images, training=False):
        return self.logits(self.hidden(keras.ops.reshape(self.scaled(images), (-1, 36))))

@tf2dist.register_data("stripes")
def stripes(config, size=600, direction="down"):
    assert direction == "across"
    labels = np.arange(size) % 3
    images = np.zeros((size, 6, 6, 1), np.uint8)
    images[np.arange(size), :, labels * 2] = 255
    parts = [Arrays(images[a:b], labels[a:b]) for a, b in ((0, 400), (400, 500), (500, size))]
    return Splits(*parts, num_classes=3)

@tf2dist.register_optimizer("slow_start")
def slow_start(peak, total_steps):
    assert total_steps == 100, total_steps
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.0, 1000, warmup_target=peak, warmup_steps=10))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_plugins(command: Command, mode: str) -> None:
    (command.folder / "mine.py").write_text(PLUGIN)
    finished = command(
        *(f"mode={mode}", "cluster=local1", "plugins=[mine.py]", "model=wide", "+model.width=16", "data=stripes"),
        "train.steps=100",
        *("optimizer=slow_start", "+optimizer.peak=0.01", "train.batch_size_per_worker=20"),
        *("+data.size=590", "+data.direction=across", "+model.act=gelu"),
    )
    assert finished.code == 0, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert (summary["model"], summary["data"], summary["test_examples"]) == ("wide", "stripes", 90)
    assert summary["global_step"] == summary["updates_applied"] == 100
    assert summary["test_accuracy"] > 0.9


@pytest.mark.slow
def test_a_name_that_no_plugin_registers(command: Command) -> None:
    (command.folder / "mine.py").write_text(PLUGIN)
    finished = command("plugins=[mine.py]", "model=wdie", "data=digits")
    assert finished.code == 2, finished
    names = "cnn, dnn, softmax, tanh, two_tower, wide"
    assert f"model (wdie): must be one of {names}; did you mean wide?" in finished.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_an_error_in_the_users_model_is_shown_whole(command: Command, mode: str) -> None:
    (command.folder / "mine.py").write_text(
        PLUGIN.replace("Wide(width, num_classes, act)", "keras.Sequential([keras.layers.Dense(-1)])")
    )
    finished = command(f"mode={mode}", "cluster=local1", "plugins=[mine.py]", "model=wide", "data=digits")
    assert finished.code == 1, finished
    assert finished.stderr.count("Traceback") == 1, finished
    assert "ValueError" in finished.stderr
    assert "mine.py" in finished.stderr


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps", [1, pytest.param(100_000, marks=pytest.mark.slow)])  # the evaluation shows it
def test_a_loss_that_is_not_finite(command: Command, mode: str, steps: int) -> None:
    rate = ["optimizer=sgd", "optimizer.learning_rate=1e30"]
    finished = command(f"mode={mode}", "cluster=local1", "data=digits", *rate, f"train.steps={steps}")
    assert finished.code == 3, finished
    assert not (finished.run_dir / "summary.json").exists()
    assert "the loss is" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.thorough
def test_without_data_and_network_it_trains_on_digits(command: Command) -> None:
    env = {"TFDS_DATA_DIR": str(command.folder / "none"), "NO_PROXY": "*"}
    finished = in_no_network(command, "cluster=local1", "train.steps=50", env=env)
    summary = summary_of(finished)
    assert summary["data"] == "digits"
    assert finished.stderr.count("warning") == 1
    assert "training on data=digits instead" in finished.stderr
    assert not (command.folder / "none").exists()


def test_without_data_and_network_it_may_be_told_to_fail(command: Command) -> None:
    env = {"TFDS_DATA_DIR": str(command.folder / "none"), "NO_PROXY": "*"}
    finished = in_no_network(command, "data.offline=fail", env=env)
    assert finished.code == 2, finished
    assert "or use data=digits" in finished.stderr
    assert not finished.run_dir.exists()


def test_fashion_mnist_is_never_replaced_by_other_data(command: Command) -> None:
    if os.path.isdir("/usr/share/datasets/fashion-mnist"):
        pytest.skip("Debian's package dataset-fashion-mnist is on this machine")
    env = {"TFDS_DATA_DIR": str(command.folder / "none"), "NO_PROXY": "*"}
    finished = in_no_network(command, "data=fashion_mnist", env=env)
    assert finished.code == 2, finished
    last = finished.stderr.splitlines()[-1]
    assert last.startswith("tf2dist: error: data (fashion_mnist): not in ")
    assert last.endswith(
        " is unknown; install Debian's package dataset-fashion-mnist, or give the folder of its idx files as data.dir"
    )
    assert "digits" not in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not finished.run_dir.exists()


def in_no_network(command: Command, *arguments: str, env: dict[str, str]) -> Finished:
    """Runs the command where no name can be resolved, so that no test depends on the network's absence."""
    (command.folder / "sitecustomize.py").write_text(
        "import socket\n"
        "real = socket.getaddrinfo\n"
        "def getaddrinfo(host, *args, **kwargs):\n"
        "    if host not in ('localhost', '127.0.0.1'):\n"
        "        raise socket.gaierror(-2, 'Name or service not known')\n"
        "    return real(host, *args, **kwargs)\n"
        "socket.getaddrinfo = getaddrinfo\n"
    )
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        env[name] = ""
    return command(*arguments, env={**env, "PYTHONPATH": str(command.folder)})


@pytest.mark.slow
def test_numbers_are_finite_and_progress_is_told_without_a_terminal(command: Command) -> None:
    finished = command("data=digits", "train.steps=300")
    summary = summary_of(finished)
    assert all(
        math.isfinite(summary[key]) for key in ("steps_per_sec", "examples_per_sec", "startup_secs", "wall_secs")
    )
    assert "step 300/300" in finished.stderr
    assert "\x1b" not in finished.stderr + finished.stdout
