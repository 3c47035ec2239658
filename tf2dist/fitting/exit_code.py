"""The exit code of a script that an error of tf2dist has ended: schedulers start the job again, or not, by it."""

import functools
import sys
from types import TracebackType

from tf2dist.errors import TfDistError


@functools.cache
def give_to_script() -> None:
    """Makes an error of tf2dist that nobody catches end this program with its exit code, and not with Python's 1."""
    show = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        # Python's own prompt calls this hook, too, and it would end with the SystemExit.
        if isinstance(error, TfDistError) and not hasattr(sys, "ps1"):
            raise SystemExit(error.exit_code)

    sys.excepthook = end
