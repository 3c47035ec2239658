"""Starts, watches and stops the tasks of one host, and sets the environment variables of their processes.

    with Launcher(log_dir) as launcher:
        launcher.start("worker-0", "package.module:function", {"any": "json"})
        for message in launcher.events(timeout_secs=1.0):
            ...

Leaving the block kills what still runs; `shutdown` asks the tasks to end before. This module never imports TensorFlow;
the processes that run it get their environment variables before they import it.
"""

import contextlib
import errno
import io
import itertools
import os
import platform
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import psutil

from tf2dist.config.schema import DevicesConfig, RunConfig
from tf2dist.errors import FailureRecord, TaskLostError, TfDistError, TrainingError
from tf2dist.launch.console import open_standard_descriptors
from tf2dist.launch.failures import MEMORY_LIMIT, THREAD_LIMIT, OomKills, fork_server_error
from tf2dist.launch.run_dir import log_path, open_log
from tf2dist.launch.warm_process import ask_for_server
from tf2dist.linux import child_environment, import_limit, poll
from tf2dist.messages import (
    Event,
    Exited,
    Forward,
    Packet,
    Ready,
    ServerEnded,
    Start,
    Started,
    ToTask,
    pack,
    receive,
    send,
)
from tf2dist.tf_constants import FAIL_FAST, KERAS_ON_TENSORFLOW, LOG_LEVEL, ONEDNN, PRIMITIVE_MEMORY

SERVER = "forkserver"  # the name of its log
START_TIMEOUT_SECS = 120.0  # enough to import TensorFlow from a cold disk
READY_POLL_SECS = 0.2
KILL_TIMEOUT_SECS = 10.0  # a killed process ends at once, unless the kernel waits for a device
NOT_RUNNING = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
SERVER_CHECK_SECS = 0.5  # tasks inherit the socket, so the server's death may give no EOF
LOG_BYTES = 1 << 16  # read of a log, which may have grown for weeks


