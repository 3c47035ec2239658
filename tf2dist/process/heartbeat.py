"""Signs of life and of progress, by which the launcher finds tasks that are frozen or stuck.

A thread reports every second that the process is alive; the launcher gives up on a task that is silent
for too long. The same thread watches the main thread. While that makes no progress, it reports every
30 s in which function the main thread is, as read from its stack: one of the user's own, if there is one. When the
watchdog's time is over, it writes the stacks of all threads to the log and reports that the task is stalled.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tf2dist.messages import Alive, LongCall, Silence, Stalled, ToLauncher
from tf2dist.tf_constants import AUTOGRAPH_FILE, CALLS_PYTHON

# With a slash, since a file of the user's may stand beside the folder under a name that begins like it.
PACKAGE = f"{Path(__file__).parents[1]}/"  # the whole package
STANDARD = f"{sysconfig.get_path('stdlib')}/"
INSTALLED = ("site-packages", "dist-packages")


def current_function() -> tuple[str, bool]:
    """The function, such as "load (mine.py:12)", and whether it is the user's own code.

    This is the innermost function of the user's in the main thread, or else in a thread in which TensorFlow calls
    Python. If there is none, it is the innermost one of tf2dist in the main thread. Threads that the user has started
    do not count, since they may legitimately wait for ever.
    """
    # A snapshot: threads run on, and frames that have ended meanwhile stay readable.
    stacks = sys._current_frames()
    main = stacks.pop(threading.main_thread().ident or 0, None)
    for stack in (main, *filter(_works_for_tensorflow, stacks.values())):
        for frame in _outwards(stack):
            if _is_users(frame.f_code.co_filename):
                return _name(frame), True
    package_frames = [frame for frame in _outwards(main) if frame.f_code.co_filename.startswith(PACKAGE)]
    return (_name(package_frames[0]) if package_frames else "the start"), False


def _works_for_tensorflow(stack: FrameType) -> bool:
    """Whether a graph calls a Python function in this thread, as with `tf.numpy_function` and `from_generator`."""
    return any(frame.f_code.co_filename.endswith(CALLS_PYTHON) for frame in _outwards(stack))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def _is_users(file: str) -> bool:
    if file.startswith(("<", PACKAGE, STANDARD)) or AUTOGRAPH_FILE in file:
        return False
    return not set(INSTALLED) & set(Path(file).parts)


def _name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    file = f"tf2dist/{path.relative_to(PACKAGE)}" if str(path).startswith(PACKAGE) else path.name
    return f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"


STACKS_SIGNAL = signal.SIGUSR1  # writes the stacks of all threads, even while one keeps Python's lock
LOG = 2  # a file descriptor, since a plugin may have replaced sys.stderr
ALIVE_EVERY_SECS = 1.0
START_SECS = 600.0  # for what comes before the first step, such as tracing and compiling
LONG_CALL_EVERY_SECS = 30.0

# The main thread writes these, or another one while that waits for it, and the reporting thread reads them without a
# lock: each is one reference, which Python replaces atomically, and a stale value only delays a report by one period.
_deadline = float("inf")
_progress_at = 0.0
_extended_until = -float("inf")
_watchdog_secs = float("inf")
_to_launcher = ToLauncher("nobody", lambda message: None)  # until `start`


def start(to_launcher: ToLauncher, watchdog_secs: float, simulated_secs: float = 0.0) -> None:
    """Begins to report; `progress` must be called every `watchdog_secs` from now on.

    Args:
        simulated_secs: how much longer that may take because of delays that are simulated.
    """
    global _watchdog_secs, _to_launcher
    _watchdog_secs = watchdog_secs + simulated_secs
    _to_launcher = to_launcher
    progress(START_SECS)
    faulthandler.register(STACKS_SIGNAL, file=LOG, all_threads=True)
    # Several signs of life must fit into the shortest time after which a task counts as lost, 0.6 of `watchdog_secs`.
    every_secs = min(ALIVE_EVERY_SECS, watchdog_secs / 10)
    threading.Thread(target=_report, args=(to_launcher, every_secs), name="heartbeat", daemon=True).start()


def progress(allowance_secs: float = 0.0) -> None:
    """Records progress; the next step may take `allowance_secs` longer than usual."""
    global _progress_at
    _progress_at = time.monotonic()
    _set_deadline(allowance_secs)


def _set_deadline(allowance_secs: float = 0.0) -> None:
    global _deadline
    # An extension outlives progress: calls to a lost host may succeed again and again before one of them hangs.
    _deadline = max(time.monotonic() + _watchdog_secs + allowance_secs, _extended_until)


def extend_deadline(secs: float) -> None:
    """Keeps the deadline at least `secs` away, whatever `progress` does meanwhile."""
    global _extended_until
    _extended_until = time.monotonic() + secs
    progress()


@contextlib.contextmanager
def announce_silence(secs: float) -> Iterator[None]:
    """Tells the launcher not to expect signs of life while the block runs, for at most `secs`.

    For calls of TensorFlow that wait for other tasks and hold Python's global interpreter lock: the reporting
    thread cannot run meanwhile.
    """
    global _deadline
    # When the lock is released the thread may run before the main thread, and must not find the deadline passed.
    _deadline = max(_deadline, time.monotonic() + _watchdog_secs + secs)
    _to_launcher.send(Silence(secs))
    try:
        yield
    finally:
        # From now on silence counts again, however much of the announced time is left.
        _to_launcher.send(Silence(0.0))


def _report(to_launcher: ToLauncher, every_secs: float) -> None:
    reported_at = 0.0
    while True:
        now = time.monotonic()
        secs = now - _progress_at
        if now > _deadline:
            _write_stacks(secs)
            _set_deadline()  # so that the next report comes after a full period instead of every second
            to_launcher.send(Stalled(int(secs), *current_function()))
        elif now - max(reported_at, _progress_at) >= LONG_CALL_EVERY_SECS:
            reported_at = now
            to_launcher.send(LongCall(int(secs), *current_function()))
        else:
            to_launcher.send(Alive())
        time.sleep(every_secs)


def _write_stacks(secs: float) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end the thread that reports the stall
        os.write(LOG, f"no progress for {secs:.0f} s; the stacks of all threads:\n".encode())
    faulthandler.dump_traceback(LOG)
