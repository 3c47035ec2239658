"""Shows the user how a run goes on: a live line on a terminal, plain lines elsewhere, through streams that never wait.

A stream does not wait for its reader, which may be a pager, a terminal after Ctrl-S, or a log collector that hangs.
"""

import contextlib
import io
import math
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self, TextIO, cast

from tf2dist.errors import TfDistError, brief_reason, printable
from tf2dist.linux import poll
from tf2dist.messages import ProgressMessage, metrics_text

CHUNK_BYTES = 4096  # a pipe that is ready accepts this many without blocking
MAX_PENDING_BYTES = 1 << 16


class Unblocked(io.TextIOBase):
    """Writes what the stream accepts, keeps up to `MAX_PENDING_BYTES` for later, and drops the rest.

    Other processes may share the descriptor, so it is not made non-blocking; `poll` is asked before each write.
    A write to a terminal can block even then, so a terminal is opened a second time, for writes that do not.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pending = b""
        try:
            self._number: int | None = stream.fileno()
        except (OSError, AttributeError):  # not a file: it accepts everything at once
            self._number = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Raises OSError if nobody can read any more."""
        if self._number is None:
            return self._stream.write(text)
        if len(self._pending) < MAX_PENDING_BYTES:
            self._pending += text.encode(self.encoding, "backslashreplace")
        self._write_pending(0.0)
        return len(text)

    def flush(self) -> None:
        if self._number is None:
            self._stream.flush()

    def drain(self, secs: float) -> None:
        """Gives the reader `secs` to take what is pending."""
        deadline = time.monotonic() + secs
        while self._pending and (left := deadline - time.monotonic()) > 0:
            self._write_pending(left)

    def _write_pending(self, wait_secs: float) -> None:
        assert self._number is not None
        with _never_waiting(self._number) as number:
            while self._pending and poll(number, secs=wait_secs, event=select.POLLOUT):
                try:
                    written = os.write(number, self._pending[:CHUNK_BYTES])
                except BlockingIOError:
                    return
                except OSError:
                    self._pending = b""
                    raise
                # What the reader takes at once is written at once; only for the first bytes may it take its time.
                self._pending = self._pending[written:]
                wait_secs = 0.0


