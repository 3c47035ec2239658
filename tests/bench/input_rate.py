"""Batches per second of an input pipeline alone, on one core: ours, or the usual one of TensorFlow's guides."""

import os
import sys
import time

import tensorflow as tf

from tests.bench.workload import BATCH_SIZE, Workload
from tf2dist import pipeline

WARMUP, BATCHES, STEPS_PER_BLOCK = 100, 2_000, 50


def ours(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.data.Dataset, int]:
    sharding = pipeline.Sharding(len(labels), BATCH_SIZE, 1, seed=0, whole_batch_loss=False)
    return pipeline.blocks(images, labels, sharding, 0, STEPS_PER_BLOCK), STEPS_PER_BLOCK


def per_element(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.data.Dataset, int]:
    """Without the scaling of the pixels, which ours leaves to the step."""
    examples = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(10_000).repeat()
    return examples.batch(BATCH_SIZE).prefetch(2), 1


def main(how: str, arrays: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    images, labels = (tf.constant(array) for array in Workload("", "", {}, "", 0, 0, 0, arrays).load_bytes())
    dataset, batches_per_element = {"ours": ours, "per_element": per_element}[how](images, labels)
    iterator, done, start = iter(dataset), -WARMUP, 0.0
    while done < BATCHES:
        next(iterator)
        done += batches_per_element
        start = start if done > 0 else time.perf_counter()
    print(done / (time.perf_counter() - start))


if __name__ == "__main__":
    main(*sys.argv[1:])
