"""Checkpoints of tables on parameter servers: exact, with any number of ps, and never as a whole in memory."""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

import tf2dist
from tests.conftest import Command, ended, our_processes, start_module, wait_until
from tf2dist.data.loading import make_impressions
from tf2dist.tf_internals.keras import fresh_names

pytestmark = pytest.mark.timeout(900)  # several runs of some 10 s, each with a limit of its own

NUM_USERS = 300_000  # more than one piece
OPTIONS = (
    *("experiment=clicks", "cluster=local2", "data.num_items=1000", "data.num_impressions=40000"),
    *("data.num_validation=1000", "train.epochs=null", "train.eval_every_steps=null"),
)
PARTITIONED = ("cluster.num_ps=2", "cluster.placement=partitioned")


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def newest_arrays(run_dir: Path) -> dict[str, np.ndarray]:
    with np.load(run_dir / "checkpoints" / steps(run_dir)[-1] / "arrays.npz") as arrays:
        return dict(arrays)


def assert_model_is_the_checkpoint(run_dir: Path) -> None:
    arrays, model = newest_arrays(run_dir), tf2dist.load_model(run_dir)
    for name in ("users", "items"):
        table = model.get_layer(name).embeddings
        slot = next(slot for slot in model.optimizer.variables if slot.path.endswith(f"{name}_embeddings_accumulator"))
        np.testing.assert_array_equal(table.numpy(), arrays[f"model/{name}/embeddings"])
        np.testing.assert_array_equal(slot.numpy(), arrays[f"optimizer/{name}/embeddings/accumulators"])
    assert len(arrays["model/users/embeddings"]) == NUM_USERS


