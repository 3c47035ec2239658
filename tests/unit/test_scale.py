"""What the benchmark measures of clusters of different sizes, and what is concluded from it."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench import bandwidth, growth, scale
from tests.bench.__main__ import read_section, write_section
from tests.bench.growth import Law, forecast, limits
from tests.bench.scale import Look, Setting, Usage
from tests.conftest import PAGES, REPOSITORY


def test_an_update_is_told_from_what_came_before() -> None:
    before = Look({"step": 10, "training_secs": 1.0}, 100.0, {"ps": Usage(1, 100.0, 50.0, 7.0, 90, 20)})
    after = Look({"step": 30, "training_secs": 3.0}, 104.0, {"ps": Usage(1, 180.0, 450.0, 207.0, 95, 24)})
    one = {"tasks": 1, "cpu_ms": 2.0, "messages": 10.0, "kilobytes": 5.0, "threads": 95, "descriptors": 24}
    assert after.since(before) == {"updates": 20, "steps_per_sec": 10.0, "roles": {"ps": one}}


def test_the_processor_time_of_a_process_has_that_of_all_its_threads() -> None:
    begin, own = scale.process_secs(os.getpid()), time.process_time()
    sum(range(1_000_000))
    assert scale.process_secs(os.getpid()) - begin == pytest.approx(time.process_time() - own, abs=0.01)
    assert scale.process_secs(os.getpid()) > begin


def test_each_mode_is_measured_with_all_workers_and_some_of_them_in_other_ways() -> None:
    found = [one for one in scale.settings([1, 8]) if one.model == "softmax"]
    for mode in ("async", "sync_replicas"):
        own = [(one.workers, one.ps, one.delay_secs) for one in found if one.mode == mode]
        assert own == [(1, 1, 0.1), (8, 1, 0.1), *((8, ps, 0.1) for ps in (2, 4, 8)), (8, 1, 0.4)]
    own = [(one.workers, one.ps, one.delay_secs) for one in found if one.mode == "sync"]
    assert own == [(1, 0, 0.1), (8, 0, 0.1), (8, 0, 0.4)]


def test_rounds_have_a_median_of_each_figure() -> None:
    rounds = [{"mode": "sync", "roles": {"ps": {"cpu_ms": value, "tasks": 2}}} for value in (1.0, 9.0, 2.0000001)]
    assert scale.median_of(rounds) == {"mode": "sync", "roles": {"ps": {"cpu_ms": 2.0, "tasks": 2}}}


def test_a_point_stays_beside_the_comparisons(tmp_path: Path) -> None:
    write_section(tmp_path, "comparisons", [{"name": "async dnn"}])
    write_section(tmp_path, "scale", [{"mode": "sync"}])
    write_section(tmp_path, "comparisons", [{"name": "sync dnn"}])
    assert read_section(tmp_path, "comparisons") == [{"name": "sync dnn"}]
    assert read_section(tmp_path, "scale") == [{"mode": "sync"}]
    assert read_section(tmp_path / "none", "scale") == []


def test_the_ideal_is_what_the_delay_allows() -> None:
    assert [Setting(mode, "softmax", 4, 1).ideal for mode in ("async", "sync", "sync_replicas")] == [40, 10, 10]


def cluster(
    mode: str, model: str, workers: int, num_ps: int, costs: dict[str, tuple[float, float, float]]
) -> dict[str, Any]:
    """A point in whose roles a batch costs so many milliseconds, messages and kilobytes."""
    batches = 1 if mode == "async" else workers
    roles = {
        role: {"tasks": 1, "threads": 100 + workers, "descriptors": 20 + (3 if role == "worker" else 2) * workers}
        | {name: cost * batches for name, cost in zip(growth.QUANTITIES, own, strict=True)}
        for role, own in costs.items()
    }
    figures = {
        "steps_per_sec": 10.0 * (workers if mode == "async" else 1),
        "efficiency": 1.0,
        "start_secs": 5.0,
        "used_gb": 1.0,
    }
    return {
        "mode": mode,
        "model": model,
        "workers": workers,
        "ps": num_ps,
        "delay_secs": 0.1,
        "roles": roles,
        **figures,
    }


def served(mode: str, model: str, workers: int, ps: int = 1) -> dict[str, Any]:
    """A cluster in which a ps needs 1 ms for each call, 3 ms for all bytes, and 2 ms in any case."""
    idle = 2 / workers
    costs = {"chief": (0.1 + idle, 1.0, 1.0), "ps": (ps + 3 + idle, 10.0, 1000.0), "worker": (2.0, 10.0, 1000.0)}
    return cluster(mode, model, workers, ps, costs)


def connected(model: str, workers: int) -> dict[str, Any]:
    """Synchronous workers, which need 2 ms, and 0.01 ms for each message."""
    sends = growth.SENDS.value(workers) if model == "softmax" else workers - 1
    return cluster(
        "sync", model, workers, 0, {"worker": (2 + 0.01 * sends, 2.0 * sends, 60.0 * growth.ARRAYS.value(workers))}
    )


SIZES = (1, 2, 4, 8, 32, 48)
POINTS = [
    *(served(mode, model, n) for mode in ("async", "sync_replicas") for model in growth.MODELS for n in SIZES),
    *(served(mode, model, 8, ps) for mode in ("async", "sync_replicas") for model in growth.MODELS for ps in (2, 4, 8)),
    *(connected(model, n) for model in growth.MODELS for n in SIZES),
]


def test_the_law_finds_what_a_batch_costs() -> None:
    law = Law(POINTS, "async", "2 million")
    assert law.constants("ps", "cpu_ms") == pytest.approx([4.0, 2.0])
    assert law.text("ps", "cpu_ms") == "4 + 2 / n"
    assert law.split() == pytest.approx((1.0, 3.25)), "8 workers share what the ps does in any case"
    assert law.at(100, "ps", "cpu_ms") == pytest.approx(4.02)
    synchronous = Law(POINTS, "sync", "softmax")
    assert synchronous.constants("worker", "cpu_ms") == pytest.approx([2.0, 0.01])
    assert synchronous.at(1001, "worker", "messages") == pytest.approx(2 * 2 * 10)


def test_noise_is_not_taken_for_a_cost_that_shrinks() -> None:
    assert growth.fit({1: 2.1, 2: 2.0, 4: 2.1, 8: 1.9}, (growth.ONE, growth.OTHERS)) == pytest.approx(
        [2.0, 0.0], rel=0.05
    )


def test_the_limits_follow_from_the_costs() -> None:
    core, ps, link = limits(Law(POINTS, "async", "softmax"), 0.1, 1e9, steps_per_call=8)
    assert (core, ps, link) == pytest.approx((2000, 25, 200)), "calls of 8 steps cost half of those of 4"


def test_a_worker_costs_something_while_it_waits() -> None:
    """Here 5 ms a second: 2 ms of them are in a batch that takes 0.4 s rather than 0.1 s."""
    idle = served("async", "softmax", 8) | {"delay_secs": 0.4, "steps_per_sec": 20.0}
    idle["roles"]["worker"]["cpu_ms"] = 2 + 5 * 0.3
    law = Law([*POINTS, idle], "async", "softmax")
    assert law.idle() == pytest.approx(5)
    assert law.at(32, "worker", "cpu_ms", 0.3) == pytest.approx(2 + 5 * 0.2)
    assert law.at(32, "ps", "cpu_ms", 0.4) == pytest.approx(4 + 4 * 2 / 32), "4 times as few batches share it"


def test_the_first_part_that_gives_up_is_found() -> None:
    """A ps has 4 ms for each update on 16 cores, and half of the bytes of its worker each way."""
    found = forecast(Law(POINTS, "async", "softmax"), 49)
    step = 0.1 + (2.0 + 4 + 2 / 49) / 1000 + 1e6 / growth.LINK
    assert (found.ps, found.staleness) == (1, 48)
    assert found.steps_per_sec == pytest.approx(49 / step)
    assert found.shares["link of a ps"] == pytest.approx(49 / step * 0.5e6 / growth.LINK)
    many = forecast(Law(POINTS, "async", "softmax"), 10_000)
    assert [part for part, _ in many.first][:2] == ["cores of a ps", "open files of a ps"]
    assert many.steps_per_sec == pytest.approx(16_000 / 4, rel=0.01), "16 cores of the ps"


def test_steps_become_longer_where_gradients_wait_for_each_other() -> None:
    few, many = (forecast(Law(POINTS, "sync_replicas", "softmax"), n).steps_per_sec for n in (10, 1000))
    assert 1 / many - 1 / few == pytest.approx(0.004 * 990, rel=0.01)
    few, many = (forecast(Law(POINTS, "sync", "softmax"), n).steps_per_sec for n in (10, 1000))
    more_arrays = growth.ARRAYS.value(1000) - growth.ARRAYS.value(10)
    assert 1 / many - 1 / few == pytest.approx(0.01e-3 * 12 + 30e3 / growth.LINK * more_arrays, rel=0.01)


def test_what_is_foretold_wrongly_stands_out() -> None:
    def row(points: list[dict[str, Any]]) -> str:
        return next(one for one in growth.predictions_table(points) if one.startswith("| sync | softmax"))

    assert "2.1, 2.1 (1.00)" in row(POINTS)
    slower = json.loads(json.dumps(POINTS))
    (one,) = (point for point in slower if (point["mode"], point["model"], point["workers"]) == ("sync", "softmax", 32))
    one["roles"]["worker"]["cpu_ms"] *= 1.2
    assert "2.1, 2.5 (**0.83**)" in row(slower)


def test_the_page_has_the_tables_of_what_was_measured() -> None:
    points = json.loads((REPOSITORY / "docs/bench.json").read_text())["scale"]
    text = PAGES["docs/scaling.md"]
    assert growth.page_of(text, points) == text
    assert text.count("written by `make bench`") == len({**growth.TABLES, **bandwidth.TABLES})


def test_what_the_page_says_of_two_cores_and_of_the_law() -> None:
    points = json.loads((REPOSITORY / "docs/bench.json").read_text())["scale"]
    text = " ".join(PAGES["docs/scaling.md"].split())
    sizes = ("mode", "model", "workers")
    (one,) = (point for point in points if [point[name] for name in sizes] == ["sync", "softmax", 32])
    secs = one["roles"]["worker"]["cpu_ms"]
    assert f"that takes {secs:.0f} ms of a core for each step, so two cores are busy for {secs / 2:.0f} ms" in text
    found = [
        ratio
        for *_, quantity, expected, real in growth.predictions(points)
        for ratio in [expected / real]
        if quantity == "cpu_ms"
    ]
    close = [ratio for ratio in found if growth.is_close(ratio, 1)]
    assert f"Of the {len(found)} figures of processor time {len(close)} are within 15 %" in text
    far = sorted(round(100 * abs(ratio - 1)) for ratio in found if ratio not in close)
    assert (len(far), far[0], far[-2], far[-1]) == (7, 16, 18, 26), "as the page says"
