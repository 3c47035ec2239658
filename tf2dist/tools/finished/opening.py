"""Opens a run for the commands: its configuration, its model and its data."""

import contextlib
import types
from dataclasses import replace
from typing import Any

import keras

from tf2dist import registry, signals
from tf2dist.config import decode
from tf2dist.config.load import load
from tf2dist.config.schema import DataConfig, RunConfig
from tf2dist.data import location
from tf2dist.data.arrays import Arrays
from tf2dist.data.loading import load as load_data
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError, DataError
from tf2dist.files import open_to_read, raising
from tf2dist.process.tables_in_files import Tables
from tf2dist.tools.finished.load_model import MAKE_ROOM, UnknownCode, load_folder
from tf2dist.tools.finished.shell import CommandLine, warn


def config_of(line: CommandLine) -> RunConfig:
    """The configuration of the run."""
    path = line.run_dir / "config.yaml"
    problem = f"RUN_DIR ({line.run_dir}): config.yaml cannot be read"
    with raising(problem, "name a run", also=(ValueError,)), open_to_read(path) as file:
        return decode.from_yaml(file.read().decode())


def model_of(line: CommandLine) -> keras.Model:
    """The model of the run, which is not trained; runs the plugins that the command line names, and no others."""
    # A run directory may come from somebody else: the plugins in its configuration are shown, but not run.
    try:
        with contextlib.ExitStack() as stack:
            with raising("TMPDIR: no folder for temporary files can be made", MAKE_ROOM):
                tables = Tables(stack.enter_context(signals.temporary_folder()) / "tables")
            return load_folder(line.run_dir, line.step, code_of(line.plugins), tables)
    except UnknownCode as error:
        run_plugins = ", ".join(config_of(line).plugins)
        raise ConfigError(
            f"plugins: {line.run_dir} needs {error.what}, but a run's own code is executed only if you name it; "
            f"give plugins=[{run_plugins or 'FILE.py'}]"
        ) from None


def data_of(line: CommandLine) -> tuple[str, Splits]:
    """The name and the examples of the data that the command line chooses, by default the run's own.

    Call `model_of` first, which runs the plugins that may register the data.
    """
    plugins = f"plugins=[{','.join(line.plugins)}]"
    if any(option.startswith("data=") for option in line.data):
        data = load([*line.data, plugins], None).data
    else:
        data = _own_data(line, plugins)
    # Never other data than asked for: a model of MNIST evaluated on the fallback would give figures that mean nothing.
    data = location.resolve(replace(data, offline="fail"), warn)
    return data.name, load_data(data)


def _own_data(line: CommandLine, plugins: str) -> DataConfig:
    """The run's own data, with the options that the command line gives for it."""
    config = config_of(line)
    name = config.data.name
    if name in registry.DATA_OF_FIT:
        raise ConfigError(
            f"data ({name}): came with the call of tf2dist.fit, and the run does not keep it; give data=NAME, "
            "which a file named with plugins=[FILE.py] may register; predict also takes FILE.npy"
        )
    if name not in registry.DATA:
        raise ConfigError(
            f"data ({name}): is the run's own code, which is executed only if you name it; give its "
            f"files with plugins=[{', '.join(config.plugins) or 'FILE.py'}], or give data=NAME"
        )
    if not line.data:
        return config.data
    tree = load([f"data={name}", *line.data, plugins], None).as_tree()["data"]
    given = {option.partition("=")[0].lstrip("+").removeprefix("data.") for option in line.data}
    own = config.as_tree()["data"]
    return decode.to_dataclass(DataConfig, own | {key: tree[key] for key in given})


def split_of(name: str, splits: Splits, split: str) -> Arrays:
    """One split of a data set."""
    arrays: Arrays | None = getattr(splits, split)
    if arrays is None or not len(arrays):
        raise DataError(f"split ({split}): data={name} has none; choose another one")
    return arrays


def code_of(plugins: list[str]) -> dict[str, Any]:
    """Runs plugins; returns the classes and functions that they define, by name."""
    # Only what a plugin defines itself, not what it imports.
    return {
        name: value
        for module in registry.load_plugins(plugins)
        for name, value in vars(module).items()
        if isinstance(value, type | types.FunctionType) and value.__module__ == module.__name__
    }
