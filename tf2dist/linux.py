"""Helpers for processes: a private network, signals when a parent dies, free ports and memory, children, late imports.

The first part is what only Linux offers. Its private network is for a local cluster. A TensorFlow server at
``localhost:2222`` binds port 2222 of all interfaces, without authentication
(https://github.com/tensorflow/tensorflow/blob/master/SECURITY.md). In a network namespace with only a loopback device,
"all interfaces" means that device.

The second part is about Python itself: commands and environments of child processes, and modules that are imported
when they are used.
"""

import contextlib
import ctypes
import errno
import fcntl
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import psutil

from tf2dist.tf_constants import IMPORTED_LAST, UNUSED_MODULES

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
PR_SET_PDEATHSIG = 1
# Parameters of glibc's mallopt, from malloc.h, and their values here in bytes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
KEPT_BYTES = 2**31 - 1  # mallopt takes a C int
GROWTH_BYTES = 1 << 26
DEFAULT_EPHEMERAL_PORTS = range(32768, 61000)  # the kernel's default


def enter_private_network() -> bool:
    """Moves this process, which must have a single thread, into a new network namespace with only a loopback device.

    Needs root, or a kernel that lets ordinary users create user namespaces.

    Returns:
        Whether it worked; if not, nothing has changed.
    """
    pid = os.fork()  # a child tries first: a failure half-way cannot be undone
    if pid == 0:
        code = 1
        try:
            _enter()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1] != 0:
        return False
    _enter()
    return True


def _enter() -> None:
    """Raises OSError if the system does not allow it, AttributeError if it has no namespaces."""
    uid, gid = os.getuid(), os.getgid()
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(CLONE_NEWNET) != 0:
        if unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        # Users and groups are mapped to themselves, so that files keep their owner.
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def allow_open_files(number: int) -> int:
    """Lets this process have so many files open, or as many as it may; returns its limit, if that is lower.

    Of the two limits, the one that holds can be raised up to the other: on most systems it is 1,024, too few for a
    thousand tasks, and the other is far higher.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit in range(number):  # no limit is -1
        limit = number if most == resource.RLIM_INFINITY else min(number, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return min(limit, number) if limit != resource.RLIM_INFINITY else number


def poll(*descriptors: int, secs: float | None = None, event: int = select.POLLIN) -> list[int]:
    """Waits until some of the descriptors can be read, or are at their end, and returns these.

    Unlike `select.select` it takes numbers from 1,024 on, as a process with many tasks or files has them.

    Args:
        secs: how long to wait at most; None for ever.
        event: what to wait for instead, such as `select.POLLOUT`.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, event)
    return [descriptor for descriptor, _ in poller.poll(None if secs is None else math.ceil(1000 * secs))]


def keep_freed_memory() -> None:
    """Makes this process keep the memory that it frees, for the next allocation of that size.

    By default glibc gets a block of more than 32 MB from the kernel each time, which maps it page by page, fills it
    with zeros, and takes it back when it is freed. A step of a large model does so with each copy of the parameters;
    with 12 million parameters that took an eighth of the processor time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(M_TOP_PAD, GROWTH_BYTES)


def free_memory() -> int:
    """The free bytes of the system, or of the control group if that has less."""
    free = int(psutil.virtual_memory().available)
    limit, used = (_text_of_group(f"memory.{name}").strip() for name in ("max", "current"))
    # Without a limit the kernel writes "max" there.
    if limit.isdecimal() and used.isdecimal():
        # What it has of files counts as used, but the kernel takes it back when memory is needed.
        pairs = (line.split() for line in _text_of_group("memory.stat").splitlines())
        of_files = sum(int(value) for name, value in pairs if name in ("active_file", "inactive_file"))
        free = min(free, int(limit) - int(used) + of_files)
    return max(0, free)


def _text_of_group(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def kernel_id() -> str:
    """What names the running kernel: equal in all containers of a host, and another one after it was booted again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def set_death_signal(signum: int) -> None:
    """Makes the kernel send this process a signal when its parent ends, for whatever reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Makes the kernel kill this process when its parent `parent_pid` ends, for whatever reason.

    Args:
        signum: what it is sent then, such as SIGTERM to have it end in order.
    """
    set_death_signal(signum)
    end_without(parent_pid)


