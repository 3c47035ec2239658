"""A port that follows the guides of TensorFlow 2: a function call for each step, and each variable sent separately."""

import json
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.bench.deep_models import BUILDERS, deep_model
from tests.bench.workload import BATCH_SIZE, HIDDEN_UNITS, LEARNING_RATE, Stopwatch, Workload, run
from tf2dist.data import Arrays, Splits
from tf2dist.model.builtin import build_model

ARGUMENTS = {"softmax": {}, "dnn": {"hidden_units": [*HIDDEN_UNITS["dnn"]]}, "cnn": {}}
MAX_SCHEDULE = 100  # calls that are scheduled at a time


def dataset(workload: Workload, seed: int) -> tf.data.Dataset:
    images, labels = workload.load_bytes()
    slices = tf.data.Dataset.from_tensor_slices((images.astype(np.float32), labels))
    return slices.shuffle(10_000, seed).repeat().batch(BATCH_SIZE)


def model_of(workload: Workload) -> keras.Model:
    """The model of tf2dist, whose input is images as bytes."""
    image = Arrays(np.zeros([1, 28, 28, 1], np.uint8))
    keras.utils.set_random_seed(0)
    if workload.model in BUILDERS:
        return deep_model(workload.model, num_classes=10)
    return build_model({"name": workload.model, **ARGUMENTS[workload.model]}, Splits(image))


def step_function(model: keras.Model, optimizer: keras.Optimizer, num_workers: int) -> Callable[..., tf.Tensor]:
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, model(images, training=True), from_logits=True
            )
            loss = tf.reduce_mean(losses) / num_workers
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    return step


def main(workload: Workload) -> None:
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": workload.jobs, "task": {"type": workload.job, "index": workload.index}}
    )
    (sync if workload.mode == "sync" else asynchronous)(workload)


def sync(workload: Workload) -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = model_of(workload)
        optimizer = keras.optimizers.SGD(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    step = step_function(model, optimizer, strategy.num_replicas_in_sync)
    iterator = iter(strategy.distribute_datasets_from_function(lambda context: dataset(workload, workload.index)))

    @tf.function
    def train(iterator: Any) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=next(iterator)), None)

    stopwatch, done = Stopwatch(workload), 0
    while not stopwatch.passed(done):
        train(iterator)
        done += 1
    stopwatch.tell()


def asynchronous(workload: Workload) -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if workload.job in ("worker", "ps"):
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)  # with fewer it can block for ever
        server = tf.distribute.Server(
            resolver.cluster_spec(), workload.job, workload.index, protocol="grpc", config=config
        )
        server.join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = model_of(workload)
        optimizer = keras.optimizers.SGD(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    step = step_function(model, optimizer, 1)

    @tf.function
    def train(iterator: Any) -> tf.Tensor:
        return strategy.run(step, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(lambda: dataset(workload, 0)))
    schedule = min(MAX_SCHEDULE, workload.warmup_steps)
    stopwatch, done = Stopwatch(workload), 0
    while not stopwatch.passed(done):
        for _ in range(schedule):
            coordinator.schedule(train, args=(iterator,))
        coordinator.join()
        done += schedule
    stopwatch.tell()


if __name__ == "__main__":
    run(main)
