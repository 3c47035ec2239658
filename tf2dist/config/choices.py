"""What ``conf/`` offers: the choices in each group, and the options that belong to each choice."""

import functools
from importlib import resources
from pathlib import Path

import yaml

from tf2dist.config.schema import OPTIONS

CONF_MODULE = "tf2dist.conf"
PLUGIN_GROUPS = ("model", "data", "optimizer")


@functools.cache
def groups() -> dict[str, list[str]]:
    """The names that may follow ``group=`` on the command line, by group."""
    # As a package's resources: conf/ stands in different places in the repository and in a wheel.
    folders = [entry for entry in resources.files(CONF_MODULE).iterdir() if entry.is_dir()]
    return {
        folder.name: sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml"))
        for folder in folders
        if folder.name != "__pycache__"
    }


@functools.cache
def values(group: str, name: str) -> dict[str, str]:
    """The settings in the file of one choice, each value as written there, such as 1e-7, 0.0 and [300, 50]."""
    text = resources.files(CONF_MODULE).joinpath(group, f"{name}.yaml").read_text()
    written = yaml.load(text, yaml.BaseLoader)  # makes strings only; safe_load would turn 1e-7 and null into values
    return {key: f"[{', '.join(value)}]" if isinstance(value, list) else value for key, value in written.items()}


@functools.cache
def keys(group: str, name: str) -> tuple[str, ...]:
    """The options that belong to one choice, such as learning_rate; none for a plugin's choice."""
    if name not in groups()[group]:
        return ()
    # Options of the schema belong to every choice of their group, and come first in the help.
    declared = [option.partition(".")[2] for option in OPTIONS if option.startswith(f"{group}.")]
    return tuple(key for key in dict.fromkeys([*declared, *values(group, name)]) if key != "name")


def choices_by_option() -> dict[str, list[str]]:
    """The choices to which each option belongs, as in {"model.dropout": ["model=cnn"]}."""
    choices: dict[str, list[str]] = {}
    for group in PLUGIN_GROUPS:
        for name in groups()[group]:
            for key in keys(group, name):
                choices.setdefault(f"{group}.{key}", []).append(f"{group}={name}")
    return choices
