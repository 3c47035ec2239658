"""Interpolation of ``${...}``: other options, and environment variables that the command line itself names.

OmegaConf resolves them. It also offers functions, with which a file could read the environment: all are refused
except for ``oc.env``, and that is allowed on the command line only.
"""

import os
import re
from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.errors import ConfigError

FILLED = "\0"  # replaces an inner interpolation that has been accepted; no option or file can contain it
OPTION = re.compile(rf"\$\{{\s*[\w.\[\]{FILLED}-]+\s*\}}")  # ${train.steps}, ${..steps}, ${model.hidden_units[0]}
ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*[A-Za-z_]\w*\s*(?:,[^${}]*)?\}")
VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)")
ANY = re.compile(r"\$\{[^${}]*\}?")
MAX_DEPTH = 32  # an option that refers to a section around it has endless levels


def check_file(name: str, content: Any) -> None:
    """Refuses functions in a configuration file.

    Raises:
        ConfigError: names the file and the function.
    """
    for text in _texts(content):
        if wrong := _not_allowed(text, ()):
            way_out = "give it on the command line" if "oc.env" in wrong else "only options, as in ${train.steps}, are"
            raise ConfigError(f"{name} ({wrong}): is not allowed in a file; {way_out}")


def resolve(tree: DictConfig, overrides: list[str]) -> dict[str, Any]:
    """The tree as plain values, with all ``${...}`` resolved.

    Args:
        overrides: the command line, which may name environment variables.

    Raises:
        ConfigError: an interpolation cannot be resolved; names the option.
    """
    # Exactly the texts on the command line are allowed, so that a file cannot read another variable. Hydra removes
    # backslashes, so a text occurs with and without them.
    written = [text for each in overrides for text in (each, each.replace("\\", ""))]
    named = {found for text in written for found in ENVIRONMENT.findall(text)}
    return {str(key): _plain(tree, key, str(key), named, 0) for key in tree}


def _plain(parent: DictConfig | ListConfig, key: Any, name: str, named: Iterable[str], depth: int) -> Any:
    """One value below `parent`, with everything inside it."""
    # Access would raise an error of OmegaConf's; `load.check_literal` reports the option in our words.
    if OmegaConf.is_missing(parent, key):
        return "???"
    value = _filled_in(parent, key, name, named) if OmegaConf.is_interpolation(parent, key) else parent[key]
    if depth > MAX_DEPTH:
        raise ConfigError(f"{name[:60]}: holds itself, or has over {MAX_DEPTH} levels; give the values themselves")
    if isinstance(value, DictConfig):
        keys: list[Any] = list(value)
        return {str(each): _plain(value, each, f"{name}.{each}", named, depth + 1) for each in keys}
    if isinstance(value, ListConfig):
        return [_plain(value, index, name, named, depth + 1) for index in range(len(value))]
    return value


def _filled_in(parent: DictConfig | ListConfig, key: Any, name: str, named: Iterable[str]) -> Any:
    """The resolved value of one interpolation."""
    # Checked before OmegaConf sees it, which would call the function.
    text = raw(parent, key)
    if wrong := _not_allowed(text, named):
        raise ConfigError(
            f"{name} ({text}): {wrong} is not allowed; name another option, as in ${{train.steps}}, or on the command "
            "line ${{oc.env:NAME}}"
        )
    for variable in VARIABLE.findall(text):
        if variable not in os.environ and f"{variable}," not in text.replace(" ", ""):
            raise ConfigError(f"{name} ({text}): the environment has no {variable}; set it, or write oc.env:NAME,VALUE")
    try:
        return parent[key]
    except (RecursionError, OmegaConfBaseException) as error:
        why = " ".join((str(error).splitlines() or ["it leads back to itself"])[0].split())
        raise ConfigError(f"{name} ({text}): cannot be filled in ({why}); name an option that has a value") from None


def raw(parent: DictConfig | ListConfig, key: Any) -> str:
    """A value as it was written, with its ``${...}``."""
    # Reading `parent[key]` would resolve it.
    plain: Any = OmegaConf.to_container(parent, resolve=False)
    return str(plain[key])


def _not_allowed(text: str, named: Iterable[str]) -> str:
    """The first interpolation that is not allowed in a text, or ""; `named`: those of the environment that are."""
    before = ""
    # From the inside out, since the name of an option may itself be interpolated, as in ${a.${b}}.
    while before != text:
        before = text
        text = OPTION.sub(FILLED, text)
    for each in named:
        text = text.replace(each, FILLED)
    while before != text:  # an option whose name contains one of these
        before = text
        text = OPTION.sub(FILLED, text)
    found = ANY.search(text) if "${" in text else None
    return found[0].replace(FILLED, "...") if found else ""


def _texts(node: Any) -> Iterable[str]:
    """All strings of a tree, keys included."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield str(key)
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
    elif isinstance(node, str):
        yield node
