"""Comparisons as a user starts them: measured, resumed after a stop, and with runs that fail."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ended, is_warm, start_module, wait_until

pytestmark = pytest.mark.timeout(300)
SMALL = ["data=digits", "model=softmax", "compare_dir=all", "optimizer.learning_rate=0.05"]
MAX_STOP_SECS = 5.0  # on a busy machine; a run that saves and a report that is drawn take longer


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return start_module(folder, "tf2dist.compare", *SMALL, *arguments)


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "all" / "compare.json").read_text())
    return content


def test_a_comparison_is_run_and_resumed(tmp_path: Path) -> None:
    """With a single contender: its run ends at the accuracy, with exact counts."""
    options = ["modes=[async]", "delays=[0]", "workers=1", "seeds=1", "until=0.6"]
    process = start(tmp_path, *options)
    wait_until(lambda: any((tmp_path / "all" / "runs").glob("*/metrics.jsonl")), process)
    found = {each.pid: each.ppid() for each in psutil.Process(process.pid).children(recursive=True) if is_warm(each)}
    assert set(found.values()) - set(found) == {process.pid}, "the run was lent the warm process of the comparison"
    stdout, stderr = ended(process, 0)
    assert "run 1 of 1: async, equal workers, seed 0" in stderr
    assert re.search(r"\nrun 1 of 1: done in 0:[0-9]{2} with a validation accuracy of 0\.[0-9]{4}\n", stderr)
    headline, page = stdout.splitlines()
    assert re.fullmatch(
        r"With equal workers, only async was measured, and reached an accuracy of 0\.6 after [0-9.]+ s\.", headline
    )
    assert page == str(tmp_path / "all" / "report.html")
    (contender,) = record(tmp_path)["contenders"]
    (run,) = contender["runs"]
    summary = json.loads((tmp_path / "all" / run["folder"] / "summary.json").read_text())
    assert summary["global_step"] == summary["target_step"] == summary["updates_applied"] == summary["saved_step"]
    *earlier, last = (evaluation["accuracy"] for evaluation in run["evaluations"])
    assert last >= 0.6
    assert all(accuracy < 0.6 for accuracy in earlier)
    assert run["evaluations"][-1]["step"] == summary["global_step"]
    assert contender["staleness_counts"] == [summary["global_step"]], "one worker alone is never stale"
    # Without the start of TensorFlow, which takes seconds.
    assert 0 < run["training_secs"] < summary["wall_secs"] - summary["startup_secs"]
    assert {path.name for path in (tmp_path / "all").glob("*.png")} >= {"accuracy.png", "staleness.png"}

    again, stderr = ended(start(tmp_path, *options), 0)
    assert "async, equal workers, seed 0: is done already" in stderr
    assert again == stdout


@pytest.mark.slow
def test_a_comparison_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Ctrl-C ends the present run without saving it, and what was done before stays."""
    options = ["modes=[sync,async]", "delays=[0,0.02]", "workers=2", "seeds=1", "until=60steps"]
    process = start(tmp_path, *options)
    runs = tmp_path / "all" / "runs"
    wait_until(lambda: (runs / "sync-delay0.02-seed0" / "metrics.jsonl").exists(), process, 120)
    begun_at = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = ended(process, 130)
    assert time.monotonic() - begun_at < MAX_STOP_SECS
    assert "saved at step" not in (tmp_path / "all" / "logs" / "sync-delay0.02-seed0.log").read_text()
    assert stderr.splitlines()[-1].endswith(f"; the same command with compare_dir={tmp_path / 'all'} goes on")
    assert stdout == ""
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"plan.json", "runs", "logs", ".lock"}
    assert [path.name for path in runs.iterdir()] == ["sync-delay0-seed0"]
    first = (runs / "sync-delay0-seed0" / "summary.json").read_bytes()

    _, stderr = ended(start(tmp_path, *options), 0)
    assert stderr.count("is done already") == 1
    assert (runs / "sync-delay0-seed0" / "summary.json").read_bytes() == first
    content = record(tmp_path)
    assert [run["state"] for contender in content["contenders"] for run in contender["runs"]] == ["done"] * 4
    by_name = {contender["name"]: contender for contender in content["contenders"]}
    slow = by_name["sync, one worker 20 ms slower"]["steps_per_sec"]["mean"]
    assert slow < 50, "no step is shorter than the delay"
    for contender in content["contenders"]:
        (run,) = contender["runs"]
        times = list((tmp_path / "all" / run["folder"] / "timeline").glob("worker-*.csv"))
        assert len(times) == 2
        assert run["global_step"] == 60
    (claim,) = [claim for claim in content["verdict"]["claims"] if claim["claim"].startswith("sync: every step")]
    assert claim["state"] == "seen"
    _, stderr = ended(start(tmp_path, *options[:-1], "until=70steps"), 2)
    assert "is of another comparison (" in stderr
    assert "train.steps=60 there, " in stderr


@pytest.mark.slow
def test_a_run_that_fails_does_not_affect_the_others(tmp_path: Path) -> None:
    options = ["modes=[sync]", "delays=[0]", "workers=1", "seeds=1", "until=20steps"]
    _, stderr = ended(start(tmp_path, *options, "optimizer.learning_rate=1e38,0.1"), 3)
    assert "has failed with exit code 3 (" in stderr
    assert "the loss is " in stderr
    assert "1 of 2 runs failed: sync, equal workers, optimizer.learning_rate=1e+38, seed 0 (exit code 3)" in stderr
    content = record(tmp_path)
    assert [run["state"] for contender in content["contenders"] for run in contender["runs"]] == ["failed", "done"]
    sentences = [line for situation in content["verdict"]["situations"] for line in situation["sentences"]]
    assert "sync: 1 of 1 runs failed; the loss was not finite." in sentences
