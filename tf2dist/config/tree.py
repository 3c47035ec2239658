"""The configuration as a tree, the form that Hydra composes and that is written into files, and back again."""

from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.config.convert import to_dataclass
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError

DEFAULT_RUN_DIR = "outputs/${now:%Y%m%d_%H%M%S}-${mode}-${model.name}"


def as_written(node: Any) -> Any:
    """A part of what Hydra has composed as plain values, with its ``${...}``."""
    return OmegaConf.to_container(node, resolve=False)


def defaults() -> dict[str, Any]:
    """The tree of all options with their defaults, except for those that come with a choice."""
    tree = RunConfig().as_tree()
    tree["run_dir"] = DEFAULT_RUN_DIR
    del tree["mode"], tree["cluster"]["kind"], tree["algorithm"]["kind"]
    for group in ("data", "model", "optimizer"):
        del tree[group]["name"]
    return tree


def from_tree(tree: Any) -> RunConfig:
    """The typed configuration; missing options have their defaults.

    Raises:
        ConfigError: an option does not exist, or a value is not of its type.
    """
    return to_dataclass(RunConfig, tree)


def from_yaml(text: str) -> RunConfig:
    """The configuration that another process has checked and written.

    Raises:
        ConfigError: the text is not such a configuration, for example because a YAML tag in it would make an object.
    """
    # OmegaConf reads YAML with a safe loader, which makes no objects of Python.
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"the configuration is not plain YAML: {first_line(error)}") from None
    return from_tree(tree)


def first_line(error: Exception) -> str:
    """The message of a library's error, on one line."""
    return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())
