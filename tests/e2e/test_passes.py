"""Asynchronous training sees every example once in a pass, however unequal its workers are, and if one is killed."""

import signal
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf2dist
from tests.conftest import task_process

NUM_EXAMPLES, BATCH_SIZE, EPOCHS = 1000, 20, 20
SLOW = {"simulate.delay_secs": [0.0, 0.05]}
ARGUMENTS: dict[str, Any] = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "verbose": 0}


@keras.saving.register_keras_serializable("tests")
class CountExamples(keras.layers.Layer):
    """Counts how often the model was trained on each example, of which the input is the number."""

    def build(self, input_shape: object) -> None:
        self.seen = self.add_weight(name="seen", shape=[NUM_EXAMPLES], initializer="zeros", trainable=False)

    def call(self, numbers: object, training: bool = False) -> object:
        if training:
            flat = keras.ops.reshape(numbers, [-1])
            self.seen.assign(self.seen + keras.ops.sum(keras.ops.one_hot(flat, NUM_EXAMPLES), axis=0))
        return keras.ops.cast(numbers, "float32") / NUM_EXAMPLES


def build() -> keras.Model:
    numbers = keras.Input([1], dtype="int32")
    model = keras.Model(numbers, keras.layers.Dense(1)(CountExamples()(numbers)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(NUM_EXAMPLES, dtype=np.int32)[:, None]
    return numbers, 3 * numbers / NUM_EXAMPLES - 1


def seen_in(model: keras.Model) -> np.ndarray:
    return next(np.array(weight) for weight in model.weights if weight.path.endswith("seen"))


def in_batches_of_one_process(epochs: int) -> list[float]:
    model = build()
    history = model.fit(*data(), batch_size=BATCH_SIZE, epochs=epochs, verbose=0).history
    return [float(loss) for loss in history["loss"]]


def test_unequal_workers() -> None:
    cluster = tf2dist.Local(workers=2, ps=1)
    result = tf2dist.fit(build, *data(), mode="async", cluster=cluster, options=SLOW, **ARGUMENTS)
    np.testing.assert_array_equal(seen_in(result.model), EPOCHS)
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
    np.testing.assert_array_equal(seen_in(result.model), EPOCHS)
