"""The writers of metrics: metrics.jsonl and TensorBoard."""

import contextlib
import fcntl
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
import tensorflow as tf

from tf2dist.errors import first_line
from tf2dist.files import as_json, open_to_read

FILE_ERRORS = (OSError, tf.errors.OpError)  # TensorBoard's writer uses TensorFlow's file systems
RETRY_SECS = 30.0
LOCK_SECS = 0.2  # the other one holds the lock for one line
EVALUATED = ("validation", "test")  # splits, with which the names of their metrics begin
# What TensorBoard shows of a curve, with its unit.
DESCRIPTIONS = {
    "learning_rate": "Learning rate of the optimizer at this step, without unit.",
    "steps_per_sec": "Global steps per second, the mean since the first step of the command, without evaluations.",
    "training_secs": "Seconds of training since the first step of the command, without evaluations.",
    "staleness": "Updates: how many others applied between a worker's pull and its push.",
}
METRICS = {"loss": "Mean loss of an example, without unit", "accuracy": "Share of right answers, from 0 to 1"}
OF_SPLITS = "Train: over the steps since the last point; validation and test: over all examples."
Values = Mapping[str, float | np.ndarray]  # an array counts how often 0, 1, 2, ... occurred


@dataclass(frozen=True)
class RunDescription:
    """A run as TensorBoard shows it beside its curves: its model as text, and its options by their dotted names."""

    model: str
    hparams: dict[str, bool | float | str]


class Writer(Protocol):
    def write(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object a line: {"step", "time", "secs", "task", name: value}; readable while the run is under way.

    Args:
        began_at: when the user's command began, by the monotonic clock; `secs` counts from there.
    """

    def __init__(self, path: Path, task: str, began_at: float) -> None:
        # Lines are flushed one by one and appended, so the evaluator and the leader can write into the same file.
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._task, self._began_at = task, began_at
        with open_to_read(path) as file:
            file.seek(max(0, path.stat().st_size - 1))
            # A full disk may have cut off the last line; then only that line is damaged, and not the next one, too.
            if file.read() not in (b"", b"\n"):
                self._file.write("\n")

    def write(self, step: int, values: Values) -> None:
        scalars = {name: value for name, value in values.items() if not isinstance(value, np.ndarray)}
        secs = round(time.monotonic() - self._began_at, 3)
        record = {"step": step, "time": time.time(), "secs": secs, "task": self._task, **scalars}
        with _locked(self._file):
            self._file.write(as_json(record) + "\n")

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _locked(file: TextIO) -> Iterator[None]:
    """Locks a file for one line: on a network file system two hosts that append may else write to the same place."""
    give_up_at = time.monotonic() + LOCK_SECS
    with contextlib.suppress(OSError):  # a file system without locks
        # Not without an end: a host that has died may still hold it.
        while time.monotonic() < give_up_at:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


class TensorBoardWriter:
    """Writes events for TensorBoard without TensorFlow, whose operations for this would run on the cluster.

    Each split is a run of its own, as with Keras' callback: TensorBoard draws the accuracies of all runs in one chart.

    Args:
        folder: has the options and the model; its subfolders train, validation and test have the curves.
        description: written before the curves; None to leave it out.
    """

    def __init__(self, folder: Path, description: RunDescription | None) -> None:
        self._folder, self._open = folder, contextlib.ExitStack()
        self._writers: dict[str, Any] = {}  # by subfolder
        if description:
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb

            self._add("", hparams_pb(description.hparams), step=0)
            self._add("", _text("model", description.model), step=0)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            split, _, metric = name.partition("_")
            run, tag = (split, metric) if split in EVALUATED and metric else ("train", name)
            self._add(run, _histogram(tag, value) if isinstance(value, np.ndarray) else _scalar(tag, value), step)
        # By default a writer flushes every two minutes, and a killed process would never have flushed.
        for writer in self._writers.values():
            writer.flush()

    def _add(self, run: str, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        # Imported here, since it takes 0.2 s and few tasks write.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if run not in self._writers:
            self._writers[run] = EventFileWriter(str(self._folder / run))
            self._open.callback(self._writers[run].close)
        self._writers[run].add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._open.close()


def _summary(tag: str, data: np.ndarray, metadata: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.util.tensor_util import make_tensor_proto

    return Summary(value=[Summary.Value(tag=tag, tensor=make_tensor_proto(data), metadata=metadata)])


def _scalar(tag: str, value: float) -> Any:
    from tensorboard.plugins.scalar import metadata

    kind = re.sub(r"^(learning_rate)_\d+$", r"\1", tag)  # of one optimizer of several
    description = DESCRIPTIONS.get(kind) or f"{METRICS.get(tag, f'The metric {tag} of the model')}. {OF_SPLITS}"
    return _summary(tag, np.array(value, np.float32), metadata.create_summary_metadata("", description))


def _histogram(tag: str, counts: np.ndarray) -> Any:
    """A histogram as TensorBoard takes it: rows of left edge, right edge and count."""
    from tensorboard.plugins.histogram import metadata

    # Empty bins at the end would stretch the picture over a thousand of them.
    counts = np.trim_zeros(counts, "b")
    edges = np.arange(len(counts)) - 0.5  # a bin of width 1 around each whole number
    rows = np.stack([edges, edges + 1, counts], axis=1).astype(np.float64)
    return _summary(tag, rows, metadata.create_summary_metadata("", DESCRIPTIONS[tag]))


def _text(tag: str, text: str) -> Any:
    """A text for TensorBoard, which shows Markdown: every line as code."""
    from tensorboard.plugins.text import metadata

    code = "\n".join(f"    {line}" for line in text.splitlines())
    return _summary(tag, np.array([code.encode()], object), metadata.create_summary_metadata("", ""))


class PatientWriter:
    """Writes through a writer that may fail, as on a full disk: drops the values then, and later tries a new writer.

    Args:
        make: makes the writer; called before the first write.
        warn: called at the first failure only.
    """

    def __init__(self, make: Callable[[], Writer], warn: Callable[[str], None]) -> None:
        self._make, self._warn = make, warn
        self._writer: Writer | None = None
        self._retry_at = -math.inf

    def write(self, step: int, values: Values) -> None:
        # A failing file system may take long to fail, so it is not tried with every value.
        if self._writer is None and time.monotonic() < self._retry_at:
            return
        try:
            self._writer = self._writer or self._make()
            self._writer.write(step, values)
        except FILE_ERRORS as error:
            if self._retry_at < 0:  # the first failure, since only a failure sets another time
                self._warn(f"the metrics could not be written ({first_line(str(error))}); the training goes on")
            self._retry_at = time.monotonic() + RETRY_SECS
            # The broken writer may hold half a record; a new one begins with a whole one.
            self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer:
            with contextlib.suppress(*FILE_ERRORS):
                writer.close()
