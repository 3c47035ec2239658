"""The program that tf2dist replaces, rewritten: sessions, feed_dict, Supervisor, SyncReplicasOptimizer."""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tests.bench import click_log
from tests.bench.workload import (
    CLICKS_BATCH_SIZE,
    COLUMNS,
    HIDDEN_UNITS,
    LEARNING_RATE,
    NUM_VALIDATION,
    TABLE_ROWS,
    Batches,
    Race,
    Stopwatch,
    Workload,
    run,
)

v1 = tf.compat.v1


@dataclass(frozen=True)
class Program:
    """What is trained, and how.

    Attributes:
        inputs: the placeholders of the arrays of `batches`.
        save_secs: the time between two checkpoints; 0 for none.
        accuracy: where it is raced for, with what is fed to evaluate it.
    """

    inputs: list[tf.Tensor]
    batches: Batches
    loss: tf.Tensor
    optimizer: Any
    save_secs: int
    accuracy: tf.Tensor | None = None
    held_out: dict[tf.Tensor, np.ndarray] = field(default_factory=dict)

    def feed(self) -> dict[tf.Tensor, np.ndarray]:
        return dict(zip(self.inputs, self.batches.next(), strict=True))


def dense(x: tf.Tensor, name: str, units: int, *, relu: bool) -> tf.Tensor:
    inputs = x.shape[-1]
    with v1.variable_scope(name):
        weights = v1.get_variable("w", [inputs, units], initializer=v1.glorot_uniform_initializer())
        bias = v1.get_variable("b", [units], initializer=v1.zeros_initializer())
    y = tf.matmul(x, weights) + bias
    return tf.nn.relu(y) if relu else y


def convolution(x: tf.Tensor, name: str, filters: int, stride: int) -> tf.Tensor:
    with v1.variable_scope(name):
        shape = [3, 3, x.shape[-1], filters]
        weights = v1.get_variable("w", shape, initializer=v1.glorot_uniform_initializer())
        bias = v1.get_variable("b", [filters], initializer=v1.zeros_initializer())
    return tf.nn.relu(tf.nn.conv2d(x, weights, stride, "SAME") + bias)


def logits_of(model: str, images: tf.Tensor) -> tf.Tensor:
    x = tf.reshape(images, [-1, 784])
    for number, units in enumerate(HIDDEN_UNITS.get(model, ())):
        x = dense(x, f"hidden{number}", units, relu=True)
    if model == "cnn":
        x = convolution(convolution(images, "conv1", 32, 1), "conv2", 64, 2)
        x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), [-1, 7 * 7 * 64])
        x = dense(x, "hidden", 64, relu=True)
    return dense(x, "logits", 10, relu=False)


def classifier(workload: Workload) -> Program:
    """One of images."""
    images = v1.placeholder(tf.float32, [None, 28, 28, 1])
    labels = v1.placeholder(tf.int32, [None])
    logits = logits_of(workload.model, images)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    correct = tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels)
    accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))
    gradient_descent = v1.train.GradientDescentOptimizer(LEARNING_RATE)
    adam = v1.train.AdamOptimizer(epsilon=1e-7)  # as Keras has it
    optimizer = adam if workload.accuracy else gradient_descent
    num_held = NUM_VALIDATION if workload.accuracy else 0
    all_images, all_labels = workload.load()
    batches = Batches([all_images[num_held:], all_labels[num_held:]], seed=workload.index)
    held_out = {images: all_images[:num_held], labels: all_labels[:num_held]}
    return Program([images, labels], batches, loss, optimizer, 600, accuracy, held_out)


def embedded(ids: tf.Tensor, name: str, rows: int, num_ps: int, columns: int = COLUMNS) -> tf.Tensor:
    """Rows of a table that lies on all the ps."""
    with v1.variable_scope(name, partitioner=v1.fixed_size_partitioner(num_ps)):
        table = v1.get_variable("table", [rows, columns], initializer=v1.random_uniform_initializer(-0.05, 0.05))
    return v1.nn.embedding_lookup(table, ids, partition_strategy="mod")


def clicks(workload: Workload) -> Program:
    """The model of clicks."""
    x, y = workload.impressions()
    inputs = {name: v1.placeholder(array.dtype, [None, *array.shape[1:]]) for name, array in x.items()}
    clicked = v1.placeholder(tf.float32, [None, 1])
    users, items = (
        embedded(inputs[name], name, TABLE_ROWS[workload.model], len(workload.jobs["ps"])) for name in ("user", "item")
    )
    user = dense(tf.concat([users, inputs["context"]], 1), "user_tower", COLUMNS, relu=False)
    item = dense(items, "item_tower", COLUMNS, relu=False)
    logits = tf.reduce_sum(user * item, 1, keepdims=True)
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicked, logits=logits))
    optimizer = v1.train.AdagradOptimizer(LEARNING_RATE)
    batches = Batches([*x.values(), y], workload.index, CLICKS_BATCH_SIZE)
    return Program([*inputs.values(), clicked], batches, loss, optimizer, save_secs=0)


