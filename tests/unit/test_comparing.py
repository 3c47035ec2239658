"""A comparison: what it reads from runs, and what it says about them."""

import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from tests.compared import compared, contenders, usual_secs
from tf2dist.config.compose import ConfigSource
from tf2dist.errors import Interrupted
from tf2dist.palette import MODE_STYLES
from tf2dist.signals import Signals
from tf2dist.tools.comparing.comparison import compare as run_comparison
from tf2dist.tools.comparing.comparison_report import _figures, how_it_was_measured, report_of
from tf2dist.tools.comparing.figures import (
    IN_THE_DARK,
    PAPER,
    contrast,
    draw_accuracy,
    draw_timeline,
    first_by_size,
    styles_of,
)
from tf2dist.tools.comparing.matrix import ContenderRun, Until
from tf2dist.tools.comparing.page import contender_columns, run_columns
from tf2dist.tools.comparing.results import MEASURES, ContenderResult, Measurement, Point, Spread, set_goal
from tf2dist.tools.comparing.running import RunOutcome
from tf2dist.tools.comparing.verdict import _claim_about_a_straggler, verdict_of

SMALL = ("data=digits", "model=softmax")


def test_what_delays_all_workers_does_not_show_that_they_wait_for_the_slow_one() -> None:
    slow = contenders(*SMALL, "modes=sync", "delays=0,0.02", "common_delay=0.05")[1][1]
    result: Any = SimpleNamespace(contender=slow)
    claims = [_claim_about_a_straggler(result, Spread((rate,)), Spread((19.6,))) for rate in (19.6, 14.0)]
    assert [claim.state for claim in claims] == ["not seen", "seen"]


def result_by_name(results: list[ContenderResult], name: str) -> ContenderResult:
    return next(result for result in results if result.contender.name == name)


def test_what_is_read_from_a_run(tmp_path: Path) -> None:
    _, results = compared(tmp_path, *SMALL, "until=0.85", "seeds=2", secs_per_example=usual_secs)
    result = result_by_name(results, "async, equal workers")
    assert result.examples is not None
    assert result.secs is not None
    # An accuracy of 0.85 needs 26,667 examples. Evaluations are 4,000 apart.
    assert result.examples.values == pytest.approx((26_667, 26_667), abs=200)
    assert result.secs.values == pytest.approx((5.33, 5.39), abs=0.04)
    (rate,) = [column.value(result) for column in MEASURES if column.key == "examples_per_sec"]
    assert rate.values == pytest.approx((5000, 5000 / 1.01))
    assert result.staleness_counts() == [180, 400, 60, 0, 2]
    sync = result_by_name(results, "sync, equal workers")
    assert sync.step_rate is not None
    assert sync.step_rate.mean == pytest.approx(1 / (300 * 1e-4 * 1.005), rel=0.01)
    assert sync.staleness is None
    assert [len(steps) for steps in result.measured[0].steps] == [60, 60, 60]


def test_the_rate_leaves_out_the_warm_up() -> None:
    secs = [9.0, *(9.0 + number for number in range(1, 8))]
    points = [Point(10 * (number + 1), at, 1000.0 * (number + 1), 0.5, 0.5) for number, at in enumerate(secs)]
    measurement = Measurement(None, {}, points, [])  # type: ignore[arg-type]
    assert measurement.rates == pytest.approx((10, 1000)), "the first ten steps took nine seconds"
    assert math.isnan(Measurement(None, {}, points[:1], []).rates[0])  # type: ignore[arg-type]


def test_the_verdict(tmp_path: Path) -> None:
    options, results = compared(tmp_path, *SMALL, "until=0.85", secs_per_example=usual_secs)
    verdict = verdict_of(results, options.until)
    assert verdict.headline == (
        "With equal workers, sync is first: it reached an accuracy of 0.85 after 2.69 s, and async after 5.39 s.\n"
        "With one worker 50 ms slower, async is first: it reached an accuracy of 0.85 after 5.39 s, and "
        "sync_replicas (1 backup) after 8.08 s."
    )
    (name, (in_time, in_examples)), _ = verdict.scenarios
    assert name == "equal workers"
    assert in_time.startswith("Seconds to an accuracy of 0.85: sync 2.69 (2.67 to 2.70); async 5.39 (")
    assert ", 2.00 times as much; sync_replicas (1 backup) " in in_time
    assert in_time.endswith("; so sync is first.")
    assert in_examples.endswith("; the runs overlap or are nearly equal, so the order is open.")
    states = {claim.text.partition(":")[0]: claim.state for claim in verdict.claims}
    assert states["sync"] == "seen", verdict.claims
    assert states["async"] == "seen"
    assert states["Equal workers"] == states["Unequal workers"] == "seen"
    assert states["The price of async is stale gradients"] == "unclear", "both need as many examples here"


