"""What is run for docs/staleness.md, in which order, and what is made of it."""

import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests import pictures
from tests.bench import growth, staleness, staleness_page
from tests.bench.staleness import QUICK, RATES, Results, Run, Setting, Stage, fill, read, stages
from tests.bench.staleness_page import WORKERS
from tests.conftest import PAGES
from tf2dist.config.load import load

POINT = Setting("dnn", "mnist", "sgd", "plain", 3, 0.3, 0)
STAGE = Stage("dnn", "mnist", "plain", (1, 3), tuned=True, seeds=(0, 1), optimizers=("sgd",))
SPREAD = {"p10": 1, "p50": 2, "p90": 3, "p99": 4, "max": 9}


def error_of(setting: Setting) -> float:
    """Without staleness 0.3 is best, and each worker more needs a third of the rate."""
    ideal = {1: 0.3, 3: 0.03}[setting.workers]
    return round(0.1 + 0.01 * abs(RATES["sgd"].index(setting.learning_rate) - RATES["sgd"].index(ideal)), 3)


def run_of(setting: Setting, **more: Any) -> Run:
    figures = {"updates": 1290, "staleness": SPREAD | {"mean": setting.workers - 1.1}}
    error = error_of(setting)
    return asdict(setting) | figures | {"validation_error": error, "test_error": error + 0.001 * setting.seed} | more


def all_runs(stage: Stage = STAGE) -> list[Setting]:
    """In the order in which they are made."""
    runs: list[Run] = []
    while setting := Results(runs).next_run([stage]):
        runs.append(run_of(setting))
    return [Setting.of(run) for run in runs]


def test_the_rate_is_searched_without_staleness_and_then_downward() -> None:
    found = [(one.workers, one.learning_rate, one.seed) for one in all_runs()]
    first = [(1, rate, 0) for rate in (1.0, 0.3, 0.1, 0.03)]
    searched = [(3, rate, 0) for rate in (0.3, 0.1, 0.03, 0.01)]
    assert found == [*first, *searched, (1, 0.3, 1), (3, 0.03, 1)]


def test_runs_that_diverge_do_not_end_the_search() -> None:
    runs = [run_of(one) for one in Results([]).first_rates("dnn", "mnist", "sgd")]
    lost = {0.3: 0.9, 0.1: 0.9014}  # NaN, and the same class for all
    for rate, error in lost.items():
        one = Setting("dnn", "mnist", "sgd", "plain", 3, rate, 0)
        runs.append(run_of(one) | {"validation_error": error, "test_error": error})
    missing = Results(runs).best_rate(POINT)
    assert isinstance(missing, Setting)
    assert missing.learning_rate == 0.03


def test_without_staleness_all_algorithms_share_a_run() -> None:
    aware = STAGE._replace(algorithm="staleness_aware", tuned=False)
    assert {one.algorithm for one in all_runs(aware) if one.workers == 1} == {"plain"}


def test_a_file_is_filled_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Setting] = []

    def measure(setting: Setting, *more: str) -> Run:
        made.append(setting)
        if len(made) == 3:
            raise KeyboardInterrupt
        return run_of(setting, secs=1.0)

    monkeypatch.setattr(staleness, "measure", measure)
    path = tmp_path / "runs.jsonl"
    with pytest.raises(KeyboardInterrupt):
        fill(path, [STAGE], staleness.EPOCHS, 1.0)
    assert len(read(path)) == 2
    fill(path, [STAGE], staleness.EPOCHS, 1.0)
    assert [Setting.of(run) for run in read(path)] == all_runs()
    assert len(made) == len(all_runs()) + 1, "only the run that was stopped is made again"


@pytest.mark.thorough  # the next test loads one of them
def test_every_run_is_a_request_that_is_accepted() -> None:
    algorithms = (*staleness.ALGORITHMS, *staleness.COMPENSATED)
    settings = [Setting("cnn", "mnist", "adam", algorithm, 9, 0.001, 2) for algorithm in algorithms]
    settings += [Setting("dnn", "fashion_mnist", name, "plain", 62, 0.1, 0) for name in staleness.OPTIMIZERS]
    for setting in settings:
        config = load(setting.options(), None)
        assert config.mode == "async"
        assert config.simulate.delay_secs == [round(one, 3) for one in staleness.delays(setting.workers, "plain")]
        assert (config.train.epochs, config.train.batch_size_per_worker) == (3, 128)
        assert config.algorithm.kind == setting.algorithm.split()[0]


