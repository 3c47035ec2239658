"""`tf2dist.predict` on real processes, held against `keras.Model.predict`; losses, stops and resumes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf2dist
from tests.conftest import ports_of_tasks, slowness, task_process, wait_until
from tests.e2e.test_old_runs import OLD_RUNS

X = np.random.default_rng(0).normal(size=(230, 3)).astype("float32")
# Of a model that takes its time, in a file of its own that the tasks import, too: a batch of four takes 0.1 s, and the
# first one waits for as many workers as the file `workers` says.
SLOW = """
import keras, numpy as np, os, pathlib, tensorflow as tf, time

def rest(x):
    folder = pathlib.Path(__file__).parent
    (folder / f"works-{os.getpid()}").touch()
    while len(list(folder.glob("works-*"))) < int((folder / "workers").read_text()):
        time.sleep(0.05)
    time.sleep(0.1)
    return x

class Slow(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(rest, [x], tf.float32), [None, 2])

def model():
    return keras.Sequential([keras.Input([2]), Slow(), keras.layers.Rescaling(2.0, offset=1.0)])

x = np.arange(800, dtype="float32").reshape(400, 2)
"""
# 25 ranges of 4 batches, as 2 workers cut them.
CALL = """
import sys
import tf2dist, slow
workers = int(sys.argv[1])
predictions = tf2dist.predict(slow.model(), slow.x, batch_size=4, cluster=tf2dist.Local(workers=workers), run_dir="run")
np = slow.np
np.save("result.npy", predictions)
"""


class Own(keras.Model):
    """With a `predict_step` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def predict_step(self, data: Any) -> Any:
        y = super().predict_step(data)
        return {"y": y, "largest": keras.ops.argmax(y, 1), "of the batch": y - keras.ops.mean(y, 0)}


def own() -> keras.Model:
    """Without a `get_config`, so that Keras cannot save it."""
    model = Own()
    model(X[:1])
    model.set_weights([np.linspace(-1, 1, 6, dtype="float32").reshape(3, 2), np.ones(2, "float32")])
    return model


def branched() -> keras.Model:
    words, numbers = keras.Input([1], dtype="string", name="words"), keras.Input([3], name="numbers")
    embedded = keras.layers.Embedding(4, 2)(keras.layers.StringLookup(vocabulary=["a", "b"])(words))
    hidden = keras.layers.Dense(5, "relu")(numbers)
    model = keras.Model(
        {"numbers": numbers, "words": words},
        [keras.layers.Flatten()(embedded), (hidden, keras.layers.Dense(1, dtype="mixed_bfloat16")(hidden))],
    )
    model.compile("adam", "mse")
    return model


WORDS = np.random.default_rng(1).choice(["a", "b", "c"], [230, 1])
CASES: dict[str, tuple[Any, Any, int, int]] = {
    "own step": (own, X, 2, 7),
    "several inputs and outputs": (branched(), {"numbers": X.astype("float64"), "words": WORDS}, 2, 32),
}


