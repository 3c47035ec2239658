"""Runs that are ended from outside, by signals and kills, and the ports that nobody can reach meanwhile."""

import contextlib
import os
import pty
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import (
    COMMAND,
    REPOSITORY,
    Command,
    fork_servers_of,
    our_processes,
    slowness,
    task_process,
    wait_until,
)
from tf2dist.signals import name_of


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def wait_for_line(process: subprocess.Popen[str], path: Path, text: str) -> None:
    """Follows a growing file until it holds a text, as long as the process runs."""
    wait_until(lambda: path.exists() and text in path.read_text(errors="replace"), process)


LONG = ["cluster=local2", "data=digits", "train.steps=100000000", "train.log_every_steps=10"]


@pytest.mark.parametrize(
    ("mode", "signum"),
    [
        ("async", signal.SIGTERM),
        pytest.param("sync", signal.SIGINT, marks=pytest.mark.thorough),  # test_resume.py stops a synchronous run
        pytest.param("async", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("sync", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("async", signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_everything(command: Command, mode: str, signum: signal.Signals) -> None:
    """Also a signal that comes twice at once, as from SLURM at a time limit.

    Until then the run directory serves this run alone.
    """
    process = command.start(f"mode={mode}", *LONG, "figure=true")
    wait_for_line(process, command.folder / "run" / "logs" / "worker-0.log", "worker=0, epoch")
    second = command("data=digits", "train.steps=5")
    assert second.code == 2, second
    assert "another run is using it" in second.stderr
    for pause_secs in (0.02, 0.0):
        process.send_signal(signum)
        time.sleep(pause_secs)  # as far apart as SLURM's
    finished = command.finish(process, timeout_secs=30)
    assert finished.code == 128 + signum, finished
    assert f"stopped by {name_of(signum)}; saved at step " in finished.stderr, finished
    assert f"; add run_dir={finished.run_dir} to go on\n" in finished.stderr, finished
    assert "Traceback" not in finished.stderr
    assert (finished.run_dir / "training.png").is_file(), "what there is of the run is drawn"


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["done", pytest.param("stopped", marks=pytest.mark.slow)])
def test_the_picture_comes_last_and_can_be_left_out(command: Command, ending: str) -> None:
    """The user has read how the run has ended before matplotlib, here one that hangs, is imported."""
    (command.folder / "matplotlib.py").write_text("import time; time.sleep(600)")
    path = os.pathsep.join([str(command.folder), str(REPOSITORY)])
    options = ["mode=sync", "cluster=local1", *(LONG if ending == "stopped" else ["data=digits", "train.steps=20"])]
    process = command.start(*options, "figure=true", env={"PYTHONPATH": path})
    assert process.stdout
    assert process.stderr
    if ending == "stopped":
        wait_for_line(process, command.folder / "run" / "logs" / "worker-0.log", "worker=0, epoch")
        process.send_signal(signal.SIGINT)
    else:
        wait_until(lambda: process.stdout.readline() == f"{command.folder}/run\n", process)  # type: ignore[union-attr]
    note = "drawing training.png\n"
    messages: list[str] = []
    while (line := process.stderr.readline()) and line != note:
        messages.append(line)
    # A second Ctrl-C within two seconds of the first would count as the same.
    process.send_signal(signal.SIGINT)
    finished = command.finish(process, timeout_secs=10)
    assert (finished.code, finished.stderr) == (130 if ending == "stopped" else 0, "")
    assert messages[-1].startswith(
        "tf2dist: error: stopped by Ctrl-C; saved at " if ending == "stopped" else "step 20/20"
    )
    assert not (finished.run_dir / "training.png").exists()


@pytest.mark.slow
def test_a_reader_that_stalls_does_not_stop_the_run(command: Command) -> None:
    """Its pipe is full from the start: the run goes on, and signals still work."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(theirs, bytes(4096)):
            pass
    os.set_blocking(theirs, True)
    words = [*COMMAND, f"run_dir={command.folder / 'run'}", "mode=sync", "cluster=local1", *LONG]
    process = subprocess.Popen(words, cwd=command.folder, stdin=subprocess.DEVNULL, stderr=theirs, text=True)
    wait_for_line(process, command.folder / "run" / "logs" / "worker-0.log", "worker=0, epoch")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30 * slowness()) == 143
    assert len(list((command.folder / "run" / "checkpoints").iterdir())) == 1
    os.close(ours)
    os.close(theirs)


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves_too(command: Command) -> None:
    """The command leads the session of a terminal; the kernel tells it that the terminal is gone."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    words = ["setsid", "--ctty", *COMMAND, f"run_dir={command.folder / 'run'}", "mode=sync", "cluster=local1", *LONG]
    process = subprocess.Popen(words, cwd=command.folder, stdin=theirs, stdout=theirs, stderr=theirs, text=True)
    os.close(theirs)
    log = command.folder / "run" / "logs" / "worker-0.log"

    def trains() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 1 << 16)
        return log.exists() and "worker=0, epoch" in log.read_text(errors="replace")

    wait_until(trains, process)
    os.close(ours)
    assert process.wait(timeout=30 * slowness()) == 129
    assert len(list((command.folder / "run" / "checkpoints").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_signal_to_a_whole_service_saves_too(command: Command, mode: str) -> None:
    """As systemd and job schedulers send it: to the tasks, which get it a second time from their launcher.

    systemd adds SIGHUP, which is for the launcher alone.
    """
    process = command.start(f"mode={mode}", *LONG)
    wait_for_line(process, command.folder / "run" / "logs" / "worker-0.log", "worker=0, epoch")
    family = psutil.Process(process.pid)
    for member in [*family.children(recursive=True), family]:
        member.send_signal(signal.SIGTERM)
        member.send_signal(signal.SIGHUP)
    finished = command.finish(process, timeout_secs=30)
    assert finished.code == 143, finished
    assert "stopped by SIGTERM; saved at step " in finished.stderr, finished


def test_a_signal_during_the_import_of_tensorflow(cold_command: Command) -> None:
    process = cold_command.start("data=digits")
    assert process.stderr
    assert process.stderr.readline() == "starting TensorFlow\n"
    process.send_signal(signal.SIGINT)
    assert cold_command.finish(process, timeout_secs=10).code == 130


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_stop_the_training(command: Command) -> None:
    process = command.start("data=digits", "train.steps=300")
    assert process.stderr
    assert process.stderr.readline()
    process.stderr.close()
    assert process.wait(timeout=60 * slowness()) == 0
    assert process.stdout
    assert "test accuracy" in process.stdout.read()
    process.stdout.close()


def test_a_killed_launcher_leaves_no_task(cold_command: Command, no_leftovers: Callable[[], None]) -> None:
    process = cold_command.start(*LONG)
    wait_for_line(process, cold_command.folder / "run" / "logs" / "worker-0.log", "worker=0, epoch")
    assert len(our_processes()) >= 6
    process.kill()
    cold_command.finish(process)
    no_leftovers()


@pytest.mark.parametrize(
    ("mode", "task"),
    [("sync", "worker-1"), *(pytest.param("async", task, marks=pytest.mark.slow) for task in ("ps-0", "chief-0"))],
)
def test_a_killed_task_is_named(command: Command, mode: str, task: str) -> None:
    process = command.start(f"mode={mode}", *LONG, "max_restarts=0")
    wait_for_line(process, command.folder / "run" / "logs" / "worker-1.log", "worker=1, epoch")
    task_process(command.folder / "run", task).kill()
    finished = command.finish(process, timeout_secs=60)
    assert finished.code == 138, finished
    assert f"{task}: was killed by SIGKILL" in finished.stderr


@pytest.mark.slow
def test_the_ports_of_a_running_cluster_cannot_be_reached(command: Command) -> None:
    process = command.start(*LONG)
    wait_for_line(process, command.folder / "run" / "logs" / "worker-0.log", "worker=0, epoch")
    server = next(iter(fork_servers_of(process.pid)))
    if os.readlink(f"/proc/{server.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        process.terminate()
        command.finish(process)
        pytest.skip("this system allows no private network")
    listening = Path(f"/proc/{server.pid}/net/tcp6").read_text().splitlines()[1:]
    ports = {int(line.split()[1].split(":")[1], 16) for line in listening if line.split()[3] == "0A"}
    assert len(ports) >= 4, "one for each task"
    addresses = [a.address for group in psutil.net_if_addrs().values() for a in group if a.family == socket.AF_INET]
    for address in addresses:
        for port in ports:
            with socket.socket() as probe:
                probe.settimeout(2)
                assert probe.connect_ex((address, port)) != 0, f"{address}:{port} is open"
    process.terminate()
    assert command.finish(process, timeout_secs=30).code == 143


BUSY = {
    "saving": ["checkpoint.every_steps=1"],
    "evaluating": ["train.eval_every_steps=1"],
    "starting": ["grace_secs=600"],  # for nothing: there is nothing to save
}


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "what", [*(pytest.param(what, marks=pytest.mark.slow) for what in ("saving", "evaluating")), "starting"]
)
def test_a_signal_during_saving_evaluation_or_start(command: Command, mode: str, what: str) -> None:
    """The run is stopped while it saves, evaluates or starts, and does hardly anything else."""
    process = command.start(f"mode={mode}", *LONG, "model=softmax", *BUSY[what])
    logs = command.folder / "run" / "logs"
    if what == "starting":
        wait_until((logs / "worker-1.log").exists, process)
    else:
        busy = command.folder / "run" / ("checkpoints" if what == "saving" else "metrics.jsonl")
        wait_until(lambda: busy.is_dir() or (busy.exists() and "validation_accuracy" in busy.read_text()), process)
    process.send_signal(signal.SIGTERM)
    finished = command.finish(process, timeout_secs=30)
    assert finished.code == 143, finished
    assert "Traceback" not in finished.stderr
    if what != "starting":
        assert "stopped by SIGTERM; saved at step " in finished.stderr
        step = finished.stderr.split("saved at step ")[1].split(";")[0]
        newest = max((command.folder / "run" / "checkpoints").iterdir()).name
        assert newest == f"step-{int(step):010}"


@pytest.mark.parametrize(
    "patience",
    [pytest.param("grace", marks=pytest.mark.slow), pytest.param("second signal", marks=pytest.mark.thorough)],
)
def test_a_stop_that_cannot_be_in_order(command: Command, patience: str) -> None:
    """With a frozen ps nothing can be saved: the attempt has a limit, and Ctrl-C ends it at once."""
    process = command.start(*LONG, f"grace_secs={2 if patience == 'grace' else 600}")
    wait_for_line(process, command.folder / "run" / "logs" / "worker-0.log", "worker=0, epoch")
    task_process(command.folder / "run", "ps-0").send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    if patience == "second signal":
        assert process.stderr
        wait_until(lambda: "stopping" in process.stderr.readline(), process)  # type: ignore[union-attr]
        process.send_signal(signal.SIGINT)
    finished = command.finish(process, timeout_secs=30)
    assert finished.code == 143, finished
