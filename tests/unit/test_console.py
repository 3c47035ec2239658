"""What the user sees."""

import io
import os
import pty
from types import SimpleNamespace

import pytest

from tf2dist import console
from tf2dist.console import Console

EVENT = {"step": 1200, "target_step": 2750, "loss": 0.31213, "accuracy": 0.9}


def test_progress_line() -> None:
    assert console.progress_line(1200, 2750, 0.31213, 1520) == "step 1,200/2,750  loss 0.3121  1,520 steps/s  0:01 left"
    assert console.progress_line(1, 10, 2.5, float("nan")) == "step 1/10  loss 2.5000"


def test_plain_output_is_lines_without_control_characters() -> None:
    stream = io.StringIO()
    with Console(stream) as plain:
        plain.status("starting")
        plain.progress(EVENT)
        plain.progress({**EVENT, "step": 2750})
        plain.warn("look out")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "starting"
    assert lines[1] == "tf2dist: warning: look out"
    assert lines[-1].startswith("step 2,750/2,750")
    assert "\x1b" not in stream.getvalue()


def test_the_rate_is_that_of_this_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart goes back to a checkpoint, which may lie behind the first step that was shown."""
    stream, clock = io.StringIO(), iter([0.0, 10.0, 20.0, 50.0, 60.0])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Console(stream) as plain:
        for step in (1, 1001, 501, 1501):
            plain.progress({**EVENT, "step": step})
    assert "step 1,501/2,750  loss 0.3121  100 steps/s  0:12 left" in stream.getvalue()


def test_a_narrow_terminal_gets_a_live_line() -> None:
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    with os.fdopen(slave, "w") as stream, Console(stream) as live:
        live.progress(EVENT)
        live.warn("[look] out")
    output = os.read(master, 1 << 16).decode()
    os.close(master)
    assert "\x1b[" in output
    assert "[look] out" in output


def test_result_lines() -> None:
    summary = {
        "mode": "async",
        "model": "dnn",
        "data": "mnist",
        "cluster": {"worker": 3, "ps": 1},
        "global_step": 2760,
        "steps_per_sec": 512.3,
        "examples_per_sec": 51230.0,
        "test_accuracy": 0.97751,
        "test_loss": 0.07,
        "test_examples": 10000,
        "staleness": {"mean": 1.05, "max": 4},
    }
    text = console.result_lines(summary, "outputs/x")
    assert "3 workers and 1 ps, 2,760 steps at 512/s" in text
    assert "test accuracy 0.9775, loss 0.0700 over 10,000 examples" in text


def test_a_full_disk_behind_it_is_no_reason_to_stop() -> None:
    stream = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    with Console(stream) as plain:
        plain.status("starting")
        plain.warn("look out")
        plain.progress(EVENT)
        plain._plain_at -= console.PLAIN_EVERY_SECS
        plain.progress(EVENT)
        plain.note("still here")
    with pytest.raises(OSError, match="No space left"):
        stream.close()
