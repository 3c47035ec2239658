"""Which function a process is in, read from its stacks: one of the user's own, if there is one."""

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tf2dist.tf_constants import AUTOGRAPH_FILE, PYTHON_FUNCTIONS

PACKAGE = str(Path(__file__).parents[1])  # the whole package
STANDARD = sysconfig.get_path("stdlib")
INSTALLED = ("site-packages", "dist-packages")
CALLS_PYTHON = f"{PYTHON_FUNCTIONS.replace('.', '/')}.py"


def current_function() -> tuple[str, bool]:
    """The function, such as "load (mine.py:12)", and whether it is the user's own code.

    This is the innermost function of the user's in the main thread, or else in a thread in which TensorFlow calls
    Python. If there is none, it is the innermost one of tf2dist in the main thread. Threads that the user has started
    do not count, since they may legitimately wait for ever.
    """
    # A snapshot: threads run on, and frames that have ended meanwhile stay readable.
    stacks = sys._current_frames()
    main = stacks.pop(threading.main_thread().ident or 0, None)
    for stack in (main, *filter(_works_for_tensorflow, stacks.values())):
        for frame in _outwards(stack):
            if _is_users(frame.f_code.co_filename):
                return _name(frame), True
    package_frames = [frame for frame in _outwards(main) if frame.f_code.co_filename.startswith(PACKAGE)]
    return (_name(package_frames[0]) if package_frames else "the start"), False


def _works_for_tensorflow(stack: FrameType) -> bool:
    """Whether a graph calls a Python function in this thread, as with `tf.numpy_function` and `from_generator`."""
    return any(frame.f_code.co_filename.endswith(CALLS_PYTHON) for frame in _outwards(stack))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def _is_users(file: str) -> bool:
    if file.startswith(("<", PACKAGE, STANDARD)) or AUTOGRAPH_FILE in file:
        return False
    return not set(INSTALLED) & set(Path(file).parts)


def _name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    file = f"tf2dist/{path.relative_to(PACKAGE)}" if str(path).startswith(PACKAGE) else path.name
    return f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"
