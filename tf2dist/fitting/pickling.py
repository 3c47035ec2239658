"""Pickles the user's functions and classes for the tasks: by name if tasks can import them, otherwise by value.

A name is better where it works: the task then runs the same module as everybody else, with its global variables.
Keras objects in what is pickled go as Keras saves them, with the user's classes: Keras's own pickling leaves out the
user's classes in an object, and what its `FeatureSpace` makes when it is adapted.
"""

import contextlib
import io
import operator
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import keras

from tf2dist.errors import FitError, reason_of
from tf2dist.linux import process_wide

# Packages that every task has: their classes and functions in a model need not be sent.
TASK_PACKAGES = ("keras", "tensorflow", "numpy", "builtins", "functools", "optree", "tf2dist")


class Pickler(cloudpickle.Pickler):
    """Pickles whatever cloudpickle does.

    Attributes:
        by_name: an object that tasks can import by its name.
        has_keras: whether there was an object that Keras saves.
    """

    by_name: Any = None
    has_keras = False

    def reducer_override(self, obj: Any) -> Any:
        # cloudpickle itself sends functions and classes alone by name, and a `tf.function` is neither.
        if obj is self.by_name:
            return obj.__qualname__
        # The same method for all that Keras saves: layers, models, losses, metrics, optimizers.
        if type(obj).__reduce__ is not keras.Layer.__reduce__:
            return super().reducer_override(obj)
        self.has_keras = True
        load, arguments = obj.__reduce__()
        _, pickles = custom_objects(obj)
        return _loaded, (load, arguments, pickles)


def _loaded(load: Callable[..., Any], arguments: tuple[Any, ...], custom: dict[str, bytes]) -> Any:
    with keras.saving.custom_object_scope(unpickled(custom)):
        loaded = load(*arguments)
    # It makes its last layers when it is first called, which in a graph of tf.data is too late.
    if isinstance(loaded, keras.utils.FeatureSpace):
        loaded.get_inputs()
    return loaded


def pickled(value: Any, argument: str, *, by_name: bool = True) -> bytes:
    """The user's function or class, pickled by name if tasks can import it, otherwise by value.

    Args:
        argument: the name of the argument of `fit`, for messages.
        by_name: otherwise the user may ask cloudpickle to pickle its module by value.
    """
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if not isinstance(module, types.ModuleType):  # a program may put any object there
        module = None
    try:
        with _by_value(module):
            file = io.BytesIO()
            pickler = Pickler(file)
            pickler.by_name = value if by_name and module and _is_named_in(module, value) else None
            pickler.dump(value)
            # A trial: what Keras has saved and cannot load again would fail in every task.
            if pickler.has_keras:
                cloudpickle.loads(file.getvalue())
            return file.getvalue()
    except Exception as error:  # whatever an object of the user's raises when it is pickled
        raise FitError(
            f"{argument}: cannot be sent to the tasks ({reason_of(error)}); move the function into a module that can "
            "be imported, or remove the object to which it refers"
        ) from None


def _is_named_in(module: types.ModuleType, value: Any) -> bool:
    # The name must lead to this very object: a decorator or a second definition may have replaced what it stands for.
    try:
        is_found = operator.attrgetter(getattr(value, "__qualname__", ""))(module) is value
    except AttributeError:  # a function within a function: its name has a part "<locals>"
        return False
    return is_found and is_importable(module.__name__)


@contextlib.contextmanager
def _by_value(module: types.ModuleType | None) -> Iterator[None]:
    # cloudpickle sends `__main__` by value anyway, and every other module by name unless it is told otherwise.
    if module is None or module.__name__ == "__main__" or is_importable(module.__name__):
        yield
        return
    # The list of such modules is one for the whole process, so it must be left as the user's program had it.
    with process_wide:
        is_listed = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if not is_listed:
                cloudpickle.unregister_pickle_by_value(module)


def custom_objects(model: keras.Model) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The user's own classes and functions in a model, and their pickles, by the names under which Keras looks them up.

    Those that cannot be pickled are left out: Keras may not need them, and if it does, loading the model fails.
    """
    # Each is pickled alone, so that one that fails leaves the others; by both names, since Keras asks for the
    # registered name of some and for the plain name of others.
    objects: dict[str, Any] = {}
    pickles: dict[str, bytes] = {}
    for code in _users_own(model):
        with contextlib.suppress(FitError):
            data = pickled(code, "model", by_name=False)
            names = code.__name__, keras.saving.get_registered_name(code)
            objects |= dict.fromkeys(names, code)
            pickles |= dict.fromkeys(names, data)
    return objects, pickles


def ambiguous_names(model: keras.Model) -> set[str]:
    """The names under which Keras looks up several of the user's own classes and functions in a model."""
    counts = Counter(map(keras.saving.get_registered_name, _users_own(model)))
    return {name for name, count in counts.items() if count > 1}


def unpickled(custom: dict[str, bytes]) -> dict[str, Any]:
    """The objects that `custom_objects` has pickled."""
    return {name: cloudpickle.loads(data) for name, data in custom.items()}


def _users_own(model: keras.Model) -> Iterator[Any]:
    """The user's own classes and functions to which a model refers, directly or through its attributes."""
    # The values keep the objects alive: the `id` of one that is gone could be given to another.
    visited: dict[int, Any] = {}
    # A list instead of recursion, since layers refer to each other in long chains and in circles.
    queue: list[Any] = [model]
    while queue:
        value = queue.pop()
        if id(value) in visited:
            continue
        visited[id(value)] = value
        if isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, list | tuple | set):
            queue.extend(value)  # not +=, which the tuples of an object that Keras tracks refuse
        # A lambda has no name by which Keras could ask for it; Keras saves its code itself.
        elif isinstance(value, types.FunctionType | type):
            if _is_users(value) and value.__name__ != "<lambda>":
                yield value
        elif not _is_users(type(value)) or hasattr(value, "get_config"):
            queue.append(type(value))
            # Into the attributes of Keras's objects and of what Keras can save; not into all the user's data.
            if type(value).__module__.partition(".")[0] == "keras" or hasattr(value, "get_config"):
                queue += _attributes(value) if hasattr(value, "__dict__") else ()


def _attributes(value: Any) -> list[Any]:
    # Keras wraps the method `build` of each layer, under the user's name, in a function that is the object's alone.
    return [attribute for key, attribute in vars(value).items() if not callable(getattr(type(value), key, None))]


def _is_users(code: Any) -> bool:
    return (getattr(code, "__module__", None) or "builtins").partition(".")[0] not in TASK_PACKAGES


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


def _same_file(path: str, other_path: str) -> bool:
    try:
        return os.path.samefile(path, other_path)
    except OSError:
        return False