def test_synchronous_runs_see_the_same_examples_and_wait_for_nothing() -> None:
    config = load(Setting("dnn", "fashion_mnist", "sgd", staleness.SYNC, 9, 0.3, 0).options(), None)
    assert (config.mode, config.cluster.num_workers) == ("sync", 9)
    assert config.simulate.delay_secs == [0.0] * 9
    assert (config.train.epochs, config.train.batch_size_per_worker) == (3, 128)


def test_larger_batches_may_have_larger_rates_than_the_best_one_without_staleness() -> None:
    runs = [run_of(one) for one in Results([]).first_rates("dnn", "mnist", "sgd")]
    searched = Results(runs).best_rate(replace(POINT, algorithm=staleness.SYNC))
    assert searched == replace(POINT, algorithm=staleness.SYNC, learning_rate=1.0)


def test_the_quick_runs_are_some_of_all() -> None:
    assert {stage.workers for stage in QUICK} == {(*staleness.FEW, *staleness.MANY)}
    everything = [one for stage in stages() if not stage.tuned for one in [stage._replace(optimizers=(), seeds=())]]
    for stage in QUICK:
        own = [one.workers for one in everything if one[:3] == stage[:3]]
        assert set(stage.workers) <= {number for numbers in own for number in numbers}


def test_the_middle_of_the_updates() -> None:
    assert staleness.spread_of([5, 10, 70, 10, 5]) == {"p10": 1, "p90": 3}
    assert staleness.spread_of([1]) == {"p10": 0, "p90": 0}


def test_a_point_has_the_range_of_its_seeds() -> None:
    assert str(staleness_page.Point(0.1, [14.0])) == "14.0"
    assert str(staleness_page.Point(0.1, [14.0, 16.0, 15.0])) == "15.0 (14.0 to 16.0)"
    assert str(staleness_page.Point(0.1, [90.0, 88.65])) == "diverged (2 of 2)"
    assert str(staleness_page.Point(0.1, [90.0])) == "diverged"
    some = staleness_page.Point(0.1, [14.0, 90.0, 16.0])
    assert (str(some), some.mean) == ("15.0 (14.0 to 16.0), diverged (1 of 3)", 15.0)


def test_a_row_has_what_was_measured() -> None:
    runs = [run_of(one) for one in all_runs()]
    assert staleness_page.error_table(runs, tuned=True)[2:] == [
        "| dnn, MNIST | SGD | plain | best rate | 10.1 (10.0 to 10.1), rate 0.3 | 10.1 (10.0 to 10.1), rate 0.03 |"
    ]
    assert staleness_page.error_table(runs, tuned=False)[2:] == [
        "| dnn, MNIST | SGD | plain | rate 0.3 | 10.1 (10.0 to 10.1) | 12.0 |"
    ]
    assert staleness_page.staleness_table(runs)[-1] == "| 3 | 5 | 1.9 (1.9 to 1.9) | 1 to 3 |"


def test_the_picture_has_a_line_and_a_mark_for_each_point(tmp_path: Path) -> None:
    fashion = STAGE._replace(data="fashion_mnist")
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(run_of(one)) + "\n" for one in all_runs(fashion)))
    drawn = pictures.staleness_drawing(path)
    assert drawn.count("<circle") == 2 * 2 + 3, "two charts with two points of plain; the first one of the others"


def test_the_page_has_the_tables_of_what_was_measured() -> None:
    text, runs = PAGES["docs/staleness.md"], read(staleness.FILE)
    assert growth.page_of(text, runs, staleness_page.TABLES, staleness_page.COMMAND) == text
    assert text.count(f"written by `{staleness_page.COMMAND}`") == len(staleness_page.TABLES)