@contextlib.contextmanager
def _never_waiting(number: int) -> Iterator[int]:
    """A descriptor for writes that do not block: a new one for a terminal, since the flag of the old one is shared."""
    terminal = -1
    with contextlib.suppress(OSError):  # not a terminal, or one of another namespace, which has no name here
        terminal = os.open(os.ttyname(number), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield number if terminal < 0 else terminal
    finally:
        if terminal >= 0:
            os.close(terminal)


PLAIN_EVERY_SECS = 5.0  # in a file or a log collector every line stays
DRAIN_SECS = 1.0  # at the end, for a slow reader to take the last lines
WIDE_TERMINAL, WIDE_BAR, NARROW_BAR = 80, 20, 8  # in columns
PART_GAP = "  "
REFRESHES_PER_SEC = 10
ERASE_BELOW = "\x1b[J"  # from the cursor on
CUT_LINES, WRAP_LINES = "\x1b[?7l", "\x1b[?7h"  # at the right edge of the terminal
_terminal = threading.Lock()  # of the console with the live line


class LiveLine:
    """The line on a terminal that changes: a spinner, a bar, and as much of the text as there is room for.

    Rich draws it several times a second, each time for the width that the terminal has then.
    """

    def __init__(self) -> None:
        self._parts: Sequence[str] = [""]
        self._completed = 0.0
        self._total: int | None = None

    def show(self, parts: Sequence[str], completed: float = 0.0, total: int | None = None) -> None:
        """Shows a text, of which the first and the last part are left out at last; without a total the bar moves."""
        self._parts, self._completed, self._total = parts, completed, total

    def __rich_console__(self, terminal: Any, options: Any) -> Iterator[Any]:
        from rich.progress_bar import ProgressBar
        from rich.segment import ControlType, Segment
        from rich.spinner import Spinner
        from rich.text import Text

        bar = WIDE_BAR if options.max_width >= WIDE_TERMINAL else NARROW_BAR
        # Some terminals break a line that has become too long for them into two. The cursor waits in the first of the
        # two, since it stands at the beginning, and so both are erased before the next drawing. Nor may a line go on in
        # the next one if the terminal has become narrower while it was drawn.
        yield Segment(ERASE_BELOW + CUT_LINES, control=[(ControlType.CLEAR,)])
        spinner = Spinner("line" if options.ascii_only else "dots").render(terminal.get_time())
        yield Text(f"{spinner} ", end="")
        yield ProgressBar(self._total, self._completed, bar, animation_time=terminal.get_time())
        text = fitted([on_one_line(part, options.encoding) for part in self._parts], options.max_width - bar - 3)
        yield Text(f" {text}", end="")
        yield Segment(WRAP_LINES + "\r", control=[(ControlType.CARRIAGE_RETURN,)])


def on_one_line(text: str, encoding: str) -> str:
    """The text with what a terminal cannot show spelled out, which makes it longer."""
    return printable(text).replace("\n", " ").encode(encoding, "backslashreplace").decode(encoding)


def fitted(parts: Sequence[str], width: int) -> str:
    """The parts that fit into so many columns: the first, the last, and then the others in their order."""
    from rich.cells import cell_len, set_cell_size

    shown: list[int] = []
    for number in dict.fromkeys((0, len(parts) - 1, *range(len(parts)))):
        line = PART_GAP.join(parts[other] for other in sorted([*shown, number]))
        if cell_len(line) <= width:
            shown.append(number)
    if not shown:
        return set_cell_size(parts[0], max(0, width - 3)).rstrip() + "..."
    return PART_GAP.join(parts[number] for number in sorted(shown))


class Console:
    """Progress and warnings go to stderr, the result alone to stdout."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = Unblocked(stream or sys.stderr)
        self._live: Any = None
        self._line = LiveLine()
        self._step = 0
        self._plain_at = time.monotonic()
        self._last_line = ""

    def __enter__(self) -> Self:
        # Of two runs side by side in one process, only the first that comes has a live line.
        if self._stream.isatty() and _terminal.acquire(blocking=False):
            # Imported here, since only a terminal needs it and it takes a while.
            from rich.console import Console as RichConsole
            from rich.live import Live

            terminal = RichConsole(file=cast(TextIO, self._stream))
            # Transient: the line vanishes at the end, and only lines that are worth keeping stay on the screen.
            self._live = Live(self._line, console=terminal, refresh_per_second=REFRESHES_PER_SEC, transient=True)
            try:
                self._live.start()
            except BaseException:
                _terminal.release()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None
            _terminal.release()
        # Without this a run that is shorter than `PLAIN_EVERY_SECS` would show no progress at all.
        else:
            self._print_last_line()
        with contextlib.suppress(OSError):
            self._stream.drain(DRAIN_SECS)

    def status(self, text: str) -> None:
        """Shows what is going on before there is progress to show."""
        if self._live:
            self._line.show([text])
        else:
            self._print_last_line()
            self._print(text)

    def epoch(self, number: int, num_epochs: int, metrics: dict[str, Any]) -> None:
        """Shows the metrics of an epoch that is over; `number`: from 1."""
        self.note(f"epoch {number}/{num_epochs}: {metrics_text(metrics)}")

    def overall(self, completed: float, total: int, parts: Sequence[str]) -> None:
        """Shows how far several runs are together, of which `completed` are done; `parts`: see `LiveLine.show`."""
        self._show_progress(completed, total, parts)
        self._last_line = ""  # each run tells its end by itself

    def note(self, text: str) -> None:
        """Prints a line that stays visible, on a terminal too."""
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"tf2dist: warning: {text}")

    def began(self, step: int) -> None:
        """Takes the step at which the training begins, or goes on: the only time when it may go back."""
        self._step = step

    def progress(self, progress: ProgressMessage) -> None:
        target = progress.target_step
        step = self._step = max(self._step, progress.step)
        parts = progress_parts(step, target, progress.metrics["loss"], progress.steps_per_sec)
        self._show_progress(step, target, parts)

    def _show_progress(self, completed: float, total: int, parts: Sequence[str]) -> None:
        """`total`: 0 if it is not known."""
        now, line = time.monotonic(), PART_GAP.join(parts)
        if self._live:
            self._line.show(parts, completed, total or None)
        elif now - self._plain_at >= PLAIN_EVERY_SECS:
            self._plain_at, self._last_line = now, ""
            self._print(line)
        else:
            self._last_line = line

    def _print_last_line(self) -> None:
        line, self._last_line = self._last_line, ""
        if line:
            self._print(line)

    def _print(self, text: str) -> None:
        text = printable(text)
        with contextlib.suppress(OSError):  # the reader has left, or the disk is full: the training goes on
            # Square brackets in a path are not markup, and soft_wrap leaves the breaking of lines to the terminal.
            if self._live:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)


def open_standard_descriptors() -> None:
    """Makes sure that the descriptors 0, 1 and 2 are open.

    If one was closed (``2>&-``), the next file that is opened gets its number, and what is meant for the terminal ends
    up there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)


