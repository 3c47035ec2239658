"""training.png is drawn by a process of its own, or one line says why it is not; the run is done in any case."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tf2dist.launch import figure as figures
from tf2dist.launch.console import Console
from tf2dist.launch.figure import Figure
from tf2dist.messages import Progress, Result

SUMMARY: dict[str, Any] = {
    "mode": "async",
    "model": "dnn",
    "data": "mnist",
    "cluster": {"worker": 2, "ps": 1},
    "global_step": 9,
    "steps_per_sec": None,
    "staleness_counts": [7, 2],
}
END = Progress("chief-0", 9, 9, {"loss": 1.0})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    rows = [{"step": step, "time": 1.0, "secs": step, "task": "chief-0", "loss": 1 / step} for step in (1, 5, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def figure(run_dir: Path) -> Iterator[Figure]:
    before = set(psutil.Process().children())
    with Figure(run_dir, is_wanted=True) as figure:
        yield figure
    assert set(psutil.Process().children()) <= before, "a process was left"


def drawers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tf2dist.finished.drawer" in child.cmdline()]


def one_drawer() -> psutil.Process:
    """The process that draws, as soon as it shows its command line.

    The kernel closes the pipe on which `Popen` waits before that; with the lowest priority it may take long.
    """
    deadline = time.monotonic() + 30
    while not (found := drawers()):
        assert time.monotonic() < deadline, psutil.Process().children()
        time.sleep(0.01)  # between two looks
    (drawer,) = found
    return drawer


def write(figure: Figure, capsys: pytest.CaptureFixture[str], *received: int) -> str:
    """Ends the run; returns what the user reads."""
    figure.hear(Result("chief-0", SUMMARY))
    figure.write(SUMMARY, None, Console(), list(received))
    return capsys.readouterr().err.replace("drawing training.png\n", "")  # on a slow machine


def test_it_begins_near_the_end_and_draws_the_result(
    figure: Figure, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure.hear(Progress("chief-0", 1, 9, {"loss": 1.0}))
    assert drawers() == []
    figure.hear(END)
    one_drawer()
    assert write(figure, capsys) == ""
    assert (run_dir / "training.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in run_dir.iterdir()} == {"metrics.jsonl", "training.png"}


def test_a_process_that_gets_no_processor_is_replaced(
    figure: Figure, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lower(pid: int, policy: int, param: os.sched_param) -> None:
        if policy != os.SCHED_IDLE:
            raise PermissionError  # as for everyone but root
        allowed(pid, policy, param)

    allowed = os.sched_setscheduler
    monkeypatch.setattr(os, "sched_setscheduler", lower)
    monkeypatch.setattr(figures, "EARLY_SECS", 0.1)
    figure.hear(END)
    first = one_drawer()
    assert os.sched_getscheduler(first.pid) == os.SCHED_IDLE
    first.send_signal(signal.SIGSTOP)
    assert write(figure, capsys) == ""
    assert (run_dir / "training.png").exists()


def test_matplotlib_is_broken(
    figure: Figure, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = run_dir / "elsewhere"
    broken.mkdir()
    (broken / "matplotlib.py").write_text("print('hello')\nraise ImportError('no such symbol\\nin libfreetype')\n")
    monkeypatch.syspath_prepend(str(broken))
    said = write(figure, capsys)
    assert said.startswith("tf2dist: warning: training.png could not be drawn (no such symbol")
    assert said.endswith(f"; the result is in {run_dir}/summary.json\n")
    assert said.count("\n") == 1
    assert not (run_dir / "training.png").exists()


def test_nothing_to_draw_or_no_place_for_it(figure: Figure, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "training.png").mkdir()
    assert "training.png could not be drawn (Is a directory); the result is in" in write(figure, capsys)
    (run_dir / "metrics.jsonl").unlink()
    with Figure(run_dir, is_wanted=True) as other:
        assert "could not be drawn ([Errno 2] No such file" in write(other, capsys)


def test_too_slow(figure: Figure, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EARLY_SECS", "TIMEOUT_SECS"):
        monkeypatch.setattr(figures, name, 0.0)
    assert "training.png could not be drawn (not done in 0 s)" in write(figure, capsys)


def test_a_signal_ends_the_wait(figure: Figure, capsys: pytest.CaptureFixture[str]) -> None:
    assert "could not be drawn (stopped by a signal)" in write(figure, capsys, signal.SIGTERM)


def test_a_run_that_wants_none_starts_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Figure(run_dir, is_wanted=False) as figure:
        figure.hear(END)
        assert write(figure, capsys) == ""
        assert drawers() == []
    assert os.listdir(run_dir) == ["metrics.jsonl"]
