"""What ``conf/`` offers: the choices in each group, and the options that belong to each choice."""

import functools
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from tf2dist.config.schema import OPTIONS
from tf2dist.errors import ConfigError

PLUGIN_GROUPS = ("model", "data", "optimizer")


@functools.cache
def conf_folder() -> Traversable:
    """The folder conf/.

    Raises:
        ConfigError: there is none.
    """
    try:
        # As a package's resources: conf/ stands in different places in the repository and in a wheel.
        return resources.files("tf2dist.conf")
    except ModuleNotFoundError:
        # Python imports from the working directory first, where a clone may be that is not installed.
        clone = Path(__file__).parents[2]
        if (clone / "conf" / "config.yaml").exists():
            return clone / "conf"
        raise ConfigError(
            f"tf2dist ({clone / 'tf2dist'}): is not installed, and has no folder conf beside it; install it, or change "
            "to another folder if it is installed"
        ) from None


@functools.cache
def groups() -> dict[str, list[str]]:
    """The names that may follow ``group=`` on the command line, by group."""
    folders = [entry for entry in conf_folder().iterdir() if entry.is_dir()]
    return {
        folder.name: sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml"))
        for folder in folders
        if folder.name != "__pycache__"
    }


@functools.cache
def values(group: str, name: str) -> dict[str, str]:
    """The settings in the file of one choice, each value as written there, such as 1e-7, 0.0 and [300, 50]."""
    text = conf_folder().joinpath(group, f"{name}.yaml").read_text()
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