def test_the_verdict_does_not_say_what_was_not_measured(tmp_path: Path) -> None:
    """The modes are as fast as each other, in spite of a slow worker, but for what differs between seeds."""
    options, results = compared(
        tmp_path, *SMALL, "until=0.85", secs_per_example=lambda contender, seed: 1e-4 + seed * 1e-5
    )
    verdict = verdict_of(results, options.until)
    assert (
        "; the runs overlap or are nearly equal, so the order is open.\nWith one worker 50 ms slower, "
        in verdict.headline
    )
    states = {claim.text.partition(":")[0]: claim.state for claim in verdict.claims}
    assert states["sync"] == "not seen", "its steps are shorter than the delay"
    assert states["Equal workers"] == states["Unequal workers"] == "unclear"

    options, results = compared(tmp_path / "b", *SMALL, "until=0.95", "seeds=1", secs_per_example=usual_secs)
    verdict = verdict_of(results, options.until)
    best = "reached an accuracy of 0.95 in every run; the best accuracy was 0.9000."
    assert verdict.headline.startswith(f"With equal workers, no mode {best}")
    sentence = "sync: no run reached an accuracy of 0.95; the best accuracy was 0.9"
    assert sentence in " ".join(verdict.scenarios[0][1])


def test_one_run_proves_no_order(tmp_path: Path) -> None:
    options, results = compared(tmp_path, *SMALL, "until=0.85", "seeds=1", secs_per_example=usual_secs)
    verdict = verdict_of(results, options.until)
    sentences = [line for _, lines in verdict.scenarios for line in lines]
    for text in (verdict.headline, *sentences[:2]):
        assert "; with one run each the order is open." in text
        assert "first" not in text, "either there is an order, or it is open"
    assert {claim.state for claim in verdict.claims if "workers: choose" in claim.text} == {"unclear"}


def test_equal_steps_are_judged_at_equal_accuracy(tmp_path: Path) -> None:
    """After 300 steps of one batch async has seen a third of the examples, sooner and with a lower accuracy."""
    secs = {"sync": 0.5e-4, "async": 1e-4, "sync_replicas": 2e-4}
    options, results = compared(
        tmp_path, *SMALL, "until=300steps", "delays=[0]", "modes=[sync,async]",
        secs_per_example=lambda contender, seed: secs[contender.mode],
    )  # fmt: skip
    ends = {result.contender.mode: result.ends()[0].secs for result in results}
    assert ends["async"] < ends["sync"]
    verdict = verdict_of(results, options.until)
    assert verdict.headline == (
        "With equal workers, sync is first: it reached an accuracy of 0.8667 (the best that all runs reached) after "
        "1.53 s, and async after 3.00 s."
    )
    assert verdict.scenarios[0][1][-1] == (
        "At 300 steps, sync has an accuracy of 0.9556 after 90,000 examples; async has an accuracy of 0.8667 after "
        "30,000 examples."
    )
    assert not [claim for claim in verdict.claims if claim.state == "seen" and "more examples than sync" in claim.text]
    _, files = report_of(options, [], results)
    goals = [contender["goal"] for contender in json.loads(files["compare.json"])["contenders"]]
    assert goals == [{"accuracy": pytest.approx(1 - 4000 / 30_000)}] * 2
    assert "The dotted line is the goal" in str(files["report.html"])


def test_a_model_without_an_accuracy_is_judged_at_equal_loss(tmp_path: Path) -> None:
    options, results = compared(
        tmp_path, *SMALL, "until=300steps", "delays=[0]", "modes=[sync,async]", secs_per_example=usual_secs
    )
    for result in results:
        for run in result.measured:
            run.points[:] = [replace(point, accuracy=None, loss=4000 / point.examples - 1) for point in run.points]
    set_goal(results, options.until)
    assert verdict_of(results, options.until).headline == (
        "With equal workers, sync is first: it reached a loss of -0.8667 (the best that all runs reached) after "
        "3.08 s, and async after 6.03 s."
    )


def test_a_run_that_has_learnt_nothing_decides_no_order(tmp_path: Path) -> None:
    """What it has reached the others have passed before their first evaluation, nobody knows when."""
    options, results = compared(
        tmp_path, *SMALL, "until=300steps", "delays=[0]", "modes=[sync,async]", secs_per_example=usual_secs
    )
    (bad,) = (result for result in results if result.contender.mode == "async")
    for run in bad.measured:
        run.points[:] = [replace(point, accuracy=0.1, secs=point.secs / 10) for point in run.points]
    set_goal(results, options.until)
    verdict = verdict_of(results, options.until)
    assert verdict.headline.startswith("With equal workers, async reached an accuracy of 0.1 (the best ")
    assert verdict.headline.endswith(" so the order is open; give a smaller eval_every_examples.")
    assert "At 300 steps, sync has an accuracy of 0.9556 after " in verdict.scenarios[0][1][-1]
    assert {claim.state for claim in verdict.claims} <= {"unclear"}


