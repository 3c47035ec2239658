"""The warm process: it has TensorFlow imported, and forks the fork server of each run of the process that started it.

The import takes seconds, and a second `fit`, the next job of a sweep and the next test need none. So the warm process
stays until the process that started it ends, for whatever reason, or calls `end_warm_process`. It runs no operation,
starts no thread and loads no code of the user, so that every run begins as the first one did. It is replaced if what it
was started with has changed: see `state_of_start`.

Another process that it starts may be lent its warm process (see `lend`), as make lends its job server: so the runs of a
comparison, each of which is a command, have TensorFlow imported once.

A launcher asks for a fork server by a packet with four descriptors: the socket of the fork server, its log, its working
directory, and a file that holds a `Serve`. The fork server answers through that socket itself. The warm process keeps a
copy of it, through which it tells the launcher the exit code in the end.
"""

import atexit
import contextlib
import errno
import functools
import gc
import hashlib
import importlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from tf2dist import linux
from tf2dist.config import load
from tf2dist.launch import forkserver
from tf2dist.linux import import_lazily, module_command, poll
from tf2dist.messages import ServerEnded, send
from tf2dist.signals import STOP_SIGNALS, reset_inherited

NUM_DESCRIPTORS = 4
END_SECS = 10.0  # a process that is asked to end does so at once, unless the kernel waits for a device
PACKAGES = ("tensorflow", "keras", "numpy", "tf2dist")
LENT = "TF2DIST_WARM_PROCESS"  # what the parent of this process lends it: see `lend`
# What nothing reads while it is imported; pytest sets its own for each test.
NOT_READ = (LENT, "TF_CONFIG", "PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "PWD", "OLDPWD", "SHLVL", "_")
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class Serve:
    """Fork a fork server.

    Attributes:
        isolate: whether to put it into a private loopback network.
        environ: all its environment variables.
    """

    isolate: bool
    environ: dict[str, str]


def state_of_start(preload: tuple[str, ...], environ: Mapping[str, str]) -> list[Any]:
    """All that an import may depend on: of two equal states one warm process can serve both."""
    read = {name: value for name, value in environ.items() if name not in NOT_READ}
    own: list[Any] = [os.getresuid(), os.getresgid(), os.getgroups(), sorted(os.sched_getaffinity(0)), _umask()]
    own.append(os.getpriority(os.PRIO_PROCESS, 0))
    with contextlib.suppress(OSError):
        own += [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "user")]
    with contextlib.suppress(OSError):
        own.append(os.stat(load.path()).st_mtime_ns)  # keras.json
    return [preload, read, module_command(""), *own, *map(resource.getrlimit, LIMITS), *map(_version, PACKAGES)]


def _umask() -> str:
    with contextlib.suppress(OSError, StopIteration):  # asking for it would set it, for all threads
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("Umask:"))
    return ""


def _version(package: str) -> str:
    with contextlib.suppress(PackageNotFoundError, OSError):
        return version(package)
    return ""


class WarmProcess:
    """A warm process as seen by the process that has started it.

    Attributes:
        pid: its process id.
        is_warm: whether a fork server of it has been ready, and the import is done.
        num_waiting: the launchers that wait for their fork server.

    Args:
        log: takes its output until the import is done.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, state: list[Any], preload: tuple[str, ...], environ: Mapping[str, str], log: int) -> None:
        self.state, self.is_warm, self.num_waiting = state, False, 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(theirs.fileno()), ",".join(preload), str(os.getpid())]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    module_command("tf2dist.launch.warm_process", *arguments),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    start_new_session=True,  # Ctrl-C reaches only the launcher, which stops the tasks in order
                )
            except OSError:
                self._control.close()
                raise
        self.pid = self._process.pid

    def ask(self, serve: Serve, server_sock: socket.socket, log: int) -> None:
        """Asks for a fork server, which may come only once the import is done. Raises OSError if it has ended."""
        _ask(self._control, self.pid, serve, server_sock, log)
        self.num_waiting += 1

    def has_ended(self) -> bool:
        return self.exit_code() is not None

    def as_lent(self) -> tuple[str, int]:
        """The value of `LENT` for a process that may ask it, too, and the descriptor which that must inherit."""
        number = self._control.fileno()
        return f"{number} {os.fstat(number).st_ino} {self.pid} {_digest(self.state)}", number

    def exit_code(self, timeout_secs: float = 0.0) -> int | None:
        """Its exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_secs)
        return None

    def served(self, is_ready: bool) -> None:
        """A launcher waits no longer: its fork server is ready, or is not needed any more."""
        with _lock:
            self.num_waiting -= 1
            self.is_warm |= is_ready
            if not self.is_warm and not self.num_waiting:
                self.state = []  # equals no other: nobody may ask it while it ends
                self._process.kill()  # it is importing and reads nothing

    def close(self, timeout_secs: float = 0.0) -> None:
        """Asks it to end once its fork servers have ended, and waits for that."""
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_RDWR)  # another process may have the socket, too
        self._control.close()
        if not self.is_warm and not self.num_waiting:
            self._process.kill()
        self.exit_code(timeout_secs)

    def forget(self) -> None:
        """In a forked copy of the process that has started it, which is not its parent."""
        self._control.close()
        self._process.returncode = 0  # so that it is not waited for


