"""What ``conf/`` offers: the names that may be chosen in each group, and the options that come with them."""

import functools
from importlib import resources
from pathlib import Path

from omegaconf import OmegaConf

CONF_MODULE = "tf2dist.conf"
PLUGIN_GROUPS = ("model", "data", "optimizer")
HIDDEN = ("plugin", "default")  # files that are chosen for the user


@functools.cache
def options() -> dict[str, list[str]]:
    """The names that may follow ``group=`` on the command line, by group."""
    groups = [entry for entry in resources.files(CONF_MODULE).iterdir() if entry.is_dir()]
    return {
        group.name: sorted(Path(file.name).stem for file in group.iterdir() if file.name.endswith(".yaml"))
        for group in groups
        if group.name != "__pycache__"
    }


@functools.cache
def keys(group: str, name: str) -> tuple[str, ...]:
    """The options in the file of one choice, such as learning_rate; none where the choice is a plugin's."""
    if name in HIDDEN or name not in options()[group]:
        return ()
    text = resources.files(CONF_MODULE).joinpath(group, f"{name}.yaml").read_text()
    return tuple(str(key) for key in OmegaConf.create(text) if key != "name")


def of_choices() -> dict[str, list[str]]:
    """The options that come with a choice, and the choices: "model.dropout" with "model=cnn"."""
    found: dict[str, list[str]] = {}
    for group in PLUGIN_GROUPS:
        for name in options()[group]:
            for key in keys(group, name):
                found.setdefault(f"{group}.{key}", []).append(f"{group}={name}")
    return found