WITH_SGD = ("dnn", "fashion_mnist", "sgd")


def shown_error(
    optimizer: str, algorithm: str, workers: int, tuned: bool, data: str = "fashion_mnist", model: str = "dnn"
) -> str:
    results = Results(read(staleness.FILE))
    return f"{staleness_page.curve(results, model, data, optimizer, algorithm, tuned)[workers].mean:.1f} %"


def losses(model: str, data: str) -> dict[str, str]:
    """By optimizer: how many points of error nine workers lose to one, each with its best rate."""
    results, found = Results(read(staleness.FILE)), {}
    for name in staleness.OPTIMIZERS:
        points = staleness_page.curve(results, model, data, name, "plain", tuned=True)
        found[name] = f"{points[9].mean - points[1].mean:.1f}"
    return found


def shares_of_rate(model: str, data: str, workers: int = 9) -> dict[str, int]:
    """By optimizer: by what the best rate of one worker is divided for several."""
    results, found = Results(read(staleness.FILE)), {}
    for name in staleness.OPTIMIZERS:
        points = staleness_page.curve(results, model, data, name, "plain", tuned=True)
        found[name] = round(points[1].rate / points[workers].rate)
    return found


def test_the_answer_of_the_page_is_what_was_measured() -> None:
    answer = " ".join(PAGES["docs/staleness.md"].partition("## ")[0].split())
    secs = {}
    for mode in ("sync", "async"):
        (row,) = re.findall(rf"^\| `{mode}` \| [\d.]+ \| (.*\(.*)$", PAGES["docs/staleness.md"], re.MULTILINE)
        secs[mode] = [cell.split()[0] for cell in row.split("|")[:-1]]
    equal, slow = 0, 3  # columns: 0, 10, 50 and 100 ms
    text = (
        f"of 0.95 on MNIST in {secs['async'][slow]} s when one of them takes three times as long for a step, and with "
    )
    assert f"{text}`sync` in {secs['sync'][slow]} s." in answer
    assert f"`sync` takes {secs['sync'][equal]} s and `async` {secs['async'][equal]} s." in answer
    best = {
        (workers, way): min(shown_error(name, way, workers, tuned=True) for name in staleness.OPTIMIZERS)
        for workers in (1, 3, 9, 33)
        for way in ("plain", "sync")
    }
    text = f"three workers end with a test error of {best[3, 'plain']} in `async` and {best[3, 'sync']} in `sync`, nine"
    assert f"{text} with {best[9, 'plain']} and {best[9, 'sync']}, and 33 with {best[33, 'plain']} and" in answer
    assert f"and {best[33, 'sync']}, each the mean of three seeds" in answer
    assert f"One worker ends with {best[1, 'plain']}." in answer
    assert shares_of_rate("dnn", "fashion_mnist") == {"sgd": 10, "momentum": 30, "adam": 3}, "a tenth, a thirtieth, ..."
    assert shares_of_rate("cnn", "fashion_mnist") == {"sgd": 10, "momentum": 10, "adam": 3}
    assert shares_of_rate("dnn", "mnist") == {"sgd": 10, "momentum": 10, "adam": 1}
    assert shares_of_rate("dnn", "mnist", 33) == {"sgd": 100, "momentum": 30, "adam": 10}
    whole = " ".join(PAGES["docs/staleness.md"].split())
    lost = losses("dnn", "fashion_mnist")
    assert f"loses {lost['sgd']} points with SGD, {lost['adam']} with Adam and {lost['momentum']} with mom" in whole
    lost = losses("dnn", "mnist")
    assert f"Adam loses least: {lost['adam']} points, SGD {lost['sgd']} and momentum {lost['momentum']}" in whole
    lost = losses("cnn", "fashion_mnist")
    assert f"with the cnn: {lost['adam']}, SGD {lost['sgd']} and momentum {lost['momentum']}" in whole
    largest = [shown_error(name, "plain", 33, tuned=True) for name in ("adam", "sgd")]
    assert f"it ends at {largest[0]}, and SGD at {largest[1]}" in whole
    both = [shown_error("momentum", name, 33, tuned=True) for name in ("staleness_aware", "plain")]
    assert f"{both[0]} with it and at {both[1]} without" in answer
    both = [shown_error("adam", name, 33, tuned=False) for name in ("staleness_aware", "plain")]
    assert f"33 with Adam at {both[0]} instead of {both[1]}" in answer
    ends = [
        [shown_error(name, way, 9, tuned=True) for way in ("sync", "plain")] for name in ("adam", "momentum", "sgd")
    ]
    (adam, stale_adam), (momentum, stale_momentum), (sgd, stale_sgd) = ends
    text = f"at {adam} with Adam and at {momentum} with momentum; `async` ends at {stale_adam} and {stale_momentum}."
    assert text in whole
    three = [shown_error("sgd", way, 3, tuned=True) for way in ("plain", "sync")]
    assert f"with three workers `async` ends at {three[0]}, and `sync` at {three[1]} with two seeds" in whole
    assert f"With nine, `async` ends at {stale_sgd} and `sync` at {sgd}, and" in whole
    relative = staleness_page.curve(Results(read(staleness.FILE)), *WITH_SGD, staleness.COMPENSATED[0], True)[9]
    assert f"nine workers with SGD end at {relative.mean:.1f} % with it, at {stale_sgd} without" in whole
    assert f"momentum end at {shown_error('momentum', 'staleness_aware', 9, tuned=False)} instead" in answer


