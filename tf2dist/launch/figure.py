"""The picture of a run, training.png, drawn by a process of its own that imports matplotlib while the run ends."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tf2dist.errors import TrainingError
from tf2dist.files import write_whole
from tf2dist.interpreter import child_environment, module_command
from tf2dist.launch.console import Console, result_lines
from tf2dist.launch.messages import Event
from tf2dist.launch.run_dir import Lock
from tf2dist.messages import HookCall, Progress, Result

PICTURE = "training.png"
LEAD_SECS = 10.0  # the import takes less than one when the processors are free
EARLY_SECS = 1.0  # after the result, for a process that keeps its low priority
TIMEOUT_SECS = 10.0  # after the result, in all
SILENT_SECS = 1.0  # after which the user is told what is waited for
POLL_SECS = 0.1
KILL_TIMEOUT_SECS = 2.0


class Figure:
    """Draws a run when it is done; its `with` block ends the process.

    Args:
        is_wanted: whether this process draws at all; if not, nothing has any effect.
    """

    def __init__(self, run_dir: Path, is_wanted: bool) -> None:
        self._run_dir, self._is_wanted = run_dir, is_wanted
        self._first: tuple[float, int] | None = None  # time and step from which the rate is counted
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_at = 0.0
        self._is_slow = False  # whether the process still has its low priority
        self._is_told = False
        self._problem = ""  # why it could not be started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end()

    def hear(self, event: Event) -> None:
        """Takes all messages of the tasks: starts the process shortly before the end, and lets it draw the result."""
        match event:
            case Progress():
                if self._ends_soon(event):
                    self._start(os.SCHED_IDLE)
            case HookCall(kind="end"):  # a callback may have ended the training before its last step
                self._start(os.SCHED_IDLE)
            case Result():
                self._start(os.SCHED_OTHER)
                self._ask(event.summary)

    def _ends_soon(self, progress: Progress) -> bool:
        now, step = time.monotonic(), progress.step
        if self._first is None or step < self._first[1]:  # a restart goes back to a checkpoint
            self._first = now, step
        if step >= progress.target_step:
            return True
        secs, steps = now - self._first[0], step - self._first[1]
        # A rate from a single report would be that of a moment.
        return secs > 0.5 and steps > 0 and (progress.target_step - step) * secs / steps < LEAD_SECS

    def _start(self, policy: int) -> None:
        """Starts the process, unless it runs already.

        Args:
            policy: SCHED_IDLE while the training may still go on, so that only idle processors are used.
        """
        if self._process or not self._is_wanted:
            return
        # One thread for numpy: its many would only be made and ended again.
        environment = child_environment() | {"MPLBACKEND": "agg", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                module_command("tf2dist.finished.drawer", str(self._run_dir), str(os.getpid())),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C ends the run, which then decides about this process
            )
        except OSError as error:
            self._problem = str(error.strerror)
        else:
            self._is_slow = policy == os.SCHED_IDLE and self._set_policy(policy)

    def _set_policy(self, policy: int) -> bool:
        """Sets the process's scheduling policy; returns whether that is allowed."""
        assert self._process, "it has been started"
        try:
            os.sched_setscheduler(self._process.pid, policy, os.sched_param(0))
            return True
        except OSError:
            return False

    def _ask(self, summary: dict[str, Any]) -> None:
        self._asked_at = self._asked_at or time.monotonic()
        if self._process and self._process.stdin:
            lines = result_lines(summary, "").splitlines()
            facts = {"lines": lines, "staleness": summary.get("staleness_counts", [])}
            # Anyone may lower a priority, but only root may raise it again.
            self._is_slow = self._is_slow and not self._set_policy(os.SCHED_OTHER)
            with contextlib.suppress(OSError):  # it has ended; `_communicate` reads why
                self._process.stdin.write(json.dumps(facts).encode() + b"\n")
                self._process.stdin.flush()

    def write(self, summary: dict[str, Any], lock: Lock | None, console: Console, received: list[int]) -> None:
        """Writes the picture of a run that is done; if that is not possible, warns and goes on.

        Args:
            received: the signals to this process; the picture is not waited for if there is one.
        """
        if not self._is_wanted:
            return
        reason: object
        picture, reason = self._picture(EARLY_SECS if self._is_slow else TIMEOUT_SECS, console, received)
        # A process of low priority gets no time while others use all processors, so one of ordinary priority follows.
        if self._is_slow and not (picture or reason):
            self._end()
            self._start(os.SCHED_OTHER)
            self._ask(summary)
            picture, reason = self._picture(TIMEOUT_SECS, console, received)
        if not picture:
            reason = reason or (self._problem if self._process is None else "") or f"not done in {TIMEOUT_SECS:.0f} s"
        if picture:
            try:
                if lock:
                    lock.check()
                write_whole(self._run_dir / PICTURE, picture)
                return
            except (OSError, TrainingError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
        console.warn(f"{PICTURE} could not be drawn ({reason}); the result is in {self._run_dir}/summary.json")

    def _picture(self, until_secs: float, console: Console, received: list[int]) -> tuple[bytes, str]:
        """The picture, or why there is none; both empty if there is none `until_secs` after the result."""
        if self._process is None:
            return b"", ""
        while not received and (now := time.monotonic()) < self._asked_at + until_secs:
            if now > self._asked_at + SILENT_SECS and not self._is_told:
                console.status(f"drawing {PICTURE}")
                self._is_told = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = self._process.communicate(timeout=POLL_SECS)
                if self._process.returncode == 0:
                    return output, ""
                # Libraries may print before it: the reason is the last line.
                told = errors.decode(errors="replace").strip().splitlines()
                return b"", (told or [f"exit code {self._process.returncode}"])[-1]
        return b"", "stopped by a signal" if received else ""

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        # With its group: matplotlib may have started `fc-list` to find the fonts, which holds the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # The kernel itself may wait for a file system that does not respond.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILL_TIMEOUT_SECS)
