"""Batches per second of an input pipeline alone, on one core: ours, or the usual one of TensorFlow's guides."""

import functools
import os
import sys
import time
from collections.abc import Callable

import tensorflow as tf

from tests.bench.workload import BATCH_SIZE, Workload
from tf2dist.data import Arrays, Splits
from tf2dist.data.passes import InputPosition, NumberedSteps, Sharding
from tf2dist.training.parameter_server.batches import gathered_batches, publish

WARMUP, BATCHES, STEPS_PER_CALL = 100, 2_000, 50


def ours(train: Arrays) -> tuple[Callable[[], object], int]:
    """As calls of many steps get their batches, see `gathered_batches`."""
    publish(Splits(train, train, train))
    sharding = Sharding(len(train), BATCH_SIZE, 1, seed=0, whole_batch_loss=False)
    steps = NumberedSteps(sharding, InputPosition())
    begun = tf.Variable(0, dtype=tf.int64)

    @tf.function(autograph=False)
    def call() -> list[list[tf.Tensor]]:
        first = begun.assign_add(STEPS_PER_CALL) - STEPS_PER_CALL
        numbers = first + tf.range(STEPS_PER_CALL, dtype=tf.int64)
        return gathered_batches(tf.stack(steps.ranges(numbers), 1), sharding, train.layout)

    return call, STEPS_PER_CALL


def per_element(train: Arrays) -> tuple[Callable[[], object], int]:
    examples = tf.data.Dataset.from_tensor_slices((train.x, train.y)).shuffle(10_000).repeat()
    return functools.partial(next, iter(examples.batch(BATCH_SIZE).prefetch(2))), 1


def main(how: str, arrays: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    train = Arrays(*Workload("", "", {}, "", 0, 0, 0, arrays).load_bytes())
    take, batches_at_once = {"ours": ours, "per_element": per_element}[how](train)
    done, start = -WARMUP, 0.0
    while done < BATCHES:
        take()
        done += batches_at_once
        start = start if done > 0 else time.perf_counter()
    print(done / (time.perf_counter() - start))


if __name__ == "__main__":
    main(*sys.argv[1:])
