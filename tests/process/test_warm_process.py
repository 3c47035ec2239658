"""The warm process: how long it stays, what replaces it, and that a run leaves nothing in it."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.process.test_launcher import TIMEOUT_SECS, make, said, start, wait_for
from tf2dist.errors import TaskLostError
from tf2dist.launch import warm_process
from tf2dist.launch.launcher import Launcher
from tf2dist.linux import code_command
from tf2dist.messages import Exited, Ready


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(warm_process.LENT, raising=False)  # what the process of this file was lent
    warm_process.end_warm_process()
    yield
    warm_process.end_warm_process()


def warm_pid(folder: Path, **options: str) -> int:
    """The process id of the warm process of a run that has ended."""
    with make(folder, env=options) as launcher:
        server = wait_for(launcher, Ready).pid
        pid = psutil.Process(server).ppid()
    assert not psutil.pid_exists(server)
    return pid


def wait_for_end(pid: int) -> None:
    """Waits until a process has ended; one whose parent has ended may stay a zombie."""
    deadline = time.monotonic() + TIMEOUT_SECS
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)  # between two looks


def test_it_stays_for_the_next_run(tmp_path: Path) -> None:
    assert warm_pid(tmp_path) == warm_pid(tmp_path)


def test_it_is_replaced_if_what_it_was_started_with_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = [warm_pid(tmp_path), warm_pid(tmp_path, KERAS_BACKEND="tensorflow")]
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    pids.append(warm_pid(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    pids.append(warm_pid(tmp_path))
    with make(tmp_path) as launcher:
        pids.append(psutil.Process(wait_for(launcher, Ready).pid).ppid())
        assert pids.pop() == pids[-1], "nothing has changed"
        with Launcher(tmp_path, preload=("json",)) as other:
            pids.append(psutil.Process(wait_for(other, Ready).pid).ppid())
        start(launcher, "worker-0", "succeed")  # by the replaced one, which stays until this run ends
        assert wait_for(launcher, Exited).code == 0
    assert len(set(pids)) == len(pids)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids[:-1] if psutil.pid_exists(pid)], 5)
    assert not alive


def test_it_is_replaced_if_it_was_killed(tmp_path: Path) -> None:
    before = warm_pid(tmp_path)
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert warm_pid(tmp_path) != before


def test_runs_side_by_side_share_it(tmp_path: Path) -> None:
    with make(tmp_path) as first:
        start(first, "worker-0", "hear")
        said(first)
        with make(tmp_path, isolate=True) as second:
            start(second, "worker-1", "succeed")
            assert wait_for(second, Exited).code == 0
            servers = {psutil.Process(launcher._server_pid) for launcher in (first, second)}
            assert len({server.ppid() for server in servers}) == 1 < len(servers)
        assert first.runs("worker-0"), "the end of the other run is not its own"


def test_a_run_goes_on_when_it_is_killed(tmp_path: Path) -> None:
    """It is not needed any more; only the exit code of the fork server would come through it."""
    with make(tmp_path) as launcher:
        wait_for(launcher, Ready)
        os.kill(launcher._warm.pid, signal.SIGKILL)
        start(launcher, "worker-0", "succeed")
        assert wait_for(launcher, Exited).code == 0
        os.kill(launcher._server_pid, signal.SIGKILL)
        with pytest.raises(TaskLostError, match="the fork server has closed its socket"):
            wait_for(launcher, Exited)


def test_a_run_sees_the_environment_and_the_folder_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that nothing reads in an import do not replace it, but tasks have them."""
    found = []
    for number in range(2):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("TF_CONFIG", f"{number}")
        with Launcher(tmp_path, preload=("numpy.random",)) as launcher:
            start(launcher, "worker-0", "where")
            found.append(said(launcher) | {"warm": launcher._warm.pid})
            wait_for(launcher, Exited)
    first, second = found
    assert first["warm"] == second["warm"]
    assert [(each["TF_CONFIG"], each["cwd"]) for each in found] == [(f"{n}", str(tmp_path / f"{n}")) for n in range(2)]
    assert first["draw"] != second["draw"], "numbers that no seed determines differ, as after an import"


def test_what_a_task_changes_is_not_there_in_the_next_run(tmp_path: Path) -> None:
    """`fit` itself, with what Keras and others have one of in a process, is in tests/e2e/test_warm_fits.py."""
    pids = set()
    for _ in range(2):
        with make(tmp_path) as launcher:
            start(launcher, "worker-0", "leave_traces")
            assert said(launcher) == {"left": [None, False]}
            wait_for(launcher, Exited)
            pids.add(launcher._warm.pid)
    assert len(pids) == 1


