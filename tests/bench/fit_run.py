"""The same training by a call of `tf2dist.fit`: MODE NUM_WORKERS STEPS EPOCHS ARRAYS RUN_DIR CALLBACKS.

CALLBACKS: "none", or "usual" for three common ones.
"""

import sys

import keras
import numpy as np

import tf2dist
from tests.bench.workload import BATCH_SIZE, HIDDEN_UNITS, LEARNING_RATE


def build() -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(units, "relu") for units in HIDDEN_UNITS["dnn"]]
    model = keras.Sequential(
        [keras.Input((28, 28, 1)), layers.Rescaling(1 / 255), layers.Flatten(), *hidden, layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(LEARNING_RATE), loss, metrics=["accuracy"])
    return model


def main() -> None:
    mode, num_workers, steps, epochs, arrays, run_dir, which = sys.argv[1:]
    usual = [
        keras.callbacks.EarlyStopping("loss", patience=100, restore_best_weights=True),
        keras.callbacks.CSVLogger(f"{run_dir}.csv"),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
    ]
    tf2dist.fit(
        build,
        np.load(f"{arrays}/images.npy", mmap_mode="r"),
        np.load(f"{arrays}/labels.npy", mmap_mode="r"),
        batch_size=BATCH_SIZE,
        steps_per_epoch=int(steps) // int(epochs),
        epochs=int(epochs),
        callbacks=usual if which == "usual" else None,
        mode=mode,
        cluster=tf2dist.Local(workers=int(num_workers)),
        run_dir=run_dir,
        verbose=0,
    )


if __name__ == "__main__":
    main()
