"""What the benchmark measures of clusters of different sizes, and what is concluded from it."""

import os
import time
from pathlib import Path

import pytest

from tests.bench import scale
from tests.bench.__main__ import read_section, write_section
from tests.bench.scale import Look, Setting, Usage


def test_an_update_is_told_from_what_came_before() -> None:
    before = Look({"step": 10, "training_secs": 1.0}, {"ps": Usage(1, 100.0, 50.0, 7.0, 90, 20)})
    after = Look({"step": 30, "training_secs": 3.0}, {"ps": Usage(1, 140.0, 250.0, 107.0, 95, 24)})
    one = {"tasks": 1, "cpu_ms": 2.0, "messages": 10.0, "kilobytes": 5.0, "threads": 95, "descriptors": 24}
    assert after.since(before) == {"updates": 20, "steps_per_sec": 10.0, "roles": {"ps": one}}


def test_the_processor_time_of_a_process_has_that_of_all_its_threads() -> None:
    begin, own = scale.process_secs(os.getpid()), time.process_time()
    sum(range(1_000_000))
    assert scale.process_secs(os.getpid()) - begin == pytest.approx(time.process_time() - own, abs=0.01)
    assert scale.process_secs(os.getpid()) > begin


def test_each_mode_is_measured_with_all_workers_and_two_of_them_with_more_ps() -> None:
    few = [(one.mode, one.workers, one.ps) for one in scale.settings([1, 8]) if one.model == "softmax"]
    ps = [("async", 1, 1), ("async", 8, 1), *(("async", 8, ps) for ps in (2, 4, 8))]
    assert few == [*ps, *(("sync_replicas", *others) for _, *others in ps), ("sync", 1, 0), ("sync", 8, 0)]


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
