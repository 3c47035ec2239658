"""What is run for the times with one slow worker, where a worker's time goes, and what docs/staleness.md says of it."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import pictures
from tests.bench import bandwidth, slowness, worker_time
from tests.bench.worker_time import Parts, Step, parts_of
from tests.conftest import PAGES, REPOSITORY
from tf2dist.config.load import load

MEASURED = json.loads((REPOSITORY / "docs" / slowness.FILE).read_text())


def timeline(steps: int, computing: float, period: float, first: float = 0.0) -> list[Step]:
    return [(first + number * period, first + number * period + computing) for number in range(steps)]


def shares(parts: Parts) -> list[float]:
    """Of one step."""
    return [round(getattr(parts, name) / parts.steps, 6) for name in worker_time.PARTS]


def test_synchronous_workers_wait_for_the_slowest() -> None:
    """The exchange of 2 s begins when the slow worker has computed for 5 s."""
    fast, slow = parts_of("sync", [timeline(40, 1, 7), timeline(41, 5, 7)])
    assert shares(fast) == [1, 0, 4, 2]
    assert shares(slow) == [5, 0, 0, 2]
    assert fast.steps == 29, "of 40 the first quarter is left out, and the last has no next one"


def test_local_steps_wait_at_the_end_of_a_round_only() -> None:
    """Steps of 1 or 2 s, and 0.5 s for the update of the own copy; 8 of them, then 3 s for the average."""

    def rounds(computing: float) -> list[Step]:
        begins = [number // 8 * 23 + number % 8 * (computing + 0.5) for number in range(64)]
        return [(begin, begin + computing) for begin in begins]

    fast, slow = parts_of("local_sgd", [rounds(1.0), rounds(2.0)])
    assert fast.steps == slow.steps == 40, "whole rounds"
    assert shares(fast)[:2] == [pytest.approx((8 * 1 + 7 * 0.5) / 8, abs=1e-6), 0]
    assert shares(fast)[2:] == pytest.approx([8 / 8, 3.5 / 8])
    assert shares(slow)[2:] == pytest.approx([0, 3.5 / 8])


def test_of_sync_replicas_late_gradients_are_told_from_used_ones() -> None:
    """Three workers need 1, 2 and 3 s, a step takes 4 s, and the last worker 10 s for its own."""
    fast = [timeline(40, secs, 4) for secs in (1, 2, 3)]
    found = parts_of("sync_replicas, 1 backup", [*fast, timeline(16, 9.5, 10, first=0.25)])
    assert [shares(parts) for parts in found[:3]] == [[1, 0, 2, 1], [2, 0, 1, 1], [3, 0, 0, 1]]
    assert shares(found[3]) == [0, 9.5, 0, 0.5]


def test_asynchronous_workers_wait_for_nobody() -> None:
    found = parts_of("async", [timeline(40, 1, 1.5), timeline(9, 5, 6)])
    assert [shares(parts) for parts in found] == [[1, 0, 0, 0.5], [5, 0, 0, 1]]


def run_of(way: str, case: str, *workers: tuple[float, ...]) -> dict[str, Any]:
    names = (*worker_time.PARTS, "steps")
    return {"way": way, "case": case, "workers": [dict(zip(names, one, strict=True)) for one in workers]}


def test_a_bar_has_the_shares_of_the_median_round() -> None:
    rounds = [run_of("sync", "slow", (1, 0, exchange, 1, 10), (3, 0, 0, 1, 10)) for exchange in (2, 8, 2)]
    bars = worker_time.bars_of(rounds, "slow")
    assert bars["sync"] == pytest.approx(
        {"computing": 0.25, "dropped": 0, "waiting": 0.5, "exchanging": 0.25, "step": 400}
    )
    assert bars["sync: slow"]["computing"] == pytest.approx(0.75)
    assert worker_time.table(rounds)[2:] == [
        "| one worker 100 ms slower | `sync` | the others | 400 | 25% | 0% | 50% | 25% |",
        "| one worker 100 ms slower | `sync` | slow | 400 | 75% | 0% | 0% | 25% |",
    ]


@pytest.mark.parametrize(
    "way", ["sync", *(pytest.param(way, marks=pytest.mark.thorough) for way in slowness.WAYS if way != "sync")]
)
def test_every_run_is_a_request_that_is_accepted(way: str) -> None:
    for case in worker_time.CASES:
        options = [one for one in worker_time.options_of(way, case) if not one.startswith("plugins=")]
        config = load([*options, *(["cluster=local4"] if case == "link" else [])], None)
        assert config.timeline
        assert config.simulate.delay_secs[-1] == pytest.approx(0.15 if case == "slow" else 0.05)
        if config.mode == "sync_replicas":
            assert config.sync_replicas.replicas_to_aggregate == worker_time.REPLICAS


def test_each_mode_has_its_fastest_rate() -> None:
    found = [("sync", 0.1, 30.0), ("sync", 0.4, 10.0), ("sync", 0.8, 11.0), ("async", 0.1, 9.0), ("async", 0.8, None)]
    rates = [{"way": way, "rate": rate, "secs": secs} for way, rate, secs in found]
    assert slowness.best_rates(rates) == {"sync": 0.4, "async": 0.1}


def test_the_points_of_a_round_replace_those_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def compared(folder: Path, options: Sequence[str]) -> dict[str, Any]:
        asked.append([folder.name, *(one for one in options if one.startswith(("seeds=", "optimizer.", "delays=")))])
        runs = [{"state": "done", "secs_to_goal": 1.0 + n, "examples_to_goal": 100, "global_step": 5} for n in range(2)]
        return {"contenders": [{"delay_secs": 0.1, "staleness": {"mean": 2.5}, "dropped": None, "runs": runs}]}

    monkeypatch.setattr(slowness, "compared", compared)
    *_, (points, _) = slowness.measure(tmp_path, {"sync_replicas, 1 backup": 0.4}, (0.1,), 2)
    name = "sync_replicas"
    assert asked == [[name, "delays=[0.1]", f"seeds={n}", "optimizer.learning_rate=0.4"] for n in (1, 2)]
    (point,) = points
    assert (point["secs"], point["staleness"], point["dropped"], len(point["loads"])) == ([1.0, 2.0], 2.5, None, 2)


def test_the_page_has_the_tables_of_what_was_measured() -> None:
    text = PAGES["docs/staleness.md"]
    assert slowness.page_of(text, MEASURED) == text
    assert text.count(f"written by `{slowness.COMMAND}`") == sum(map(len, slowness.TABLES.values()))


def test_everything_was_measured_three_times() -> None:
    points = {(one["way"], one["slow_secs"]): one for one in MEASURED["points"]}
    assert set(points) == {(way, secs) for way in slowness.WAYS for secs in slowness.SLOW_SECS}
    assert all(len(one["secs"]) == len(one["loads"]) == 3 and all(one["secs"]) for one in points.values())
    rounds = Counter((run["way"], run["case"]) for run in MEASURED["runs"])
    assert set(rounds) == {(way, case) for way in slowness.WAYS for case in worker_time.CASES}
    assert set(rounds.values()) == {3}
    assert slowness.best_rates(MEASURED["rates"]) == {one["way"]: one["rate"] for one in MEASURED["points"]}


def test_what_the_page_says_of_one_slow_worker() -> None:
    rounds = {(one["way"], one["slow_secs"]): one["secs"] for one in MEASURED["points"]}
    secs = {key: statistics.median(values) for key, values in rounds.items()}
    backup = "sync_replicas, 1 backup"
    for way in (backup, "async"):
        assert max(rounds["sync", 0.0]) < min(rounds[way, 0.0])
        assert max(rounds[way, 0.1]) < min(rounds["sync", 0.1]), "three times as long"
        assert secs[way, 0.2] < 0.5 * secs["sync", 0.2], "five times as long"
    assert secs[backup, 0.2] < 1.2 * secs[backup, 0.0], "hardly anything"
    for way in ("sync", "local_sgd"):
        assert secs[way, 0.2] == pytest.approx(secs[way, 0.0] * 250 / 50, rel=0.25), "in proportion to its steps"
    dropped = {one["slow_secs"]: one["dropped"] for one in MEASURED["points"] if one["way"] == backup}
    assert 0.2 < dropped[0.0] < 0.25
    rates = {one["way"]: one["rate"] for one in MEASURED["points"]}
    assert {rates[way] for way in slowness.WAYS if way != "async"} == {4 * rates["async"]}


QUOTED = {
    "docs/modes.md": "five times as slow",
    "docs/zh/modes.md": "五分之一",
}


def test_the_answer_of_the_page() -> None:
    secs = {(one["way"], one["slow_secs"]): statistics.median(one["secs"]) for one in MEASURED["points"]}
    text = " ".join(PAGES["docs/staleness.md"].split())
    backup = secs["sync_replicas, 1 backup", 0.1]
    slow = f"with `sync` in {secs['sync', 0.1]:.1f} s. `sync_replicas` with a backup takes {backup:.1f} s"
    assert f"in {secs['async', 0.1]:.1f} s when one of them takes three times as long for a step, and {slow}" in text
    assert f"`sync` takes {secs['sync', 0.0]:.1f} s and `async` {secs['async', 0.0]:.1f} s." in text
    assert abs(secs["sync", 0.05] - secs["async", 0.05]) < 2, "level"


@pytest.mark.parametrize("page", QUOTED)
def test_what_pages_quote(page: str) -> None:
    secs = {one["way"]: statistics.median(one["secs"]) for one in MEASURED["points"] if one["slow_secs"] == 0.2}
    quoted = re.search(rf"{QUOTED[page]}.{{,30}}`sync`\D+(\d+)\D+`async`\D+(\d+)\D+`sync_replicas`\D+(\d+)",
                       " ".join(PAGES[page].split()))  # fmt: skip
    assert quoted
    ways = "sync", "async", "sync_replicas, 1 backup"
    assert [int(number) for number in quoted.groups()] == [round(secs[way]) for way in ways]


def test_what_the_page_says_of_a_slow_network() -> None:
    points = json.loads((REPOSITORY / "docs/bench.json").read_text())["bandwidth"]
    cases = {"async": ("async", ""), "sync": ("sync", ""), "local_sgd": ("sync", "algorithm=local_sgd")}
    found = {way: bandwidth.found(points, mode=mode, option=option, mbit=100) for way, (mode, option) in cases.items()}
    rates = {way: point["examples_per_sec"] for way, point in found.items() if point}
    assert 19 < rates["local_sgd"] / rates["async"] < 20
    assert 2.7 < rates["sync"] / rates["async"] < 3


def test_what_the_page_says_of_the_time_of_a_worker() -> None:
    slow, link = (worker_time.bars_of(MEASURED["runs"], case) for case in ("slow", "link"))
    assert all(slow[way]["waiting"] > slow[way]["computing"] for way in ("sync", "local_sgd"))
    assert slow["async"]["computing"] > 0.7
    assert slow["async"]["waiting"] == link["async"]["waiting"] == 0
    assert slow["sync_replicas, 1 backup: slow"]["dropped"] > 0.9
    assert [way for way, shares in link.items() if shares["computing"] > 0.1] == ["local_sgd"]
    shares = {way: f"{link[way]['computing']:.0%}".replace("%", " %") for way in ("async", "sync", "local_sgd")}
    first = f"`async` compute for {shares['async']} of their time, those of `sync` for {shares['sync']}, and with"
    assert f"{first} `algorithm=local_sgd` for {shares['local_sgd']}." in " ".join(PAGES["docs/staleness.md"].split())


def test_the_pictures_have_all_that_was_measured() -> None:
    drawn = pictures.slow_worker_drawing(MEASURED["points"])
    assert drawn.count("<circle") == len(MEASURED["points"])
    assert pictures.worker_time_drawing(MEASURED["runs"]).count('height="15"') == 4 * (8 + 4)


@pytest.mark.slow
def test_a_comparison_is_run_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mode on a small data set, whose second round has one run more."""
    monkeypatch.setattr(slowness, "WAYS", {"async": ["modes=[async]"]})
    monkeypatch.setattr(slowness, "UNTIL", 0.5)
    real = slowness.options_of
    small = ["data=digits", "model=softmax"]
    monkeypatch.setattr(slowness, "options_of", lambda *arguments: [*real(*arguments), *small])
    rounds = list(slowness.measure(tmp_path, {"async": 0.4}, (0.0,), 2))
    for number, (points, record) in enumerate(rounds, 1):
        (point,) = points
        assert len(point["secs"]) == number
        assert record["common_delay_secs"] == slowness.COMMON_SECS


@pytest.mark.slow
@pytest.mark.parametrize("way", worker_time.MODES)
def test_a_real_run_has_all_parts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is 100 ms slower computes all the time; those that wait for it compute for a third of it."""
    real = worker_time.options_of
    small = ["data=digits", "model=softmax"]
    monkeypatch.setattr(
        worker_time, "options_of", lambda *arguments: [one for one in real(*arguments) if "data=" not in one] + small
    )
    *fast, slow = (worker_time.shares_of([one]) for one in worker_time.measure(way, "slow", 3.0)["workers"])
    is_bound = way in ("sync", "local_sgd")
    assert slow["computing"] + slow["dropped"] > 0.6
    assert slow["waiting"] < 0.1
    for one in fast:
        assert (one["waiting"] > 0.4) == is_bound
        assert one["computing"] > (0.15 if is_bound else 0.4)
    assert (slow["dropped"] > 0.5) == way.startswith("sync_replicas")
