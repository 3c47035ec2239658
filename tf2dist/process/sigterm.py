"""How a task ends on SIGTERM, even while TensorFlow's C++ code holds the main thread."""

import os
import signal
import threading

EXIT_CODE = 128 + signal.SIGTERM
_write_end: list[int] = []
_asked = threading.Event()
_only_asks = threading.Event()  # set: SIGTERM does not end this process
_fork = threading.local()


def end_on_sigterm() -> None:
    """Makes SIGTERM end this process at once; after `stop_when_asked` it only makes `asked_to_stop` true.

    A Python handler runs only when the main thread is back in Python code, and a thread inside a
    collective operation may never be. Python's C handler writes a byte into a pipe at once, and a
    thread reads it. To be called again after a synchronous strategy was made: TensorFlow's
    coordination service installs a handler of its own, which only records the signal.
    """
    if not _write_end:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        _write_end.append(write_end)
        os.register_at_fork(before=_hold_sigterm, after_in_parent=_take_sigterm, after_in_child=_leave_sigterm)
        threading.Thread(target=_listen, args=(read_end,), name="end_on_sigterm", daemon=True).start()
    # Does nothing: Python writes to the wakeup descriptor only for signals that have a handler.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(_write_end[0], warn_on_full_buffer=False)


def _hold_sigterm() -> None:
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _take_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _leave_sigterm() -> None:
    """Restores the default effect of SIGTERM in a process that the user's code has forked.

    That process inherits the pipe. A byte that its handler wrote would reach the thread of this task, which would
    take the signal for its own. So SIGTERM is blocked from before the fork until the handler is removed.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _take_sigterm()


def stop_when_asked() -> None:
    """From now on SIGTERM does not end this process, which has something to save; see `asked_to_stop`.

    Nor does a second one: a signal to a whole service reaches this process directly and through its launcher. If
    it does not stop in time, the launcher kills it.
    """
    _only_asks.set()


def asked_to_stop() -> bool:
    return _asked.is_set()


def _listen(read_end: int) -> None:
    while True:
        if os.read(read_end, 1)[0] != signal.SIGTERM:
            continue
        if not _only_asks.is_set():
            # sys.exit would end this thread alone, and TensorFlow's clean-up may wait for other tasks.
            os._exit(EXIT_CODE)
        _asked.set()
