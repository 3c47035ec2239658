"""The words of a launcher to a running task, heard even while its main thread is blocked in TensorFlow's C++ code.

SIGTERM ends a task, or asks it to stop. Messages come one per line on its standard input. `PeerGone` says that another
task is lost. TensorFlow notices the end of a process when its connections close. When a whole host is cut off nothing
closes them, and a call to it waits for ever. `LeaderDone` is for the evaluator. The other messages come from the caller
of `fit` and are for the leader.
"""

import contextlib
import os
import queue
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from tf2dist.cluster.addresses import Ip, as_ipv4, ip_of, resolve, split
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.messages import HookAnswer, LeaderDone, PauseWanted, PeerGone, ToTask, unpack
from tf2dist.process import heartbeat

EXIT_CODE = 128 + signal.SIGTERM  # as a shell reports a process that the signal has ended
_write_end: list[int] = []  # of the pipe; empty until it is made
_asked = threading.Event()
_only_asks = threading.Event()  # set: SIGTERM does not end this process
_leader_is_done = threading.Event()
_fork = threading.local()  # several threads may fork at once, each with a signal mask of its own
RECONNECT_SECS = 90.0  # TensorFlow calls the lost host a few more times, and each time gRPC gives up after 20 s


def end_on_sigterm() -> None:
    """Makes SIGTERM end this process at once; after `stop_when_asked` it only makes `asked_to_stop` true.

    A Python handler runs only when the main thread returns to Python code, and a thread in a collective
    operation may never return. Python's C handler writes a byte into a pipe at once, and a thread reads it.
    Must be called again after a synchronous strategy was made: TensorFlow's coordination service installs a
    handler of its own, which only records the signal.
    """
    if not _write_end:
        read_end, write_end = os.pipe()
        # Python requires it: a handler must not block, even if the pipe is full.
        os.set_blocking(write_end, False)
        _write_end.append(write_end)
        os.register_at_fork(before=_block_sigterm, after_in_parent=_restore_mask, after_in_child=_reset_in_child)
        threading.Thread(target=_read_signals, args=(read_end,), name="end_on_sigterm", daemon=True).start()
    # A handler that does nothing: Python writes to the wakeup descriptor only for signals that have one.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(_write_end[0], warn_on_full_buffer=False)


def _block_sigterm() -> None:
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _reset_in_child() -> None:
    """Restores the default effect of SIGTERM in a process that the user's code has forked.

    That process inherits the pipe. A byte that its handler wrote would reach the thread of this task, which would
    mistake the signal for its own. So SIGTERM is blocked from before the fork until the handler is removed.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Last: a signal that came meanwhile is pending, and takes effect now, without the handler.
    _restore_mask()


def stop_when_asked() -> None:
    """From now on SIGTERM does not end this process, which saves its state first; see `asked_to_stop`.

    A second SIGTERM does not end it either: a signal to a whole service reaches this process both directly and
    through its launcher. If it does not stop in time, the launcher kills it.
    """
    _only_asks.set()


def asked_to_stop() -> bool:
    """Whether SIGTERM has come since `stop_when_asked`."""
    return _asked.is_set()


def leader_is_done() -> bool:
    """Whether the leader, on another host, has ended with its result."""
    return _leader_is_done.is_set()


def _read_signals(read_end: int) -> None:
    while True:
        # The byte is the number of the signal; code of the user's may have handlers for others.
        if os.read(read_end, 1)[0] != signal.SIGTERM:
            continue
        if not _only_asks.is_set():
            # sys.exit would end this thread only, and TensorFlow's exit handlers may wait for other tasks.
            os._exit(EXIT_CODE)
        _asked.set()


@dataclass(frozen=True)
class Inbox:
    """The messages from the caller of `fit`; a thread fills it, and the main thread reads it.

    Attributes:
        answers: to this task's calls of hooks.
        pause_wanted: set when the caller wants a pause.
    """

    answers: "queue.SimpleQueue[HookAnswer]" = field(default_factory=queue.SimpleQueue)
    pause_wanted: threading.Event = field(default_factory=threading.Event)


def listen(cluster: Cluster) -> Inbox:
    """Reads the messages in a thread, since the main thread may wait in the call that has to be cut off.

    The thread reads from a copy of the file descriptor, and `sys.stdin` is empty from now on. A thread that waits in
    `sys.stdin` holds its lock; a process that the user's code forks closes `sys.stdin`, and would wait for that lock
    for ever.
    """
    copy = os.dup(0)
    # Code of the user's that reads standard input finds its end there, and takes no message away from the thread.
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    inbox = Inbox()
    threading.Thread(target=_read_messages, args=(cluster, copy, inbox), name="inbox", daemon=True).start()
    return inbox


def _read_messages(cluster: Cluster, pipe: int, inbox: Inbox) -> None:
    for line in _lines(pipe):
        match message := unpack(line, ToTask):
            case HookAnswer():
                inbox.answers.put(message)
            case PauseWanted():
                inbox.pause_wanted.set()
            case LeaderDone():
                _leader_is_done.set()
            case PeerGone(gone):
                address = cluster.address(Task.parse(gone))
                # Before the cut: the calls that it fails may be repeated at once, and the watchdog must know.
                heartbeat.extend_deadline(RECONNECT_SECS)
                print(f"{gone} is gone: {shut_down_connections(address)} connections to {address} are cut", flush=True)


def _lines(pipe: int) -> Iterator[bytes]:
    partial = b""
    # A pipe delivers bytes and not lines: one read may hold several of them, or a part of one. An empty read means
    # that the launcher has closed its end, after which no message can come.
    while block := os.read(pipe, 4096):
        *lines, partial = (partial + block).split(b"\n")
        yield from lines


def shut_down_connections(address: str) -> int:
    """Shuts down this process's connections to "host:port", so that calls in flight fail; returns how many."""
    host, port = split(address)
    try:
        peers = {(as_ipv4(ip_of(ip)), port) for _, (ip, _) in resolve(host, port)}
    except OSError:
        return 0
    # TensorFlow has no call that closes a connection, and gRPC does not expose its sockets: so all descriptors of this
    # process are searched.
    return sum(_shut_down(int(name), peers) for name in os.listdir("/proc/self/fd"))


def _shut_down(number: int, peers: set[tuple[Ip, int]]) -> bool:
    """Ends the connection behind a file descriptor, if it is one to a wanted peer."""
    with contextlib.suppress(OSError):  # not connected, or just closed
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            # Of a copy, since leaving the block closes it, and gRPC still owns the original: the number of a closed
            # descriptor could be reused for a file while gRPC goes on writing to it.
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and _peer(connection) in peers:
                    connection.shutdown(socket.SHUT_RDWR)  # acts on the connection itself, through any descriptor of it
                    return True
    return False


def _peer(connected: socket.socket) -> tuple[Ip, int]:
    """The other end of a connection; TensorFlow reaches IPv4 addresses by IPv6 sockets, as ::ffff:10.0.0.1."""
    host, port = connected.getpeername()[:2]
    return as_ipv4(ip_of(host)), int(port)
