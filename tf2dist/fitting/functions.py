"""Sends the user's functions to the tasks: by name if tasks can import them, otherwise by cloudpickle.

A name is better where it works: the task then runs the same module as everybody else, with its global variables, and
nothing is unpickled.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from tf2dist.files import write_whole
from tf2dist.fitting.pickling import is_importable, pickled


def send_function(folder: Path, function: Callable[..., Any], file: str, what: str) -> dict[str, str]:
    """Sends a function; returns what `load_function` needs, as a value of JSON.

    Args:
        folder: that of the job.
        file: the name of the file in it, for a function that tasks cannot import.
        what: the argument of `fit` that it is, for messages.

    Raises:
        FitError: it cannot be sent.
        OSError: the file cannot be written.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    # The name must lead to this very object: a decorator or a second definition may have replaced what it stands for.
    if module and is_importable(module) and _attribute(sys.modules[module], name) is function:
        return {"import": f"{module}:{name}"}
    write_whole(folder / file, pickled(function, what))
    return {"pickle": file}


def load_function(folder: Path, stored: dict[str, str]) -> Callable[..., Any]:
    """Returns the function that `send_function` has sent.

    Args:
        folder: that of the job, of which `shipping.check_private` has made sure that nobody else can write in it.
    """
    ((kind, value),) = stored.items()
    if kind == "pickle":
        pickle: Callable[..., Any] = cloudpickle.loads((folder / value).read_bytes())
        return pickle
    module, _, name = value.partition(":")
    function: Callable[..., Any] = _attribute(importlib.import_module(module), name)
    return function


def _attribute(owner: Any, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), owner)
    except AttributeError:  # a function within a function: its name has a part "<locals>"
        return None
