"""Output of a call of `fit` while it runs: on a terminal, in a file, below the cell of a notebook."""

import html
import io
import sys
from collections.abc import Sequence
from typing import Any, Self, TextIO, cast

from tf2dist.cluster.spec import Place
from tf2dist.errors import printable
from tf2dist.launch.console import PART_GAP, WIDE_BAR, Console, cluster_text, number_of
from tf2dist.messages import ProgressMessage

MAX_EPOCHS = 20  # in the table of a notebook, which is sent again with each of them
BAR_STYLE = "width: 16em; max-width: 100%; vertical-align: middle"


def console_of(verbose: int) -> Console:
    """The console of a call.

    Args:
        verbose: 0, 1 or 2.
    """
    # Only the process's own standard error may be used by its descriptor.
    stream = sys.stderr if sys.stderr is sys.__stderr__ and sys.stderr else cast(TextIO, NoFile(sys.stderr))
    if verbose != 1:
        return LinesConsole(stream) if verbose == 2 else QuietConsole(stream)
    return NotebookConsole(stream) if in_notebook() else Console(stream)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def opening_line(call: str, place: Place) -> str:
    """The line that is shown at once: building the model and importing TensorFlow in the tasks take seconds."""
    cluster, task = place
    does = "starting" if cluster.is_managed else f"{task} joins"
    return f"{call}: {does} {cluster_text(cluster.num_workers, cluster.num_ps)}"


def step_line(mode: str, num_batches: int, batch_size: int | None) -> str:
    """A line that says what a step is.

    Args:
        num_batches: that the cluster takes in one step.
        batch_size: None for a stream, whose batches may have any number of examples.
    """
    if mode == "async":
        return f"a step is one worker's batch{f' of {batch_size:,} examples' if batch_size else ''}"
    if batch_size is None:
        return "a step takes one batch of each worker"
    product = f"{num_batches} x {batch_size:,} = " if num_batches > 1 else ""
    return f"a step takes {product}{number_of(num_batches * batch_size, 'example')}"


class LinesConsole(Console):
    """Shows the lines that stay, for a log; Keras itself prints those of the epochs to the standard output."""

    def __enter__(self) -> Self:  # without a live line on a terminal
        return self

    def status(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        if in_notebook():  # below a cell only warnings are red
            print(printable(text), flush=True)
        else:
            super().note(text)

    def epoch(self, number: int, num_epochs: int, metrics: dict[str, Any]) -> None:
        pass

    def progress(self, progress: ProgressMessage) -> None:
        pass


class QuietConsole(LinesConsole):
    """Shows only warnings."""

    def note(self, text: str) -> None:
        pass


class NotebookConsole(Console):
    """Below the cell of a notebook: a bar and a table of the epochs, which change, then the lines that stay.

    Warnings alone are red. Rich would need ipywidgets for it.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._display: Any = None
        self._bar, self._text = "", ""  # as HTML, and for a notebook that shows none
        self._epochs: dict[int, dict[str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def status(self, text: str) -> None:
        self._bar, self._text = f"<div>{html.escape(printable(text))}</div>", printable(text)
        self._show()

    def note(self, text: str) -> None:
        print(printable(text), flush=True)

    def epoch(self, number: int, num_epochs: int, metrics: dict[str, Any]) -> None:
        numbers = {name: f"{value:.4f}" for name, value in metrics.items() if isinstance(value, float)}
        # By number: a run that was started again at a checkpoint repeats the epochs after it.
        self._epochs[number] = {"epoch": f"{number}/{num_epochs}", **numbers}
        self._show()

    def _show_progress(self, completed: float, total: int, parts: Sequence[str]) -> None:
        filled = int(WIDE_BAR * completed // total) if total else 0
        line = PART_GAP.join(parts)
        self._text = f"{'━' * filled}{'─' * (WIDE_BAR - filled)} {line}"
        # Without a value the bar moves.
        value = f'value="{completed}" max="{total}" ' if total else ""
        bar = f'<progress {value}style="{BAR_STYLE}">'
        self._bar = f"<div>{bar}</progress> {html.escape(line)}</div>"
        self._show()

    def _show(self) -> None:
        from IPython.display import display

        shown = list(self._epochs.values())[-MAX_EPOCHS:]
        cut = f"the last {MAX_EPOCHS} epochs; the history has all" if len(self._epochs) > MAX_EPOCHS else ""
        lines = [", ".join(" ".join(pair) for pair in epoch.items()) for epoch in shown]
        data = {"text/plain": "\n".join(filter(None, [*lines, cut, self._text])),
                "text/html": f"{self._bar}{_table(shown)}{cut and f'<div>{cut}</div>'}"}  # fmt: skip
        if self._display:
            self._display.update(data, raw=True)
        else:
            self._display = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def _table(epochs: Sequence[dict[str, str]]) -> str:
    """A table with a column for each metric; without colours of its own, since a notebook is light or dark."""
    if not epochs:
        return ""
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    cells = ("".join(f"<td>{html.escape(epoch.get(name, ''))}</td>" for name in names) for epoch in epochs)
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    # Wider than a phone, it scrolls by itself.
    return f'<div style="overflow-x: auto"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


class NoFile(io.TextIOBase):
    """A stream that a notebook or a test has put in place of the standard error, or None in place of a closed one.

    Its `fileno` may be that of the process's own standard error, and what is written there does not appear below the
    cell of a notebook. So this stream has none.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text) if self._stream else len(text)

    def flush(self) -> None:
        if self._stream:
            self._stream.flush()

    def fileno(self) -> int:
        raise OSError("no file")
