"""The files into which AutoGraph writes its versions of functions, in the folder for temporary files.

It would remove them when a process ends as usual; a task does not, and may be killed. So a task notes their names in a
list, which lies in memory, and its fork server removes them once the task has ended.
"""

import contextlib
import importlib.util
import os
import sys

from tf2dist.tf_constants import AUTOGRAPH_FILE


def new_list() -> int:
    """The descriptor of an empty list, for a process that is forked."""
    return os.memfd_create("generated files")


def note(generated: int) -> None:
    """In a task: from now on the names of these files are added to the list."""

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        if event == "tempfile.mkstemp" and AUTOGRAPH_FILE in str(arguments[0]):
            os.write(generated, os.fsencode(f"{arguments[0]}\n"))

    sys.addaudithook(on_event)


def remove(generated: int) -> None:
    """Removes the files in the list, with the bytecode that Python has put beside them, and closes it."""
    os.lseek(generated, 0, os.SEEK_SET)
    with open(generated, "rb") as lines:
        paths = lines.read().splitlines()
    for path in map(os.fsdecode, paths):
        for file in (path, importlib.util.cache_from_source(path)):
            with contextlib.suppress(OSError):
                os.remove(file)
