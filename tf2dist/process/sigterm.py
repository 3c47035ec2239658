"""How a task ends on SIGTERM, even while TensorFlow's C++ code holds the main thread."""

import os
import signal
import threading

EXIT_CODE = 128 + signal.SIGTERM
_write_end: list[int] = []
_asked = threading.Event()
_may_ask = threading.Event()
_fork = threading.local()


def end_on_sigterm() -> None:
    """Makes SIGTERM end this process at once, wherever it is; after `stop_when_asked` it is a question.

    A Python handler waits until the main thread runs Python again, which a thread inside a
    collective never does; but the C handler writes a byte first, and a thread reads it. To be
    called once more after a synchronous strategy was made: TensorFlow's coordination service
    installs a handler of its own, which only notes the signal.
    """
    if not _write_end:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        _write_end.append(write_end)
        os.register_at_fork(before=_hold_sigterm, after_in_parent=_take_sigterm, after_in_child=_leave_sigterm)
        threading.Thread(target=_listen, args=(read_end,), name="end_on_sigterm", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(_write_end[0], warn_on_full_buffer=False)


def _hold_sigterm() -> None:
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _take_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _leave_sigterm() -> None:
    """In a process that the user's code has forked: SIGTERM ends that process alone.

    It has inherited our pipe. A byte in it would reach the thread of this task, which would take the signal for its
    own: so SIGTERM is held back from before the fork until the handler is gone.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _take_sigterm()


def stop_when_asked() -> None:
    """From now on there is something to save: SIGTERM is a question, see `asked_to_stop`.

    However often it is asked: who signals a whole service reaches this process twice, and one that
    does not stop in time is killed by its launcher.
    """
    _may_ask.set()


def asked_to_stop() -> bool:
    return _asked.is_set()


def _listen(read_end: int) -> None:
    while True:
        if os.read(read_end, 1)[0] != signal.SIGTERM:
            continue
        if not _may_ask.is_set():
            os._exit(EXIT_CODE)
        _asked.set()
