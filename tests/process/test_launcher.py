"""Launcher and fork server with real processes: every exit is reported, no process is left."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.conftest import REPOSITORY
from tf2dist.errors import TaskLostError
from tf2dist.launch import launcher as launcher_module
from tf2dist.launch.launcher import Launcher
from tf2dist.launch.warm_process import end_warm_process
from tf2dist.messages import Exited, PeerGone, Ready, ResultMessage

Message = TypeVar("Message")

TIMEOUT_SECS = 30.0
PTRACE_SEIZE = 0x4206


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def make(tmp_path: Path, **options: Any) -> Launcher:
    return Launcher(tmp_path, preload=(), **options)


def wait_for(launcher: Launcher, kind: type[Message], task: str = "") -> Message:
    for event in launcher.events(TIMEOUT_SECS):
        if isinstance(event, kind) and task in ("", getattr(event, "task", "")):
            return event
    raise AssertionError(f"no {kind.__name__} in {TIMEOUT_SECS} s")


def said(launcher: Launcher, task: str = "") -> dict[str, Any]:
    """The next result that a target sends."""
    return wait_for(launcher, ResultMessage, task).summary


def start(launcher: Launcher, name: str, function: str, **payload: Any) -> None:
    target = f"tests.process.targets:{function}"
    launcher.start(name, target, {"name": name, **payload}, sys_path=sys.path)


def test_a_message_reaches_its_task_alone(tmp_path: Path) -> None:
    with make(tmp_path) as launcher:
        for name in ("worker-0", "worker-1"):
            start(launcher, name, "hear")
            said(launcher, name)
        launcher.send_to_task("nobody-0", PeerGone("nothing"))
        for name in ("worker-1", "worker-0"):
            launcher.send_to_task(name, PeerGone(f"for {name}"))
            assert said(launcher, name) == {"heard": f"for {name}"}
            wait_for(launcher, Exited, name)
            launcher.send_to_task(name, PeerGone("too late"))


def test_a_program_that_has_changed_signals_and_closed_streams(tmp_path: Path) -> None:
    """As one that calls `fit` may have, or the program that has started it."""
    code = """if True:
        import os, signal, sys
        from pathlib import Path
        import psutil
        from tests.process.test_launcher import *

        for number in range(3):
            os.close(number)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGPIPE})
        folder = Path(sys.argv[1])
        with make(folder, isolate=True) as launcher:
            for name, function in (("worker-0", "wait"), ("worker-1", "hear")):
                start(launcher, name, function)
                said(launcher, name)
            launcher.signal("worker-0", signal.SIGTERM)
            code = wait_for(launcher, Exited).code
            task = psutil.Process(launcher.tasks["worker-1"])
            os.kill(launcher._server_pid, signal.SIGKILL)
            psutil.wait_procs([task])
            launcher.send_to_task("worker-1", PeerGone("too late"))
            with pytest.raises(TaskLostError, match="the fork server was killed by SIGKILL"):
                wait_for(launcher, Exited)
        (folder / "code").write_text(str(code))
    """
    completed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, timeout=60)
    assert completed.returncode == 0
    assert (tmp_path / "code").read_text() == str(-signal.SIGTERM)


def test_tasks_run_report_and_log(tmp_path: Path) -> None:
    with make(tmp_path) as launcher:
        for name in ("worker-0", "worker-1"):
            start(launcher, name, "succeed")
        ends = [wait_for(launcher, Exited) for _ in range(2)]
        assert {end.task for end in ends} == {"worker-0", "worker-1"}
        assert all(end.code == 0 for end in ends)
        assert launcher.tasks == {}
    assert (tmp_path / "worker-1.log").read_text() == "hello from worker-1\n"


def test_exit_codes_and_tracebacks_are_reported(tmp_path: Path) -> None:
    with make(tmp_path) as launcher:
        start(launcher, "worker-0", "fail")
        start(launcher, "worker-1", "leave")
        codes = {end.task: end.code for end in (wait_for(launcher, Exited) for _ in range(2))}
    assert codes == {"worker-0": 1, "worker-1": 7}
    assert "this target is broken" in (tmp_path / "worker-0.log").read_text()


def test_a_killed_task_is_reported_and_can_be_started_again(tmp_path: Path) -> None:
    with make(tmp_path) as launcher:
        for _ in range(2):
            start(launcher, "worker-0", "wait")
            said(launcher)
            launcher.signal("worker-0", signal.SIGKILL)
            assert wait_for(launcher, Exited).code == -signal.SIGKILL


def test_a_stopped_task_does_not_run(tmp_path: Path) -> None:
    with make(tmp_path) as launcher:
        assert not launcher.runs("worker-0")
        start(launcher, "worker-0", "wait")
        event = said(launcher)
        child = psutil.Process(event["child"])
        assert launcher.runs("worker-0")
        for signum, alone, runs in (
            (signal.SIGSTOP, True, False),
            (signal.SIGCONT, True, True),
            (signal.SIGSTOP, False, False),
            (signal.SIGKILL, False, False),
        ):
            launcher.signal("worker-0", signum, alone)
            deadline = time.monotonic() + TIMEOUT_SECS
            while launcher.runs("worker-0") is not runs:
                assert time.monotonic() < deadline, event
                time.sleep(0.01)  # between two looks
            if alone:
                assert child.status() != psutil.STATUS_STOPPED
        wait_for(launcher, Exited)


def test_a_killed_task_that_does_not_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may wait for a device or a file system; here a debugger keeps the process."""
    monkeypatch.setattr(launcher_module, "KILL_TIMEOUT_SECS", 1.0)
    with make(tmp_path) as launcher:
        start(launcher, "worker-0", "wait")
        pid = said(launcher)["pid"]
        if ctypes.CDLL(None).ptrace(PTRACE_SEIZE, pid, None, None) != 0:
            pytest.skip("no process may trace another here")
        try:
            with pytest.raises(TaskLostError, match="worker-0, killed 1 s ago, has not ended: a file system or a dev"):
                launcher.kill_all()
        finally:
            os.waitpid(pid, 0)


