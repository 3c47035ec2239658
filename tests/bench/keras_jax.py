"""Keras's own synchronous training on JAX: DataParallel over gloo, in an environment that need not have TensorFlow."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

from tests.bench.workload import BATCH_SIZE, HIDDEN_UNITS, LEARNING_RATE, Stopwatch, Workload, run

layers = keras.layers


def network(model: str) -> keras.Model:
    image = [keras.Input((28, 28, 1)), layers.Rescaling(1 / 255)]
    if model == "cnn":
        hidden = [
            layers.Conv2D(32, 3, 1, "same", activation="relu"),
            layers.Conv2D(64, 3, 2, "same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(64, "relu"),
        ]
    else:
        hidden = [layers.Flatten(), *(layers.Dense(units, "relu") for units in HIDDEN_UNITS[model])]
    return keras.Sequential([*image, *hidden, layers.Dense(10)])


class Watch(keras.callbacks.Callback):  # type: ignore[misc]
    """Looks at the end of epochs alone: a hook of batches would make Keras wait for the figures of each step."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._steps, self._stopwatch = workload.warmup_steps, Stopwatch(workload)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if self._stopwatch.passed((epoch + 1) * self._steps):
            self._stopwatch.tell()


def main(workload: Workload) -> None:
    workers = workload.jobs["worker"]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    keras.utils.set_random_seed(0)  # all begin with the same weights
    keras.distribution.initialize(workers[0], len(workers), workload.index)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    images, labels = workload.load_bytes()
    # An epoch is the warm-up, or what is timed.
    rows = np.random.default_rng(workload.index).integers(len(labels), size=workload.warmup_steps * BATCH_SIZE)
    model = network(workload.model)
    model.compile(keras.optimizers.SGD(LEARNING_RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    epochs = workload.steps // workload.warmup_steps
    model.fit(images[rows], labels[rows], BATCH_SIZE, epochs, verbose=0, callbacks=[Watch(workload)])


if __name__ == "__main__":
    run(main)
