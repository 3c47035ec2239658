"""The fork server: how its end is reported, what it imports, and which environment its tasks get."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.process.test_launcher import make, said, start, wait_for
from tf2dist.errors import Interrupted, TaskLostError, TrainingError
from tf2dist.launch.failures import FailureReader
from tf2dist.launch.launcher import Launcher
from tf2dist.messages import Began, Exited, Ready
from tf2dist.tf_constants import AUTOGRAPH_FILE


@pytest.fixture(autouse=True)
def _clean(no_leftovers: Callable[[], None]) -> None:
    pass


def test_the_tasks_of_a_killed_fork_server_die_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how the server ended; its log may hold unrelated output."""
    (tmp_path / "chatty.py").write_text("print('chatter', flush=True)")
    monkeypatch.syspath_prepend(tmp_path)
    with Launcher(tmp_path, preload=("chatty",)) as launcher:
        start(launcher, "worker-0", "wait")
        event = said(launcher)
        os.kill(launcher._server_pid, signal.SIGKILL)
        with pytest.raises(TaskLostError) as error:
            wait_for(launcher, Began)
        psutil.wait_procs([psutil.Process(pid) for pid in (event["pid"],) if psutil.pid_exists(pid)], timeout=5)
    assert "chatter" in (tmp_path / "forkserver.log").read_text()
    assert str(error.value) == "the fork server was killed by SIGKILL"
    assert error.value.exit_code == 138, "worth a retry"


PAUSES = """
import os, time
parents = []
os.register_at_fork(
    after_in_child=lambda: parents.append(os.getppid()),
    after_in_parent=lambda: len(parents) == 1 and time.sleep(60),  # the fork server, which a warm process has forked
)
"""


def test_what_a_task_has_started_dies_with_a_fork_server_that_is_killed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills the task alone; the launcher kills what it has started, if it knows the task's process."""
    (tmp_path / "pauses.py").write_text(PAUSES)
    monkeypatch.syspath_prepend(tmp_path)
    with Launcher(tmp_path, preload=("pauses",)) as launcher:
        start(launcher, "worker-0", "wait")
        event = said(launcher)
        started = [psutil.Process(event[name]) for name in ("pid", "child")]
        os.kill(launcher._server_pid, signal.SIGKILL)  # in its pause, before it could tell of the task
        with pytest.raises(TaskLostError):
            wait_for(launcher, Began)
        assert psutil.wait_procs(started, timeout=5)[1] == []


def test_a_task_keeps_no_descriptors_of_those_before_it(tmp_path: Path) -> None:
    names = ("worker-0", "worker-1", "worker-2")
    with make(tmp_path) as launcher:
        for name in names:
            start(launcher, name, "wait")
        open_files = [psutil.Process(said(launcher)["pid"]).num_fds() for _ in names]
    assert len(set(open_files)) == 1


def test_a_fork_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """And a retry would end in the same way."""
    with Launcher(tmp_path, preload=("no_such_module",)) as launcher, pytest.raises(TrainingError) as error:
        wait_for(launcher, Ready)
    assert "the fork server failed: ModuleNotFoundError: No module named 'no_such_module'" in str(error.value)
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("exhaust", "was killed by SIGABRT: the limit on memory is reached"),
        ("compute", "SIGXCPU: the limit on processor time is reached"),
    ],
)
def test_a_task_that_ends_at_a_limit_is_not_worth_a_retry(tmp_path: Path, function: str, says: str) -> None:
    with make(tmp_path) as launcher:
        start(launcher, "worker-0", function)
        failure = FailureReader(tmp_path, launcher.log_of).read(wait_for(launcher, Exited))
    assert says in failure.message
    assert failure.exit_code == 1


def test_a_fork_server_that_reaches_a_limit_is_not_worth_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hungry = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))\nbytearray(1 << 40)\n"
    (tmp_path / "hungry.py").write_text(hungry)
    monkeypatch.syspath_prepend(tmp_path)
    says = "fork server failed: MemoryError; the limit on memory is reached; raise it"
    with Launcher(tmp_path, preload=("hungry",)) as launcher, pytest.raises(TrainingError, match=says):
        wait_for(launcher, Ready)