def assert_like_keras(found: Any, wanted: Any) -> None:
    keras.tree.assert_same_structure(found, wanted)
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True):
        assert (type(one), one.dtype, one.shape) == (np.ndarray, other.dtype, other.shape)
        np.testing.assert_allclose(one.astype("float32"), other.astype("float32"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_those_of_keras(case: str, tmp_path: Path, no_leftovers: Callable[[], None]) -> None:
    given, x, workers, batch_size = CASES[case]
    model = given if isinstance(given, keras.Model) else given()
    taken = x if isinstance(x, np.ndarray) else {**x, "words": keras.ops.convert_to_tensor(WORDS)}
    wanted = model.predict(taken, batch_size, verbose=0)
    run_dir = tmp_path / "run"
    arguments: dict[str, Any] = {"cluster": tf2dist.Local(workers=workers), "run_dir": run_dir, "verbose": 0}
    assert_like_keras(tf2dist.predict(given, x, batch_size, **arguments), wanted)
    logs = [(run_dir / "logs" / f"worker-{index}.log").read_text() for index in range(workers)]
    # A worker that is ready late finds that the others have taken every range.
    assert any("range " in log for log in logs)
    again = tf2dist.predict(given, x, batch_size, **arguments)
    assert_like_keras(again, wanted)
    assert logs == [(run_dir / "logs" / f"worker-{index}.log").read_text() for index in range(workers)]


def test_a_run_predicts_a_mapped_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).integers(0, 256, (230, 28, 28, 1), np.uint8)
    np.save(tmp_path / "x.npy", x)
    found = tf2dist.predict(
        OLD_RUNS / "sync",
        np.load(tmp_path / "x.npy", mmap_mode="r"),
        cluster=tf2dist.Local(workers=2),
        run_dir=tmp_path / "run",
    )
    assert_like_keras(found, tf2dist.load_model(OLD_RUNS / "sync").predict(x, verbose=0))
    opening, *_, told, place = capfd.readouterr().err.splitlines()
    assert opening == "predict: starting 2 workers"
    assert re.fullmatch(r"230 examples in [\d.]+ s \([\d.,]+/s\)", told)
    assert place == str(tmp_path / "run")


def write_slow_model(folder: Path, slow: str = SLOW, *, at_once: int = 1) -> None:
    """`at_once`: that many workers have begun a range before the first range is done."""
    (folder / "slow.py").write_text(slow)
    (folder / "workers").write_text(str(at_once))


def start(folder: Path, workers: int, *, at_once: int = 1) -> "subprocess.Popen[str]":
    write_slow_model(folder, at_once=at_once)
    (folder / "call.py").write_text(CALL)
    return subprocess.Popen(
        [sys.executable, "call.py", str(workers)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def done(folder: Path) -> dict[str, int]:
    """When each range was written."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "run" / "ranges").glob("*.npz")}


def check_result(folder: Path, process: "subprocess.Popen[str]") -> str:
    _, err = process.communicate(timeout=100 * slowness())
    assert process.returncode == 0, err
    wanted = 2 * np.arange(800, dtype="float32").reshape(400, 2) + 1
    np.testing.assert_array_equal(np.load(folder / "result.npy"), wanted)
    return err


@pytest.mark.thorough
@pytest.mark.parametrize("worker", ["worker-1", pytest.param("worker-0", marks=pytest.mark.slow)])
def test_a_worker_is_killed(worker: str, tmp_path: Path, no_leftovers: Callable[[], None]) -> None:
    process = start(tmp_path, 3, at_once=3)
    wait_until(lambda: len(done(tmp_path)) >= 3, process)
    task_process(tmp_path / "run", worker).kill()
    assert f"{worker} was killed by SIGKILL; starting it again" in check_result(tmp_path, process)


@pytest.mark.thorough
def test_a_prediction_goes_on_with_another_number_of_workers(tmp_path: Path, no_leftovers: Callable[[], None]) -> None:
    # All of it is killed at once, in the middle.
    process = start(tmp_path, 2)
    wait_until(lambda: len(done(tmp_path)) >= 4, process)
    process.kill()
    process.communicate(timeout=60 * slowness())
    no_leftovers()
    first = done(tmp_path)
    assert 4 <= len(first) < 25
    # Ctrl-C.
    process = start(tmp_path, 3)
    wait_until(lambda: len(done(tmp_path)) >= len(first) + 2, process)
    task_process(tmp_path / "run", "worker-1").kill()
    wait_until(lambda: len(done(tmp_path)) >= len(first) + 4, process)
    second = done(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60 * slowness())
    assert process.returncode == -signal.SIGINT
    path = tmp_path / "run"
    assert err.splitlines()[-1] == f'KeyboardInterrupt: tf2dist: stopped by Ctrl-C; add run_dir="{path}" to go on'
    no_leftovers()
    assert first.items() <= second.items() <= done(tmp_path).items(), "no range is written again"
    # To the end; what a range file holds is taken as it is, so its range is not predicted again.
    marked = path / "ranges" / min(first)
    os.rename(marked, tmp_path / "kept.npz")
    np.savez(marked, np.full([16, 2], -1, "float32"))
    process = start(tmp_path, 1)
    process.communicate(timeout=100 * slowness())
    assert process.returncode == 0
    result = np.load(tmp_path / "result.npy")
    rows = slice(16 * int(marked.stem), 16 * int(marked.stem) + 16)
    assert (result[rows] == -1).all()
    wanted = 2 * np.arange(800, dtype="float32").reshape(400, 2) + 1
    wanted[rows] = -1
    np.testing.assert_array_equal(result, wanted)
    assert not (path / "ranges").exists()
    assert json.loads((path / "summary.json").read_text())["examples"] == 400


class Checking(keras.layers.Layer):
    """Refuses large numbers."""

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(self.check, [x], tf.float32), x.shape)

    def check(self, x: np.ndarray) -> np.ndarray:
        assert x.max() < 2.0, "too large"
        return x


def checking() -> keras.Model:
    return keras.Sequential([keras.Input([3]), Checking()])


def test_an_error_of_a_task_is_an_exception_with_its_place(tmp_path: Path) -> None:
    told = rf"(?m)^worker-\d: .*AssertionError: too large, in the layer \w+/checking \({__file__}:\d+\)$"
    with pytest.raises(tf2dist.TaskFailure, match=told):
        tf2dist.predict(checking, X, 7, cluster=tf2dist.Local(workers=2), run_dir=tmp_path / "run", verbose=0)


@pytest.mark.thorough
def test_an_error_of_the_users_code_is_told(tmp_path: Path) -> None:
    model = SLOW.replace("time.sleep(0.1)", "assert x.max() < 790, 'too large'")
    write_slow_model(tmp_path, model)
    command = [sys.executable, "-c", CALL, "2"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100 * slowness())
    assert finished.returncode == 1
    assert "AssertionError: too large" in finished.stderr
    assert re.search(r"worker-\d: .*\(.*slow.py:9\)$", finished.stderr.splitlines()[-1])


@pytest.mark.slow
def test_many_hosts_make_the_same_call(tmp_path: Path) -> None:
    """The run directory is the same for both; worker 0 returns the result."""
    write_slow_model(tmp_path)
    code = """
import tf2dist, slow
predictions = tf2dist.predict(slow.model(), slow.x, batch_size=4, run_dir="run", verbose=0)
print(predictions if predictions is None else float(abs(predictions - 2 * slow.x - 1).max()))
"""
    addresses = [f"localhost:{port}" for port in ports_of_tasks(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"chief": addresses[:1], "worker": addresses[1:]},
                        "task": {"type": job, "index": 0},
                    }
                ),
            },
        )
        for job in ("chief", "worker")
    ]
    outs = [process.communicate(timeout=110 * slowness()) for process in processes]
    assert [out.splitlines()[-1:] for out, _ in outs] == [["0.0"], ["None"]], outs
    logs = [(tmp_path / "run" / "logs" / f"worker-{index}.log").read_text() for index in (0, 1)]
    assert all("range " in log for log in logs), "both have worked"
