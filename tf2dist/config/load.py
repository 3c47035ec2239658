"""Loads one command line as one checked `RunConfig`, or says in one line what is wrong; reads keras.json for it.

Keras reads KERAS_HOME/keras.json, or ~/.keras/keras.json, when it is imported. A data format or an
epsilon from there makes another model of the same code, and the file may differ from host to host. So the launcher
reads the file once and the values become options: hosts compare them, checkpoints hold them, and every task sets them.
The launcher must not import Keras, which takes seconds: `resolve`, `notes` and what they call follow
keras/src/backend/config.py, and a probe compares the two.
"""

import functools
import json
import os
import re
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.config.checks import check, with_floats
from tf2dist.config.compose import (
    ConfigSource,
    groups,
    hydra_settings,
    keys,
    name_of,
    open_hydra,
    prepare_overrides,
    setting,
)
from tf2dist.config.decode import DEFAULT_RUN_DIR, as_written, flatten, to_dataclass
from tf2dist.config.option import rules_of
from tf2dist.config.schema import ClusterConfig, KerasConfig, RunConfig
from tf2dist.errors import ConfigError, brief_reason
from tf2dist.files import is_path, raising
from tf2dist.tf_constants import KERAS_DEFAULTS, KERAS_HOME

DEFAULTS = KerasConfig(**KERAS_DEFAULTS)


def resolve(settings: KerasConfig) -> KerasConfig:
    """Completes the settings that no option gives: from keras.json, or else with Keras's own defaults."""
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
    """The settings in keras.json; none if the file does not exist, or is not JSON, which Keras ignores too."""
    try:
        mode = os.stat(path()).st_mode
    except (OSError, ValueError):  # it does not exist, or its folder is not accessible
        return {}
    # Opening a named pipe would block until somebody writes to it.
    if not stat.S_ISREG(mode):
        raise ConfigError(f"keras.json ({path()}): is not a regular file; remove it, or set KERAS_HOME")
    try:
        with raising(f"keras.json ({path()}): cannot be read", "repair it, or set KERAS_HOME", also=(RecursionError,)):
            values = json.loads(Path(path()).read_text(encoding="utf-8"))
    except ValueError:
        return {}
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


BUILT_IN = ConfigSource()
MAX_DIGITS = 308  # of an integer that a float can hold


def load(overrides: list[str], tf_config: str | None, source: ConfigSource = BUILT_IN) -> RunConfig:
    """Composes, converts and checks the configuration of one command line.

    Args:
        overrides: the arguments of the command, such as ``["mode=sync", "train.steps=100"]``.
        tf_config: the value of the environment variable TF_CONFIG, which chooses the default cluster.
        source: the configuration files.
    """
    with open_hydra(source) as hydra:
        ready = prepare_overrides(hydra, source.name, overrides, tf_config)
        # An override with ${...} may be about the working directory, which Hydra notes when it composes.
        if source == BUILT_IN and not any("${" in override for override in ready):
            composed = _composed_before(tuple(ready))
        else:
            composed = hydra.compose_config(source.name, ready, RunMode.RUN)
        config = to_config(composed, tf_config)
        config.run_dir = run_dir_of(composed, config)
        return config


@functools.lru_cache(maxsize=8)
def _composed_before(overrides: tuple[str, ...]) -> DictConfig:
    """Composes the files of the package, which nobody changes, once for each command line.

    It takes a tenth of a second, and a program may call `fit` many times.
    """
    with open_hydra(BUILT_IN) as hydra:
        return hydra.compose_config(BUILT_IN.name, list(overrides), RunMode.RUN)


def run_dir_of(composed: DictConfig, config: RunConfig) -> str | None:
    """The directory of a run, which has two names: ours and Hydra's."""
    if as_written(composed.hydra.run)["dir"] == "${run_dir}":
        return config.run_dir
    hydra_dir = setting(composed, "hydra.run.dir")
    if config.run_dir not in (None, hydra_dir):
        raise ConfigError(
            f"hydra.run.dir ({hydra_dir}): is another name of run_dir, which is {config.run_dir}; give one"
        )
    if not is_path(hydra_dir):
        raise ConfigError(
            f"hydra.run.dir ({hydra_dir}): is not a valid name of a directory; leave it out for the default"
        )
    return hydra_dir


