"""Where numbers go: metrics.jsonl and TensorBoard."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

Scalars = Mapping[str, float]


class Writer(Protocol):
    def write(self, step: int, scalars: Scalars) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object a line: {"step", "time", "task", name: value}; readable while the run goes on."""

    def __init__(self, path: Path, task: str) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._task = task

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


class Writers:
    """Several writers as one."""

    def __init__(self, *writers: Writer) -> None:
        self._writers = writers

    def write(self, step: int, scalars: Scalars) -> None:
        for writer in self._writers:
            writer.write(step, scalars)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
