"""The standard streams of the command, whatever it was started with."""

import os
import sys
from typing import TextIO

from tf2dist.errors import printable


def prepare() -> None:
    """Makes sure that stdin, stdout and stderr exist and take every character.

    If a stream was closed (``2>&-``), the next file that is opened gets its number, and what is meant for the
    terminal ends up there. On an ASCII terminal other characters are spelled out.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def say(text: str, stream: TextIO) -> None:
    """Prints lines, with control characters spelled out.

    Raises:
        OSError: they cannot be written; the stream discards everything from then on.
    """
    try:
        print(printable(text), file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # otherwise Python tries again when it exits
        raise
