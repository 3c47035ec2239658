"""What a call of `fit` shows while it runs: on a terminal, in a file, below the cell of a notebook."""

import io
import sys
from typing import Any, Self, TextIO, cast

from tf2dist.cluster.spec import Place
from tf2dist.errors import printable
from tf2dist.launch.console import WIDE_BAR, Console, cluster_text
from tf2dist.messages import ProgressMessage


def console_of(verbose: int) -> Console:
    """The console of a call.

    Args:
        verbose: 0, 1 or 2.
    """
    # Only the process's own standard error may be used by its descriptor.
    stream = sys.stderr if sys.stderr is sys.__stderr__ and sys.stderr else cast(TextIO, NoFile(sys.stderr))
    if verbose != 1:
        return QuietConsole(stream)
    return NotebookConsole(stream) if in_notebook() else Console(stream)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def opening_line(place: Place) -> str:
    """What is shown at once: building the model and importing TensorFlow in the tasks take seconds."""
    cluster, task = place
    does = "starting" if cluster.is_managed else f"{task} joins"
    return f"fit: {does} {cluster_text(cluster.num_workers, cluster.num_ps)}"


class QuietConsole(Console):
    """Shows only warnings."""

    def __enter__(self) -> Self:  # without a live line on a terminal
        return self

    def status(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def progress(self, progress: ProgressMessage) -> None:
        pass


class NotebookConsole(Console):
    """One line below the cell that changes, with a bar; other lines go to the standard output, warnings alone are red.

    Rich would need ipywidgets for it.
    """

    _display: Any = None

    def __enter__(self) -> Self:
        return self

    def status(self, text: str) -> None:
        self._show(text)

    def note(self, text: str) -> None:
        print(printable(text), flush=True)

    def _show_progress(self, step: int, target_step: int, line: str) -> None:
        filled = WIDE_BAR * step // max(target_step, 1)
        self._show(f"{'━' * filled}{'─' * (WIDE_BAR - filled)} {line}")

    def _show(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": printable(text)}
        if self._display:
            self._display.update(data, raw=True)
        else:
            self._display = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]


class NoFile(io.TextIOBase):
    """A stream that a notebook or a test has put in place of the standard error.

    Its `fileno` may be that of the process's own standard error, and what is written there does not appear below the
    cell of a notebook. So this stream has none.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        raise OSError("no file")