def held(process: psutil.Process) -> tuple[int, int, int]:
    """The descriptors, threads and descendants of a process, once it waits."""
    deadline = time.monotonic() + TIMEOUT_SECS
    while process.pid != os.getpid() and process.status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between two looks
    return process.num_fds(), process.num_threads(), len(process.children(recursive=True))


def test_ten_runs_leave_nothing_behind(tmp_path: Path) -> None:
    warm = psutil.Process(warm_pid(tmp_path))
    gc.collect()  # what earlier tests have left to be closed
    before = held(psutil.Process()), held(warm)
    for _ in range(10):
        warm_pid(tmp_path)
    assert (held(psutil.Process()), held(warm)) == before


def test_it_stays_when_the_thread_ends_that_has_started_it(tmp_path: Path) -> None:
    """The kernel sends its signal of a parent's death at the end of that thread, too."""
    pids: list[int] = []
    thread = threading.Thread(target=lambda: pids.append(warm_pid(tmp_path)))
    thread.start()
    thread.join(TIMEOUT_SECS)
    assert warm_pid(tmp_path) == pids[0]


def test_a_forked_copy_of_the_process_has_its_own(tmp_path: Path) -> None:
    code = """
import os, pathlib, sys
from tests.process.test_warm_process import warm_pid
folder = pathlib.Path(sys.argv[1])
before = warm_pid(folder)
child = os.fork()
if not child:
    os._exit(warm_pid(folder) == before)
assert os.waitpid(child, 0)[1] == 0
assert warm_pid(folder) == before
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, timeout=60, check=True)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "sys.exit(0)"])
def test_it_ends_with_its_parent(tmp_path: Path, end: str) -> None:
    """Although another process may hold its socket."""
    code = f"""
import os, pathlib, signal, subprocess, sys
from tests.process.test_warm_process import warm_pid, warm_process
warm = warm_pid(pathlib.Path(sys.argv[1]))
os.set_inheritable(warm_process._warm._control.fileno(), True)
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
print(warm, child.pid, flush=True)
{end}
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=30)
    pid, child = map(int, done.stdout.split())
    try:
        wait_for_end(pid)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_server_that_ends_before_it_is_ready_ends_nobody_else(tmp_path: Path) -> None:
    """The launcher does not know its process id yet."""
    code = """
import pathlib, socket, sys
from tests.process.test_launcher import make
from tf2dist.errors import TrainingError
from tf2dist.launch import launcher
from tf2dist.messages import ServerEnded, pack

def ask(server_sock, log, **arguments):
    warm = ask_for_server(server_sock, log, **arguments)
    server_sock.send(pack(ServerEnded(1)))  # as the warm process does if there can be no more processes
    return warm

ask_for_server, launcher.ask_for_server = launcher.ask_for_server, ask
for _ in range(2):
    try:
        with make(pathlib.Path(sys.argv[1])) as one:
            one.wait_ready(lambda: None)
    except TrainingError as error:
        print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, process_group=0)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("the fork server failed: ") == 2


def test_one_that_is_stopped_is_woken_for_the_next_run(tmp_path: Path) -> None:
    pid = warm_pid(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    assert warm_pid(tmp_path) == pid


def test_a_run_may_begin_in_a_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    warm_pid(tmp_path)


def test_a_killed_caller_takes_its_run_with_it_although_a_forked_copy_of_it_lives(tmp_path: Path) -> None:
    code = """
import os, pathlib, signal, sys, time
from tests.process.test_launcher import make, said, start
with make(pathlib.Path(sys.argv[1])) as launcher:
    start(launcher, "worker-0", "wait")
    task = said(launcher)["pid"]
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        time.sleep(60)
        os._exit(0)
    print(task, child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=30)
    task, child = map(int, done.stdout.split())
    try:
        wait_for_end(task)
    finally:
        os.kill(child, signal.SIGKILL)


def test_idle_it_takes_no_processor_time(tmp_path: Path) -> None:
    process = psutil.Process(warm_pid(tmp_path))
    before = process.cpu_times()
    time.sleep(0.5)  # the time that is looked at
    assert process.cpu_times() == before