def prepare_streams() -> None:
    """Makes sure that stdin, stdout and stderr exist and take every character; an ASCII terminal gets others spelled
    out."""
    open_standard_descriptors()
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def write_at_once(text: str, stream: TextIO) -> None:
    """Writes a text.

    Raises:
        OSError: it cannot be written; the stream discards everything from then on.
    """
    try:
        print(text, end="", file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # otherwise Python tries again when it exits
        raise


def show(text: str) -> None:
    """Prints a text to the standard output as it is; ends the command without an error if the reader has left.

    Raises:
        TfDistError: it cannot be written.
    """
    try:
        write_at_once(text, sys.stdout)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        raise TfDistError(f"the standard output cannot be written ({brief_reason(error)})") from None


def show_lines(text: str) -> None:
    """Shows lines that may quote what others have written: control characters are spelled out."""
    show(f"{printable(text)}\n")


def print_result(text: str, console: Console, name: str, elsewhere: str = "") -> None:
    """Prints what a command has found, which is no trouble if the reader has left, and a warning on a full disk."""
    try:
        write_at_once(f"{printable(text)}\n", sys.stdout)
    except BrokenPipeError:
        pass
    except OSError as error:
        console.warn(f"{name} could not be printed ({brief_reason(error)}){elsewhere}")


def progress_parts(step: int, target_step: int, loss: float, steps_per_sec: float | None) -> list[str]:
    """For example ``step 1,200/2,750``, ``loss 0.3121``, ``1,520 steps/s`` and ``0:01 left``; `target_step`: 0 if it
    is not known."""
    target = f"/{target_step:,}" if target_step else ""
    parts = [f"step {step:,}{target}"] + ([] if math.isnan(loss) else [f"loss {loss:.4f}"])
    if steps_per_sec:
        parts.append(f"{rate_text(steps_per_sec)} steps/s")
    if steps_per_sec and target_step:
        parts.append(f"{clock_text((target_step - step) / steps_per_sec)} left")
    return parts


def clock_text(secs: float) -> str:
    """Minutes and seconds, as in 0:01."""
    minutes, seconds = divmod(round(secs), 60)
    return f"{minutes}:{seconds:02}"


def rate_text(per_sec: float) -> str:
    """A rate with two digits at least: 1,520, 7.3 or 0.042."""
    # The format .2g writes 99.6 as 1e+02; from 9.95 on a whole number has two digits anyway.
    return f"{per_sec:,.0f}" if per_sec >= 9.95 else f"{per_sec:.2g}"


def number_of(count: int, noun: str) -> str:
    """For example ``1 worker`` or ``3 workers``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def state_text(state: str, exit_code: int | None) -> str:
    """The state of a run, with its exit code if it failed, as in ``failed (3)``."""
    return f"failed ({exit_code})" if state == "failed" else state


def cluster_text(num_workers: int, num_ps: int) -> str:
    """For example ``2 workers and 1 ps``."""
    return number_of(num_workers, "worker") + (f" and {num_ps} ps" if num_ps else "")


def result_lines(summary: dict[str, Any], run_dir: str) -> str:
    """The result of a run for the user, in three lines; two if nothing was evaluated."""
    cluster, data = summary["cluster"], summary["data"]
    staleness = summary.get("staleness")
    stale = f", staleness {staleness['mean']:.2f} (at most {staleness['max']})" if staleness else ""
    delayed = ", with simulated delays" if "simulated" in summary else ""
    name = summary.get("algorithm", "plain")
    algorithm = "" if name == "plain" else f" ({name})"
    rate = ""
    if summary["steps_per_sec"]:
        rate = f" at {rate_text(summary['steps_per_sec'])}/s ({rate_text(summary['examples_per_sec'])} examples/s)"
    return (
        f"{summary['mode']}{algorithm} {summary['model']} on {data}: {cluster_text(cluster['worker'], cluster['ps'])}, "
        f"{number_of(summary['global_step'], 'step')}{rate}{stale}{delayed}\n"
        f"{last_evaluation(summary)}{run_dir}"
    )


def last_evaluation(summary: dict[str, Any]) -> str:
    """One line with the metrics of the test, or of the validation if there was no test; "" without either."""
    split = next((split for split in ("test", "validation") if f"{split}_examples" in summary), None)
    if split is None:
        return ""
    metrics = {name.removeprefix(f"{split}_"): value for name, value in summary.items() if name.startswith(f"{split}_")}
    num_examples = metrics.pop("examples")
    return f"{split} {metrics_text(metrics)} over {num_examples:,} examples\n"
