"""When the steps of each worker begin and end, recorded on request: the option timeline.

A step begins when all that it needs has come, and ends when its gradient is there; between two steps a worker waits.
The graph of a step calls a function of the worker's own process at both moments. If nothing is recorded, the graph of
a step has nothing of this.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.tf_internals import publish_functions

FOLDER = "timeline"
TOKEN = "tf2dist.timeline"
FLUSH_SECS = 0.5  # a worker's process may be killed at the end of the run
Tensors = TypeVar("Tensors")  # in any structure
MAX_STEPS = 20_000  # of each worker: some hundred kilobytes

# TensorFlow holds Python functions by weak references only.
_published: dict[str, Callable[[np.ndarray, np.ndarray], int]] = {}


class Recorder:
    """What the graph of a step calls in the worker's process.

    Writes a file for each worker, worker-0.csv and so on, with a line for each step: when it began and when it ended,
    in seconds as of `time.time()`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._begun_at: dict[int, float] = {}
        self._files: dict[int, TextIO] = {}
        self._num_steps: dict[int, int] = {}
        self._flushed_at = 0.0

    def __call__(self, worker: np.ndarray, has_ended: np.ndarray) -> int:
        now, index = time.time(), int(worker)
        with self._lock:
            if not has_ended:
                self._begun_at[index] = now
            elif (begun_at := self._begun_at.pop(index, None)) is not None:
                self._write(index, begun_at, now)
        return 0

    def _write(self, worker: int, begun_at: float, ended_at: float) -> None:
        number = self._num_steps[worker] = self._num_steps.get(worker, 0) + 1
        if number > MAX_STEPS:
            return
        try:
            file = self._files.get(worker) or self._open(worker)
            file.write(f"{begun_at:.6f},{ended_at:.6f}\n")
            if ended_at - self._flushed_at > FLUSH_SECS:
                file.flush()
                self._flushed_at = ended_at
        except (OSError, ValueError):  # a full disk, after which the file may be closed: the training goes on
            self._num_steps[worker] = MAX_STEPS

    def _open(self, worker: int) -> TextIO:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        file = self._files[worker] = open(self._folder / f"worker-{worker}.csv", "a", encoding="ascii")  # noqa: SIM115
        return file


def recorded(tensors: Tensors, worker: Any, *, has_ended: bool) -> Tensors:
    """The tensors, once it is recorded that all of them are there. Each worker must have called `publish`."""
    with tf.device("CPU:0"), tf.control_dependencies(tf.nest.flatten(tensors)):
        inputs = [tf.cast(worker, tf.int64), tf.constant(has_ended)]
        noted = tf.raw_ops.PyFunc(input=inputs, token=TOKEN, Tout=[tf.int64])
    with tf.control_dependencies(noted):
        copies: Tensors = tf.nest.map_structure(tf.identity, tensors)
        return copies


def publish(config: RunConfig, run_dir: Path) -> None:
    """Makes the recorder callable by the graphs that run in this process."""
    if config.timeline:
        _published[TOKEN] = Recorder(run_dir / FOLDER)
        publish_functions(_published)
