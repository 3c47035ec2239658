"""The workload of every contender of the benchmark, and its own measurements."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

BATCH_SIZE = 100
DEEP_BATCH_SIZE = 16
CLICKS_BATCH_SIZE = 256
NUM_IMPRESSIONS = 1_000_000
WARM = "warm"  # the line that a contender prints after its warm-up
COLUMNS = 16  # of the tables of the model of clicks, and units of its layers
LEARNING_RATE = 0.01
# The hidden layers of the models without convolutions. Those called "million" have about so many parameters.
HIDDEN_UNITS: dict[str, tuple[int, ...]] = {
    "softmax": (),
    "dnn": (300, 50, 50, 50),
    "2 million": (1024, 1024),
    "12 million": (4096, 2048),
    "50 million": (8192, 5376),
}
# The rows of each of the two tables of the model of clicks.
TABLE_ROWS = {
    "1 thousand rows": 1_000,
    "100 thousand rows": 100_000,
    "1 million rows": 1_000_000,
    "10 million rows": 10_000_000,
}
# In the race to an accuracy.
NUM_VALIDATION = 5_000
EVALUATE_EVERY = {"async": 300, "sync": 100}  # global steps, over as many examples


@dataclass(frozen=True)
class Workload:
    """The part of one process in a comparison.

    Attributes:
        mode: "async" or "sync"; ignored by a contender of one process.
        jobs: the addresses of each job, as in TF_CONFIG.
        steps: global steps in all, of which the first `warmup_steps` are not timed.
        arrays: a folder with images.npy, uint8 [n, 28, 28, 1], and labels.npy, int32 [n].
        accuracy: if above 0, the time to this accuracy is measured instead of the rate, with Adam; on
            NUM_VALIDATION examples that are not trained on.
    """

    mode: str
    model: str
    jobs: dict[str, list[str]]
    job: str
    index: int
    steps: int
    warmup_steps: int
    arrays: str
    accuracy: float = 0.0

    @classmethod
    def from_arguments(cls) -> "Workload":
        return cls(**json.loads(sys.argv[1]))

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """Images as float32 in [0, 1] and labels as int32."""
        images, labels = self.load_bytes()
        return images.astype(np.float32) / 255, labels

    def impressions(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The clicks for a model with tables."""
        from tf2dist.data.loading import make_impressions  # imports TensorFlow

        rows = TABLE_ROWS[self.model]
        x, y, _ = make_impressions(NUM_IMPRESSIONS, rows, rows)
        return x, y

    def load_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        folder = Path(self.arrays)
        return np.load(folder / "images.npy"), np.load(folder / "labels.npy")


class Stopwatch:
    """The rate from `warmup_steps` on."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)
        self._first_step_at = 0.0

    def passed(self, step: int) -> bool:
        """Notes that `step` global steps are done; returns whether those were all."""
        self._last = (time.perf_counter(), step)
        if step:
            self._first_step_at = self._first_step_at or time.time()
        if self._first is None and step >= self._workload.warmup_steps:
            self._first = self._last
            print(WARM, flush=True)
        return step >= self._workload.steps

    def tell(self) -> None:
        if self._first is None or self._first == self._last:
            raise ValueError(f"{self._workload.steps} steps are too few: there was but one look after the warm-up")
        secs, steps = self._last[0] - self._first[0], self._last[1] - self._first[1]
        tell(steps / secs, timed_steps=steps, first_step_at=self._first_step_at)


class Race:
    """The seconds from the first step to the first evaluation with the wanted accuracy."""

    def __init__(self, workload: Workload) -> None:
        self._accuracy, self._every = workload.accuracy, EVALUATE_EVERY[workload.mode]
        self._start, self._next = 0.0, self._every

    def won(self, step: int, evaluate: Callable[[], float]) -> bool:
        """To be called after every step."""
        self._start = self._start or time.perf_counter()
        if step < self._next:
            return False
        self._next = (step // self._every + 1) * self._every
        return evaluate() >= self._accuracy

    def tell(self) -> None:
        tell(time.perf_counter() - self._start)


def tell(figure: float, **more: float) -> None:
    """Prints figures for `contenders`, then waits for the end: a task that left early would fail the others."""
    print(json.dumps({"figure": figure, **more}), flush=True)
    sys.stdin.readline()


def run(main: Callable[[Workload], None]) -> None:
    """Runs a contender; one that has failed ends at once, even if threads of TensorFlow still run."""
    try:
        main(Workload.from_arguments())
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class Batches:
    """Shuffled batches of several arrays for feeding by hand, as the tutorials of TensorFlow 1 had them."""

    def __init__(self, arrays: Sequence[np.ndarray], seed: int, size: int = BATCH_SIZE) -> None:
        self._arrays, self._size = list(arrays), size
        self._random = np.random.default_rng(seed)
        self._shuffle()

    def _shuffle(self) -> None:
        order = self._random.permutation(len(self._arrays[0]))
        self._arrays, self._at = [array[order] for array in self._arrays], 0

    def next(self) -> list[np.ndarray]:
        if self._at + self._size > len(self._arrays[0]):
            self._shuffle()
        part = slice(self._at, self._at + self._size)
        self._at += self._size
        return [array[part] for array in self._arrays]
