"""One process with all the cores: Keras's own `fit`, and a bare loop of `tf.function` calls."""

import sys
from typing import Any

import keras
import tensorflow as tf

from tests.bench.plain_port import dataset, model_of
from tests.bench.workload import (
    BATCH_SIZE,
    CLICKS_BATCH_SIZE,
    COLUMNS,
    LEARNING_RATE,
    TABLE_ROWS,
    Stopwatch,
    Workload,
    run,
)
from tf2dist.model.builtin import two_tower

STEPS_PER_CALL = 50


def keras_fit(workload: Workload, model: keras.Model, stopwatch: Stopwatch) -> None:
    class Watch(keras.callbacks.Callback):
        done = 0

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            stopwatch.passed(batch + 1)

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(LEARNING_RATE), loss, steps_per_execution=STEPS_PER_CALL)
    model.fit(dataset(workload, 0), steps_per_epoch=workload.steps, epochs=1, verbose=0, callbacks=[Watch()])


def fit_clicks(workload: Workload, stopwatch: Stopwatch) -> None:
    """Keras as it is, with the model of clicks."""

    class Watch(keras.callbacks.Callback):
        done = 0

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.done += 1
            self.model.stop_training = stopwatch.passed(self.done)

    (x, y), rows = workload.impressions(), TABLE_ROWS[workload.model]
    model = two_tower({name: array.shape[1:] for name, array in x.items()}, None, rows, rows, COLUMNS)
    model.compile(keras.optimizers.Adagrad(LEARNING_RATE), model.loss, metrics=[keras.metrics.AUC()])
    model.fit(x, y, batch_size=CLICKS_BATCH_SIZE, epochs=1_000, verbose=0, callbacks=[Watch()])


def bare(workload: Workload, model: keras.Model, stopwatch: Stopwatch) -> None:
    """The fastest that plain TensorFlow does here: whole batches gathered from the array, a loop in the graph."""
    images, labels = (tf.constant(array) for array in workload.load_bytes())
    variables = [variable.value for variable in model.trainable_variables]

    def gather(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(images, rows), tf.gather(labels, rows)

    order = tf.data.Dataset.range(len(labels)).shuffle(len(labels)).repeat().batch(BATCH_SIZE, drop_remainder=True)
    iterator = iter(order.map(gather).prefetch(8))

    @tf.function
    def steps(iterator: Any) -> None:
        for _ in tf.range(STEPS_PER_CALL):
            batch_images, batch_labels = next(iterator)
            with tf.GradientTape() as tape:
                logits = model(tf.cast(batch_images, tf.float32), training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch_labels, logits)
                loss = tf.reduce_mean(losses)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(LEARNING_RATE * gradient)

    done = 0
    while not stopwatch.passed(done):
        steps(iterator)
        done += STEPS_PER_CALL


def main(workload: Workload) -> None:
    stopwatch = Stopwatch(workload)
    if workload.model in TABLE_ROWS:
        fit_clicks(workload, stopwatch)
    else:
        {"keras_fit": keras_fit, "bare": bare}[sys.argv[2]](workload, model_of(workload), stopwatch)
    stopwatch.tell()


if __name__ == "__main__":
    run(main)