class Launcher:
    """The tasks of one host, each in its own process, forked from one that has TensorFlow loaded: see `warm_process`.

    Attributes:
        ready: whether tasks can be forked. `events` keeps this and the following attributes up to date.
        isolated: whether the tasks have a private network.
        ports: free ports for the tasks.
        tasks: the process ids of the tasks that run, by name; 0 until the process id is known.

    Args:
        log_dir: an existing folder; task `worker-0` logs to ``worker-0.log`` there.
        isolate: whether to put the tasks into a private loopback network (see `linux`).
        preload: modules that are imported once for all tasks.
        env: environment variables set before anything is imported.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        isolate: bool = False,
        preload: tuple[str, ...] = ("tf2dist.task",),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log_dir = log_dir
        self.isolate = isolate
        self.preload = preload
        self.env = dict(env or {})
        self.ready = self.isolated = False
        self._server_pid = 0  # until it is ready, and once it has ended
        self.ports: list[int] = []
        self.tasks: dict[str, int] = {}
        self._oom_kills = OomKills()
        self._log_starts: dict[str, int] = {}

    def __enter__(self) -> Self:
        open_standard_descriptors()  # or the socket could get one of their numbers, which the log takes
        self._sock, server_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_sock, self._open_log(SERVER) as log:
            try:
                self._warm = ask_for_server(
                    server_sock,
                    log.fileno(),
                    isolate=self.isolate,
                    preload=self.preload,
                    environ={**child_environment(), **self.env},
                )
            except OSError as error:
                self._sock.close()
                limits = {errno.EAGAIN: f": {THREAD_LIMIT}", errno.ENOMEM: f": {MEMORY_LIMIT}"}
                reason = f"{error.strerror}{limits.get(error.errno or 0, '')}"
                raise TrainingError(f"the fork server could not be started: {reason}") from None
        return self

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Waits until tasks can be forked.

        Args:
            check: called several times a second; an exception that it raises ends the wait.
        """
        limit_secs = import_limit(START_TIMEOUT_SECS)
        deadline = time.monotonic() + limit_secs
        while not self.ready:
            try:
                for _ in self.events(READY_POLL_SECS):
                    if self.ready:
                        return
            except TfDistError:
                check()  # a signal to the whole service may have ended the server too
                raise
            check()
            if time.monotonic() > deadline:
                raise TaskLostError(f"TensorFlow was not imported within {limit_secs:.0f} s")

    def start(self, name: str, target: str, payload: Any, *, sys_path: list[str] | None = None) -> None:
        """Forks a task that calls ``target`` ("module:function") with ``(payload, to_launcher)``, a `ToLauncher`.

        Raises:
            ConfigError: its log cannot be written.
        """
        self._open_log(name).close()  # the task itself could not report that it has none
        FailureRecord.path(self.log_dir, name).unlink(missing_ok=True)  # left by an earlier run
        self.tasks[name] = 0
        path = None if sys_path is None else tuple(sys_path)
        start = Start(name, target, payload, str(log_path(self.log_dir, name)), path)
        try:
            send(self._sock, start)
        except OSError:
            self._give_up()

    def events(self, timeout_secs: float) -> Iterator[Event]:
        """Yields the messages of the tasks and of the server for `timeout_secs`.

        Raises:
            TaskLostError: the fork server was killed, and the tasks with it.
            TrainingError: it failed by itself, and would fail again.
        """
        deadline = time.monotonic() + timeout_secs
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            if not poll(self._sock.fileno(), secs=min(remaining, SERVER_CHECK_SECS)):
                has_ended = not _exists(self._server_pid) if self.ready else self._warm.has_ended()
                if has_ended:
                    self._give_up()
                if time.monotonic() >= deadline:
                    return
                continue
            event: Packet | None = None
            with contextlib.suppress(ConnectionResetError):  # the server ended without reading all that was sent to it
                event = receive(self._sock, Packet)
            match event:
                case None:
                    self._give_up()
                case Ready():
                    self._warm.served(is_ready=True)
                    self._server_pid = event.pid
                    self.ready, self.isolated, self.ports = True, event.isolated, list(event.ports)
                case ServerEnded():
                    self._server_pid = 0  # another process may get the number
                    self._give_up(event.code)
                case Started() if event.task in self.tasks:
                    self.tasks[event.task] = event.pid
                case Exited():
                    self.tasks.pop(event.task, None)
            yield event

    def log_of(self, name: str) -> str:
        """The output of a task since it was started; of a long one the last LOG_BYTES."""
        path = log_path(self.log_dir, name)
        if not path.exists():
            return ""
        with open(path, "rb") as log:
            log.seek(max(self._log_starts.get(name, 0), os.fstat(log.fileno()).st_size - LOG_BYTES))
            return log.read(LOG_BYTES).decode(errors="replace")

    def _open_log(self, name: str) -> io.BufferedWriter:
        log = os.fdopen(open_log(self.log_dir, name), "ab")
        self._log_starts[name] = log.tell()  # earlier processes of this name wrote what is before it
        return log

    def runs(self, name: str) -> bool:
        """Whether the task's process has started and is neither stopped nor dead."""
        return _runs(self.tasks.get(name, 0))

    def give_up_on(self, name: str) -> NoReturn:
        """Kills everything, since a task that was killed `KILL_TIMEOUT_SECS` ago is not reported as ended."""
        killed = f"{name}, killed {KILL_TIMEOUT_SECS:.0f} s ago"
        server_runs = _runs(self._server_pid)
        self._kill_server()
        if server_runs:
            raise TaskLostError(f"{killed}, has not ended: a file system or a device may not respond")
        raise TaskLostError(f"the fork server is frozen: it does not report the end of {killed}")

    def _kill_server(self) -> None:
        """Also kills what the tasks have started, which the kernel does not kill when the server ends."""
        for name in list(self.tasks):
            self.signal(name, signal.SIGKILL)
        if self._server_pid:  # 0 would mean this process's own group
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server_pid, signal.SIGKILL)

    def _give_up(self, code: int | None = None) -> NoReturn:
        """Kills everything, since the fork server has ended, with this exit code if it is known already."""
        # The socket may close before a process has ended.
        if code is None:
            code = self._code_of_server(SERVER_CHECK_SECS) if self.ready else self._warm.exit_code(SERVER_CHECK_SECS)
        self._kill_server()
        self._server_pid = 0
        raise fork_server_error(code, self.log_of(SERVER), log_path(self.log_dir, SERVER), self._oom_kills)

    def _code_of_server(self, timeout_secs: float) -> int | None:
        """Waits for the end of the fork server; returns its exit code, None without one."""
        deadline = time.monotonic() + timeout_secs
        while poll(self._sock.fileno(), secs=max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(ConnectionResetError):  # said once, before what can still be read
                event = receive(self._sock, Packet)
                if event is None:
                    return None
                if isinstance(event, ServerEnded):
                    self._server_pid = 0
                    return event.code
        return None

    def send_to_task(self, name: str, message: ToTask) -> None:
        """Writes a message to the task's standard input, if it still runs.

        May be called from any thread: a packet is sent whole or not at all.
        """
        if name in self.tasks:
            with contextlib.suppress(OSError):  # the server has ended, and `events` will raise that
                send(self._sock, Forward(name, pack(message).decode()))

    def signal(self, name: str, signum: int, alone: bool = False) -> None:
        """Sends a signal to the task and to what it has started, or to it alone, if it still runs."""
        pid = self.tasks.get(name, 0)
        if pid:  # 0 would mean this process's own group
            with contextlib.suppress(ProcessLookupError):
                (os.kill if alone else os.killpg)(pid, signum)

    def kill_all(self) -> list[Event]:
        """Kills every task; returns the messages that came before all had ended."""
        deadline = time.monotonic() + KILL_TIMEOUT_SECS
        events: list[Event] = []
        for name in list(self.tasks):
            self.signal(name, signal.SIGKILL)
        while self.tasks and time.monotonic() < deadline:
            for event in self.events(0.1):
                events.append(event)
                if isinstance(event, Started):  # its process id was not known when the signal was sent
                    self.signal(event.task, signal.SIGKILL)
        if self.tasks:
            self.give_up_on(next(iter(self.tasks)))
        return events

    def __exit__(self, *_: object) -> None:
        try:
            if self._server_pid:
                self.kill_all()
                self._sock.shutdown(socket.SHUT_WR)  # makes the server kill what is left and exit
                if self._code_of_server(KILL_TIMEOUT_SECS) is None:
                    self._kill_server()
                    self._code_of_server(KILL_TIMEOUT_SECS)  # the kernel itself may wait for a device
        except (TfDistError, OSError):
            pass  # the server died: the kernel has killed its tasks
        finally:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # a process that this one has forked may have the socket, too
            self._sock.close()
            if not self.ready:
                self._warm.served(is_ready=False)


def _exists(pid: int) -> bool:
    """Whether a process has not ended; nobody may have asked yet for the exit code of one that has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):  # no file can be opened to look
        return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in NOT_RUNNING
    except (psutil.Error, OSError):  # it has ended, or no file can be opened to look
        return False


ENVIRONMENT = {
    LOG_LEVEL: "2",  # 1 and below print the cluster's configuration on every task
    FAIL_FAST: "use_caller",  # a call to a task that is gone fails instead of waiting for it
    **KERAS_ON_TENSORFLOW,
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of nvidia-smi
    "grpc_proxy": "",  # otherwise gRPC connects the tasks through a proxy
    "http_proxy": "",
    "https_proxy": "",
}
LARGE_KERNEL = 1 << 18  # weights; the products of smaller matrices gain nothing by oneDNN, or lose
# By default TensorFlow has oneDNN prepare the backward pass of each convolution again in every step, an eighth of the
# processor time of MobileNetV2. What is prepared takes a few megabytes for each thread that computes.
KEPT_PRIMITIVES = (PRIMITIVE_MEMORY, "0")
# Freed memory stays in the arena of glibc that it came from. With parameter servers variables and gradients arrive in
# dozens of threads, and by default these share 8 arenas for each core, several of which come to hold room for all
# variables. Outside the first arena glibc takes blocks of more than 64 MB from the kernel each time.
ONE_ARENA = ("MALLOC_ARENA_MAX", "1")


def environment_of(config: RunConfig) -> Mapping[str, str]:
    """The variables for a run with these options."""
    onednn = completed(config.devices, _known_kernels(config.model)).onednn
    variables = ENVIRONMENT if onednn is None else ENVIRONMENT | {ONEDNN: str(int(onednn))}
    # oneDNN is chosen for large layers; small models lose 3 % of their time with one arena. All modes have the same, as
    # they share a warm process.
    suggested = [KEPT_PRIMITIVES, ONE_ARENA] if onednn else [KEPT_PRIMITIVES]
    return variables | {name: value for name, value in suggested if name not in os.environ}


def _known_kernels(model: Mapping[str, Any]) -> Iterator[int]:
    """The weights between the hidden layers of model=dnn; other models are not known before they are built."""
    units = model.get("hidden_units")
    # A plugin may have another model of this name.
    if model["name"] == "dnn" and isinstance(units, list) and all(isinstance(size, int) for size in units):
        yield from (num_inputs * num_outputs for num_inputs, num_outputs in itertools.pairwise(units))


def completed(devices: DevicesConfig, kernel_sizes: Iterable[int]) -> DevicesConfig:
    """The options with oneDNN where it suits a model, and neither they nor this process's environment say anything.

    TensorFlow chooses oneDNN by the processor alone: on one without AVX512-VNNI not even for large products of
    matrices.

    Args:
        kernel_sizes: the weights of the dense layers, as far as they are known.
    """
    is_open = devices.onednn is None and ONEDNN not in os.environ and platform.machine() == "x86_64"
    if is_open and max(kernel_sizes, default=0) >= LARGE_KERNEL:
        return replace(devices, onednn=True)
    return devices


def warm_up(config: RunConfig, check: Callable[[], None]) -> None:
    """Waits until the warm process is ready for runs with these options; then `warm_process.lend` has one to lend.

    Args:
        check: as in `Launcher.wait_ready`.

    Raises:
        TfDistError: it cannot be started.
    """
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder), env=environment_of(config)) as launcher:
        launcher.wait_ready(check)
