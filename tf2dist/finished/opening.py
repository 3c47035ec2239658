"""The model, the configuration and the data of a run, as the commands need them."""

import types
from dataclasses import replace
from typing import Any

import keras

from tf2dist import registry
from tf2dist.config import schema
from tf2dist.config.load import load
from tf2dist.config.schema import RunConfig
from tf2dist.data import location
from tf2dist.data.arrays import Arrays, Splits
from tf2dist.data.loading import load as load_data
from tf2dist.errors import ConfigError, DataError
from tf2dist.files import open_to_read
from tf2dist.finished.loading import UnknownCode, load_model
from tf2dist.finished.shell import Request, warn


def config_of(request: Request) -> RunConfig:
    """The configuration of the run.

    Raises:
        ConfigError: there is none, or it is no configuration.
    """
    path = request.run_dir / "config.yaml"
    try:
        with open_to_read(path) as file:
            return schema.from_yaml(file.read().decode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"RUN_DIR ({request.run_dir}): config.yaml cannot be read ({reason}); name a run") from None


def model_of(request: Request) -> keras.Model:
    """The model of the run, with the code in the plugins that the command line names, and in no others.

    Raises:
        RequestError: it cannot be loaded.
    """
    try:
        return load_model(request.run_dir, request.step, code_of(request.plugins))
    except UnknownCode as error:
        its = ", ".join(config_of(request).plugins)
        raise ConfigError(
            f"plugins: {request.run_dir} has {error.what}, and no code of a run is executed unasked; name its files "
            f"with plugins=[{its or 'FILE.py'}]"
        ) from None


def data_of(request: Request) -> tuple[str, Splits]:
    """The name and the examples of the data that the command line chooses, or else of the run's own.

    Call `model_of` before, which runs the plugins.

    Raises:
        RequestError: they cannot be had.
    """
    if request.data:
        data = load([*request.data, f"plugins=[{','.join(request.plugins)}]"], None).data
    else:
        config = config_of(request)
        data = config.data
        if data.name in registry.DATA_OF_FIT:
            raise ConfigError(
                f"data ({data.name}): came with the call of tf2dist.fit, and the run does not keep it; give data=NAME, "
                "which a file named with plugins=[FILE.py] may register; predict also takes FILE.npy"
            )
        if data.name not in registry.DATA:
            raise ConfigError(
                f"data ({data.name}): is code of the run's own, and no code of a run is executed unasked; name its "
                f"files with plugins=[{', '.join(config.plugins) or 'FILE.py'}], or give data=NAME"
            )
    data = location.resolve(replace(data, offline="fail"), warn)
    return data.name, load_data(data)


def split_of(name: str, splits: Splits, split: str) -> Arrays:
    """One split of a data set.

    Raises:
        DataError: it has no such examples.
    """
    arrays: Arrays | None = getattr(splits, split)
    if arrays is None or not len(arrays):
        raise DataError(f"split ({split}): data={name} has none; choose another one")
    return arrays


def code_of(plugins: list[str]) -> dict[str, Any]:
    """Runs plugins; returns the classes and functions that they define, by name."""
    return {
        name: found
        for module in registry.load_plugins(plugins)
        for name, found in vars(module).items()
        if isinstance(found, type | types.FunctionType) and found.__module__ == module.__name__
    }