def test_several_scenarios_are_counted_in_the_headline(tmp_path: Path) -> None:
    options, results = compared(
        tmp_path, "data=digits", "model=softmax,dnn,cnn", "until=0.85", "delays=[0]", "modes=[sync,async]",
        secs_per_example=lambda contender, seed:
            1e-4 if contender.config.model["name"] == "cnn" else usual_secs(contender, seed),
    )  # fmt: skip
    assert verdict_of(results, options.until).headline == (
        "Time to an accuracy of 0.85: sync is first in 2 of 3 scenarios; in 1 of 3 the order is open."
    )


def test_a_cell_is_a_number_whose_unit_is_in_the_head(tmp_path: Path) -> None:
    _, results = compared(tmp_path, *SMALL, "until=0.85", "backups=[0,1]", secs_per_example=usual_secs)
    runs = [(result, outcome) for result in results for outcome in result.outcomes]
    for columns, rows in ((contender_columns(results), results), (run_columns(), runs)):
        for column in columns:
            if column.is_number:
                texts = [text for row in rows if (text := column.text(row))]
                assert texts, column.title
                assert all(re.fullmatch(r"[0-9,.]+( \([0-9,.]+ to [0-9,.]+\))?", text) for text in texts), texts
    (with_backup,) = {column.text(results[-1]) for column in contender_columns(results) if column.key == "dropped"}
    assert with_backup == "12"
    heads = [column.title for column in contender_columns(results)]
    assert heads[3:5] == ["seconds to the goal", "examples to the goal"]
    assert heads[-3:] == ["staleness in updates", "dropped gradients in %", "seconds to the first step"]


@pytest.mark.parametrize(("slower", "millis"), [(1, 30 * 20), (9, 3000)])
def test_all_time_lines_have_one_axis(tmp_path: Path, slower: int, millis: int) -> None:
    """A step takes from 20 ms with async to 180 ms with sync and a slow worker; 30 of the shortest or 3 s are shown."""
    _, results = compared(
        tmp_path, *SMALL, "until=0.85", secs_per_example=lambda contender, seed: slower * usual_secs(contender, seed)
    )
    figure = draw_timeline(results, False)
    (limits,) = {axes.get_xlim() for axes in figure.axes}
    assert limits == pytest.approx((0, millis), rel=0.01)
    for axes in figure.axes:
        line = axes.collections[0].get_datalim(axes.transData)
        assert (line.x0, line.x1) == pytest.approx(limits, rel=0.01, abs=0.1), "from edge to edge"


