"""The output of a run for the user."""

import contextlib
import faulthandler
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from typing import Any

import pytest

from tf2dist import cli
from tf2dist.errors import FailureRecord, TaskFailure
from tf2dist.fitting.consoles import QuietConsole, console_of, step_line
from tf2dist.launch import console
from tf2dist.launch.console import Console, Unblocked
from tf2dist.messages import ProgressMessage

PROGRESS = ProgressMessage(step=1200, target_step=2750, metrics={"loss": 0.31213, "accuracy": 0.9}, task="chief-0")
PARTS = ["step 1,200/2,750", "loss 0.3121", "1,520 steps/s", "0:01 left"]


def all_of(descriptor: int) -> str:
    """All that was written to the other end, which is closed."""
    output = b""
    with os.fdopen(descriptor, "rb", buffering=0) as file, contextlib.suppress(OSError):  # a terminal's end is an error
        while part := file.read(1 << 16):
            output += part
    return output.decode()


def test_progress_line() -> None:
    assert console.progress_parts(1200, 2750, 0.31213, 1520) == PARTS
    assert console.progress_parts(1, 10, 2.5, None) == ["step 1/10", "loss 2.5000"]
    assert console.progress_parts(9, 9, float("nan"), 3.0) == ["step 9/9", "3 steps/s", "0:00 left"]


@pytest.mark.parametrize(("rate", "text"), [(1520.4, "1,520"), (12.34, "12"), (7.31, "7.3"), (0.0421, "0.042")])
def test_a_slow_rate_is_not_shown_as_zero(rate: float, text: str) -> None:
    assert f"{text} steps/s" in console.progress_parts(1, 10, 2.5, rate)


def test_a_line_shows_what_matters_most_in_its_width() -> None:
    assert console.fitted(PARTS, 80) == "step 1,200/2,750  loss 0.3121  1,520 steps/s  0:01 left"
    assert console.fitted(PARTS, 40) == "step 1,200/2,750  loss 0.3121  0:01 left"
    assert console.fitted(PARTS, 29) == "step 1,200/2,750  0:01 left"
    assert console.fitted(PARTS, 20) == "step 1,200/2,750"
    assert console.fitted(["waiting for 进程-0 and others"], 16) == "waiting for..."


def test_plain_output_is_lines_without_control_characters() -> None:
    stream = io.StringIO()
    with Console(stream) as plain:
        plain.status("starting")
        plain.progress(PROGRESS)
        plain.progress(replace(PROGRESS, step=2750))
        plain.warn("look out")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "starting"
    assert lines[1] == "tf2dist: warning: look out"
    assert lines[-1].startswith("step 2,750/2,750")
    assert "\x1b" not in stream.getvalue()


def test_a_stream_that_is_no_file_is_flushed_after_each_line() -> None:
    with Console(io.TextIOWrapper(written := io.BytesIO(), encoding="utf-8")) as plain:
        plain.warn("look out")
        assert written.getvalue() == b"tf2dist: warning: look out\n"


def test_plain_output_has_a_line_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line stays, in a file or a log collector."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Console(stream := io.StringIO()) as plain:
        for step in range(1, 25):
            plain.progress(replace(PROGRESS, step=step))
            now += 0.5
        assert [line.partition("/")[0] for line in stream.getvalue().splitlines()] == ["step 11", "step 21"]


def test_of_two_runs_in_a_process_one_has_the_live_line() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        for _ in range(2):
            with Console(terminal) as first, Console(terminal) as second:
                second.status("plain")
                assert (first._live is None, second._live is None) == (False, True)
    assert all_of(master).count("plain\r\n") == 2


def test_only_a_restart_goes_back_and_the_rate_is_that_of_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(console, "PLAIN_EVERY_SECS", 0.0)
    with Console(stream) as plain:
        for step in (1, 1001, 501):
            plain.progress(replace(PROGRESS, step=step, steps_per_sec=100.0))
        plain.began(501)  # from a checkpoint
        plain.progress(replace(PROGRESS, step=601, steps_per_sec=50.0))
    assert [line.partition("/")[0] for line in stream.getvalue().splitlines()] == [
        *("step 1", "step 1,001", "step 1,001", "step 601")
    ]
    assert "step 601/2,750  loss 0.3121  50 steps/s  0:43 left" in stream.getvalue()