class LentProcess:
    """A warm process of another process, which has lent it.

    Attributes:
        pid: its process id.

    Args:
        value: of the variable `LENT`.

    Raises:
        OSError: it cannot be asked any more.
    """

    def __init__(self, value: str) -> None:
        self.number, inode, self.pid = map(int, value.split()[:3])
        found = os.fstat(self.number)  # a process in between may have closed it, and the number may be another file's
        if not stat.S_ISSOCK(found.st_mode) or found.st_ino != inode:
            raise OSError(errno.EBADF, "not what was lent")
        self._control = socket.socket(fileno=os.dup(self.number))
        os.set_inheritable(self.number, False)  # `lend` passes it on
        self._check_open()  # or another process may have its number
        self._pidfd = os.pidfd_open(self.pid)

    def _check_open(self) -> None:
        if poll(self._control.fileno(), secs=0.0, event=0):  # tells in any case whether the other end is closed
            raise OSError(errno.EPIPE, "the warm process has ended")

    def ask(self, serve: Serve, server_sock: socket.socket, log: int) -> None:
        """Asks for a fork server. Raises OSError if it has ended, or its owner lends it no longer."""
        self._check_open()
        _ask(self._control, self.pid, serve, server_sock, log)

    def has_ended(self) -> bool:
        # Not whether the socket is closed: what was asked before its owner closed it is still served.
        return bool(poll(self._pidfd, secs=0.0))

    def exit_code(self, timeout_secs: float = 0.0) -> None:
        """No exit code, which only its parent gets."""

    def served(self, is_ready: bool) -> None:
        """It stays whether or not somebody waits."""


def _ask(control: socket.socket, pid: int, serve: Serve, server_sock: socket.socket, log: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGCONT)  # one that is stopped would never serve anybody
    cwd = os.open(".", os.O_PATH)  # has no name if it was removed
    request = os.memfd_create("fork server")
    try:
        os.write(request, json.dumps(asdict(serve)).encode())
        socket.send_fds(control, [b"serve"], [server_sock.fileno(), log, cwd, request])
    finally:
        os.close(request)
        os.close(cwd)