def test_a_file_that_has_changed_is_imported_anew(tmp_path: Path) -> None:
    """What the user's code imports is imported after the fork."""
    found = []
    for number in (1, 22):
        sends = f"send = lambda _, to_launcher: to_launcher.send(ResultMessage({{'n': {number}}})) or 0"
        (tmp_path / "changing.py").write_text(f"from tf2dist.messages import ResultMessage\n{sends}\n")
        with make(tmp_path) as launcher:
            launcher.start("worker-0", "changing:send", {}, sys_path=[str(tmp_path), *sys.path])
            found.append((said(launcher)["n"], launcher._warm.pid))
            wait_for(launcher, Exited)
    (first, pid), (second, other) = found
    assert (first, second, pid) == (1, 22, other)


WARM_PID = """
from pathlib import Path
from tests.process.test_warm_process import warm_pid
print(warm_pid(Path(sys.argv[1])))
"""


def warm_pid_of_child(folder: Path, descriptors: list[int], code: str = WARM_PID, **variables: str) -> int:
    """The process id of the warm process that serves a run of a child process, which has this module's path."""
    command = code_command(code, str(folder))
    found = subprocess.run(
        command, env={**os.environ, **variables}, pass_fds=descriptors, capture_output=True, text=True, check=True
    )
    return int(found.stdout)


def test_a_child_process_that_was_lent_it_has_none_of_its_own(tmp_path: Path) -> None:
    assert warm_process.lend() == ({}, []), "there is none"
    pid = warm_pid(tmp_path)
    variables, descriptors = warm_process.lend()
    before = held(psutil.Process(pid))
    assert warm_pid_of_child(tmp_path, descriptors, **variables) == pid
    assert warm_pid(tmp_path) == pid
    assert held(psutil.Process(pid)) == before
    changed = warm_pid_of_child(tmp_path, descriptors, **variables, KERAS_BACKEND="tensorflow")
    assert changed != pid, "it may import something else"


@pytest.mark.parametrize("how", ["the descriptor is closed", "it is of another file", "the warm process has ended"])
def test_a_child_process_that_cannot_ask_a_lent_one_starts_another(tmp_path: Path, how: str) -> None:
    pid = warm_pid(tmp_path)
    variables, descriptors = warm_process.lend()
    with contextlib.ExitStack() as stack:
        match how:
            case "the descriptor is closed":
                descriptors = []
            case "it is of another file":
                other, descriptors[0] = descriptors[0], os.dup(2)
                stack.callback(os.close, descriptors[0])
                words = variables[warm_process.LENT].split()
                assert words[0] == f"{other}"
                variables[warm_process.LENT] = " ".join([f"{descriptors[0]}", *words[1:]])
            case _:
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert warm_pid_of_child(tmp_path, descriptors, **variables) != pid


def lent_process() -> warm_process.LentProcess:
    (value,) = warm_process.lend()[0].values()
    return warm_process.LentProcess(value)


def test_a_run_goes_on_when_a_lent_one_is_killed(tmp_path: Path) -> None:
    warm_pid(tmp_path)
    lent = lent_process()
    with make(tmp_path) as launcher:
        launcher._warm = lent
        wait_for(launcher, Ready)
        assert not lent.has_ended()
        os.kill(lent.pid, signal.SIGKILL)
        start(launcher, "worker-0", "succeed")
        assert wait_for(launcher, Exited).code == 0
        assert lent.has_ended()


def test_threads_ask_at_once_whether_a_lent_one_has_ended(tmp_path: Path) -> None:
    """As runs of `fit` side by side do."""
    warm_pid(tmp_path)
    lent = lent_process()
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda _: any(lent.has_ended() for _ in range(5000)), range(4)))


def test_what_was_asked_before_a_lent_one_is_replaced_is_served(tmp_path: Path) -> None:
    pid = warm_pid(tmp_path)
    lent = lent_process()
    with make(tmp_path) as launcher:
        os.kill(pid, signal.SIGSTOP)  # as if the machine were busy
        launcher._warm = lent
        threading.Timer(2.0, os.kill, [pid, signal.SIGCONT]).start()
        warm_process.end_warm_process()
        assert wait_for(launcher, Ready)
    with pytest.raises(OSError, match="has ended"):
        lent.ask(warm_process.Serve(False, {}), socket.socket(), 2)


WARM_PID_OF_GRANDCHILD = """
from pathlib import Path
from tests.process.test_warm_process import warm_pid_of_child, warm_process
variables, descriptors = warm_process.lend()
print(warm_pid_of_child(Path(sys.argv[1]), descriptors, **variables))
"""


def test_a_child_process_lends_on_what_it_was_lent(tmp_path: Path) -> None:
    pid = warm_pid(tmp_path)
    variables, descriptors = warm_process.lend()
    assert warm_pid_of_child(tmp_path, descriptors, WARM_PID_OF_GRANDCHILD, **variables) == pid