# A command with the terminal as its standard error, told what to do line by line.
COMMAND = """
import os
import sys
from tf2dist.launch.console import Console
from tf2dist.messages import ProgressMessage
with Console() as live:
    live.progress(ProgressMessage(1200, 2750, {"loss": 0.31213}, 1520.0, task="chief-0"))
    for line in open(0, encoding="utf-8"):
        say, _, text = line.strip().partition(" ")
        getattr(live, say)(text)
        live._live.refresh()
        os.write(1, line.encode())  # Rich takes what is printed
"""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_live_line_fits_the_terminal_also_after_its_width_has_changed(encoding: str) -> None:
    master, slave = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env |= {"TERM": "xterm", "PYTHONIOENCODING": encoding}
    process = subprocess.Popen([sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=slave, env=env, text=True, encoding="utf-8")  # fmt: skip
    assert process.stdin
    assert process.stdout
    for columns in (100, 40, 60, 25):
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        status = ["status waiting for wörker-0 and others\n"] * (columns < 40)
        for line in (f"note {columns} columns\n", *status, f"warn end of [{columns}]\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == line
    os.close(slave)
    process.stdin.close()
    output = all_of(master)
    assert process.wait(60) == 0
    drawn = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part) for part in re.split(r"[\r\n]+", output)]

    def lines_at(columns: int) -> list[str]:
        begin, end = drawn.index(f"{columns} columns"), drawn.index(f"tf2dist: warning: end of [{columns}]")
        assert all(len(line) <= columns for line in drawn[begin:end]), drawn
        return drawn[begin + 1 : end]

    assert lines_at(100)[0].endswith(" step 1,200/2,750  loss 0.3121  1,520 steps/s  0:01 left")
    assert re.search(r"[━╸╺-]{4,8} +step 1,200/2,750  0:01 left$", lines_at(40)[0]), "the bar stays"
    assert lines_at(60)[0].endswith(" step 1,200/2,750  loss 0.3121  0:01 left")
    assert lines_at(25)[-1].endswith(" waiting for...")
    # A terminal that breaks long lines keeps the cursor in the first part of a line which has become too long; one that
    # has just become narrower cuts off the line that is drawn for the former width.
    starts, ends = output.count("\r\r\x1b[2K\x1b[J\x1b[?7l"), output.count("\x1b[?7h\r")
    assert starts
    assert ends > starts, "the first line of all begins without the first of these"


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
    small = {"cluster": {"worker": 1, "ps": 0}, "global_step": 1, "steps_per_sec": 0.25, "examples_per_sec": 2.5}
    assert "mnist: 1 worker, 1 step at 0.25/s (2.5 examples/s)" in console.result_lines(summary | small, "x")
    assert "simulated" not in text
    assert text.startswith("async dnn on mnist: ")
    assert console.result_lines(summary | {"algorithm": "plain"}, "outputs/x") == text
    corrected = console.result_lines(summary | {"algorithm": "delay_compensated"}, "x")
    assert corrected.startswith("async (delay_compensated) dnn on mnist: ")
    assert "(at most 4), with simulated delays\n" in console.result_lines(summary | {"simulated": {}}, "x")


EVALUATIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"test_mae": 0.5, "test_loss": 1.25, "test_examples": 442, "validation_loss": 3.0, "validation_examples": 9},
        "test loss 1.2500, mae 0.5000 over 442 examples\n",
    ),
    (
        {"validation_accuracy": 0.9, "validation_loss": 3.0, "validation_per_class": [0.5], "validation_examples": 9},
        "validation accuracy 0.9000, loss 3.0000 over 9 examples\n",
    ),
    ({"test_examples": 9}, "test no metrics over 9 examples\n"),
    ({"validation_accuracy": None}, ""),
]


@pytest.mark.parametrize(("summary", "line"), EVALUATIONS)
def test_the_metrics_of_the_last_evaluation(summary: dict[str, Any], line: str) -> None:
    assert console.last_evaluation(summary) == line


