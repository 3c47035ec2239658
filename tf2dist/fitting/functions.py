"""Sends the user's functions to the tasks: by name if tasks can import them, otherwise by cloudpickle.

A name is better where it works: the task then runs the same module as everybody else, with its global variables, and
nothing is unpickled.
"""

import contextlib
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from tf2dist.errors import FitError, reason_of
from tf2dist.files import write_whole


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


def is_importable(module: str) -> bool:
    """Whether a task, which has the same `sys.path`, gets this process's module when it imports the name."""
    # The main module of a task is another one.
    if module == "__main__" or module not in sys.modules:
        return False
    if module in sys.builtin_module_names:
        return True
    # A module of a package is found only if its package is, since Python imports that first.
    parent = module.rpartition(".")[0]
    if parent and not is_importable(parent):
        return False
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    try:
        # Asks the finders themselves: `importlib.util.find_spec` answers from `sys.modules`, where everything that
        # this process has imported stands, also a module that a test or a notebook has put there.
        specs = (finder.find_spec(module, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, specs), None)
    except (ImportError, AttributeError, ValueError):
        return False
    file = getattr(sys.modules[module], "__file__", None)
    # Another file of the same name may come first in the path, or the name was given to a module by hand.
    return spec is not None and (file is None or spec.origin is None or _same_file(file, spec.origin))


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def pickled(value: Any, what: str) -> bytes:
    """The user's function or class, pickled by value if tasks cannot import its module.

    Raises:
        FitError: cloudpickle cannot pickle it, for example because it refers to an open file.
    """
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    try:
        with _by_value(module):
            data: bytes = cloudpickle.dumps(value)
            return data
    except Exception as error:  # whatever an object of the user's raises when it is pickled
        raise FitError(
            f"{what}: cannot be sent to the tasks ({reason_of(error)}); move the function into a module that can "
            "be imported, or remove the object to which it refers"
        ) from None


@contextlib.contextmanager
def _by_value(module: types.ModuleType | None) -> Iterator[None]:
    # cloudpickle sends `__main__` by value anyway, and every other module by name unless it is told otherwise.
    if module is None or module.__name__ == "__main__" or is_importable(module.__name__):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        # The list of such modules is one for the whole process, so it must be left as the user's program had it.
        cloudpickle.unregister_pickle_by_value(module)
