"""How a task ends on SIGTERM, even while its main thread is blocked in TensorFlow's C++ code."""

import os
import signal
import threading

EXIT_CODE = 128 + signal.SIGTERM  # as a shell reports a process that the signal has ended
_write_end: list[int] = []  # of the pipe; empty until it is made
_asked = threading.Event()
_only_asks = threading.Event()  # set: SIGTERM does not end this process
_fork = threading.local()  # several threads may fork at once, each with a signal mask of its own


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
        threading.Thread(target=_listen, args=(read_end,), name="end_on_sigterm", daemon=True).start()
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


def _listen(read_end: int) -> None:
    while True:
        # The byte is the number of the signal; code of the user's may have handlers for others.
        if os.read(read_end, 1)[0] != signal.SIGTERM:
            continue
        if not _only_asks.is_set():
            # sys.exit would end this thread only, and TensorFlow's exit handlers may wait for other tasks.
            os._exit(EXIT_CODE)
        _asked.set()
