"""Runs as commands of their own, one after the other, and whether one is done."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tf2dist import files
from tf2dist.linux import child_environment, code_command

POLL_SECS = 0.1
STOP_SECS = 2.0  # for a job to end what it has started
# The command of a job. If its parent is killed, the kernel sends the job SIGTERM, so that it saves and ends in order.
RUN = (
    "from tf2dist import linux; linux.end_with_parent(int(sys.argv.pop(1)))\nfrom tf2dist.__main__ import main; main()"
)


def run_job(
    arguments: list[str], received: list[int], output: IO[bytes], while_it_runs: Callable[[], None] = lambda: None
) -> int:
    """Runs a command of tf2dist to its end, or until a signal comes, which ends it at once; returns its exit code.

    Args:
        arguments: of the command.
        received: the signals to this process, which grow while it runs.
        output: a file for what it prints.
        while_it_runs: called ten times a second.
    """
    command = code_command(RUN, str(os.getpid()), *arguments)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=child_environment())
    while not received:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_SECS)
            # A shell gives the same code for a process that a signal has killed.
            return code if code >= 0 else 128 - code
        while_it_runs()
    # Ctrl-C on a terminal has reached the job, too, which begins to save. Two different signals ask for an end at once,
    # see `signals.is_impatient`. What the kernel kills then leaves nothing behind, but is not waited for.
    process.send_signal(signal.SIGINT)
    for end in (process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECS)
            break
    return 128 + received[0]


def finished_summary(run_dir: Path) -> dict[str, Any] | None:
    """The result of a run that is done and has saved its weights; None for any other."""
    try:
        with files.open_to_read(run_dir / "summary.json") as file:
            summary: dict[str, Any] = json.load(file)
        # Without the weights of its last step a job is resumed, so that it can save them.
        return summary if summary["global_step"] == summary.get("saved_step", summary["global_step"]) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