@pytest.mark.parametrize(
    "mode", [pytest.param("async", marks=pytest.mark.thorough), pytest.param("sync_replicas", marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on_with_other_servers_and_in_the_other_mode(command: Command, mode: str) -> None:
    """Where nothing is left to train, what the servers hold is written as model.keras."""
    options = (*OPTIONS, f"data.num_users={NUM_USERS}")
    run_dir = command.folder / "run"
    process = command.start(*options, f"mode={mode}", *PARTITIONED, "train.steps=1000000", "checkpoint.every_steps=20")
    wait_until(lambda: bool(steps(run_dir)), process, timeout_secs=120)
    process.kill()
    command.finish(process)
    step = int(steps(run_dir)[-1].removeprefix("step-"))
    before = newest_arrays(run_dir)
    three = ("cluster.num_ps=3", "cluster.placement=partitioned")
    for more, mode_after, servers in ((0, mode, three), (10, "sync", ()), (20, mode, ("cluster.num_ps=1",))):
        resumed = command(*options, f"mode={mode_after}", *servers, f"train.steps={step + more}")
        assert resumed.code == 0, resumed
        if not more:
            assert f"going on at step {step}" in resumed.stderr
            for name, array in newest_arrays(run_dir).items():
                np.testing.assert_array_equal(array, before[name], err_msg=name)
        assert_model_is_the_checkpoint(run_dir)
        after = newest_arrays(run_dir)["model/users/embeddings"]
        moved = (after != before["model/users/embeddings"]).any(axis=1).sum()
        assert bool(more) <= moved <= more * 1000, "the users of these steps alone, 500 for each worker"


@pytest.mark.slow
def test_a_killed_server_takes_no_table_with_it(command: Command) -> None:
    options = ("mode=async", *OPTIONS, f"data.num_users={NUM_USERS}", *PARTITIONED)
    process = command.start(*options, "train.steps=3000", "checkpoint.every_steps=200")
    wait_until(lambda: bool(steps(command.folder / "run")), process, timeout_secs=120)
    next(process for process in our_processes() if is_task(process, "ps-1")).kill()
    finished = command.finish(process)
    assert finished.code == 0, finished
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert (summary["updates_applied"], summary["restarts"]) == (3000, 1)
    assert_model_is_the_checkpoint(finished.run_dir)


TASKS = ("chief-0", "ps-0", "ps-1")


def stopped_peaks(command: Command, *options: str) -> dict[str, int]:
    """Runs until two more checkpoints are there, and stops; the most MB of each of `TASKS` that no file has."""
    run_dir = command.folder / "run"
    before = set(steps(run_dir))

    def stop(process: subprocess.Popen[str]) -> None:
        wait_until(lambda: len(set(steps(run_dir)) - before) > 1, process, timeout_secs=120)
        process.send_signal(signal.SIGTERM)

    return peaks_of(command, TASKS, stop, 143, "train.steps=1000000", "checkpoint.every_steps=20", *options)


def ended_peak(command: Command, *options: str) -> int:
    """Goes on for some steps, to the end of a run; likewise of the coordinator."""
    last = int(steps(command.folder / "run")[-1].removeprefix("step-"))
    peaks = peaks_of(command, ("chief-0",), lambda process: None, 0, f"train.steps={last + 20}", *options)
    return peaks["chief-0"]


def peaks_of(
    command: Command, tasks: Sequence[str], act: Callable[[subprocess.Popen[str]], None], code: int, *options: str
) -> dict[str, int]:
    samples: dict[str, list[int]] = {task: [] for task in tasks}
    process = command.start("mode=async", *OPTIONS, *options)
    sampling = threading.Thread(target=_sample, args=(process, samples))
    sampling.start()
    act(process)
    finished = command.finish(process)
    sampling.join()
    assert finished.code == code, finished
    assert min(map(len, samples.values())) > 20
    return {task: max(numbers) for task, numbers in samples.items()}


def _sample(process: subprocess.Popen[str], samples: dict[str, list[int]]) -> None:
    found: dict[str, psutil.Process] = {}
    while process.poll() is None:
        missing = samples.keys() - found.keys()
        with contextlib.suppress(OSError, psutil.Error):  # one that has just ended
            running = our_processes() if missing else []
            found |= {task: one for one in running for task in missing if is_task(one, task)}
        for task, one in list(found.items()):
            try:
                status = Path(f"/proc/{one.pid}/status").read_text(encoding="utf-8")
                samples[task].append(int(re.findall(r"RssAnon:\s*(\d+)", status)[0]) >> 10)
            except (OSError, IndexError):  # it has ended
                del found[task]
        threading.Event().wait(0.02)


def is_task(process: psutil.Process, name: str) -> bool:
    folder = f"/proc/{process.pid}/fd"
    return any(os.readlink(f"{folder}/{number}").endswith(f"{name}.log") for number in (1, 2))


@pytest.mark.slow
def test_only_servers_hold_tables_and_only_their_rows(command: Command, tmp_path: Path) -> None:
    """With a million rows, 64 MB and as much of the optimizer, instead of a thousand."""
    stopped, ended = {}, {}
    for rows in (1000, 1_000_000):
        own = Command(tmp_path / str(rows))
        own.folder.mkdir()
        users = f"data.num_users={rows}"
        stopped[rows] = stopped_peaks(own, users, *PARTITIONED)
        ended[rows] = ended_peak(own, users, "cluster.num_ps=1")
        assert (own.folder / "run" / "model.keras").stat().st_size > rows * 128
    more = {task: stopped[1_000_000][task] - stopped[1000][task] for task in TASKS}
    assert more["chief-0"] < 100, (more, stopped)
    assert max(more["ps-0"], more["ps-1"]) < 64 + 100, (more, stopped)  # half of both, and pieces that are read
    assert ended[1_000_000] < ended[1000] + 100, ended


@pytest.mark.slow
def test_a_table_is_exported_evaluated_and_taken_over(command: Command) -> None:
    options = ("mode=async", *OPTIONS, "data.num_users=100000", *PARTITIONED)
    finished = command(*options, "train.steps=40")
    assert finished.code == 0, finished
    stdout, _ = ended(start_module(command.folder, "tf2dist.evaluate", str(finished.run_dir)), 0)
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert float(re.findall(r"loss +(\S+)", stdout)[0]) == pytest.approx(summary["test_loss"], rel=1e-3)

    ended(start_module(command.folder, "tf2dist.export", str(finished.run_dir)), 0)
    exported, model = tf.saved_model.load(str(finished.run_dir / "saved_model")), tf2dist.load_model(finished.run_dir)
    x, _, _ = make_impressions(100, 100_000, 1000, sample=1)
    like = {tensor.name: tf.cast(x[tensor.name], tensor.dtype) for tensor in model.inputs}
    np.testing.assert_allclose(exported.serve(like), model(like), rtol=1e-5)

    again = command(*options, "train.steps=1", f"init_from={finished.run_dir}", run_dir="again")
    assert again.code == 0, again
    before, after = (newest_arrays(run_dir)["model/users/embeddings"] for run_dir in (finished.run_dir, again.run_dir))
    moved = (before != after).any(axis=1).sum()
    assert 0 < moved <= 500, "the users of one batch alone"


def two_layers() -> keras.Model:
    embedding = keras.layers.Embedding(NUM_USERS, 16, name="users")
    model = keras.Sequential([keras.Input([], dtype="int32"), embedding, keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


class Marks(keras.callbacks.Callback):
    """Sets the last row of the table, which no example looks up, after the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            table = self.model.get_layer("users").embeddings
            table.assign(np.concatenate([table.numpy()[:-1], np.full([1, 16], 7, np.float32)]))


@pytest.mark.parametrize(
    "is_builder", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.thorough)]
)
def test_callbacks_have_the_table_and_change_it(tmp_path: Path, is_builder: bool) -> None:
    keras.utils.set_random_seed(3)
    with fresh_names():
        model: Any = two_layers if is_builder else two_layers()
    x, y = np.arange(1000) * 200, np.arange(1000) % 7
    local = tf2dist.Local(workers=2, ps=2)
    given: dict[str, Any] = {
        "mode": "async",
        "options": ["cluster.placement=partitioned"],
        "cluster": local,
        "run_dir": tmp_path / "run",
    }
    result = tf2dist.fit(model, x, y, batch_size=50, epochs=2, callbacks=[Marks()], verbose=0, **given)
    table = result.model.get_layer("users").embeddings.numpy()
    np.testing.assert_array_equal(table[-1], np.full(16, 7, np.float32))
    np.testing.assert_array_equal(table, newest_arrays(result.run_dir)["model/users/embeddings"])
    np.testing.assert_array_equal(table, tf2dist.load_model(result.run_dir).get_layer("users").embeddings.numpy())
    assert result.history["loss"][1] < result.history["loss"][0]
