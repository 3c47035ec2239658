"""training.png: every kind of run can be drawn, at its end or while it goes on, and no run fails because of it."""

import gc
import json
import math
import os
import struct
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure

from tf2dist.cluster.sources import find_place
from tf2dist.cluster.spec import Cluster, Place, Task
from tf2dist.config.schema import RunConfig
from tf2dist.launch.console import Console
from tf2dist.launch.run_dir import rows_of
from tf2dist.palette import SPLIT_STYLES
from tf2dist.tools.end_of_run import draw_training, new_cycles_collected
from tf2dist.tools.plotting import SeriesByName, as_png, draw_run, metrics_of, series_of, training_figure


def row(step: int, secs: float, /, task: str = "chief-0", **values: Any) -> dict[str, Any]:
    return {"step": step, "time": 1e9 + secs, "secs": secs, "task": task, **values}


def points(series: SeriesByName, name: str) -> list[tuple[float, float, float]]:
    """The step, the seconds and the value of each point."""
    one = series[name]
    return list(zip(one.steps, one.secs, one.values, strict=True))


def test_repeated_steps_replace_earlier_ones() -> None:
    first = [row(step, secs, loss=1.0) for step, secs in ((1, 5.0), (50, 6.0), (90, 7.0))]
    # The run continues from the checkpoint at step 40, in the same command.
    same_command = series_of([*first, row(41, 9.0, loss=0.5), row(95, 10.0, loss=0.4)])
    assert points(same_command, "loss") == [(1, 0, 1), (41, 4, 0.5), (95, 5, 0.4)]


@pytest.mark.parametrize(("began", "start_up"), [(0.0, 4.0), (60.0, 4.0), (60.0, 30.0)])
def test_the_time_is_that_of_all_commands_without_their_start_up(began: float, start_up: float) -> None:
    """Of a new command, whose clock starts at 0; it may have needed longer than all of the one before it."""
    first = [row(step, secs, loss=1.0) for step, secs in ((1, 5.0), (50, 6.0), (90, 7.0))]
    second = [row(41, start_up, loss=0.5), row(95, start_up + 1.0, loss=0.4)]
    series = series_of([*first, *({**one, "time": one["time"] + began} for one in second)])
    assert points(series, "loss") == [(1, 0, 1), (41, 2, 0.5), (95, 3, 0.4)]


def test_evaluations_are_drawn_at_the_time_of_the_leader() -> None:
    """The evaluator counts its seconds from its own start."""
    rows = [row(1, 5.0, loss=1.0), row(1, 900.0, "evaluator-0", validation_loss=2.0), row(9, 6.0, loss=0.5)]
    series = series_of(rows)
    assert points(series, "validation_loss") == [(1, 0, 2)]
    assert points(series, "loss")[-1] == (9, 1, 0.5)


def test_a_late_row_of_the_evaluator_removes_none_of_the_leader() -> None:
    leaders = [row(step, step / 100, validation_loss=1.0) for step in (100, 200, 300, 400)]
    late = [row(150, 9.0, "evaluator-0", validation_loss=2.0), row(200, 9.0, "evaluator-0", validation_loss=3.0)]
    series = series_of([*leaders, *late, row(500, 5.0, validation_loss=1.0)])
    assert points(series, "validation_loss") == [
        (100, 0, 1),
        (150, 1, 2),
        (200, 2, 3),
        (300, 2, 1),
        (400, 3, 1),
        (500, 4, 1),
    ]


def test_a_run_that_was_started_again_replaces_the_evaluations_after_its_checkpoint() -> None:
    first = [row(1, 1.0, loss=1.0), row(400, 2.0, loss=1.0), row(400, 1.0, "evaluator-0", validation_loss=2.0)]
    again = [row(210, 4.0, loss=1.0), row(300, 5.0, "evaluator-0", validation_loss=3.0)]
    assert points(series_of([*first, *again]), "validation_loss") == [(300, 3, 3)]


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


def figure_of(rows: list[dict[str, Any]], staleness: Sequence[int] = ()) -> Figure:
    figure = training_figure(series_of(rows), "a: test accuracy 0.94", "a line", staleness)
    figure.draw_without_rendering()
    return figure


def quantities(figure: Figure) -> list[str]:
    """What the vertical axes show, of the panels that name it."""
    return [title for axes in figure.axes if (title := axes.get_title(loc="left"))]


@pytest.mark.parametrize("mode", MODES)
def test_the_axes_of_each_mode(mode: str) -> None:
    staleness = MODES[mode].get("staleness_counts", [])
    figure = figure_of(rows_of_mode(mode), staleness)
    labels = [axes.get_xlabel().partition(" (")[0].partition(":")[0] for axes in figure.axes]
    assert labels == 2 * ["global step", "time since the first step"] + (["staleness"] if mode == "async" else [])
    assert quantities(figure) == ["loss", "accuracy"] + (["updates (log scale)"] if mode == "async" else [])
    for one, values in zip(figure.axes[::2], ((0.548, 0.853, 0.43), (0.825, 0.833, 0.94)), strict=False):
        lines = {line.get_label(): line.get_ydata()[-1] for line in one.lines}  # type: ignore[index]
        assert lines == dict(zip(("training", "validation", "test"), values, strict=True))
    assert [text.get_text() for text in figure.texts] == ["a: test accuracy 0.94", "a line"]