def _digest(state: list[Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


# It is kept: each run asks the same one.
_lent_process = functools.lru_cache(maxsize=1)(LentProcess)


_lock = threading.Lock()
_warm: WarmProcess | None = None
_replaced: list[WarmProcess] = []  # that have not ended, as far as it is known


def ask_for_server(
    server_sock: socket.socket, log: int, *, isolate: bool, preload: tuple[str, ...], environ: dict[str, str]
) -> WarmProcess | LentProcess:
    """Asks a warm process for a fork server: that of this process, one that it was lent, or else a new one.

    Args:
        server_sock: the fork server's end of its socket.
        log: the file for its output.

    Raises:
        OSError: the warm process cannot be started.
    """
    global _warm
    state = state_of_start(preload, environ)
    serve = Serve(isolate, environ)
    with _lock:
        _replaced[:] = [each for each in _replaced if not each.has_ended()]
        if _warm and _warm.state == state and not _warm.has_ended():
            with contextlib.suppress(OSError):  # it ends in this moment
                _warm.ask(serve, server_sock, log)
                return _warm
        value = os.environ.get(LENT, "")
        if value.endswith(_digest(state)):
            with contextlib.suppress(OSError, ValueError):
                lent = _lent_process(value)
                lent.ask(serve, server_sock, log)
                return lent
        if _warm:
            _warm.close()
            _replaced.append(_warm)
        _warm = None  # should the next one fail to start
        _warm = WarmProcess(state, preload, environ, log)
        _warm.ask(serve, server_sock, log)
        return _warm


def lend() -> tuple[dict[str, str], list[int]]:
    """The environment variables and the descriptors by which a child process may ask for fork servers, too.

    They are for this process's warm process or, without one, for that which this process was lent. There are none
    without either, or while it still imports.
    """
    with _lock:
        if _warm and _warm.is_warm:
            value, number = _warm.as_lent()
            return {LENT: value}, [number]
        with contextlib.suppress(OSError, ValueError):
            value = os.environ.get(LENT, "")
            return {LENT: value}, [_lent_process(value).number]
        return {}, []


def end_warm_process() -> None:
    """Ends the process that tf2dist keeps for the next run of this one; the next run starts another.

    A process that has called `fit` or `predict` keeps one with TensorFlow imported, which saves seconds at the start of
    each further call. It takes no processor time and about 250 MB of memory, and ends with this process.
    """
    global _warm
    with _lock:
        warm, _warm = _warm, None
    if warm:
        warm.close(END_SECS)


def _forget() -> None:
    global _lock, _warm
    _lock = threading.Lock()
    for each in [*_replaced, *([_warm] if _warm else [])]:
        each.forget()
    _replaced.clear()
    _warm = None


atexit.register(end_warm_process)
os.register_at_fork(after_in_child=_forget)


# The other side: the warm process itself.


def main() -> None:
    reset_inherited()
    control, parent_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[3])
    # The import takes seconds, and nothing reads the socket meanwhile. The kernel sends the signal also when only the
    # thread has ended that has started this process.
    signal.signal(signal.SIGCONT, lambda number, frame: linux.end_without(parent_pid))
    linux.die_with_parent(parent_pid, signal.SIGCONT)
    own_parent_pid = os.getppid()  # 0 in another PID namespace
    for number in STOP_SIGNALS:  # the launcher handles those to the whole group or service
        signal.signal(number, signal.SIG_IGN)
    import_lazily()
    try:
        for module in filter(None, sys.argv[2].split(",")):
            importlib.import_module(module)
    except BaseException:
        _tell_all(control, traceback.format_exc())
        raise
    gc.collect()
    gc.freeze()  # what is imported stays, and a collector that looked at it would copy its pages in each task
    _close_log()
    os.chdir("/")  # a file system may be unmounted
    # From now on the end of its parent only wakes it, since fork servers have tasks to kill before they end.
    pipe = forkserver.woken_by(signal.SIGCHLD, signal.SIGCONT)
    serve_requests(control, pipe, own_parent_pid)
    os._exit(0)  # without TensorFlow's clean-up: nothing may stay for so long


def _tell_all(control: socket.socket, text: str) -> None:
    """Writes why the import has failed into the logs of those that wait for it, but the first, which is its output."""
    control.setblocking(False)
    asked = 0
    with contextlib.suppress(OSError):
        while descriptors := socket.recv_fds(control, 16, NUM_DESCRIPTORS)[1]:
            if asked:
                os.write(descriptors[1], text.encode())
            asked += 1


def _close_log() -> None:
    """The log is that of the first run, and its file must not be held open for the next ones."""
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(null, number)
    os.close(null)


def serve_requests(control: socket.socket, pipe: tuple[int, int], parent_pid: int) -> None:
    """Forks fork servers until nobody can ask for one any more, and the last one has ended.

    Args:
        pipe: of which the first end can be read after a signal.
        parent_pid: of the process that asks; it has ended if that is not the parent any more.
    """
    servers: dict[int, socket.socket] = {}  # by process id the socket to its launcher
    is_open, (wakeup, _) = True, pipe
    while is_open or servers:
        readable = poll(wakeup, *([control.fileno()] if is_open else []))
        if wakeup in readable:
            os.read(wakeup, 4096)
            report_ends(servers)
            if os.getppid() != parent_pid:
                is_open = False
                for pid, sock in servers.items():
                    with contextlib.suppress(OSError):  # a process that the launcher has forked may have the other end
                        sock.shutdown(socket.SHUT_RD)
                    os.kill(pid, signal.SIGCONT)  # one that is stopped must see that
        if is_open and control.fileno() in readable:
            packet, descriptors, _, _ = socket.recv_fds(control, 16, NUM_DESCRIPTORS)
            if not packet:
                is_open = False
                continue
            own = [control.fileno(), *pipe, *(sock.fileno() for sock in servers.values())]
            servers |= fork_server(descriptors, own)


def report_ends(servers: dict[int, socket.socket]) -> None:
    """Tells the launcher of each fork server that has ended its exit code."""
    while servers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if sock := servers.pop(pid, None):
            with sock, contextlib.suppress(OSError):
                send(sock, ServerEnded(os.waitstatus_to_exitcode(status)), socket.MSG_DONTWAIT)


def fork_server(descriptors: list[int], not_its_own: list[int]) -> dict[int, socket.socket]:
    """Forks a fork server; returns its process id with its socket, or nothing if it cannot be forked.

    Args:
        descriptors: the socket, the log, the working directory, and the request.
        not_its_own: the descriptors of the warm process that it must not have.
    """
    sock_fd, log, cwd, request = descriptors
    sock = socket.socket(fileno=sock_fd)
    try:
        pid = os.fork()
        if pid == 0:
            run_server(sock, log, cwd, request, not_its_own)
        return {pid: sock}
    except OSError as error:  # no more processes or memory
        with contextlib.suppress(OSError):
            os.write(log, f"{error}\n".encode())
        with sock, contextlib.suppress(OSError):
            send(sock, ServerEnded(1), socket.MSG_DONTWAIT)
        return {}
    finally:
        for descriptor in (log, cwd, request):
            os.close(descriptor)


def run_server(sock: socket.socket, log: int, cwd: int, request: int, not_its_own: list[int]) -> NoReturn:
    """In the forked child: becomes what a process would be that the launcher has started, and serves."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # the pipe is the warm process's
        os.setsid()
        for descriptor in not_its_own:
            os.close(descriptor)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        with open(request, encoding="utf-8") as file:
            file.seek(0)
            serve = Serve(**json.load(file))
        os.environ.clear()
        os.environ.update(serve.environ)
        with contextlib.suppress(OSError):  # this user may not enter it
            os.fchdir(cwd)
        os.close(cwd)
        importlib.invalidate_caches()  # of relative entries of sys.path
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # as after an import; Python's own generator is seeded at a fork
        code = forkserver.main(sock, serve.isolate)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
