"""What the benchmark measures on limited links, and the tables that it makes of it."""

import json
from typing import Any

import pytest

from tests.bench import bandwidth, growth
from tests.bench.bandwidth import Look, Setting
from tests.conftest import PAGES, REPOSITORY


def test_the_busiest_way_of_all_links_counts() -> None:
    setting = Setting("sync", "", 100, 100)
    before = Look({"step": 10, "training_secs": 1.0}, 50.0, [0, 0, 5, 0], 3.0)
    after = Look({"step": 14, "training_secs": 3.0}, 54.0, [1, 2, 40_000_005, 3], 5.0)
    assert after.since(before, setting) == {
        "updates": 4,
        "examples_per_sec": 800.0,
        "megabytes": 5.0,  # 2 steps/s for 4 s
        "link_share": 0.8,
        "cpu_ms": 250.0,
        "used_cores": 0.5,
    }


def test_every_case_is_measured_on_every_link() -> None:
    names = [(one.mode, one.option, one.mbit) for one in bandwidth.settings() if one.batch == bandwidth.BATCH_SIZE]
    assert sorted(names) == sorted((*case, mbit) for case in bandwidth.CASES for mbit in bandwidth.MBIT)
    assert Setting("async", "", 100, 100).tasks[:2] == ("chief-0", "ps-0")
    assert len(Setting("async", "", 100, 100).tasks) == 2 + len(Setting("sync", "", 100, 100).tasks)


def measured(setting: Setting) -> dict[str, Any]:
    """A core needs 1 ms for an example, and 50 ms for a batch in any case; at 1 Mbit/s a step would take 200 s."""
    names = {"mode": setting.mode, "option": setting.option, "batch": setting.batch, "mbit": setting.mbit}
    used = {"used_cores": 1.5, "cpu_ms": 4 * (50.0 + setting.batch), "megabytes": 7.5, "link_share": 0.951}
    return names | used | {"examples_per_sec": 4 * setting.batch / (200 / setting.mbit + setting.batch / 1000)}


POINTS = [measured(setting) for setting in bandwidth.settings()]


def test_a_row_has_both_links_of_a_case() -> None:
    rows = bandwidth.rates_table(POINTS)[2:]
    assert len(rows) == len(POINTS) / 2
    assert rows[0] == "| async |  | 100 | 7.5 | 190 | 95% | 1,333 | 95% | 1.5 |"


def test_the_batch_that_computes_as_long_as_it_is_on_the_link() -> None:
    rows = bandwidth.batches_table(POINTS)[2:]
    assert bandwidth.core_rate(POINTS) == pytest.approx(1000)
    assert len(rows) == len(bandwidth.CASES)
    assert rows[2] == "| sync_replicas |  | 2 | 2,000 | 0.2 | 200 | 0.02 | 20 |"


def test_the_page_has_the_tables_of_what_was_measured() -> None:
    points = json.loads((REPOSITORY / "docs/bench.json").read_text())["bandwidth"]
    text = PAGES["docs/scaling.md"]
    assert growth.page_of(text, points, bandwidth.TABLES) == text


def test_the_advice_of_the_page_is_what_was_measured() -> None:
    points = json.loads((REPOSITORY / "docs/bench.json").read_text())["bandwidth"]
    text = " ".join(PAGES["docs/scaling.md"].split())
    rates = {(one["mode"], one["option"], one["batch"], one["mbit"]): one["examples_per_sec"] for one in points}
    slow = {case[:2]: rate for case, rate in rates.items() if case[2:] == (bandwidth.BATCH_SIZE, 100)}
    halved, local = ("sync", "cluster.transfer_dtype=bfloat16"), ("sync", "algorithm=local_sgd")
    ranks = [*sorted(slow, key=lambda case: slow[case], reverse=True)]
    assert ranks == [local, halved, ("sync", ""), ("async", halved[1]), ("async", ""), ("sync_replicas", "")]
    assert slow[local] > 20 * slow["sync_replicas", ""], "more than 20 times as fast"
    assert rates[*local, 100, 1000] > rates[*halved, 100, 1000], "still faster with small batches"
    assert all(rates[mode, "", 1000, 100] > 9 * rates[mode, "", 100, 100] for mode in ("async", "sync"))
    assert all(one["used_cores"] < 1 / 3 for one in points if one["mbit"] == 100)
    assert f"about {float(f'{bandwidth.core_rate(points):.1g}'):,.0f} examples in a second" in text
