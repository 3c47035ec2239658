"""The standard streams of the command, whatever it was started with."""

import os
import sys
from typing import TextIO

from tf2dist.errors import printable


def prepare() -> None:
    """Makes sure that there are three, and that they take every letter.

    A stream that was closed (``2>&-``) leaves its number to the next file that is opened, and what is
    meant for the terminal would end up there. An ASCII terminal gets other letters spelled out.
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
    """Prints lines, without what a terminal would obey.

    Raises:
        OSError: the stream does not take them; it takes nothing more then.
    """
    try:
        print(printable(text), file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python tries again at its end
        raise
