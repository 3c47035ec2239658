"""Signs of life and of progress: what tells a task that works from one that is frozen or stuck.

A thread reports every second that the process runs; a frozen process is silent, and the launcher
sees that. The same thread watches the main one: where that makes no progress it writes the stack
of every thread to the log, and says so. A thread of faulthandler's, which needs no lock of Python's,
watches ours.
"""

import faulthandler
import sys
import threading
import time
from typing import Any

from tf2dist.forkserver import Send

ALIVE_EVERY_SECS = 1.0
START_SECS = 600.0  # for what comes before the first step: tracing and compiling take what they take
_deadline = float("inf")
_excused_until = -float("inf")
_watchdog_secs = float("inf")


def start(send: Send, watchdog_secs: float) -> None:
    """Begins to report; `beat` must be called every `watchdog_secs` from now on."""
    global _watchdog_secs
    _watchdog_secs = watchdog_secs
    beat(START_SECS)
    every_secs = min(ALIVE_EVERY_SECS, watchdog_secs / 10)
    threading.Thread(target=_report, args=(send, every_secs), name="pulse", daemon=True).start()


def beat(allowance_secs: float = 0.0) -> None:
    """Notes progress; what comes next may take `allowance_secs` more than usual."""
    global _deadline
    _deadline = max(time.monotonic() + _watchdog_secs + allowance_secs, _excused_until)


def excuse(secs: float) -> None:
    """Expects no progress before so long a time has passed, whatever progress there is until then."""
    global _excused_until
    _excused_until = time.monotonic() + secs
    beat()


def _report(send: Send, every_secs: float) -> None:
    while True:
        faulthandler.dump_traceback_later(max(_watchdog_secs, ALIVE_EVERY_SECS))  # if the lock is kept for so long
        packet: dict[str, Any] = {"event": "alive"}
        if time.monotonic() > _deadline:
            print(f"no progress for {_watchdog_secs:.0f} s; the stacks of all threads:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            beat()  # says it again after as long a time
            packet = {"event": "stalled"}
        send(packet)
        time.sleep(every_secs)
