"""Batches per second of an input pipeline alone, on one core: ours, or the usual one of TensorFlow's guides."""

import functools
import os
import sys
import time

import tensorflow as tf

from tests.bench.workload import BATCH_SIZE, Workload
from tf2dist.data import Arrays, Splits
from tf2dist.data.pipeline import Sharding, blocks
from tf2dist.training.parameter_server.inputs import publish, remote_examples

WARMUP, BATCHES, STEPS_PER_BLOCK = 100, 2_000, 50


def ours(train: Arrays) -> tuple[tf.data.Dataset, int]:
    publish(Splits(train, train, train))
    sharding = Sharding(len(train), BATCH_SIZE, 1, seed=0, whole_batch_loss=False)
    take = functools.partial(remote_examples, "train", layout=train.layout)
    return blocks(take, sharding, 0, STEPS_PER_BLOCK), STEPS_PER_BLOCK


def per_element(train: Arrays) -> tuple[tf.data.Dataset, int]:
    examples = tf.data.Dataset.from_tensor_slices((train.x, train.y)).shuffle(10_000).repeat()
    return examples.batch(BATCH_SIZE).prefetch(2), 1


def main(how: str, arrays: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    train = Arrays(*Workload("", "", {}, "", 0, 0, 0, arrays).load_bytes())
    dataset, batches_per_element = {"ours": ours, "per_element": per_element}[how](train)
    iterator, done, start = iter(dataset), -WARMUP, 0.0
    while done < BATCHES:
        next(iterator)
        done += batches_per_element
        start = start if done > 0 else time.perf_counter()
    print(done / (time.perf_counter() - start))


if __name__ == "__main__":
    main(*sys.argv[1:])