def test_what_is_imported_may_forget_who_is_woken_by_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As asyncio does in each forked process from Python 3.12 on."""
    forgets = "import os, signal\nos.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))\n"
    (tmp_path / "forgets.py").write_text(forgets)
    monkeypatch.syspath_prepend(tmp_path)
    with Launcher(tmp_path, preload=("forgets",)) as launcher:
        wait_for(launcher, Ready)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param("by itself", marks=pytest.mark.thorough),
        "killed",
        pytest.param("with its launcher", marks=pytest.mark.slow),
    ],
)
def test_a_task_leaves_no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with make(tmp_path) as launcher:
        start(launcher, "worker-0", "generate", waits=ends != "by itself")
        event = said(launcher)
        assert any(AUTOGRAPH_FILE in name for name in event["files"]), event
        if ends == "killed":
            os.kill(event["pid"], signal.SIGKILL)
        if ends != "with its launcher":
            wait_for(launcher, Exited)
            assert not list(folder.rglob("*.py*"))  # a folder for bytecode may stay, which others write to as well
    assert not list(folder.rglob("*.py*"))


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ctypes", "json", "tf2dist"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file in the working directory was run')")
    monkeypatch.chdir(tmp_path)
    with make(tmp_path) as launcher:
        start(launcher, "worker-0", "succeed")
        said(launcher)
        assert wait_for(launcher, Exited).code == 0


def test_parts_of_keras_that_tasks_do_not_use_are_imported_when_they_are_used(tmp_path: Path) -> None:
    with Launcher(tmp_path, preload=("keras",)) as launcher:
        start(launcher, "worker-0", "use_wrappers")
        assert said(launcher) == {"before": [], "after": ["matplotlib", "sklearn"]}
        assert wait_for(launcher, Exited).code == 0


@pytest.mark.parametrize("variable", ["TF2DIST_TOKEN", "TF2DIST_TOKEN_FILE"])
def test_the_token_stays_with_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "a secret of many characters")
    with make(tmp_path) as launcher:
        start(launcher, "worker-0", "surroundings")
        assert said(launcher)["names"] == []
        wait_for(launcher, Exited)


def test_a_fork_server_that_dies_with_a_request_unread(tmp_path: Path) -> None:
    with make(tmp_path) as launcher:
        wait_for(launcher, Ready)
        server = psutil.Process(launcher._server_pid)
        server.suspend()
        start(launcher, "worker-0", "wait")
        server.kill()
        with pytest.raises(TaskLostError, match="fork server was killed by SIGKILL"):
            wait_for(launcher, Began)


def test_the_output_of_an_earlier_start_is_not_searched_for_the_cause(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("terminate called after throwing an instance of 'std::bad_alloc'\n")
    with make(tmp_path) as launcher:
        start(launcher, "worker-0", "abort")
        failure = FailureReader(tmp_path, launcher.log_of).read(wait_for(launcher, Exited))
    assert (failure.message, failure.exit_code) == ("was killed by SIGABRT", 138)


def test_a_fork_server_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    says = "^the fork server could not be started: No such file or directory$"
    with pytest.raises(TrainingError, match=says), Launcher(tmp_path):
        pass


WITHOUT_PROCESSES = """
import os, pathlib, resource, sys
from tf2dist.errors import TrainingError
from tf2dist.launch.launcher import Launcher
from tf2dist.launch.warm_process import state_of_start
state_of_start((), {})  # modules that are imported when they are needed may not be readable to the other user
os.setgroups([]), os.setgid(65534), os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    with Launcher(pathlib.Path(sys.argv[1])):
        pass
except TrainingError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user, whose processes are limited")
def test_a_fork_server_that_the_limit_on_processes_forbids() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        command = [sys.executable, "-c", WITHOUT_PROCESSES, folder]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert completed.stderr == ""
    assert (
        "could not be started: Resource temporarily unavailable: the limit on processes or threads" in completed.stdout
    )


def test_a_signal_explains_the_end_of_the_fork_server(tmp_path: Path) -> None:
    """A signal to a whole service may end the server before the server ignores it."""

    def check() -> None:
        raise Interrupted(signal.SIGTERM)

    with Launcher(tmp_path, preload=()) as launcher:
        os.kill(launcher._warm.pid, signal.SIGKILL)
        launcher._warm.exit_code(10)
        with pytest.raises(Interrupted):
            launcher.wait_ready(check)
