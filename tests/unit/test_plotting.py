"""training.png: every kind of run can be drawn, at its end or while it goes on, and no run fails because of it."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from tf2dist.cluster.sources import find_place
from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config.schema import RunConfig
from tf2dist.launch.console import Console
from tf2dist.launch.plotting import SeriesByName, draw_run, metrics_of, rows_of, series_of, training_figure
from tf2dist.launch.start import draw_training


def row(step: int, secs: float, /, task: str = "chief-0", **values: Any) -> dict[str, Any]:
    return {"step": step, "time": 1e9 + secs, "secs": secs, "task": task, **values}


def points(series: SeriesByName, name: str) -> list[tuple[float, float, float]]:
    """The step, the seconds and the value of each point."""
    one = series[name]
    return list(zip(one.steps, one.secs, one.values, strict=True))


def test_repeated_steps_replace_earlier_ones() -> None:
    first = [row(step, secs, loss=1.0) for step, secs in ((1, 5.0), (50, 6.0), (90, 7.0))]
    # The run continues from the checkpoint at step 40: in the same command, and in a new one, whose clock starts at 0.
    same_command = series_of([*first, row(41, 9.0, loss=0.5), row(95, 10.0, loss=0.4)])
    assert points(same_command, "loss") == [(1, 5, 1), (41, 9, 0.5), (95, 10, 0.4)]
    new_command = series_of([*first, row(41, 4.0, loss=0.5), row(95, 5.0, loss=0.4)])
    assert points(new_command, "loss") == [(1, 5, 1), (41, 11, 0.5), (95, 12, 0.4)], (
        "the times of both commands must be added up"
    )


def test_evaluations_are_drawn_at_the_time_of_the_leader() -> None:
    """The evaluator counts its seconds from its own start."""
    rows = [row(1, 5.0, loss=1.0), row(1, 900.0, "evaluator-0", validation_loss=2.0), row(9, 6.0, loss=0.5)]
    series = series_of(rows)
    assert points(series, "validation_loss") == [(1, 5, 2)]
    assert points(series, "loss")[-1] == (9, 6, 0.5)


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
    series = series_of([row(1, 1.0, **values, a=1.0, b=2.0), row(1, 2.0, validation_mae=1.0, test_loss=2.0)])
    assert metrics_of(series) == ["loss", "top_accuracy", "mae", "a"]


def test_damaged_lines_and_one_that_is_still_written_are_left_out(tmp_path: Path) -> None:
    lines = [json.dumps(row(step, step, loss=1.0)) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text(f'{lines[0]}\n{{"step": 2, "ti\n[1]\n\n{lines[1]}\n{lines[2][:-9]}')
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1, 2]


ODD: dict[str, Any] = {"$\\x": 1.0, "_hidden": 2.0, "精度": 3.0}
NAN = float("nan")
LOCAL = find_place(RunConfig(), {})
RUNS = {
    "a usual one": [row(step, step / 9, loss=2 / step, accuracy=1 - 1 / step) for step in range(1, 30)],
    "a long one": [row(step, step * 9.0, loss=math.sin(step) ** 2) for step in range(1, 900)],
    "one step": [row(1, 5.0, loss=2.0, accuracy=0.0), row(1, 5.5, test_loss=2.0, validation_loss=1.0)],
    "a loss that is 0": [row(1, 5.0, loss=2.0), row(2, 6.0, loss=0.0)],
    "holes": [row(step, step, loss=NAN if step % 3 else 1.0, auc=None) for step in range(1, 400)],
    "huge numbers": [row(1, 5.0, loss=1e-30), row(10**9, 1e7, loss=1e30)],
    "negative ones": [row(1, 5.0, loss=-1e9), row(2, 6.0, loss=3.0)],
    "names that look like formulas": [row(1, 5.0, loss=1.0, **ODD)],
}


@pytest.mark.filterwarnings("ignore:Glyph")  # the font lacks some of the characters
@pytest.mark.parametrize(
    ("run", "staleness"),
    [*((run, []) for run in RUNS), *(("one step", counts) for counts in ([3], [0, 5, 2], [10**6] + [0] * 998 + [1]))],
    ids=lambda value: value if isinstance(value, str) else len(value),
)
def test_every_run_can_be_drawn(run: str, staleness: list[int], tmp_path: Path) -> None:
    write_run(tmp_path, RUNS[run], SUMMARY | {"data": "$x$ " + "x" * 500, "staleness_counts": staleness})
    assert draw_run(tmp_path) == tmp_path / "training.png"
    png = (tmp_path / "training.png").read_bytes()
    width, height = struct.unpack(">2I", png[16:24])
    assert png.startswith(b"\x89PNG")
    assert width == 900
    assert height < 1500


# A short run as each mode writes it.
SUMMARY: dict[str, Any] = {
    "mode": "sync",
    "model": "softmax",
    "data": "digits",
    "cluster": {"worker": 2, "ps": 0},
    "global_step": 100,
    "steps_per_sec": None,
    "test_accuracy": 0.94,
    "test_loss": 0.43,
    "test_examples": 360,
}
MODES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async", "cluster": {"worker": 2, "ps": 1}, "staleness_counts": [59, 41]},
    "sync": {},
    "sync_replicas": {"mode": "sync_replicas", "cluster": {"worker": 2, "ps": 1}},
}


def rows_of_mode(mode: str) -> list[dict[str, Any]]:
    leader = "worker-0" if mode == "sync" else "chief-0"
    return [
        row(1, 4.0, leader, accuracy=0.125, loss=2.41, learning_rate=0.001),
        row(50, 4.1, leader, validation_accuracy=0.833, validation_loss=0.853, training_secs=0.07),
        row(100, 4.2, leader, accuracy=0.825, loss=0.548, steps_per_sec=719.8, learning_rate=0.001),
        row(100, 4.3, leader, test_accuracy=0.94, test_loss=0.43, training_secs=0.11),
    ]


def write_run(run_dir: Path, rows: list[dict[str, Any]], summary: dict[str, Any] | None = None) -> None:
    text = "".join(json.dumps(each).replace("NaN", "null") + "\n" for each in rows)
    (run_dir / "metrics.jsonl").write_text(text)
    if summary:
        (run_dir / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("mode", MODES)
def test_the_axes_of_each_mode(mode: str) -> None:
    staleness = MODES[mode].get("staleness_counts", [])
    figure = training_figure(series_of(rows_of_mode(mode)), ["a line", "another"], staleness)
    axes = [(axes.get_xlabel().partition(" (")[0], axes.get_ylabel()) for axes in figure.axes]
    metrics = [pair for name in ("loss", "accuracy") for pair in (("global step", name), ("wall time", ""))]
    assert axes == metrics + ([("staleness", "updates")] if mode == "async" else [])
    for one, values in zip(figure.axes[::2], ((0.548, 0.853, 0.43), (0.825, 0.833, 0.94)), strict=False):
        lines = {line.get_label(): line.get_ydata()[-1] for line in one.lines}  # type: ignore[index]
        assert lines == dict(zip(("training", "validation", "test"), values, strict=True))
    assert [text.get_text() for text in figure.texts] == ["Training", "a line\nanother"]


@pytest.mark.parametrize("summary", [None, SUMMARY, {"of": "something else"}], ids=["none", "its own", "foreign"])
def test_a_run_that_goes_on_is_drawn_without_its_result(
    summary: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above: list[str] = []

    def note(series: SeriesByName, lines: list[str], staleness: list[int]) -> Any:
        above.extend(lines)
        return training_figure(series, lines, staleness)

    monkeypatch.setattr("tf2dist.launch.plotting.training_figure", note)
    write_run(tmp_path, rows_of_mode("sync"), summary)
    assert draw_run(tmp_path)
    unfinished = [f"{tmp_path.name}: not finished, step 100"]
    result = ["sync softmax on digits: 2 workers, 100 steps", "test accuracy 0.9400, loss 0.4300 over 360 examples"]
    assert above == (result if summary == SUMMARY else unfinished)


def test_a_run_without_numbers_has_no_picture(tmp_path: Path) -> None:
    for rows in ([], [row(1, 5.0, loss=None)], [{"step": 1}]):
        write_run(tmp_path, rows)
        assert draw_run(tmp_path) is None
    assert not (tmp_path / "training.png").exists()


def test_the_look_of_a_program_that_calls_fit_is_its_own(tmp_path: Path) -> None:
    write_run(tmp_path, rows_of_mode("sync"))
    with matplotlib.rc_context({"lines.linewidth": 7.0}):
        draw_run(tmp_path)
        assert matplotlib.rcParams["lines.linewidth"] == 7.0


# At the end of a run.


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine the user is told of the drawing."""
    monkeypatch.setattr("tf2dist.launch.start.SILENT_SECS", 60.0)


