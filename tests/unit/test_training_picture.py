"""The picture of a run: its data is read from metrics.jsonl, and every kind of run can be drawn."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from tf2dist.finished.drawer import add_rows
from tf2dist.finished.training_picture import SeriesByName, draw


def row(step: int, secs: float, /, task: str = "chief-0", **values: Any) -> dict[str, Any]:
    return {"step": step, "time": 1e9 + secs, "secs": secs, "task": task, **values}


def series_of(*rows: dict[str, Any]) -> SeriesByName:
    series = SeriesByName()
    for each in rows:
        series.add(each)
    return series


def points(found: SeriesByName, name: str) -> list[tuple[float, float, float]]:
    """The step, the seconds and the value of each point."""
    series = found.by_name[name]
    return list(zip(series.steps, series.secs, series.values, strict=True))


def test_repeated_steps_replace_earlier_ones() -> None:
    first = [row(step, secs, loss=1.0) for step, secs in ((1, 5.0), (50, 6.0), (90, 7.0))]
    # The run continues from the checkpoint at step 40: in the same command, and in a new one, whose clock starts at 0.
    same_command = series_of(*first, row(41, 9.0, loss=0.5), row(95, 10.0, loss=0.4))
    assert points(same_command, "loss") == [(1, 5, 1), (41, 9, 0.5), (95, 10, 0.4)]
    new_command = series_of(*first, row(41, 4.0, loss=0.5), row(95, 5.0, loss=0.4))
    assert points(new_command, "loss") == [(1, 5, 1), (41, 11, 0.5), (95, 12, 0.4)], (
        "the times of both commands must be added up"
    )


def test_evaluations_are_drawn_at_the_time_of_the_leader() -> None:
    """The evaluator counts its seconds from its own start."""
    found = series_of(row(1, 5.0, loss=1.0), row(1, 900.0, "evaluator-0", validation_loss=2.0), row(9, 6.0, loss=0.5))
    assert points(found, "validation_loss") == [(1, 5, 2)]
    assert points(found, "loss")[-1] == (9, 6, 0.5)


def test_the_metrics_to_draw() -> None:
    """The loss, then three metrics of the model that have numbers, accuracies first."""
    values: dict[str, Any] = {
        "mae": 1.0,
        "top_accuracy": 0.5,
        "auc": None,
        "steps_per_sec": 9.0,
        "learning_rate": 0.1,
        "loss": 2.0,
    }
    found = series_of(row(1, 1.0, **values, a=1.0, b=2.0), row(1, 2.0, validation_mae=1.0, test_loss=2.0))
    assert found.metrics() == ["loss", "top_accuracy", "mae", "a"]


def test_a_file_with_damaged_and_incomplete_lines(tmp_path: Path) -> None:
    """Damaged lines are skipped; a last line without an end is read when it is complete."""
    path, series = tmp_path / "metrics.jsonl", SeriesByName()
    lines = [json.dumps(row(step, step, loss=1.0)) for step in (1, 2, 3)]
    path.write_text(f'{lines[0]}\n{{"step": 2, "ti\n[1]\n{lines[1]}\n{lines[2][:9]}')
    end = add_rows(series, path, 0)
    path.write_text(path.read_text() + lines[2][9:] + "\n")
    add_rows(series, path, end)
    assert [step for step, *_ in points(series, "loss")] == [1, 2, 3]


ODD: dict[str, Any] = {"$\\x": 1.0, "_hidden": 2.0, "精度": 3.0}
NAN = float("nan")
RUNS = {
    "a usual one": series_of(*[row(step, step / 9, loss=2 / step, accuracy=1 - 1 / step) for step in range(1, 30)]),
    "a long one": series_of(*[row(step, step * 9.0, loss=math.sin(step) ** 2) for step in range(1, 900)]),
    "one step": series_of(row(1, 5.0, loss=2.0, accuracy=0.0), row(1, 5.5, test_loss=2.0, validation_loss=1.0)),
    "a loss that is 0": series_of(row(1, 5.0, loss=2.0), row(2, 6.0, loss=0.0)),
    "holes": series_of(*[row(step, step, loss=NAN if step % 3 else 1.0, auc=None) for step in range(1, 400)]),
    "huge numbers": series_of(row(1, 5.0, loss=1e-30), row(10**9, 1e7, loss=1e30)),
    "negative ones": series_of(row(1, 5.0, loss=-1e9), row(2, 6.0, loss=3.0)),
    "names that look like formulas": series_of(row(1, 5.0, loss=1.0, **ODD)),
}


@pytest.mark.filterwarnings("ignore:Glyph")  # the font lacks some of the characters
@pytest.mark.parametrize(
    ("run", "staleness"),
    [*((run, []) for run in RUNS), *(("one step", counts) for counts in ([3], [0, 5, 2], [10**6] + [0] * 998 + [1]))],
    ids=lambda value: value if isinstance(value, str) else len(value),
)
def test_every_run_can_be_drawn(run: str, staleness: list[int]) -> None:
    png = draw(RUNS[run], ["async $dnn on _data_: 3 workers", "x" * 500], staleness)
    width, height = struct.unpack(">2I", png[16:24])
    assert png.startswith(b"\x89PNG")
    assert width == 900
    assert height < 1500


def test_a_run_without_numbers() -> None:
    for empty in (SeriesByName(), series_of(row(1, 5.0, loss=None))):
        with pytest.raises(ValueError, match=r"metrics.jsonl has no numbers"):
            draw(empty, [], [])
