"""The settings of Keras that keras.json would otherwise change on each host separately.

Keras reads KERAS_HOME/keras.json, or ~/.keras/keras.json, when it is imported. A data format or an
epsilon from there makes another model of the same code, so the launcher reads the file once and the
values become options: hosts compare them, checkpoints hold them, and every task sets them.
The launcher must not import Keras, which takes seconds: this module follows keras/src/backend/config.py,
and a probe compares the two.
"""

import json
import os
import stat
from dataclasses import asdict, replace
from typing import Any

from tf2dist.config.option import rules_of
from tf2dist.config.schema import KerasConfig
from tf2dist.errors import ConfigError
from tf2dist.tf_constants import KERAS_DEFAULTS, KERAS_HOME

DEFAULTS = KerasConfig(**KERAS_DEFAULTS)


def resolve(settings: KerasConfig) -> KerasConfig:
    """Completes the settings that no option gives: from keras.json, or else with Keras's own defaults.

    Raises:
        ConfigError: the file holds a value that Keras or this program refuses.
    """
    in_file = from_file()
    given = {name: value for name, value in asdict(settings).items() if value is not None}
    resolved = replace(DEFAULTS, **{**in_file, **given})
    # After the merge: a value out of range in the file does no harm where an option overrides it.
    for name, value, holds, rule in rules_of(resolved, "keras."):
        if not holds:
            raise ConfigError(f"{name} ({value}, as in {path()}): {rule}")
    return resolved


def notes(settings: KerasConfig) -> list[str]:
    """A line about each setting that keras.json changes from Keras's default."""
    return [
        f"keras.{name} is {value}, as in {path()}"
        for name, value in from_file().items()
        if value == getattr(settings, name) != getattr(DEFAULTS, name)
    ]


def path() -> str:
    """The path at which Keras looks for its file."""
    folder = os.environ.get(KERAS_HOME)
    if folder is None:
        home = os.path.expanduser("~")
        # As Keras does where the home directory cannot be written.
        folder = os.path.join(home if os.access(home, os.W_OK) else "/tmp", ".keras")
    return os.path.expanduser(os.path.join(folder, "keras.json"))


def from_file() -> dict[str, Any]:
    """The settings in keras.json; none if the file does not exist, or is not JSON, which Keras ignores too.

    Raises:
        ConfigError: Keras would fail on the file, or wait for ever.
    """
    try:
        mode = os.stat(path()).st_mode
    except (OSError, ValueError):  # it does not exist, or its folder is not accessible
        return {}
    # Opening a named pipe would block until somebody writes to it.
    if not stat.S_ISREG(mode):
        raise ConfigError(f"keras.json ({path()}): is not a regular file; remove it, or set KERAS_HOME")
    try:
        with open(path(), encoding="utf-8") as file:
            values = json.load(file)
    except ValueError:
        return {}
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"keras.json ({path()}): cannot be read ({reason}); repair it, or set KERAS_HOME") from None
    if not isinstance(values, dict):
        raise ConfigError(f"keras.json ({path()}): is not a JSON object; remove it, or set KERAS_HOME")
    # Keras asserts these types when it is imported, and a failed assertion names no file.
    for name, default in KERAS_DEFAULTS.items():
        if name in values and not isinstance(values[name], type(default)):
            kind = "a number with a point" if isinstance(default, float) else "a word"
            raise ConfigError(
                f"keras.json ({path()}): {name} ({values[name]!s:.40}) must be {kind}, as Keras wants it; correct the "
                "file"
            )
    return {name: values[name] for name in KERAS_DEFAULTS if name in values}