def to_config(composed: DictConfig, tf_config: str | None) -> RunConfig:
    """Converts and checks what Hydra has composed, with or without Hydra's own settings."""
    with hydra_settings(composed) as overrides:
        tree = _resolved(composed)
    check_literal(tree)
    config = to_dataclass(RunConfig, tree)
    if as_written(composed).get("run_dir", DEFAULT_RUN_DIR) == DEFAULT_RUN_DIR:
        config.run_dir = None  # a folder with this name, and a number at its end if there is one already
    given = set(map(name_of, overrides))
    if "cluster" in given and config.cluster.kind != "local" and "cluster.num_workers" not in given:
        # What a file says is of the local cluster that the command line has replaced; the others know the number.
        config.cluster.num_workers = ClusterConfig().num_workers
    # The length that a file says is replaced by the one of the command line, which may be of the other kind.
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        is_chosen = f"train.{length}" in given and getattr(config.train, length) is not None
        if is_chosen and f"train.{other}" not in given:
            setattr(config.train, other, None)
    _check_names(config, overrides)
    # The scheduler that has set it expects one task of its cluster here; a local cluster on each host would be wrong.
    # Its workers may be ranks.
    is_in_it = config.cluster.kind == "ranks" and not config.cluster.addresses and config.cluster.rank is None
    if tf_config and config.cluster.kind != "tf_config" and not is_in_it:
        is_listed = config.cluster.kind in ("hosts", "ranks")
        instead = "use the lists given here" if is_listed else "train on this machine alone"
        raise ConfigError(
            f"cluster ({config.cluster.kind}): the environment variable TF_CONFIG is set, so this process is one task "
            f"of another cluster; give cluster=tf_config, or unset TF_CONFIG to {instead}"
        )
    check(config)
    # After the checks, whose messages show paths as the user wrote them. Absolute, so that they mean the same in every
    # process.
    config.plugins = [_absolute(path) for path in config.plugins]
    config.init_from = _absolute(config.init_from) if config.init_from else None
    config.optimizer = with_floats("optimizer", config.optimizer)
    config.model = with_floats("model", config.model)
    config.keras = resolve(config.keras)
    return config


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _resolved(composed: DictConfig) -> dict[str, Any]:
    """The options as plain values, with all ``${...}`` resolved."""
    options = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        tree: Any = OmegaConf.to_container(options, resolve=True)
    except (OmegaConfBaseException, RecursionError):
        _refuse_interpolation(options)
        raise
    return {str(key): value for key, value in tree.items()}


def _refuse_interpolation(options: DictConfig) -> None:
    """Raises ConfigError for the first option whose ``${...}`` cannot be resolved."""
    for name, text in flatten(as_written(options), lists=True):
        if not (isinstance(text, str) and "${" in text):
            continue
        try:
            value = OmegaConf.select(options, name)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            reason = "it leads back to itself" if isinstance(error, RecursionError) else brief_reason(error)
            raise ConfigError(
                f"{name} ({text}): cannot be filled in ({reason}); name an option that has a value"
            ) from None


def check_literal(tree: dict[str, Any]) -> None:
    """Refuses ``${...}`` that is left, as from the environment, missing values, and numbers that no float holds."""
    for location, value in flatten(tree, lists=True):
        name = re.sub(r"\[\d+\]", "", location)  # of the list
        if isinstance(value, str) and "${" in value:
            raise ConfigError(f"{name} ({value}): holds ${{...}} where a value must stand; give the value itself")
        if value == "???":
            raise ConfigError(f"{name} (???): is missing; give a value")
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            raise ConfigError(f"{name} ({value}): must be a number of at most {MAX_DIGITS} digits; give fewer")


def _check_names(config: RunConfig, overrides: list[str]) -> None:
    """Checks the chosen names, and that our own models and data have the arguments that are given."""
    # Names become parts of file names, such as that of the default run directory.
    names = {"model": config.model.get("name"), "optimizer": config.optimizer.get("name"), "data": config.data.name}
    for group, name in names.items():
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", name)):
            raise ConfigError(f"{group} ({name}): must be a name of letters, digits, _ . and -, at most 64 of them")
        if not config.plugins and name not in groups()[group]:
            raise ConfigError(f"{group} ({name}): there is no such {group}; choose with {group}=NAME")
    # Our models and data take only the arguments in their files; an optimizer takes every argument of its Keras class.
    for group, arguments_given in (("model", config.model), ("data", config.data.arguments)):
        known = {"name", *keys(group, names[group])}
        if not config.plugins and (unknown := [key for key in arguments_given if key not in known]):
            _refuse_unknown(group, str(names[group]), unknown[0], overrides)


def _refuse_unknown(group: str, name: str, key: str, overrides: list[str]) -> None:
    """Raises ConfigError for an option that a choice of ours lacks; names the experiment that sets it, if one does."""
    options = ", ".join(keys(group, name)) or "none"
    given_keys = set(map(name_of, overrides))
    experiment = [
        override for override in overrides if override.startswith("experiment=") and override != "experiment=null"
    ]
    origin = f"; {experiment[0]} gives it" if experiment and f"{group}.{key}" not in given_keys else ""
    raise ConfigError(f"{group}.{key}: is not an option of {group}={name}; it has {options}{origin}")