def wide_and_deep(workload: Workload) -> Program:
    """The model of `click_log`."""
    x, y = click_log.examples()
    numbers, ids = (v1.placeholder(array.dtype, [None, *array.shape[1:]]) for array in x.values())
    clicked = v1.placeholder(tf.float32, [None, 1])
    num_ps, rows = len(workload.jobs["ps"]), click_log.ROWS
    deep_rows, wide_rows = (
        [embedded(ids[:, i], f"{part}{i}", rows, num_ps, size) for i, size in enumerate(sizes)]
        for part, sizes in (("deep", click_log.COLUMNS), ("wide", [1] * len(click_log.COLUMNS)))
    )
    deep = tf.concat([numbers, *deep_rows], 1)
    for number, units in enumerate(click_log.HIDDEN_UNITS):
        deep = dense(deep, f"hidden{number}", units, relu=True)
    logits = tf.add_n([dense(deep, "deep", 1, relu=False), dense(numbers, "wide", 1, relu=False), *wide_rows])
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicked, logits=logits))
    batches = Batches([*x.values(), y], workload.index, click_log.BATCH_SIZE)
    return Program([numbers, ids, clicked], batches, loss, v1.train.AdagradOptimizer(LEARNING_RATE), save_secs=0)


BUILDERS: dict[str, Callable[[Workload], Program]] = {
    **dict.fromkeys(TABLE_ROWS, clicks),
    click_log.WIDE_AND_DEEP: wide_and_deep,
}


def main(workload: Workload) -> None:
    v1.disable_v2_behavior()
    is_chief = workload.index == 0
    # Without the filter a worker's session needs all the other workers, at its end too.
    filters = ["/job:ps", f"/job:worker/task:{workload.index}"] if workload.job == "worker" else []
    session_config = v1.ConfigProto(device_filters=filters)
    if sys.argv[2] == "old, our threads":  # see `devices.share_cores`
        session_config.intra_op_parallelism_threads = max(1, (os.cpu_count() or 1) // len(workload.jobs["worker"]))
        session_config.experimental.disable_thread_spinning = True
    cluster = tf.train.ClusterSpec(workload.jobs)
    server = v1.train.Server(cluster, job_name=workload.job, task_index=workload.index, config=session_config)
    if workload.job == "ps":
        server.join()

    build = BUILDERS.get(workload.model, classifier)
    more: dict[str, Any] = {}
    with v1.device(v1.train.replica_device_setter(worker_device=f"/job:worker/task:{workload.index}", cluster=cluster)):
        global_step = v1.train.get_or_create_global_step()
        program = build(workload)
        optimizer = program.optimizer
        if workload.mode == "sync":
            count = len(workload.jobs["worker"])
            optimizer = v1.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=count, total_num_replicas=count)
        train = optimizer.minimize(program.loss, global_step=global_step)
        if workload.mode == "sync":
            more["local_init_op"] = optimizer.chief_init_op if is_chief else optimizer.local_step_init_op
            more["ready_for_local_init_op"] = optimizer.ready_for_local_init_op
            tokens, queue_runner = optimizer.get_init_tokens_op(), optimizer.get_chief_queue_runner()
        initialize = v1.global_variables_initializer()

    supervisor = v1.train.Supervisor(
        is_chief=is_chief,
        logdir=tempfile.mkdtemp() if is_chief else None,
        init_op=initialize,
        global_step=global_step,
        recovery_wait_secs=1,
        save_model_secs=program.save_secs,
        **more,
    )
    session = supervisor.prepare_or_wait_for_session(server.target, config=session_config)
    if workload.mode == "sync" and is_chief:
        supervisor.start_queue_runners(session, [queue_runner])
        session.run(tokens)

    stopwatch, race = Stopwatch(workload), Race(workload)
    while True:
        _, _, step = session.run([train, program.loss, global_step], feed_dict=program.feed())
        if workload.accuracy:
            if is_chief and race.won(int(step), lambda: session.run(program.accuracy, program.held_out)):
                race.tell()
        elif stopwatch.passed(int(step)):
            stopwatch.tell()
            break


if __name__ == "__main__":
    run(main)