def end_without(parent_pid: int) -> None:
    """Ends this process if its parent `parent_pid` has ended."""
    if os.getppid() not in (parent_pid, 0):  # 0: it is in another PID namespace
        os._exit(1)


def ephemeral_ports() -> range:
    """The ports that the kernel gives to outgoing connections; empty if they cannot be read."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        return range(0)
    return range(first, last + 1)


def unused_ports(count: int) -> list[int]:
    """Different free ports from 10,000 up to those that the kernel gives to outgoing connections.

    If these begin below 20,000, the free ports may be among them.
    """
    first_ephemeral = (ephemeral_ports() or DEFAULT_EPHEMERAL_PORTS)[0]
    candidates = list(range(10_000, max(first_ephemeral, 20_000)))
    random.SystemRandom().shuffle(candidates)
    return list(itertools.islice(filter(is_free, candidates), count))


def is_free(port: int) -> bool:
    """Whether no process listens there, by IPv6 or IPv4; a kernel may have only one of the two."""
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            with socket.socket(family) as sock:
                sock.bind(("", port))
                return True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return False


SECRETS = ("TF2DIST_TOKEN", "TF2DIST_TOKEN_FILE")  # the token of a job's control connections, or its file

SAME_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"
CALL_MAIN = "import importlib; importlib.import_module(sys.argv.pop(1)).main()"

# For what a process has one of, such as the filters of warnings: held by a thread from its change until it is put back.
# Runs of `fit` may be side by side in threads, and each would put back what another one has changed.
process_wide = threading.RLock()


@contextlib.contextmanager
def without_warnings(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """Ignores the warnings of a category whose text begins with a pattern."""
    with process_wide, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, category)
        yield


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that calls the `main` of a module, with `arguments` in ``sys.argv[1:]``.

    Unlike ``python -m MODULE`` it does not import from the working directory, where there may be some other keras.py.
    """
    return code_command(CALL_MAIN, module, *arguments)


def module_path() -> list[str]:
    """This process's `sys.path` without what is no string, such as a Path, which Python skips when it imports."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def code_command(code: str, *arguments: str) -> list[str]:
    """The command that runs a piece of code with the module path of this process, `arguments` in ``sys.argv[1:]``."""
    return [sys.executable, "-P", "-c", SAME_PATH + code, json.dumps(module_path()), *arguments]


def child_environment() -> dict[str, str]:
    """This process's environment without the job token, since child processes run the user's code."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


class LazyFinder:
    """Finds `UNUSED_MODULES` where Python itself finds them, and has them executed when an attribute is first read."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in UNUSED_MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def import_lazily() -> None:
    """Makes later imports of the parts of Keras that a task does not use lazy; one that does not exist is no error.

    For wrappers that look like scikit-learn's estimators, and for pictures, Keras imports scikit-learn and matplotlib,
    where they are installed. That takes a third of the time in which TensorFlow and Keras are imported, and every run
    waits for it.
    """
    sys.meta_path.insert(0, LazyFinder())


FIRST_START = 4.0  # times as long as usual: measured 2.4 times the processor time, and all hosts compile at once


def import_limit(secs: float) -> float:
    """How long TensorFlow's import may take here, if `secs` are enough for one that is compiled to byte code.

    Some installers leave compiling to the first import, and what was installed may be read-only: then every import
    compiles.
    """
    return secs if _is_compiled(*IMPORTED_LAST) else FIRST_START * secs


def _is_compiled(package: str, file: str) -> bool:
    with contextlib.suppress(ImportError, ValueError, NotImplementedError):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or []:
            return Path(importlib.util.cache_from_source(os.path.join(folder, file))).exists()
    return True  # it is not known where it is, and the import will tell
