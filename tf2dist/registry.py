"""Models, data and optimizers by name; a plugin file adds its own with the decorators here.

    import keras
    import tf2dist

    @tf2dist.register_model("mine")
    def mine(input_shape, num_classes, width=64):
        return keras.Sequential([keras.Input(input_shape), keras.layers.Rescaling(1 / 255), keras.layers.Flatten(),
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
# What a run of `fit` calls its data; nothing is registered under these names, as the data came with the call.
ARRAYS_OF_FIT, STREAM_OF_FIT = DATA_OF_FIT = ("arrays", "stream")
_LOCATIONS: dict[tuple[str, str], str] = {}  # file and line of what plugins have registered, by option and name


def _decorator(registry: Registry, option: str, name: str, override: bool) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        # A helper may register functions of several files, so the place is the function's own. A class has no code
        # object; its place is the caller's.
        code, caller = getattr(function, "__code__", None), sys._getframe(1)
        file, line = (code.co_filename, code.co_firstlineno) if code else (caller.f_code.co_filename, caller.f_lineno)
        location = f"{file}, line {line}"
        earlier = _LOCATIONS.get((option, name), "tf2dist itself")
        # A plugin that another one imports runs twice, and registers the same functions again.
        if name in registry and not override and earlier != location:
            raise ConfigError(
                f"{option} ({name}): is registered by {earlier}, and again by {location}; choose another name, or "
                f"replace the first with @tf2dist.register_{option}({name!r}, override=True)"
            )
        registry[name] = function
        if not function.__module__.startswith("tf2dist."):
            _LOCATIONS[option, name] = location
        return function

    return register


def register_model(name: str, *, override: bool = False) -> Callable[[Function], Function]:
    """Registers ``function(input_shape, num_classes, **arguments) -> keras.Model``, compiled or not.

    `input_shape` is that of one example, such as (28, 28, 1), and `num_classes` None for data without classes. A
    compiled model is trained with its own loss, metrics and optimizer, or if that is None, with the optimizer of the
    options. One that is not compiled gives the logits of the classes, [batch, num_classes]. The inputs are those of the
    data, so images are bytes from 0 to 255; a model that wants them from 0 to 1 begins with
    ``keras.layers.Rescaling(1 / 255)``.

    Args:
        name: the value of ``model=`` that chooses it; its arguments are options, as in ``+model.width=128``.
        override: replaces what is registered under the name, be it a model of tf2dist's own.

    Raises:
        ConfigError: the name is taken.
    """
    return _decorator(MODELS, "model", name, override)


def register_data(name: str, *, override: bool = False) -> Callable[[Function], Function]:
    """Registers ``function(data_config, **arguments) -> tf2dist.data.Splits``.

    `data_config` has the options ``data.*`` as attributes, such as ``data_config.num_validation``. The splits are
    `tf2dist.data.Arrays`. Without ``num_classes=None`` they are taken for a classification of ten classes.

    Args:
        name: the value of ``data=`` that chooses it; its arguments are options, as in ``+data.size=1000``.
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
        name: the value of ``optimizer=`` that chooses it; its arguments are options, as in ``+optimizer.peak=0.1``.
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


def call(option: str, name: str, function: Callable[..., Any], arguments: dict[str, Any], fixed: dict[str, Any]) -> Any:
    """Calls a registered function with the user's arguments and those of the run (`fixed`).

    Raises:
        ConfigError: the function does not accept these arguments, or needs others.
    """
    if conflicts := sorted(arguments.keys() & fixed.keys()):
        raise ConfigError(
            f"{option}.{conflicts[0]} ({arguments[conflicts[0]]}): is given by the run itself; leave it out"
        )
    try:
        inspect.signature(function).bind(**fixed, **arguments)
    except TypeError as error:
        way_out = "leave it out" if "unexpected" in str(error) else f"give it with +{option}.ARGUMENT=VALUE"
        raise ConfigError(f"{option} ({name}): {error}; {way_out}") from None
    return function(**fixed, **arguments)


class _Loader(SourceFileLoader):
    """Neither reads nor writes cached byte code, which a change of the file in the same second would not invalidate."""

    def get_code(self, fullname: str) -> types.CodeType:
        code: types.CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load_plugins(paths: list[str]) -> list[types.ModuleType]:
    """Runs the user's files, which register their functions; returns them as modules.

    While a file runs, its folder is the first in ``sys.path``, as with ``python FILE``. Then the folder moves to
    the end: the file's functions may still import from it later, but a file there cannot hide an installed module.

    Each file becomes a module in ``sys.modules``; without that `multiprocessing` could not find its functions.
    """
    modules = []
    for number, path in enumerate(paths):
        loader = _Loader(f"tf2dist_plugin_{number}_{Path(path).stem}", path)
        module = types.ModuleType(loader.name)
        module.__file__ = path
        sys.modules[loader.name] = module
        modules.append(module)
        folder = str(Path(path).parent)
        sys.path.insert(0, folder)
        try:
            loader.exec_module(module)
        finally:
            with contextlib.suppress(ValueError):  # the file may have replaced the list
                sys.path.remove(folder)
            sys.path.append(folder)
    return modules