def draw_at_end(run_dir: Path, place: Place = LOCAL, **options: Any) -> None:
    draw_training(RunConfig(run_dir=str(run_dir), **options), place, Console())


@pytest.mark.usefixtures("_patient")
def test_a_run_is_drawn_by_the_process_of_its_leader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster("sync", {"worker": ("a:1", "b:1")})
    write_run(tmp_path, rows_of_mode("sync"))
    draw_at_end(tmp_path, figure=False)
    draw_at_end(tmp_path, Place(cluster, Task("worker", 1)))
    assert not (tmp_path / "training.png").exists()
    draw_at_end(tmp_path, Place(cluster, Task("worker", 0)))
    assert (tmp_path / "training.png").exists()
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("_patient")
def test_a_run_that_failed_before_its_first_step_is_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_at_end(tmp_path)
    write_run(tmp_path, [row(1, 5.0, loss=None)])
    draw_at_end(tmp_path)
    draw_training(RunConfig(), LOCAL, Console())
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("_patient")
def test_a_picture_that_cannot_be_written_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rows_of_mode("sync"))
    (tmp_path / "training.png").mkdir()
    draw_at_end(tmp_path)
    again = f"python -m tf2dist.plot {tmp_path} draws it"
    assert capsys.readouterr().err == f"tf2dist: warning: training.png could not be drawn (Is a directory); {again}\n"


