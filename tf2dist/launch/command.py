"""The frame of a command that trains: signals from its very start, one line for an error, and the exit code."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from tf2dist.errors import Interrupted, RequestError, TfDistError, printable
from tf2dist.files import settle_home
from tf2dist.launch.console import DRAIN_SECS, prepare_streams
from tf2dist.launch.unblocked import Unblocked
from tf2dist.signals import Signals

MAX_LINE_CHARS = 300

Run = Callable[[list[str], float, Signals], None]


def run_command(run: Run, argv: list[str] | None = None) -> NoReturn:
    """Runs one command line and exits: see `errors` for the codes.

    Args:
        run: takes the arguments, `time.time()` at the start, and the signals.
        argv: None for those of this process.
    """
    started_at = time.time()
    prepare_streams()
    arguments = sys.argv[1:] if argv is None else argv
    settle_home()
    with Signals() as signals:
        try:
            code = run_and_report(run, arguments, started_at, signals)
        except KeyboardInterrupt:  # a signal before there was anything to stop
            code = report(Interrupted(signals.received[0]))
    sys.exit(code)


def run_and_report(run: Run, arguments: list[str], started_at: float, signals: Signals) -> int:
    """Runs one command line; prints its error, if there is one, and returns the exit code."""
    try:
        run(arguments, started_at, signals)
    except TfDistError as error:
        return report(error)
    return 0


def report(error: TfDistError) -> int:
    """Writes the error's lines for the user; returns its exit code."""
    text = brief(str(error)) if isinstance(error, RequestError) else str(error)
    stream = Unblocked(sys.stderr)
    with contextlib.suppress(OSError):  # nobody can read the error; the exit code remains
        print(printable(f"tf2dist: error: {text}"), file=stream, flush=True)
        stream.drain(DRAIN_SECS)
    return error.exit_code


def brief(text: str) -> str:
    """At most three lines of at most `MAX_LINE_CHARS`, without control characters that a value may hold."""
    lines = text.splitlines()
    if len(lines) > 3:
        lines = [*lines[:2], f"and {len(lines) - 2} more; python -m tf2dist.doctor with the same options shows all"]
    lines = [printable(line) for line in lines]
    half = MAX_LINE_CHARS // 2 - 2  # the option's name is at the beginning, the advice at the end
    return "\n".join(line if len(line) <= MAX_LINE_CHARS else f"{line[:half]}...{line[-half:]}" for line in lines)
