"""Signs of life and of progress: what tells a task that works from one that is frozen or stuck.

A thread reports every second that the process lives; who is silent for too long is lost to the
launcher. The same thread watches the main one: where that makes no progress it says every 30 s in
which function it stands, and in the end writes the stack of every thread to the log, and says so.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator

from tf2dist.messages import ToLauncher
from tf2dist.process.whereabouts import whereabouts

STACKS_SIGNAL = signal.SIGUSR1  # writes the stacks of all threads, even while one keeps Python's lock
LOG = 2  # a file descriptor: a plugin may have put something else into the place of sys.stderr
ALIVE_EVERY_SECS = 1.0
START_SECS = 600.0  # for what comes before the first step: tracing and compiling take what they take
TELL_EVERY_SECS = 30.0
_deadline = float("inf")
_progress_at = 0.0
_excused_until = -float("inf")
_watchdog_secs = float("inf")
_to_launcher = ToLauncher("nobody", lambda message: None)  # until `start`


def start(to_launcher: ToLauncher, watchdog_secs: float) -> None:
    """Begins to report; `progress` must be called every `watchdog_secs` from now on."""
    global _watchdog_secs, _to_launcher
    _watchdog_secs = watchdog_secs
    _to_launcher = to_launcher
    progress(START_SECS)
    faulthandler.register(STACKS_SIGNAL, file=LOG, all_threads=True)
    every_secs = min(ALIVE_EVERY_SECS, watchdog_secs / 10)
    threading.Thread(target=_report, args=(to_launcher, every_secs), name="pulse", daemon=True).start()


def progress(allowance_secs: float = 0.0) -> None:
    """Notes progress; what comes next may take `allowance_secs` more than usual."""
    global _progress_at
    _progress_at = time.monotonic()
    _wait(allowance_secs)


def _wait(allowance_secs: float = 0.0) -> None:
    global _deadline
    _deadline = max(time.monotonic() + _watchdog_secs + allowance_secs, _excused_until)


def extend_deadline(secs: float) -> None:
    """Expects no progress before so long a time has passed, whatever progress there is until then."""
    global _excused_until
    _excused_until = time.monotonic() + secs
    progress()


@contextlib.contextmanager
def announce_silence(secs: float) -> Iterator[None]:
    """Around a call of TensorFlow that waits for others and keeps Python's lock: our thread cannot report then."""
    global _deadline
    _deadline = max(_deadline, time.monotonic() + _watchdog_secs + secs)
    _to_launcher.silence(secs)
    try:
        yield
    finally:
        _to_launcher.silence(0.0)


def _report(to_launcher: ToLauncher, every_secs: float) -> None:
    told_at = 0.0
    while True:
        now = time.monotonic()
        secs = now - _progress_at
        if now > _deadline:
            _write_stacks(secs)
            _wait()  # says it again after as long a time
            to_launcher.stalled(secs, *whereabouts())
        elif now - max(told_at, _progress_at) >= TELL_EVERY_SECS:
            told_at = now
            to_launcher.standing(secs, *whereabouts())
        else:
            to_launcher.alive()
        time.sleep(every_secs)


def _write_stacks(secs: float) -> None:
    with contextlib.suppress(OSError):  # a full disk
        os.write(LOG, f"no progress for {secs:.0f} s; the stacks of all threads:\n".encode())
    faulthandler.dump_traceback(LOG)
