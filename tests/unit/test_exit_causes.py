"""The cause of a process's end, from its exit code and its output."""

import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tf2dist.launch.failures import (
    FILE_LIMIT,
    MEMORY_LIMIT,
    STACK_LIMIT,
    THREAD_LIMIT,
    TIME_LIMIT,
    FailureReader,
    error_line,
    limit_reached,
)
from tf2dist.launch.launcher import Launcher
from tf2dist.messages import Exited


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'\n", MEMORY_LIMIT),
        (1, "cannot start worker-0: [Errno 12] Cannot allocate memory\n", MEMORY_LIMIT),
        (1, "ImportError: libtensorflow_cc.so.2: failed to map segment from shared object\n", MEMORY_LIMIT),
        (1, "cannot start worker-0: [Errno 11] Resource temporarily unavailable\n", THREAD_LIMIT),
        (
            -signal.SIGABRT,
            "F0000 env.cc:123] Check failed: ret == 0 Thread tf_ creation via pthread_create() failed.\n"
            + "    @     0x7fe4dcd94e22  tsl::(anonymous namespace)::PThread::PThread()\n" * 20,
            THREAD_LIMIT,
        ),
        (1, "RuntimeError: can't start new thread\n", THREAD_LIMIT),
        (-signal.SIGABRT, "E0000 ev_epoll1.cc:1295] UNKNOWN:eventfd: Too many open files (24)\n", FILE_LIMIT),
        (-signal.SIGXCPU, "", TIME_LIMIT),
        (-signal.SIGABRT, "F0000 rendezvous.cc:1] Check failed: a == b\n", ""),
        (-signal.SIGKILL, "terminate called after throwing an instance of 'std::bad_alloc'\n", ""),
        (-signal.SIGABRT, "std::bad_alloc\n" + "of this life\n" * 20, ""),
    ],
)
def test_a_limit_is_recognised_in_the_output(code: int, log: str, said: str) -> None:
    assert limit_reached(code, log) == said


@pytest.mark.parametrize(("kilobytes", "said"), [(100, STACK_LIMIT), (8192, "")])
def test_a_crash_with_a_small_stack_is_one_of_its_limit(kilobytes: int, said: str) -> None:
    program = "from tf2dist.launch.failures import limit_reached; print(limit_reached(-11, ''))"
    command = f'ulimit -s {kilobytes}; exec {sys.executable} -c "{program}"'
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == f"{said}\n", done.stderr


def test_the_error_line_is_the_exception() -> None:
    log = "I0000 chatter\nTraceback:\n  File\nImportError: no such library\nI0000 more chatter\n\n"
    assert error_line(log) == "ImportError: no such library"
    assert error_line("one\ntwo\n") == "two"
    assert error_line("") == "it printed nothing"


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    """That of a worker may have grown for weeks."""
    with open(tmp_path / "worker-0.log", "wb") as log:
        log.truncate(50 << 20)
        log.seek(0, 2)
        log.write(b"".join(b"\nline %d" % number for number in range(100)))
    reader = FailureReader(tmp_path, Launcher(tmp_path).log_of)
    tracemalloc.start()
    try:
        failure = reader.read(Exited("worker-0", 7, 0.0))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert failure.details == "\n".join(f"line {number}" for number in range(70, 100))
    assert most_bytes < 1 << 20