DRAW = """
import sys
from tf2dist.cluster.sources import find_place
from tf2dist.config.schema import RunConfig
from tf2dist.launch.console import Console
from tf2dist.launch.start import draw_training

assert "matplotlib" not in sys.modules, "importing it would delay the start of every run"
config = RunConfig(run_dir=sys.argv[1])
draw_training(config, find_place(config, {}), Console())
"""


def python(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def test_a_broken_matplotlib_is_one_warning_and_an_error_of_the_command(tmp_path: Path) -> None:
    write_run(tmp_path, rows_of_mode("sync"))
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no such symbol\\nin libfreetype')\n")
    completed = python("-c", DRAW, tmp_path, PYTHONPATH=str(tmp_path))
    assert (completed.returncode, completed.stdout) == (0, "")
    assert completed.stderr.startswith("tf2dist: warning: training.png could not be drawn (no such symbol); ")
    assert completed.stderr.count("\n") == 1
    completed = python("-m", "tf2dist.plot", tmp_path, PYTHONPATH=str(tmp_path))
    words = "tf2dist: error: matplotlib: cannot be imported (no such symbol); install it again\n"
    assert (completed.returncode, completed.stdout, completed.stderr) == (2, "", words)


@pytest.mark.filterwarnings("ignore:Glyph")
def test_matplotlib_itself_says_nothing(tmp_path: Path) -> None:
    """Without a folder for its cache, and with a name for which it has no letters."""
    write_run(tmp_path, [row(1, 5.0, loss=1.0, **ODD)])
    completed = python("-c", DRAW, tmp_path, HOME="/nonexistent", MPLCONFIGDIR="")
    stderr = completed.stderr.replace("drawing training.png\n", "")  # on a slow machine
    assert (completed.returncode, completed.stdout, stderr) == (0, "", "")
    assert (tmp_path / "training.png").exists()


# The command.


def test_the_command_draws_and_prints_the_path(tmp_path: Path) -> None:
    write_run(tmp_path, rows_of_mode("async"), SUMMARY | MODES["async"])
    completed = python("-m", "tf2dist.plot", tmp_path)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, f"{tmp_path / 'training.png'}\n", "")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_a_run_without_numbers(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    completed = python("-m", "tf2dist.plot", tmp_path)
    words = f"tf2dist: error: RUN_DIR ({tmp_path}): metrics.jsonl has no numbers; wait for the first steps\n"
    assert (completed.returncode, completed.stdout, completed.stderr) == (2, "", words)
