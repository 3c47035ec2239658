"""A worker of a prediction, in its own process."""

import json
import math
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError
from tf2dist.fitting.shipping import ShippedSource
from tf2dist.messages import ToLauncher
from tf2dist.predicting.ranges import DESCRIPTION, Ranges
from tf2dist.process import devices, heartbeat


class Watch(keras.callbacks.Callback):
    """Tells the watchdog of each batch, and ends the work on a range that another worker has finished meanwhile."""

    def __init__(self, ranges: Ranges, number: int) -> None:
        super().__init__()
        self._ranges, self._number = ranges, number

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        heartbeat.progress()
        if self._ranges.has(self._number):
            self.model.stop_predicting = True


def predict_ranges(
    config: RunConfig, cluster: Cluster, task: Task, source: ShippedSource, run_dir: Path, to_launcher: ToLauncher
) -> None:
    """Predicts ranges until all are done; the leader reports the progress of all.

    Raises:
        ConfigError: an output has not one row for each example.
    """
    devices.configure(config.devices, cluster, task)
    if advice := devices.advice_on_gpus(cluster, task):
        to_launcher.note(advice)
    splits = source.load()
    model = source.build(splits)
    description = json.loads((run_dir / DESCRIPTION).read_bytes())
    batch_size = description["batch_size"]
    ranges = Ranges(run_dir, len(splits.train), description["range_size"])
    start, done_at_start = time.monotonic(), ranges.num_done()
    for number in ranges.order(task.index, cluster.num_workers):
        if ranges.has(number):
            continue
        part = splits.train[ranges.examples(number)]
        outputs = model.predict(
            keras.tree.map_structure(as_keras_takes, part.x), batch_size, verbose=0, callbacks=[Watch(ranges, number)]
        )
        if not ranges.has(number):
            ranges.save(number, rows_of(outputs, len(part), source.name), str(task))
            print(f"range {number} of {len(ranges)}", flush=True)
        heartbeat.progress()
        if task == cluster.leader:
            done = ranges.num_done()
            rate = (done - done_at_start) * ranges.size / batch_size / (time.monotonic() - start)
            target = math.ceil(ranges.num_examples / batch_size)
            to_launcher.progress(min(done * ranges.size // batch_size, target), target, {"loss": math.nan}, rate)
    if task == cluster.leader:
        secs = round(time.monotonic() - start, 3)
        to_launcher.result({"model": source.name, "examples": ranges.num_examples, "secs": secs})


def as_keras_takes(leaf: np.ndarray | None) -> Any:
    """The array, or a tensor of its strings: Keras takes no bytes of numpy."""
    return tf.convert_to_tensor(leaf) if leaf is not None and leaf.dtype.kind == "S" else leaf


def rows_of(outputs: Any, num_examples: int, name: str) -> list[np.ndarray]:
    """The outputs of a model in one list. Raises ConfigError if one has not a row for each example."""
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(outputs)]
    if wrong := [len(leaf) for leaf in leaves if len(leaf) != num_examples]:
        raise ConfigError(
            f"model ({name}): its predict gives {wrong[0]} rows for {num_examples} examples, and must give one for "
            "each; use model.predict"
        )
    return leaves