def test_each_split_has_its_style_and_a_single_point_no_line() -> None:
    """In the picture and in the legend."""
    rows = [row(step, step, loss=1 / step, validation_loss=2 / step) for step in range(1, 60)]
    figure = figure_of([*rows, row(60, 60.0, test_loss=0.1)])
    (legend,) = figure.legends
    shown = {
        text.get_text(): (line.get_color(), line.get_linestyle(), line.get_marker())
        for line, text in zip(legend.get_lines(), legend.get_texts(), strict=True)
    }
    colours = {split: style.colour for split, style in SPLIT_STYLES.items()}
    # Of 59 points none is marked.
    assert shown == {
        "training": (colours["training"], "-", ""),
        "validation": (colours["validation"], "--", ""),
        "test": (colours["test"], "None", SPLIT_STYLES["test"].marker),
    }


def test_the_time_begins_at_0() -> None:
    figure = figure_of(rows_of_mode("sync"))
    by_time = figure.axes[1]
    assert by_time.lines[0].get_xdata()[0] == 0  # type: ignore[index]
    assert by_time.get_xlim()[0] <= 0 < by_time.get_xlim()[1]


def test_a_single_step_has_whole_numbers_beside_it() -> None:
    by_step = figure_of([row(7, 5.0, loss=2.0)]).axes[0]
    low, high = by_step.get_xlim()
    assert [tick for tick in by_step.get_xticks() if low <= tick <= high] == [6, 7, 8]


def test_a_logarithmic_axis_is_marked() -> None:
    falling = figure_of([row(step, step, loss=30 / step, score=step / 30) for step in range(1, 30)])
    assert quantities(falling) == ["loss (log scale)", "score"]
    assert [axes.get_yscale() for axes in falling.axes] == ["log", "log", "linear", "linear"]


def test_a_late_update_does_not_squeeze_the_staleness() -> None:
    counts = [1000, 500, 200, 50] + [0] * 50 + [1, 1]
    axes = figure_of(rows_of_mode("async"), counts).axes[-1]
    assert axes.get_xlim()[1] < 12
    assert axes.get_xlabel().endswith("its push; 2 beyond this axis, up to 55")
    for few in ([1000, 500, 200, 50, 0, 0, 0, 0, 1], [5] * 100):
        axes = figure_of(rows_of_mode("async"), few).axes[-1]
        assert axes.get_xlim()[1] >= len(few) - 0.5
        assert axes.get_xlabel().endswith("its push")


@pytest.mark.parametrize("summary", [None, SUMMARY, {"of": "something else"}], ids=["none", "its own", "foreign"])
def test_the_title_has_the_name_and_the_result(
    summary: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on has none yet; in its own directory it has its name, too."""
    above: list[str] = []

    def note(series: SeriesByName, title: str, line: str, staleness: list[int]) -> Any:
        above.extend([title, line])
        return training_figure(series, title, line, staleness)

    monkeypatch.setattr("tf2dist.tools.plotting.training_figure", note)
    write_run(tmp_path, rows_of_mode("sync"), summary)
    monkeypatch.chdir(tmp_path)
    assert draw_run(Path())
    unfinished = [f"{tmp_path.name}: not finished, step 100", ""]
    result = [
        f"{tmp_path.name}: test accuracy 0.9400, loss 0.4300 over 360 examples",
        "sync softmax on digits: 2 workers, 100 steps",
    ]
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
    monkeypatch.setattr("tf2dist.tools.end_of_run.SILENT_SECS", 60.0)


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
from tf2dist.tools.end_of_run import draw_training

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
    """Also of a run whose name has characters that the font lacks."""
    run_dir = tmp_path / "实验"
    run_dir.mkdir()
    write_run(run_dir, rows_of_mode("async"), SUMMARY | MODES["async"])
    completed = python("-m", "tf2dist.plot", run_dir)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, f"{run_dir / 'training.png'}\n", "")
    assert (run_dir / "training.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_a_run_without_numbers(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    completed = python("-m", "tf2dist.plot", tmp_path)
    words = f"tf2dist: error: RUN_DIR ({tmp_path}): metrics.jsonl has no numbers; wait for the first steps\n"
    assert (completed.returncode, completed.stdout, completed.stderr) == (2, "", words)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_figure_is_freed_once_it_is_saved(is_enabled: bool) -> None:
    """It has references to itself; a program that has turned the collector off collects by itself."""
    gc.collect()
    if not is_enabled:
        gc.disable()
    try:
        with new_cycles_collected():
            figure = Figure()
            figure.add_subplot().plot([1, 2])
            as_png(figure)
            found = weakref.ref(figure)
            del figure
        assert (found() is None) == is_enabled == gc.isenabled()
    finally:
        gc.enable()
