"""The user's functions on their way to the tasks: by name where tasks can import them, by cloudpickle elsewhere."""

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

from tf2dist.errors import FitError, first_line
from tf2dist.files import write_whole


def sent(folder: Path, function: Callable[..., Any], file: str, what: str) -> dict[str, str]:
    """Sends a function; returns what `received` needs, as JSON holds it.

    Args:
        folder: of the job.
        file: in it, for a function that tasks cannot import.
        what: it is, for messages.

    Raises:
        FitError: it cannot be sent.
        OSError: the file cannot be written.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module and is_importable(module) and _attribute(sys.modules[module], name) is function:
        return {"import": f"{module}:{name}"}
    write_whole(folder / file, pickled(function, what))
    return {"pickle": file}


def received(folder: Path, stored: dict[str, str]) -> Callable[..., Any]:
    """The function that `sent` has sent."""
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
    except AttributeError:  # one that was made inside a function
        return None


def is_importable(module: str) -> bool:
    """Whether a task, which has the same path, can import the module that this process has under this name."""
    if module == "__main__" or module not in sys.modules:
        return False
    if module in sys.builtin_module_names:
        return True
    parent = module.rpartition(".")[0]
    if parent and not is_importable(parent):
        return False
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    try:
        specs = (finder.find_spec(module, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, specs), None)
    except (ImportError, AttributeError, ValueError):
        return False
    file = getattr(sys.modules[module], "__file__", None)
    return spec is not None and (file is None or spec.origin is None or _same_file(file, spec.origin))


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def pickled(value: Any, what: str) -> bytes:
    """The user's code by value where tasks cannot import it.

    Raises:
        FitError: cloudpickle cannot take it.
    """
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    try:
        with _by_value(module):
            data: bytes = cloudpickle.dumps(value)
            return data
    except Exception as error:
        raise FitError(
            f"{what}: cannot be sent to the tasks ({first_line(str(error))}); move the function into a module that can "
            "be imported, or leave out what it holds on to"
        ) from None


@contextlib.contextmanager
def _by_value(module: types.ModuleType | None) -> Iterator[None]:
    if module is None or module.__name__ == "__main__" or is_importable(module.__name__):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
