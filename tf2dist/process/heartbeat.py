"""Signs of life and of progress, by which the launcher finds tasks that are frozen or stuck.

A thread reports every second that the process is alive; the launcher gives up a task that is silent
for too long. The same thread watches the main thread. While that makes no progress, it reports every
30 s in which function the main thread is. When the watchdog's time is over, it writes the stacks of
all threads to the log and reports that the task is stalled.
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
LOG = 2  # a file descriptor, since a plugin may have replaced sys.stderr
ALIVE_EVERY_SECS = 1.0
START_SECS = 600.0  # for what comes before the first step, such as tracing and compiling
STANDING_EVERY_SECS = 30.0
_deadline = float("inf")
_progress_at = 0.0
_extended_until = -float("inf")
_watchdog_secs = float("inf")
_to_launcher = ToLauncher("nobody", lambda message: None)  # until `start`


def start(to_launcher: ToLauncher, watchdog_secs: float) -> None:
    """Begins to report; `progress` must be called every `watchdog_secs` from now on."""
    global _watchdog_secs, _to_launcher
    _watchdog_secs = watchdog_secs
    _to_launcher = to_launcher
    progress(START_SECS)
    faulthandler.register(STACKS_SIGNAL, file=LOG, all_threads=True)
    # Several signs fit into the shortest time after which a task counts as lost.
    every_secs = min(ALIVE_EVERY_SECS, watchdog_secs / 10)
    threading.Thread(target=_report, args=(to_launcher, every_secs), name="heartbeat", daemon=True).start()


def progress(allowance_secs: float = 0.0) -> None:
    """Notes progress; what comes next may take `allowance_secs` more than usual."""
    global _progress_at
    _progress_at = time.monotonic()
    _set_deadline(allowance_secs)


def _set_deadline(allowance_secs: float = 0.0) -> None:
    global _deadline
    _deadline = max(time.monotonic() + _watchdog_secs + allowance_secs, _extended_until)


def extend_deadline(secs: float) -> None:
    """Keeps the deadline at least `secs` away, whatever `progress` does meanwhile."""
    global _extended_until
    _extended_until = time.monotonic() + secs
    progress()


@contextlib.contextmanager
def announce_silence(secs: float) -> Iterator[None]:
    """For a call of TensorFlow that waits for other tasks and keeps Python's lock, so that nothing can be reported."""
    global _deadline
    _deadline = max(_deadline, time.monotonic() + _watchdog_secs + secs)
    _to_launcher.silence(secs)
    try:
        yield
    finally:
        _to_launcher.silence(0.0)


def _report(to_launcher: ToLauncher, every_secs: float) -> None:
    reported_at = 0.0
    while True:
        now = time.monotonic()
        secs = now - _progress_at
        if now > _deadline:
            _write_stacks(secs)
            _set_deadline()  # it is reported again after as long a time
            to_launcher.stalled(secs, *whereabouts())
        elif now - max(reported_at, _progress_at) >= STANDING_EVERY_SECS:
            reported_at = now
            to_launcher.standing(secs, *whereabouts())
        else:
            to_launcher.alive()
        time.sleep(every_secs)


def _write_stacks(secs: float) -> None:
    with contextlib.suppress(OSError):  # a full disk
        os.write(LOG, f"no progress for {secs:.0f} s; the stacks of all threads:\n".encode())
    faulthandler.dump_traceback(LOG)
