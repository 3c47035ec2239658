"""What a comparison shows while it runs: the progress of each run, and the time that is left."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compared import contenders
from tf2dist.launch.console import Console
from tf2dist.tools.comparing.matrix import runs_of
from tf2dist.tools.comparing.running import ComparisonProgress

SMALL = ("data=digits", "model=softmax")


class Shown(Console):
    """Keeps what a comparison shows."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.notes: list[str] = []
        self.bar: tuple[float, int] = (0.0, 0)
        self.parts: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def overall(self, completed: float, total: int, parts: Sequence[str]) -> None:
        self.bar, self.parts = (completed, total), list(parts)


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


def test_each_run_shows_its_progress_and_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("tf2dist.tools.comparing.running.time", clock)
    console, file = Shown(), tmp_path / "metrics.jsonl"
    options, found = contenders(*SMALL, "modes=[sync,async]", "delays=[0]", "until=0.9", "train.epochs=100")
    runs = list(runs_of(found, 2))
    progress = ComparisonProgress(console, runs, runs[3:], options.until)

    def seen(secs: float, *rows: str) -> list[str]:
        clock.now += secs
        file.write_text("\n".join(["cut off}", *rows, '{"step": 9']))
        progress.poll()
        return console.parts

    progress.begin(runs[0], tmp_path)
    assert console.parts == ["1/4", "starting", "sync, equal workers, seed 0"]
    # 100 passes over 1,257 examples by 3 workers with 100 each are 419 steps.
    rows = ['{"step": 31, "steps_per_sec": 10.0}', '{"step": 30, "validation_accuracy": 0.75}']
    assert seen(2, *rows[:1]) == ["1/4", "step 31", str(runs[0]), "at most 0:39 left of this run"]
    assert seen(2, *rows)[1] == "accuracy 0.7500/0.9"
    clock.now += 6
    progress.end()
    assert console.notes == ["run 1 of 4: done in 0:10 with a validation accuracy of 0.7500, about 0:20 left"]
    progress.begin(runs[1], tmp_path)
    assert seen(4) == ["2/4", "starting", "async, equal workers, seed 0", "0:16 left"]
    assert console.bar[0] == pytest.approx(1.4), "four of its ten seconds"
    clock.now += 16
    progress.end()
    progress.begin(runs[2], tmp_path)
    assert console.parts[-1] == "0:20 left", "as long as the other run of async"
    progress.end()
    progress.skip(runs[3])
    assert console.notes[-1].endswith("seed 1: is done already")


@pytest.mark.parametrize(
    ("until", "row", "progress_text", "left"),
    [
        ("300steps", '{"step": 120, "steps_per_sec": 10.0}', "step 120/300", "0:40 left"),
        ("60s", '{"step": 120, "steps_per_sec": 10.0, "training_secs": 11.9}', "0:12/1:00", "1:40 left"),
    ],
)
def test_the_time_left_of_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: str, row: str, progress_text: str, left: str
) -> None:
    """There are two runs, and the other one is taken to last as long."""
    clock = Clock()
    monkeypatch.setattr("tf2dist.tools.comparing.running.time", clock)
    options, found = contenders(*SMALL, "modes=[sync,async]", "delays=[0]", f"until={until}")
    console, runs = Shown(), list(runs_of(found, 1))
    progress = ComparisonProgress(console, runs, [], options.until)
    progress.begin(runs[0], tmp_path)
    clock.now += 4
    (tmp_path / "metrics.jsonl").write_text(f"{row}\n")
    progress.poll()
    assert console.parts == ["1/2", progress_text, "sync, equal workers, seed 0", left]
