"""Asynchronous training sees every example once in a pass, however unequal its workers are, and if one is killed."""

import signal
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf2dist
from tests.conftest import Command, task_process, wait_until
from tests.e2e import count_examples
from tests.e2e.count_examples import NUM_EXAMPLES, build, data, seen_by

BATCH_SIZE, EPOCHS = 20, 20
SLOW = {"simulate.delay_secs": [0.0, 0.05]}
ARGUMENTS: dict[str, Any] = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "verbose": 0}


def in_batches_of_one_process(epochs: int) -> list[float]:
    model = build()
    history = model.fit(*data(), batch_size=BATCH_SIZE, epochs=epochs, verbose=0).history
    return [float(loss) for loss in history["loss"]]


@pytest.mark.thorough
def test_unequal_workers() -> None:
    cluster = tf2dist.Local(workers=2, ps=1)
    result = tf2dist.fit(build, *data(), mode="async", cluster=cluster, options=SLOW, **ARGUMENTS)
    np.testing.assert_array_equal(seen_by(result.model), EPOCHS)
    quick, slow = (worker["local_steps"] for worker in result.summary["workers"])
    assert quick + slow == EPOCHS * NUM_EXAMPLES // BATCH_SIZE
    assert quick > 2 * slow, "the quick worker takes what the slow one does not get to"
    losses = in_batches_of_one_process(EPOCHS)
    assert result.history["loss"][-1] == pytest.approx(losses[-1], abs=0.1 * losses[0])


class Kill(keras.callbacks.Callback):
    """Kills a worker in the middle of an epoch, while it has batches of a call that are not done."""

    def __init__(self, run_dir: Path, victims: dict[int, str]) -> None:
        super().__init__()
        self.run_dir, self.victims = run_dir, victims

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if epoch in self.victims:
            process = task_process(self.run_dir, self.victims[epoch])
            threading.Timer(0.2, process.send_signal, [signal.SIGKILL]).start()


def test_a_worker_is_killed_in_an_epoch(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = tf2dist.fit(
        build,
        *data(),
        mode="async",
        cluster=tf2dist.Local(workers=2, ps=1),
        options=SLOW,
        callbacks=[Kill(run_dir, {3: "worker-1", 12: "worker-0"})],
        run_dir=str(run_dir),
        **ARGUMENTS,
    )
    assert result.summary["restarts"] == 2
    np.testing.assert_array_equal(seen_by(result.model), EPOCHS)


@pytest.mark.parametrize(
    "resumed",
    [
        pytest.param("async cluster=local3", marks=pytest.mark.thorough),
        pytest.param("sync cluster=local1", marks=pytest.mark.slow),
        pytest.param("sync_replicas cluster=local1", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_stopped_in_a_pass_and_resumed_with_another_size(command: Command, resumed: str) -> None:
    common = [f"plugins=[{count_examples.__file__}]", "data=numbers", "model=counting", "train.epochs=5"]
    slow = ["mode=async", "cluster=local2", "simulate.delay_secs=[0.02,0.05]", "train.batch_size_per_worker=20"]
    process = command.start(*common, *slow)
    metrics = command.folder / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"loss"' in metrics.read_text(), process)
    process.terminate()
    assert command.finish(process).code == 143
    finished = command(*common, *f"mode={resumed} train.batch_size_per_worker=7".split())
    assert finished.code == 0, finished
    np.testing.assert_array_equal(seen_by(tf2dist.load_model(finished.run_dir)), 5)
