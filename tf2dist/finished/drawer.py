"""A process that draws training.png: imports matplotlib while the run ends, and draws when it gets the result."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tf2dist.errors import first_line
from tf2dist.files import open_to_read
from tf2dist.linux import die_with_parent

if TYPE_CHECKING:
    from tf2dist.finished.training_picture import SeriesByName


def main() -> None:
    """Draws the run in the directory ``sys.argv[1]``, for the parent process ``sys.argv[2]``.

    Reads a line of JSON from the standard input once the run has its result: `lines`, the text above the picture, and
    `staleness`, how often 0, 1, 2, ... occurred, empty for none. Writes the PNG to the standard output. If it cannot
    be drawn, writes the reason to the standard error and exits with code 1.
    """
    die_with_parent(int(sys.argv[2]))
    try:
        # Whatever it writes at its import or while it draws must not be taken for a part of the picture.
        with os.fdopen(os.dup(1), "wb") as output:
            os.dup2(2, 1)
            output.write(drawn(Path(sys.argv[1])))
    except Exception as error:  # a damaged installation of matplotlib may raise anything
        print(first_line(str(error)) or type(error).__name__, file=sys.stderr)
        sys.exit(1)


def drawn(run_dir: Path) -> bytes:
    """The picture as PNG, once the result has come.

    Raises:
        ImportError: there is no matplotlib, or it is damaged; other errors of matplotlib too.
        OSError: metrics.jsonl cannot be read.
        ValueError: it has nothing to draw, or the parent has closed the standard input without a result.
    """
    # Here and not above, so that an error becomes one line.
    from tf2dist.finished import training_picture

    series, path = training_picture.SeriesByName(), run_dir / "metrics.jsonl"
    end = 0
    with contextlib.suppress(FileNotFoundError):  # the first line of a short run may come with its result
        end = add_rows(series, path, 0)
    # Most of a long file is read by now; its last lines have come with the result.
    line = sys.stdin.buffer.readline()
    add_rows(series, path, end)
    facts = json.loads(line)
    return training_picture.draw(series, facts["lines"], facts["staleness"])


def add_rows(series: "SeriesByName", path: Path, start: int) -> int:
    """Adds the records of the lines after `start`, in bytes; returns the end of the last whole line."""
    end = start
    with open_to_read(path) as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):  # it is still being written
                break
            end += len(line)
            with contextlib.suppress(ValueError):  # a full disk has cut it off
                row = json.loads(line)
                if isinstance(row, dict):
                    series.add(row)
    return end