def test_what_the_page_says_of_the_cnn_and_of_mnist() -> None:
    results, whole = Results(read(staleness.FILE)), " ".join(PAGES["docs/staleness.md"].split())
    points = staleness_page.curve(results, "cnn", "fashion_mnist", "adam", "plain", tuned=False)
    one, three, nine = (f"{points[workers].mean:.1f} %" for workers in staleness.FEW)
    text = f"ends at {one} without staleness, at {three} with three workers and at {nine} with nine, and"
    assert f"{text} diverges with 33." in whole
    for optimizer, workers in (("sgd", 3), ("momentum", 9), ("adam", 33)):
        lost = staleness_page.curve(results, "cnn", "fashion_mnist", optimizer, "plain", tuned=False)[workers]
        assert min(lost.errors) > staleness_page.SAME_CLASS
    (sync, stale), (many_sync, many_stale) = (
        [shown_error("adam", way, workers, tuned=True, data="mnist") for way in ("sync", "plain")]
        for workers in (9, 33)
    )
    one = shown_error("adam", "plain", 1, tuned=True, data="mnist")
    text = f"with Adam end at {sync} in `sync` and at {stale} in `async`, 33 at {many_sync} and {many_stale}, and one"
    assert f"{text} worker at {one}" in whole
    mnist = {
        name: staleness_page.curve(results, "cnn", "mnist", name, "plain", tuned=False) for name in staleness.OPTIMIZERS
    }
    of_three = {name: [error > staleness_page.SAME_CLASS for error in mnist[name][3].errors] for name in mnist}
    assert (sum(of_three["sgd"]), sum(of_three["momentum"]), len(of_three["sgd"])) == (3, 2, 3)
    sync = shown_error("adam", "sync", 9, tuned=True, data="mnist", model="cnn")
    assert f"on MNIST nine end at {sync} and {mnist['adam'][9].mean:.1f} %" in whole
    assert f"ends at {mnist['adam'][9].mean:.1f} % with nine instead of {mnist['adam'][1].mean:.1f} %" in whole


def test_what_the_page_says_of_the_tuned_cnn() -> None:
    results, whole = Results(read(staleness.FILE)), " ".join(PAGES["docs/staleness.md"].split())
    (sync, of_nine, of_many), (stale, stale_of_nine, stale_of_many) = (
        [shown_error("adam", way, workers, tuned=True, model="cnn") for workers in (3, 9, 33)]
        for way in ("sync", "plain")
    )
    text = f"The cnn with Adam and three workers ends at {sync} in `sync` and at {stale} in `async`, with nine at"
    assert f"{text} {of_nine} and {stale_of_nine}, and with 33 at {of_many} and {stale_of_many};" in whole
    aware = shown_error("adam", "staleness_aware", 33, tuned=True, model="cnn")
    assert f"with the cnn and 33 workers Adam ended at {aware} with it and at {stale_of_many} without" in whole
    last = staleness_page.curve(results, "cnn", "fashion_mnist", "momentum", "plain", tuned=True)[33]
    assert last.rate == staleness.RATES["momentum"][-1], "the smallest of all that were tried"


