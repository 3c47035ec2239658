"""Runs as commands of their own, one after the other, and whether one is done."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tf2dist import files
from tf2dist.interpreter import child_environment, code_command

POLL_SECS = 0.1
# The command of a job. If its parent is killed, the kernel sends the job SIGTERM, so that it saves and ends in order.
RUN = (
    "from tf2dist import linux; linux.end_with_parent(int(sys.argv.pop(1)))\nfrom tf2dist.__main__ import main; main()"
)


def run_job(
    arguments: list[str],
    received: list[int],
    output: IO[bytes] | None = None,
    while_it_runs: Callable[[], None] = lambda: None,
) -> int:
    """Runs a command of tf2dist to its end, passing signals on; returns its exit code.

    Args:
        arguments: of the command.
        received: the signals to this process, which grow while it runs.
        output: a file for what it prints; None for the streams of this process.
        while_it_runs: called ten times a second.
    """
    command = code_command(RUN, str(os.getpid()), *arguments)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=child_environment())
    passed_on = 0
    # Ctrl-C also reaches the job directly, from the terminal; the job takes the two for one request, see `signals`.
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_SECS)
            # A shell gives the same code for a process that a signal has killed.
            return code if code >= 0 else 128 - code
        for number in received[passed_on:]:
            process.send_signal(number)
        passed_on = len(received)
        while_it_runs()


def finished_summary(run_dir: Path) -> dict[str, Any] | None:
    """The result of a run that is done and has saved its weights; None for any other."""
    try:
        with files.open_to_read(run_dir / "summary.json") as file:
            summary: dict[str, Any] = json.load(file)
        # Without the weights of its last step a job is resumed, so that it can save them.
        return summary if summary["global_step"] == summary.get("saved_step", summary["global_step"]) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
