"""Signals to a command: which of them count, during its start, and as process 1."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import COMMAND, Command, wait_until
from tf2dist import signals
from tf2dist.launch import single_run
from tf2dist.signals import Signals, StopRequest

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("pair", "counted"),
    [
        ((TERM, TERM), [TERM]),  # SLURM, at a time limit
        ((TERM, HUP), [TERM]),  # systemd
        ((HUP, TERM), [TERM]),  # the same, as it may arrive
        ((INT, INT), [INT]),
        ((HUP, INT), [HUP]),
        ((TERM, INT), [TERM, INT]),
        ((INT, TERM), [INT, TERM]),
    ],
)
def test_a_signal_that_is_repeated_at_once_is_the_same_request(pair: tuple[int, int], counted: list[int]) -> None:
    with Signals() as stop, stop.deferred():
        for number in pair:
            os.kill(os.getpid(), number)
    assert stop.received == counted
    assert (stop.signum, stop.is_urgent) == (counted[0], len(counted) > 1)


def test_a_signal_that_is_repeated_later_is_impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "REPEAT_SECS", 0.0)
    with Signals() as stop, stop.deferred():
        for number in (TERM, TERM, HUP):
            os.kill(os.getpid(), number)
    assert stop.received == [TERM, TERM, HUP]


def test_nohup_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with Signals() as stop, stop.deferred():
            os.kill(os.getpid(), HUP)
            assert stop.received == []
            assert (stop.signum, stop.is_urgent) == (0, False)
        assert signal.getsignal(HUP) == signal.SIG_IGN
    finally:
        signal.signal(HUP, before)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (number - 1) & 1)


@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_a_signal_while_the_command_begins(command: Command, number: signal.Signals) -> None:
    """Also if the program that starts it has blocked the signal.

    And as process 1, as in a container: the kernel drops every signal for which that has no handler.
    """
    unshare = ["unshare", *(["--user", "--map-root-user"] if os.geteuid() else []), "--pid", "--fork", "--kill-child"]
    possible = shutil.which("unshare") and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    prefix = unshare if possible else []
    run_dir = command.folder / "run"
    words = [*prefix, *COMMAND, f"run_dir={run_dir}", "data=digits"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=command.folder)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    results: list[int] = []

    def listens() -> bool:
        children = psutil.Process(process.pid).children() if prefix else [psutil.Process(process.pid)]
        results[:] = [child.pid for child in children]
        return bool(results) and catches(results[0], TERM)

    wait_until(listens, process)
    os.kill(results[0], number)
    finished = command.finish(process, timeout_secs=10)
    assert finished.code == 128 + number, finished
    assert finished.stderr == f"tf2dist: error: stopped by {signals.name_of(number)}\n"
    assert not run_dir.exists()


def test_signals_are_handled_before_anything_slow_is_imported() -> None:
    """Until then Python shows a traceback for Ctrl-C."""
    code = "import sys, tf2dist.__main__; print(*sorted(name for name in sys.modules if name.startswith('tf2dist')))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert completed.stdout.split() == ["tf2dist", "tf2dist.__main__", "tf2dist.signals"], completed.stderr


def test_a_signal_between_the_imports_and_the_tasks() -> None:
    """A slow operation there, such as a download, gets the chance to clean up."""
    code = """if True:
        import os, signal, sys
        from tf2dist import cli
        def slow(*args):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                print("tidied up")
        cli.run = slow
        cli.main([])
    """
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (completed.returncode, completed.stdout) == (143, "tidied up\n")
    assert completed.stderr == "tf2dist: error: stopped by SIGTERM\n"


def test_a_signal_ends_a_command_whose_reader_stalls() -> None:
    code = """if True:
        import os, signal
        from tf2dist import signals
        signals.end_at_once()
        os.set_blocking(2, False)
        try:
            while True:
                os.write(2, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(2, True)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        assert process.wait(30) == 143
    finally:
        process.kill()
        process.communicate()


def test_a_signal_while_a_job_is_submitted_leaves_no_file(tmp_path: Path) -> None:
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    ray.write_text("#!/bin/sh\ntouch started\nexec sleep 60\n")
    ray.chmod(0o700)
    command = [sys.executable, "-m", "tf2dist.render", "ray", f"run_dir={tmp_path}/run", "--submit", "--command", "a b"]
    environment = os.environ | {"PATH": f"{ray.parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_until((tmp_path / "started").exists, process)
    assert list(tmp_path.glob("tf2dist-*.py"))
    process.terminate()
    # The end of the output is also that of the process which submits.
    assert (process.communicate(timeout=30)[1], process.returncode) == ("tf2dist: error: stopped by SIGTERM\n", 143)
    assert not list(tmp_path.glob("tf2dist-*.py"))


def test_a_signal_while_a_model_is_exported_leaves_no_folder(tmp_path: Path) -> None:
    """With a model that stands for one of Keras, whose import and export take seconds."""
    code = """if True:
        import os, signal, sys, types
        from tf2dist import signals
        from tf2dist.tools.finished import exporting, shell
        class Model:
            def export(self, path, **settings):
                path.mkdir()
                os.kill(os.getpid(), signal.SIGINT)
        opening = types.SimpleNamespace(model_of=lambda line: Model())
        sys.modules["tf2dist.tools.finished.opening"] = opening
        sys.modules["tf2dist.tf_internals.keras"] = types.SimpleNamespace(inputs_of=lambda model: [])
        signals.end_at_once()
        exporting.export(shell.read_command_line(sys.argv[1:], ()))
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=30)
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith("tf2dist: error: stopped by Ctrl-C\n")
    assert list(tmp_path.iterdir()) == []


# A job that takes the signals as a run does, or takes none.
JOBS = {
    "orderly": """
import pathlib, time
from tf2dist.signals import Signals
with Signals() as stop, stop.deferred():
    pathlib.Path(sys.argv[2]).touch()
    while not stop.is_urgent:
        time.sleep(0.01)
pathlib.Path(sys.argv[2]).write_text(str(stop.received))
""",
    "deaf": """
import pathlib, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
pathlib.Path(sys.argv[2]).touch()
time.sleep(600)
""",
}


@pytest.mark.parametrize(("kind", "heard"), [("orderly", "[2, 15]"), ("deaf", "")])
@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.usefixtures("no_leftovers")
def test_a_job_of_a_comparison_ends_at_once_with_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, heard: str, number: signal.Signals
) -> None:
    """Without an orderly stop, which would save: it is told twice, and killed if it does not hear."""
    monkeypatch.setattr(single_run, "RUN_JOB", JOBS[kind])
    monkeypatch.setattr(single_run, "JOB_STOP_SECS", 0.5 if kind == "deaf" else 60.0)
    stop = StopRequest()
    ready = tmp_path / "ready"

    def look() -> None:
        if ready.exists():
            stop.ask(number)

    with open(tmp_path / "log", "wb") as log:
        assert single_run.run_job([str(ready)], stop, log, look) == 128 + number
    assert ready.read_text() == heard