def test_nothing_is_shown_with_verbose_0() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream, QuietConsole(stream) as quiet:
        quiet.status("starting")
        quiet.progress(PROGRESS)
    assert all_of(master) == ""


@pytest.mark.parametrize(("verbose", "shown"), [(0, "tf2dist: warning: look out\n"),
                                                (2, "going on at step 5\ntf2dist: warning: look out\n")])  # fmt: skip
def test_lines_that_stay_are_shown_with_verbose_2(verbose: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    with console_of(verbose) as lines:
        lines.status("starting")
        lines.note("going on at step 5")
        lines.progress(PROGRESS)
        lines.epoch(1, 3, {"loss": 0.5})  # Keras prints it
        lines.warn("look out")
    assert stream.getvalue() == shown


def test_a_full_disk_behind_stderr_is_ignored() -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream, Console(stream) as plain:
        plain.status("starting")
        plain.warn("look out")
        plain.progress(PROGRESS)
        plain._plain_at -= console.PLAIN_EVERY_SECS
        plain.progress(PROGRESS)
        plain.note("still here")


SEQUENCE = "a\x1b[2J\x9b1m\rb\x00\u202ec\udcff"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_are_spelled_out(is_terminal: bool) -> None:
    master, slave = pty.openpty() if is_terminal else os.pipe()
    with os.fdopen(slave, "w") as stream, Console(stream) as shown:
        for say in (shown.status, shown.note, shown.warn):
            say(f"{SEQUENCE}\nnext")
        shown.progress(PROGRESS)
    output = all_of(master)
    assert r"a\x1b[2J\x9b1m\rb\x00\u202ec\udcff" in output
    assert not [part for part in ("\x1b[2J", "\x9b", "\x00", "\u202e") if part in output]


def test_control_characters_in_a_users_error_are_spelled_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [FailureRecord(task, 0.0, 1, f"{task}: {SEQUENCE}", SEQUENCE) for task in ("worker-0", "worker-1")]

    def fail(*_: object) -> None:
        raise TaskFailure(failures)

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 1
    output = capsys.readouterr().err
    assert output.count("b\\x00\\u202ec") == 3
    assert "".join(output.split("\n")).isprintable()


def test_a_reader_that_stalls_and_comes_back() -> None:
    """The writer does not wait; what fits into the buffer is kept for later."""
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as stream, Console(stream) as plain:
        for number in range(100_000):  # more than the pipe and the memory for it
            plain.status(f"line {number}")
        read = os.read(ours, 1 << 20)
        plain.status("and more")
    with os.fdopen(ours) as rest:
        lines = (read.decode() + rest.read()).splitlines()
    assert lines[:2] == ["line 0", "line 1"]
    assert lines[9_000] == "line 9000", "what the pipe holds, and as much that was kept"


def test_a_terminal_that_stalls_blocks_nothing() -> None:
    """A terminal that is ready may take only a part of a write, and an ordinary write waits for the rest."""
    master, slave = pty.openpty()
    faulthandler.dump_traceback_later(30, exit=True)  # nothing else ends a write that blocks
    try:
        with os.fdopen(slave, "w") as stream:
            terminal = Unblocked(stream)
            for _ in range(100):
                terminal.write("x" * 777 + "\n")
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(master)


@pytest.mark.parametrize(
    ("mode", "num_batches", "batch_size", "line"),
    [
        ("async", 1, 1000, "a step is one worker's batch of 1,000 examples"),
        ("async", 1, None, "a step is one worker's batch"),
        ("sync", 3, 100, "a step takes 3 x 100 = 300 examples"),
        ("sync", 1, 100, "a step takes 100 examples"),
        ("sync", 3, None, "a step takes one batch of each worker"),
        ("sync_replicas", 2, 1, "a step takes 2 x 1 = 2 examples"),
    ],
)
def test_what_a_step_is(mode: str, num_batches: int, batch_size: int | None, line: str) -> None:
    assert step_line(mode, num_batches, batch_size) == line


def test_a_stream_with_a_high_number(many_files: int) -> None:
    read_end, write_end = os.pipe()
    high = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, many_files)
    os.close(write_end)
    with os.fdopen(high, "w") as stream:
        Console(stream).note("a line")
    assert all_of(read_end) == "a line\n"
