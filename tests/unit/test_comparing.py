"""A comparison: its contenders, what it refuses, what it reads from runs, and what it says about them."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest

from tests.compared import compared, contenders, usual_secs
from tests.conftest import PAGES
from tf2dist import compare
from tf2dist.comparing.matrix import Contender, runs_of
from tf2dist.comparing.options import PARSERS
from tf2dist.comparing.report import write_report
from tf2dist.comparing.results import ContenderResult, Measurement, Point
from tf2dist.comparing.running import earlier_plan, prepare_folder
from tf2dist.comparing.verdict import verdict_of
from tf2dist.errors import ConfigError

SMALL = ("data=digits", "model=softmax")


def names(*arguments: str) -> list[str]:
    return [contender.name for contender in contenders(*SMALL, *arguments)[1]]


def override_of(contender: Contender, name: str) -> str:
    (match,) = (override for override in contender.overrides if override.startswith(f"{name}="))
    return match.partition("=")[2]


def test_the_default_contenders() -> None:
    assert names() == [
        "sync, equal workers",
        "sync, one worker 50 ms slower",
        "async, equal workers",
        "async, one worker 50 ms slower",
        "sync_replicas (1 backup), equal workers",
        "sync_replicas (1 backup), one worker 50 ms slower",
    ]


def test_every_mode_is_evaluated_after_as_many_examples() -> None:
    _, selected = contenders(*SMALL, "workers=4", "delays=[0]", "eval_every_examples=2000", "until=0.9")
    assert [
        (contender.mode, contender.batches, override_of(contender, "train.eval_every_steps")) for contender in selected
    ] == [
        ("sync", 4, "5"),
        ("async", 1, "20"),
        ("sync_replicas", 3, "7"),
    ]
    assert {override_of(contender, "train.until_accuracy") for contender in selected} == {"0.9"}


def test_the_last_worker_is_slow_and_others_are_not_delayed() -> None:
    even, slow = contenders(*SMALL, "modes=sync", "delays=0,0.02", "simulate.distribution=exponential")[1]
    assert not any(override.startswith("simulate.") for override in even.overrides)
    assert override_of(slow, "simulate.delay_secs") == "[0,0,0.02]"
    assert override_of(slow, "simulate.distribution") == "exponential"


def test_an_option_of_a_mode_is_given_to_that_mode_alone() -> None:
    result = contenders(*SMALL, "algorithm=plain,staleness_aware", "delays=0", "modes=[sync,async]", "seed=5")[1]
    assert [contender.way for contender in result] == ["sync", "async", "async (algorithm=staleness_aware)"]
    assert [contender.config.algorithm.kind for contender in result] == ["plain", "plain", "staleness_aware"]
    assert [contender.config.seed for contender in result] == [5, 5, 5]


def test_other_options_make_situations() -> None:
    assert names("modes=sync", "delays=[0]", "train.batch_size_per_worker=10,20") == [
        "sync, equal workers, train.batch_size_per_worker=10",
        "sync, equal workers, train.batch_size_per_worker=20",
    ]


def test_the_contenders_take_turns() -> None:
    _, found = contenders(*SMALL, "modes=[sync,async]", "delays=[0]", "seed=3")
    runs = list(runs_of(found, 3))
    assert [(run.contender.mode, run.seed) for run in runs] == [
        ("sync", 3), ("async", 3), ("async", 4), ("sync", 4), ("sync", 5), ("async", 5),
    ]  # fmt: skip
    assert len({run.folder for run in runs}) == 6


@pytest.mark.parametrize(
    ("until", "expected"),
    [("0.9", "train.until_accuracy=0.9"), ("30s", "train.until_secs=30"), ("50steps", "train.steps=50")],
)
def test_the_end_of_the_runs(until: str, expected: str) -> None:
    assert expected in contenders(*SMALL, f"until={until}", "modes=sync", "delays=0")[1][0].overrides


REFUSED = [
    (["modes=[asink]"], "modes (asink): must be among async, sync, sync_replicas; did you mean async?"),
    (["modes=[]"], "modes ([]): must be a list such as modes=[sync,async]"),
    (["modes=sync,sync"], "modes (sync,sync): has a value twice"),
    (["delays=[0,slow]"], "delays ([0,slow]): must be seconds from 0 on"),
    (["delays=nan"], "delays (nan): must be seconds from 0 on"),
    (["backups=[3]"], "backups (3): must be less than the 3 workers"),
    (["backups=[1]", "modes=sync"], "backups ([1]): is for mode sync_replicas; add it to modes"),
    (["until=2"], "until (2): must be an accuracy above 0 and up to 1"),
    (["until=fast"], "until (fast): must be"),
    (["until=0steps"], "until (0steps): must be"),
    (["seeds=0"], "seeds (0): must be a whole number from 1 to 100"),
    (["workers=1.5"], "workers (1.5): must be a whole number"),
    (["seed=1,2"], "seed (1): the runs of a contender have seeds in a row; give seeds=3"),
    (["mode=sync"], "mode (sync): is set by the comparison; give modes=[async,sync]"),
    (["cluster=local4"], "cluster (local4): is set by the comparison; give workers=3"),
    (["train.steps=5"], "train.steps (5): is set by the comparison; give until=2000steps"),
    (["run_dir=x"], "run_dir (x): is set by the comparison; give compare_dir=DIR"),
    (["train.epochs=2", "until=50steps"], "train.epochs: until=50steps is the end of the runs"),
    (["delay=[0]"], "delay: there is no such option; did you mean delays?"),
    (["train.stepz=5"], "train.stepz: there is no such option; did you mean train.steps?"),
    (["model=dnn,nope"], "model (nope): must be one of cnn, dnn"),
    (["algorithm=staleness_aware", "modes=sync"], "algorithm (staleness_aware): is for mode=async"),
    (["data=parabola"], "until (0.95): data=parabola has no classes; give until=2000steps"),
    (["--json"], "--json: there is no such flag"),
    (["-m"], "--multirun: is not for a comparison"),
    (["-sc", "install=bash"], "--shell-completion: is not for a comparison"),
    (["train.batch_size_per_worker=1000"], "train.batch_size_per_worker (1000): each of 3 workers has only"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_a_wrong_request_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data = [] if any(argument.startswith("data=") for argument in arguments) else ["data=digits"]
    with pytest.raises(SystemExit) as ended:
        compare.main([*data, *arguments])
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"tf2dist: error: {message}")
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_comparison_is_refused(tmp_path: Path) -> None:
    def runs(*arguments: str) -> list[object]:
        return list(runs_of(contenders(*SMALL, "modes=sync", "delays=0", *arguments)[1], 2))

    prepare_folder(tmp_path / "a", runs("until=0.9"))  # type: ignore[arg-type]
    before = earlier_plan(tmp_path / "a")
    prepare_folder(tmp_path / "a", runs("until=0.9", "modes=async"))  # type: ignore[arg-type]
    assert earlier_plan(tmp_path / "a").items() > before.items(), "more contenders may join"
    with pytest.raises(ConfigError, match=r"is of another comparison \(train.until_accuracy=0.9 there, .*0.8 here\)"):
        prepare_folder(tmp_path / "a", runs("until=0.8"))  # type: ignore[arg-type]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="has files, and is not of a comparison"):
        prepare_folder(tmp_path / "b", runs())  # type: ignore[arg-type]


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
    assert result.example_rate is not None
    assert result.example_rate.values == pytest.approx((5000, 5000 / 1.01))
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
    assert verdict.headline == "With equal workers, sync is first. With one worker 50 ms slower, async is first."
    (name, (in_time, in_examples)), _ = verdict.situations
    assert name == "equal workers"
    assert in_time.startswith("In time, sync comes to 0.85 first, after ")
    assert ", 2.00 times as much; sync_replicas (1 backup) needs " in in_time
    assert in_examples.endswith("The runs of sync and async overlap or are nearly equal, so their order is open.")
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
    assert "about equal" in verdict.headline
    states = {claim.text.partition(":")[0]: claim.state for claim in verdict.claims}
    assert states["sync"] == "not seen", "its steps are shorter than the delay"
    assert states["Equal workers"] == states["Unequal workers"] == "unclear"

    options, results = compared(tmp_path / "b", *SMALL, "until=0.95", "seeds=1", secs_per_example=usual_secs)
    verdict = verdict_of(results, options.until)
    assert "no run has come to the target" in verdict.headline
    assert "sync: no run came to 0.95; the best accuracy was 0.9" in " ".join(verdict.situations[0][1])


def test_one_run_proves_no_order(tmp_path: Path) -> None:
    options, results = compared(tmp_path, *SMALL, "until=0.85", "seeds=1", secs_per_example=usual_secs)
    verdict = verdict_of(results, options.until)
    assert "in one run each" in verdict.headline
    assert {claim.state for claim in verdict.claims if "workers: choose" in claim.text} == {"unclear"}


def test_the_files_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix with all axes has all pictures; names are quoted for HTML and are no formulas."""
    monkeypatch.setattr("tf2dist.comparing.figures.MAX_PANELS", 2)  # drawing all sixteen takes seconds
    options, results = compared(
        tmp_path, "data=digits", "model=softmax,dnn", "backups=[0,1]", "until=0.85", "delays=[0,0.05]",
        secs_per_example=usual_secs, failed=("sync-delay0-modelsoftmax-seed1",), data="<b>$x_1$",
    )  # fmt: skip
    headline = write_report(options, ["until=<0.85>"], results, tmp_path)
    assert headline
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {f"{name}.png" for name in ("accuracy", "staleness", "timeline", "backups", "map")}
    text = (tmp_path / "report.html").read_text()
    assert text.count("<figure") == 5
    assert text.count("data:image/svg+xml;base64,") == 20
    assert "&lt;b&gt;$x_1$" in text
    assert "until=&lt;0.85&gt;" in text
    assert "failed (3)" in text
    record = json.loads((tmp_path / "compare.json").read_text())
    assert record["verdict"]["headline"] == headline
    first = record["contenders"][0]
    assert [run["state"] for run in first["runs"]] == ["done", "failed"]
    assert first["runs"][0]["evaluations"][-1]["examples"] == 39_000
    assert record["not_run"] == ["sync, equal workers, model=softmax: without the runs of seed 1 (failed)."]


def test_the_report_says_which_axes_were_not_run(tmp_path: Path) -> None:
    options, results = compared(
        tmp_path, *SMALL, "until=0.85", "delays=[0]", "modes=[sync]", "seeds=1", secs_per_example=usual_secs
    )
    write_report(options, [], results, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"accuracy.png", "timeline.png"}
    not_run = " ".join(json.loads((tmp_path / "compare.json").read_text())["not_run"])
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
    write_report(options, [], results, tmp_path)
    assert "no run has come to the target" in (tmp_path / "report.html").read_text()


LINES = re.findall(r"^(?:\$ )?python -m tf2dist\.compare(.*)", "\n".join(PAGES.values()), re.MULTILINE)


@pytest.mark.parametrize("line", LINES)
def test_the_commands_of_the_pages_are_accepted(line: str) -> None:
    assert len(contenders(*shlex.split(line))[1]) > 2


def test_the_help_names_every_option() -> None:
    assert all(re.search(rf"^    {name}=", compare.__doc__ or "", re.MULTILINE) for name in PARSERS)
