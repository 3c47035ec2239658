"""The configuration as a tree, the form that Hydra composes and that is written into files, and back again.

OmegaConf could convert values, too, but the reason of an error would have to be parsed out of its English messages,
and it accepts any int as bool.
"""

from collections.abc import Iterator
from typing import Any, TypeVar, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.config.schema import DataConfig, RunConfig
from tf2dist.declared import TreeReader, declared, inside
from tf2dist.errors import ConfigError, brief_reason

T = TypeVar("T")
DEFAULT_RUN_DIR = "outputs/${now:%Y%m%d_%H%M%S}-${mode}-${model.name}"
BOOLS = {  # the words of YAML 1.1, and 0 and 1
    **dict.fromkeys(("true", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "no", "n", "off", "0"), False),
}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word or a path"}
# Everything that has only one reading is accepted; 1.5 for a whole number has none.
ACCEPTED = {int: (int, str), float: (int, float, str), bool: (bool, int, str), str: (bool, int, float, str)}


class OptionReader(TreeReader):
    """Converts values as the command line and YAML give them; missing options have their defaults."""

    def fields(self, kind: Any, tree: dict[str, Any], where: str) -> dict[str, Any]:
        # The arguments of data stand among its options in files, and are separate in the dataclass.
        rest = "arguments" if kind is DataConfig else ""
        known = declared(kind)[0].keys() - {rest}
        others = {key: value for key, value in tree.items() if key not in known}
        if others and not rest:
            raise ConfigError(f"{inside(where, next(iter(others)))}: there is no such option; see --help")
        found = {key: value for key, value in tree.items() if key in known}
        return {**found, rest: others} if rest else found

    def scalar(self, kind: type, value: Any) -> Any:
        # Not isinstance, for which a bool is an int too.
        if type(value) not in ACCEPTED[kind] or (kind is bool and str(value).lower() not in BOOLS):
            raise ValueError
        return BOOLS[str(value).lower()] if kind is bool else kind(value)

    def error(self, hint: Any, value: Any, where: str) -> Exception:
        if hint in KINDS:
            return ConfigError(f"{where} ({'null' if value is None else value}): must be {KINDS[hint]}")
        if get_origin(hint) is list:
            return ConfigError(f"{where}: must be a list such as [a,b]")
        where = where or "the configuration"
        return ConfigError(f"{where} ({value}): holds several options; give them one by one, see --help")

    def item(self, where: str, index: int) -> str:
        return f"{where}[{index}]"


def to_dataclass(kind: type[T], tree: Any) -> T:
    """An object of a dataclass of options with the values of a tree; missing options have their defaults."""
    return OptionReader().read(kind, tree)


def from_yaml(text: str) -> RunConfig:
    """The configuration that another process has checked and written."""
    # OmegaConf reads YAML with a safe loader, which makes no objects of Python.
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"the configuration is not plain YAML: {brief_reason(error)}") from None
    return to_dataclass(RunConfig, tree)


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


def flatten(tree: Any, name: str = "", *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """All values in a tree by their dotted names, as in "train.steps"; `lists`: also those in lists, "plugins[0]"."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flatten(value, inside(name, key), lists=lists)
    elif lists and isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from flatten(value, f"{name}[{index}]", lists=True)
    else:
        yield name, tree
