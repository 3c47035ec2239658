"""Models, data and optimizers by name; a plugin file adds its own with the decorators here.

    import keras
    import tf2dist

    @tf2dist.register_model("mine")
    def mine(input_shape, num_classes, width=64):
        return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(),
                                 keras.layers.Dense(width, "relu"), keras.layers.Dense(num_classes)])

trains with ``python -m tf2dist plugins=[mine.py] model=mine +model.width=128``.
"""

import contextlib
import inspect
import sys
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, TypeVar

from tf2dist.errors import ConfigError, nearest

Function = TypeVar("Function", bound=Callable[..., Any])
Registry = dict[str, Callable[..., Any]]

MODELS: Registry = {}
DATA: Registry = {}
OPTIMIZERS: Registry = {}
_PLACES: dict[tuple[str, str], str] = {}  # where each was registered, by option and name; not those of our own


def _decorator(registry: Registry, option: str, name: str, override: bool) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        # That of the function, since a helper may register those of several files; a class has none of its own.
        code, caller = getattr(function, "__code__", None), sys._getframe(1)
        file, line = (code.co_filename, code.co_firstlineno) if code else (caller.f_code.co_filename, caller.f_lineno)
        place = f"{file}, line {line}"
        before = _PLACES.get((option, name), "tf2dist itself")
        # A file that another one imports runs twice; what it registers then is the same.
        if name in registry and not override and before != place:
            raise ConfigError(
                f"{option} ({name}): is registered by {before}, and again by {place}; choose another name, or replace "
                f"the first with @tf2dist.register_{option}({name!r}, override=True)"
            )
        registry[name] = function
        if not function.__module__.startswith("tf2dist."):
            _PLACES[option, name] = place
        return function

    return register


def register_model(name: str, *, override: bool = False) -> Callable[[Function], Function]:
    """Registers ``function(input_shape, num_classes, **arguments) -> keras.Model`` that gives logits.

    The images reach the model as float32 from 0 to 1: the bytes of the data divided by 255. A model
    that wants other inputs begins with a layer of its own, such as ``keras.layers.Rescaling(255.0)``.

    Args:
        name: what ``model=`` chooses it by; its arguments are options, as in ``+model.width=128``.
        override: replaces what is registered under the name, be it a model of tf2dist's own.

    Raises:
        ConfigError: the name is taken.
    """
    return _decorator(MODELS, "model", name, override)


def register_data(name: str, *, override: bool = False) -> Callable[[Function], Function]:
    """Registers ``function(data_config, **arguments) -> tf2dist.data.Splits``, with images of bytes (uint8).

    Args:
        name: what ``data=`` chooses it by; its arguments are options, as in ``+data.size=1000``.
        override: as of `register_model`.

    Raises:
        ConfigError: the name is taken.
    """
    return _decorator(DATA, "data", name, override)


def register_optimizer(name: str, *, override: bool = False) -> Callable[[Function], Function]:
    """Registers ``function(**arguments) -> keras.optimizers.Optimizer``.

    The optimizer must treat each variable by itself: with several parameter servers each of them
    runs one of its own over the variables that it holds. A function with a parameter `total_steps`
    gets the number of updates of the whole run, for a schedule.

    Args:
        name: what ``optimizer=`` chooses it by; its arguments are options, as in ``+optimizer.peak=0.1``.
        override: as of `register_model`.

    Raises:
        ConfigError: the name is taken.
    """
    return _decorator(OPTIMIZERS, "optimizer", name, override)


def look_up(registry: Registry, option: str, name: str) -> Callable[..., Any]:
    """The registered function.

    Raises:
        ConfigError: nothing is registered under `name`.
    """
    if name in registry:
        return registry[name]
    raise ConfigError(f"{option} ({name}): must be one of {', '.join(sorted(registry))}{nearest(name, registry)}")


def call(option: str, name: str, function: Callable[..., Any], given: dict[str, Any], fixed: dict[str, Any]) -> Any:
    """Calls what is registered as `name` with the user's arguments and those that the run gives.

    Raises:
        ConfigError: the function takes no such arguments, or wants others.
    """
    if both := sorted(given.keys() & fixed.keys()):
        raise ConfigError(f"{option}.{both[0]} ({given[both[0]]}): is given by the run itself; leave it out")
    try:
        inspect.signature(function).bind(**fixed, **given)
    except TypeError as error:
        way_out = "leave it out" if "unexpected" in str(error) else f"give it with +{option}.ARGUMENT=VALUE"
        raise ConfigError(f"{option} ({name}): {error}; {way_out}") from None
    return function(**fixed, **given)


class _Loader(SourceFileLoader):
    """Leaves no byte code beside the user's file, and takes none: it is told from a changed file by whole seconds."""

    def get_code(self, fullname: str) -> types.CodeType:
        code: types.CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load_plugins(paths: list[str]) -> None:
    """Runs the user's files, which register what they define.

    As with ``python FILE`` the file's own folder comes first where it looks for modules. When it
    has run the folder goes to the end: its functions may import later, and no file beside it may
    then stand in the place of a module that is installed.

    Each file is a module that can be looked up, or its functions could not be given to `multiprocessing`.
    """
    for number, path in enumerate(paths):
        loader = _Loader(f"tf2dist_plugin_{number}_{Path(path).stem}", path)
        module = types.ModuleType(loader.name)
        module.__file__ = path
        sys.modules[loader.name] = module
        folder = str(Path(path).parent)
        sys.path.insert(0, folder)
        try:
            loader.exec_module(module)
        finally:
            with contextlib.suppress(ValueError):  # the file may have made the list anew
                sys.path.remove(folder)
            sys.path.append(folder)
