"""Models, data and optimizers by name; a plugin file adds its own with the decorators here.

    import keras
    import tf2dist

    @tf2dist.register_model("mine")
    def mine(input_shape, num_classes, width=64):
        return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(),
                                 keras.layers.Dense(width, "relu"), keras.layers.Dense(num_classes)])

trains with ``python -m tf2dist plugins=[mine.py] model=mine +model.width=128``.
"""

import runpy
from collections.abc import Callable
from typing import Any, TypeVar

from tf2dist.errors import ConfigError
from tf2dist.hints import nearest

Function = TypeVar("Function", bound=Callable[..., Any])
Registry = dict[str, Callable[..., Any]]

MODELS: Registry = {}
DATA: Registry = {}
OPTIMIZERS: Registry = {}


def _decorator(registry: Registry, name: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        registry[name] = function
        return function

    return register


def register_model(name: str) -> Callable[[Function], Function]:
    """Registers ``function(input_shape, num_classes, **arguments) -> keras.Model`` that gives logits."""
    return _decorator(MODELS, name)


def register_data(name: str) -> Callable[[Function], Function]:
    """Registers ``function(data_config) -> tf2dist.data.Splits``."""
    return _decorator(DATA, name)


def register_optimizer(name: str) -> Callable[[Function], Function]:
    """Registers ``function(**arguments) -> keras.optimizers.Optimizer``.

    The optimizer must treat each variable by itself: with several parameter servers each of them
    runs one of its own over the variables that it holds.
    """
    return _decorator(OPTIMIZERS, name)


def look_up(registry: Registry, option: str, name: str) -> Callable[..., Any]:
    """The registered function.

    Raises:
        ConfigError: nothing is registered under `name`.
    """
    if name in registry:
        return registry[name]
    raise ConfigError(f"{option} ({name}): must be one of {', '.join(sorted(registry))}{nearest(name, registry)}")


def load_plugins(paths: list[str]) -> None:
    """Runs the user's files, which register what they define."""
    for path in paths:
        runpy.run_path(path)