def test_leaving_stops_tasks_and_their_children(tmp_path: Path) -> None:
    with make(tmp_path) as launcher:
        start(launcher, "worker-0", "wait")
        event = said(launcher)
    assert not psutil.pid_exists(event["pid"])


def test_an_exception_in_the_block_stops_everything(tmp_path: Path) -> None:
    def run() -> None:
        with make(tmp_path) as launcher:
            start(launcher, "worker-0", "wait")
            said(launcher)
            raise KeyError

    with pytest.raises(KeyError):
        run()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_launcher_leaves_no_process(tmp_path: Path, frozen: bool) -> None:
    code = f"""
import pathlib
from tests.process import test_launcher as t
from tf2dist.messages import Began
with t.make(pathlib.Path({str(tmp_path)!r})) as launcher:
    t.start(launcher, "worker-0", "wait", stubborn=True)
    event = t.said(launcher)
    print(event["pid"], flush=True)
    t.wait_for(launcher, Began)  # which never comes
"""
    path = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as launcher:
        assert launcher.stdout
        task = psutil.Process(int(launcher.stdout.readline()))
        if frozen:
            psutil.Process(task.ppid()).suspend()
        launcher.kill()
    assert launcher.returncode == -signal.SIGKILL, "it was still waiting"
    psutil.wait_procs([task], timeout=5)
    assert not task.is_running()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_launcher_that_is_killed_during_the_import_leaves_no_process(tmp_path: Path, at_once: bool) -> None:
    slow = "import pathlib, time; pathlib.Path(__file__ + '.mark').touch(); time.sleep(60)"
    (tmp_path / "slow.py").write_text(slow)
    code = f"""
import pathlib, time
from tf2dist.launch.launcher import Launcher
from tf2dist.launch.warm_process import end_warm_process
with Launcher(pathlib.Path({str(tmp_path)!r}), preload=("slow",)) as launcher:
    while not {at_once} and not pathlib.Path({str(tmp_path / "slow.py.mark")!r}).exists():
        time.sleep(0.01)
    print(launcher._warm.pid, flush=True)
    time.sleep(60)
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as launcher:
        assert launcher.stdout
        server = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
    psutil.wait_procs([server], timeout=5)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def own_addresses() -> list[str]:
    return [a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == socket.AF_INET]


@pytest.mark.parametrize("isolate", [True, False])
def test_ports_of_an_isolated_cluster_cannot_be_reached(tmp_path: Path, isolate: bool) -> None:
    with make(tmp_path, isolate=isolate) as launcher:
        wait_for(launcher, Ready)
        if isolate and not launcher.isolated:
            pytest.skip("this system allows no private network")
        start(launcher, "worker-0", "listen", port=launcher.ports[0])
        event = said(launcher)
        assert (event["interfaces"] == ["lo"]) or not isolate
        # Without isolation the same port is open on every address: the test can tell the difference.
        result = [reachable(address, launcher.ports[0]) for address in own_addresses()]
        assert not any(result) if isolate else result[0]


def test_ports_are_all_different(tmp_path: Path) -> None:
    with make(tmp_path) as launcher:
        wait_for(launcher, Ready)
        assert len(set(launcher.ports)) == len(launcher.ports) >= 32


def test_a_launcher_in_a_process_with_many_open_files(tmp_path: Path, many_files: int) -> None:
    """As one with many tasks, or a program that calls `fit`."""
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < many_files:
            held.append(os.dup(held[0]))
        end_warm_process()
        with make(tmp_path) as launcher:
            start(launcher, "worker-0", "hear")
            said(launcher)
            launcher.send_to_task("worker-0", PeerGone("it"))
            assert said(launcher) == {"heard": "it"}
    finally:
        for descriptor in held:
            os.close(descriptor)
