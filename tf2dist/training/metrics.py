"""Where numbers go: metrics.jsonl and TensorBoard."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import tensorflow as tf

from tf2dist.errors import first_line

FILE_ERRORS = (OSError, tf.errors.OpError)  # TensorBoard's writer uses TensorFlow's file systems
RETRY_SECS = 30.0
Scalars = Mapping[str, float]


class Writer(Protocol):
    def write(self, step: int, scalars: Scalars) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object a line: {"step", "time", "task", name: value}; readable while the run goes on."""

    def __init__(self, path: Path, task: str) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._task = task
        if path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n"):  # cut off on a full disk
            self._file.write("\n")

    def write(self, step: int, scalars: Scalars) -> None:
        record = {"step": step, "time": time.time(), "task": self._task, **scalars}
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Scalars for TensorBoard, written without TensorFlow: its ops would go through the cluster."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer as EventWriter  # 0.2 s, and only the leader writes

        self._writer = EventWriter(str(folder))

    def write(self, step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # otherwise every two minutes, and never if the process is killed

    def close(self) -> None:
        self._writer.close()


class PatientWriter:
    """Goes on without a writer that fails, as on a full disk, and tries again with a new one.

    Args:
        make: makes the writer; called before the first write.
        warn: told once.
    """

    def __init__(self, make: Callable[[], Writer], warn: Callable[[str], None]) -> None:
        self._make, self._warn = make, warn
        self._writer: Writer | None = None
        self._retry_at = -math.inf

    def write(self, step: int, scalars: Scalars) -> None:
        if self._writer is None and time.monotonic() < self._retry_at:
            return
        try:
            self._writer = self._writer or self._make()
            self._writer.write(step, scalars)
        except FILE_ERRORS as error:
            if self._retry_at < 0:
                self._warn(f"the metrics could not be written ({first_line(str(error))}); the training goes on")
            self._retry_at = time.monotonic() + RETRY_SECS
            self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer:
            with contextlib.suppress(*FILE_ERRORS):
                writer.close()