def test_contenders_of_a_mode_look_alike_and_are_told_apart(tmp_path: Path) -> None:
    _, results = compared(tmp_path, *SMALL, "until=0.85", "backups=[0,1,2]", secs_per_example=usual_secs)
    styles = styles_of(results)
    assert {mode_label: styles[mode_label] for mode_label in ("sync", "async")} == {
        mode_label: MODE_STYLES[mode_label] for mode_label in ("sync", "async")
    }
    assert styles["sync_replicas (no backups)"] == MODE_STYLES["sync_replicas"]
    for look in ([style.colour for style in styles.values()], [style.marker for style in styles.values()]):
        assert len(set(look)) == 5
    dark = [IN_THE_DARK[style.colour] for style in styles.values()]
    assert len(set(dark)) == 5
    assert all(contrast(style.colour, PAPER) >= 3 for style in styles.values())
    assert all(contrast(colour, IN_THE_DARK[PAPER]) >= 3 for colour in dark)
    lines = draw_accuracy(results, Until("accuracy", 0.85), False).axes[0].get_lines()
    drawn = {line.get_label(): (line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
    for mode_label, style in styles.items():
        assert drawn[mode_label] == (style.colour, style.dash, style.marker)


@pytest.mark.thorough
def test_every_text_in_a_picture_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf2dist.tools.comparing.figures.MAX_PANELS", 1)
    options, results = compared(
        tmp_path, "data=digits", "model=softmax,dnn", "backups=[0,1,2]", "until=0.85", "delays=[0,0.05]",
        secs_per_example=lambda contender, seed: usual_secs(contender, seed) / (1 + len(contender.scenario) % 7),
    )  # fmt: skip
    won = {result.contender.mode_label for result in first_by_size(results).values()}
    assert len(won) > 1
    figures = [draw(False) for *_, draw in _figures(options, results)]
    assert len(figures) == 5
    for figure in figures:
        for axes in figure.axes:
            cells = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
            for text in [text for text in axes.findobj(Text) if text.get_text()]:
                behind = [to_hex(cell.get_facecolor()) for cell in cells
                          if cell.get_x() < text.get_position()[0] < cell.get_x() + 1
                          and cell.get_y() < text.get_position()[1] < cell.get_y() + 1
                          and text.get_transform() == axes.transData]  # fmt: skip
                pair = (to_hex(text.get_color()), behind[-1] if behind else to_hex(axes.get_facecolor()))
                for one, other in (pair, [IN_THE_DARK.get(colour, colour) for colour in pair]):
                    assert contrast(one, other) >= 4.5, (text.get_text(), one, other)


def test_the_files_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix with all axes has all pictures; names are quoted for HTML and are no formulas."""
    monkeypatch.setattr("tf2dist.tools.comparing.figures.MAX_PANELS", 2)  # drawing all sixteen takes seconds
    options, results = compared(
        tmp_path, "data=digits", "model=softmax,dnn", "backups=[0,1]", "until=0.85", "delays=[0,0.05]",
        "common_delay=0.01", secs_per_example=usual_secs, failed=("sync-delay0-modelsoftmax-seed1",), data="<b>$x_1$",
    )  # fmt: skip
    headline, files = report_of(options, ["until=<0.85>"], results)
    assert headline
    pictures = {f"{name}.png" for name in ("accuracy", "staleness", "timeline", "backups", "map")}
    assert set(files) == {"compare.json", "report.html", *pictures}
    text = str(files["report.html"])
    assert "Every worker sleeps for 10 ms in each of its steps" in text
    assert text.count("<figure") == 5
    assert text.count("data:image/svg+xml;base64,") == 20
    assert "&lt;b&gt;$x_1$" in text
    assert "until=&lt;0.85&gt;" in text
    assert "failed (3)" in text
    record = json.loads(files["compare.json"])
    assert record["verdict"]["headline"] == headline
    first = record["contenders"][0]
    assert [run["state"] for run in first["runs"]] == ["done", "failed"]
    assert first["runs"][0]["evaluations"][-1]["examples"] == 39_000
    assert record["not_run"] == ["sync, equal workers, model=softmax: without the runs of seed 1 (failed)."]


def test_the_report_names_what_all_contenders_share(tmp_path: Path) -> None:
    options, results = compared(
        tmp_path, "data=digits", "model=softmax", "delays=[0]", "modes=[sync]", "optimizer.learning_rate=0.1,0.2",
        secs_per_example=usual_secs,
    )  # fmt: skip
    (text,) = (text for text in how_it_was_measured(options, results) if text.startswith("All contenders"))
    name = results[0].contender.config.optimizer["name"]
    assert text == f"All contenders train with the optimizer {name} and with batches of 100 examples for each worker."


def test_the_report_says_which_axes_were_not_run(tmp_path: Path) -> None:
    options, results = compared(
        tmp_path, *SMALL, "until=0.85", "delays=[0]", "modes=[sync]", "seeds=1", secs_per_example=usual_secs
    )
    _, files = report_of(options, [], results)
    assert {name for name in files if name.endswith(".png")} == {"accuracy.png", "timeline.png"}
    not_run = " ".join(json.loads(files["compare.json"])["not_run"])
    for what in ("A slow worker", "Staleness", "Backup workers", "The map", "seeds=3"):
        assert what in not_run


def test_runs_without_evaluations_make_a_report_too(tmp_path: Path) -> None:
    options, results = compared(tmp_path, *SMALL, "until=50steps", "seeds=1", secs_per_example=usual_secs)
    for path in tmp_path.glob("runs/*/metrics.jsonl"):
        path.unlink()
    for path in tmp_path.glob("runs/*/timeline/worker-1.csv"):
        path.write_text("1.0,\n2")
    for result in results:
        result.measured = [Measurement(run.run, run.summary, [], []) for run in result.measured]
    set_goal(results, options.until)
    text = str(report_of(options, [], results)[1]["report.html"])
    assert "With equal workers, no run was evaluated." in text
    assert "dotted" not in text


def test_ctrl_c_while_the_report_is_drawn_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*SMALL, "modes=sync", "delays=0", "until=0.85", f"compare_dir={tmp_path / 'all'}"]

    def ran(runs: list[ContenderRun], folder: Path, *_: object) -> list[RunOutcome]:
        compared(folder, *arguments, secs_per_example=usual_secs)
        return [RunOutcome(run, "done", 0) for run in runs]

    def interrupted(*_: object) -> bytes:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal came too late")

    monkeypatch.setattr("tf2dist.tools.comparing.comparison.run_all", ran)
    monkeypatch.setattr("tf2dist.tools.comparing.figures.as_png", interrupted)
    with Signals() as signals, pytest.raises(Interrupted, match=r"compare_dir=.*all goes on") as stopped:
        run_comparison(arguments, arguments, ConfigSource(), signals)
    assert stopped.value.exit_code == 130
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"plan.json", "runs", "logs", ".lock"}