def test_the_compensation_of_33_workers() -> None:
    best: dict[str, float] = {}
    for run in read(staleness.FILE):
        if (run["workers"], run["optimizer"], run["data"]) == (33, "sgd", "fashion_mnist"):
            best[run["algorithm"]] = min(best.get(run["algorithm"], 100.0), 100 * run["test_error"])
    two = [error for algorithm, error in best.items() if algorithm.startswith("delay_compensated")]
    assert len(two) == 2, "as the page says"
    plain = shown_error("sgd", "plain", 33, tuned=True)
    text = f"they end at {two[0]:.1f} % and {two[1]:.1f} %, and plain training at {plain}"
    assert text in " ".join(PAGES["docs/staleness.md"].split())


def test_delay_compensation_helps_at_one_rate() -> None:
    results, ends = Results(read(staleness.FILE)), []
    for algorithm in (staleness.COMPENSATED[0], "plain"):
        point = Setting(*WITH_SGD, algorithm, 9, staleness.STEEP[9], 0)
        found = staleness_page.point_of(results, point, tuned=False)
        assert found
        ends.append(found)
    assert len(ends[0].errors) == len(ends[1].errors) == len(staleness.SEEDS)
    assert max(ends[0].errors) < min(ends[1].errors)
    text = " ".join(PAGES["docs/staleness.md"].split())
    assert f"ends at {ends[0].mean:.1f} % instead of {ends[1].mean:.1f} %" in text


def test_the_page_says_what_was_not_measured() -> None:
    runs = read(staleness.FILE)
    cnn = [run for run in runs if run["model"] == "cnn"]
    for data, workers in (("fashion_mnist", {*staleness.FEW, 33}), ("mnist", set(staleness.FEW))):
        assert {run["workers"] for run in cnn if run["data"] == data} == workers
    assert {run["model"] for run in runs if run["workers"] in staleness.OTHERS} == {"dnn"}
    results = Results(runs)
    for data, name, tuned in itertools.product(("fashion_mnist", "mnist"), staleness.OPTIMIZERS, (False, True)):
        plain, aware = (
            staleness_page.curve(results, "dnn", data, name, algorithm, tuned) for algorithm in staleness.ALGORITHMS
        )
        for points in (plain, aware):
            assert {workers: len(point.errors) for workers, point in points.items()} == dict.fromkeys(WORKERS, 3)
        sync = staleness_page.curve(results, "dnn", data, name, staleness.SYNC, tuned=True)
        once = {workers for workers, point in sync.items() if len(point.errors) == 1}
        assert once == ({2, 5, 17} if data == "fashion_mnist" else set())
        assert set(sync) == {1, 3, 9, 33} | once
        assert not tuned or aware[62].mean < plain[62].mean, "all three end lower with it"
        if (data, name, tuned) == ("fashion_mnist", "adam", True):
            text = f"Adam at {aware[62].mean:.1f} % instead of {plain[62].mean:.1f} %"
            assert text in " ".join(PAGES["docs/staleness.md"].split())


def test_the_command_makes_the_quick_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "runs.jsonl", set[tuple[str, ...]]()

    def measure(setting: Setting, *more: str) -> Run:
        asked.add(more)
        return {**asdict(setting), "staleness": None, "validation_error": 0.2, "test_error": 0.2, "secs": 1.0}

    monkeypatch.setattr(staleness, "measure", measure)
    monkeypatch.setattr("sys.argv", ["staleness", "--quick", "--out", str(path), "--epochs", "0.5", "data.dir=here"])
    assert staleness.main() == 0
    assert asked == {("data.dir=here",)}
    assert len(read(path)) == 20, "as the page says"
    assert {run["epochs"] for run in read(path)} == {0.5}
