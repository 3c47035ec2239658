"""The predictions of a data set as files, and the worker that makes them, in its own process.

There is a file for each range of examples, and then one for each output:

run_dir/prediction.json       of which model and examples they are
run_dir/ranges/000012.npz     the outputs of one range
run_dir/predictions/0.npy     the first output of all examples; once it is there, the ranges are removed
"""

import json
import math
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import keras
import numpy as np

from tf2dist.data.arrays import as_keras_takes
from tf2dist.errors import ConfigError, TrainingError
from tf2dist.files import raising
from tf2dist.launch.run_dir import RANGES
from tf2dist.messages import ProgressMessage, ResultMessage
from tf2dist.process import devices, heartbeat
from tf2dist.training.setup import TaskContext

DESCRIPTION = "prediction.json"
MOST_EXAMPLES, MOST_RANGES = 4096, 10_000
RANGES_OF_A_WORKER = 16  # at least, so that little is lost by a kill, and none waits long for the last


def range_size(num_examples: int, batch_size: int, num_workers: int) -> int:
    """The examples of a range: whole batches, so that all batches are those of one process."""
    wanted = min(MOST_EXAMPLES, num_examples / (RANGES_OF_A_WORKER * num_workers))
    return math.ceil(max(wanted, num_examples / MOST_RANGES) / batch_size) * batch_size


@dataclass(frozen=True)
class Ranges:
    """The ranges of the examples, and their files in a run directory; a file is there whole or not at all.

    Attributes:
        size: the examples of each range but the last one.
    """

    run_dir: Path
    num_examples: int
    size: int

    def __len__(self) -> int:
        return math.ceil(self.num_examples / self.size)

    def examples(self, number: int) -> slice:
        return slice(number * self.size, min((number + 1) * self.size, self.num_examples))

    def path(self, number: int) -> Path:
        return self.run_dir / RANGES / f"{number:06}.npz"

    def has(self, number: int) -> bool:
        # The leader's host joins the ranges and removes them, perhaps while a worker of another one still looks.
        return self.path(number).exists() or self.joined.is_dir()

    def num_done(self) -> int:
        try:
            return sum(name.endswith(".npz") for name in os.listdir(self.run_dir / RANGES))
        except FileNotFoundError:
            return 0

    def is_complete(self) -> bool:
        return self.joined.is_dir() or self.num_done() == len(self)

    def order(self, index: int, num_workers: int) -> list[int]:
        """All ranges in the order in which a worker looks whether they are done: first its own, then the others'.

        So nobody waits for a worker that is slow or lost, and the last to end has seen that all are done.
        """
        own = range(index, len(self), num_workers)
        others = sorted(set(range(len(self))) - set(own))
        random.Random(index).shuffle(others)  # so that two workers that help a third rarely take the same
        return [*own, *others]

    def save(self, number: int, outputs: list[np.ndarray], writer: str) -> None:
        # With the name of the writer: another worker may be writing the same range.
        part = self.path(number).with_suffix(f".{writer}")
        part.parent.mkdir(mode=0o700, exist_ok=True)
        with open(part, "wb") as file:
            np.savez(file, *outputs)
            file.flush()
            # On disk before it gets its name: after a power failure the name must not lead to an empty file.
            os.fsync(file.fileno())
        part.replace(self.path(number))

    @property
    def joined(self) -> Path:
        return self.run_dir / "predictions"

    def join(self) -> list[np.ndarray]:
        """The outputs of all examples, in their order, mapped from files; what is written into them stays in memory."""
        if not self.joined.is_dir():
            with raising(f"{self.joined}: cannot be written", "make room", TrainingError):
                self._write_joined()
        shutil.rmtree(self.run_dir / RANGES, ignore_errors=True)
        files = sorted(self.joined.iterdir(), key=lambda path: int(path.stem))
        return [np.load(file, mmap_mode="c", allow_pickle=False) for file in files]

    def _write_joined(self) -> None:
        part = self.joined.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
        part.mkdir(mode=0o700)
        first = self._read(0)
        # Written, not mapped: on a full disk a write into a mapping would end the process.
        files = [part / f"{number}.npy" for number in range(len(first))]
        for path, leaf in zip(files, first, strict=True):
            head = np.lib.format.header_data_from_array_1_0(leaf) | {"fortran_order": False}
            with open(path, "xb") as file:
                np.lib.format.write_array_header_1_0(file, head | {"shape": (self.num_examples, *leaf.shape[1:])})
        for number in range(len(self)):
            for path, leaf, like in zip(files, self._read(number), first, strict=True):
                if leaf.shape[1:] != like.shape[1:]:
                    raise ConfigError(
                        f"model: gives outputs of {list(like.shape[1:])} and of {list(leaf.shape[1:])}, which are no "
                        "array together; pad them to one shape"
                    )
                with open(path, "ab") as file:
                    file.write(leaf.astype(like.dtype, copy=False).tobytes())
        part.replace(self.joined)

    def _read(self, number: int) -> list[np.ndarray]:
        path = self.path(number)
        with (
            raising(
                f"{path}: cannot be read",
                "remove it, and the same call predicts it again",
                TrainingError,
                (ValueError, BadZipFile),
            ),
            np.load(path, allow_pickle=False) as file,
        ):
            return [file[name] for name in file.files]


class RangeCallback(keras.callbacks.Callback):
    """Tells the watchdog of each batch, and ends the work on a range that another worker has finished meanwhile."""

    def __init__(self, ranges: Ranges, number: int) -> None:
        super().__init__()
        self._ranges, self._number = ranges, number

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        heartbeat.progress()
        if self._ranges.has(self._number):
            self.model.stop_predicting = True


def predict_ranges(context: TaskContext) -> None:
    """Predicts ranges until all are done; the leader reports the progress of all."""
    cluster, task, source, to_launcher = context.cluster, context.task, context.source, context.to_launcher
    run_dir = context.run_dir
    devices.configure(context.config.devices, cluster, task)
    if advice := devices.advice_on_gpus(cluster, task):
        to_launcher.note(advice)
    splits = context.splits
    model = source.build(splits)
    description = json.loads((run_dir / DESCRIPTION).read_bytes())
    batch_size = description["batch_size"]
    ranges = Ranges(run_dir, len(splits.train), description["range_size"])
    start, done_at_start = time.monotonic(), ranges.num_done()
    for number in ranges.order(task.index, cluster.num_workers):
        if ranges.has(number):
            continue
        part = splits.train[ranges.examples(number)]
        outputs = predict_part(model, part.x, batch_size, RangeCallback(ranges, number))
        if not ranges.has(number):
            ranges.save(number, rows_of(outputs, len(part), source.name), str(task))
            print(f"range {number} of {len(ranges)}", flush=True)
        heartbeat.progress()
        if task == cluster.leader:
            done = ranges.num_done()
            rate = (done - done_at_start) * ranges.size / batch_size / (time.monotonic() - start)
            target = math.ceil(ranges.num_examples / batch_size)
            step = min(done * ranges.size // batch_size, target)
            to_launcher.send(ProgressMessage(step, target, {"loss": math.nan}, rate))
    if task == cluster.leader:
        secs = round(time.monotonic() - start, 3)
        to_launcher.send(ResultMessage({"model": source.name, "examples": ranges.num_examples, "secs": secs}))


def predict_part(model: keras.Model, x: Any, batch_size: int, callback: keras.callbacks.Callback) -> Any:
    """The outputs for some examples, all of them: a limit of Keras is that of the whole prediction."""
    getattr(keras.config, "set_max_steps_per_epoch", lambda _: None)(None)  # which not every version has
    return model.predict(as_keras_takes(x), batch_size, verbose=0, callbacks=[callback])


def rows_of(outputs: Any, num_examples: int, name: str) -> list[np.ndarray]:
    """The outputs of a model in one list. Raises ConfigError if one has not a row for each example."""
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(outputs)]
    if wrong := [len(leaf) for leaf in leaves if len(leaf) != num_examples]:
        raise ConfigError(
            f"model ({name}): its predict gives {wrong[0]} rows for {num_examples} examples, and must give one for "
            "each; use model.predict"
        )
    return leaves
