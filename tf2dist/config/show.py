"""The output of ``--cfg`` and ``--info``: the configuration of a command line, and where it comes from."""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.default_element import DefaultsTreeNode, GroupDefault, InputDefault, VirtualRoot
from hydra.types import RunMode
from omegaconf import OmegaConf

from tf2dist.config.arguments import Arguments
from tf2dist.config.compose import UNREADABLE, for_hydra, unresolved
from tf2dist.config.load import load, with_cluster
from tf2dist.config.source import Source, UserFolder, opened, what_hydra_says
from tf2dist.errors import ConfigError

GLOBAL = "_global_"


def configuration(arguments: Arguments, tf_config: str | None) -> str:
    """The output of ``--cfg``: the whole configuration in YAML, or one part of it.

    Raises:
        ConfigError: the command line is wrong, or the part does not exist.
    """
    # Loaded and checked even if it is shown unresolved, so that it is shown only if it would run.
    tree: Any = load(arguments.overrides, tf_config, arguments.source).as_tree()
    if not arguments.is_resolved:
        written = unresolved(with_cluster(arguments.overrides, tf_config), arguments.source)
        tree = _as_written(tree, OmegaConf.to_container(written, resolve=False))
    package = arguments.package or GLOBAL
    if package == GLOBAL:
        return str(OmegaConf.to_yaml(OmegaConf.create(tree)))
    for key in package.split("."):
        if not isinstance(tree, dict) or key not in tree:
            raise ConfigError(f"--package ({package}): is not a part of the configuration; see --cfg without it")
        tree = tree[key]
    if isinstance(tree, dict | list):
        return f"# @package {package}\n{OmegaConf.to_yaml(OmegaConf.create(tree))}"
    return f"{tree}\n"


def _as_written(value: Any, written: Any) -> Any:
    """A value with ``${...}`` where it was written like that."""
    if isinstance(value, dict) and isinstance(written, dict):
        return {key: _as_written(inside, written.get(key)) for key, inside in value.items()}
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_as_written(*pair) for pair in zip(value, written, strict=True)]
    return written if isinstance(written, str) and "${" in written else value


def information(arguments: Arguments, tf_config: str | None) -> str:
    """The output of ``--info``.

    Raises:
        ConfigError: the command line is wrong.
    """
    load(arguments.overrides, tf_config, arguments.source)  # for its errors, which are clearer than Hydra's
    overrides = for_hydra(with_cluster(arguments.overrides, tf_config), arguments.source)
    # Functions, since each part makes Hydra read the files again.
    makers: dict[str, Callable[[], str]] = {
        "searchpath": lambda: _search_path(arguments.source),
        "defaults-tree": lambda: _defaults(arguments.source, overrides)[0],
        "defaults": lambda: _defaults(arguments.source, overrides)[1],
        "config": lambda: "Config\n" + configuration(arguments, tf_config),
    }
    chosen = makers if arguments.subject == "all" else {arguments.subject: makers[arguments.subject]}
    return "\n".join(maker() for maker in chosen.values())


def _search_path(source: Source) -> str:
    with opened(source) as hydra:
        sources = hydra.config_loader.get_sources()
        shown = [(each.provider, each.full_path().replace(UserFolder.scheme(), "file", 1)) for each in sources]
    # Our own schema and Hydra's files are on the path as well, and mean nothing to the user.
    rows = [row for row in shown if row[0] not in ("hydra", "schema")]
    return _table("Config search path", ("Provider", "Search path"), rows)


def _defaults(source: Source, overrides: list[str]) -> tuple[str, str]:
    """The tree of the files that make the configuration, and their list in the order in which they are merged."""
    try:
        with opened(source) as hydra:
            found = hydra.config_loader.compute_defaults_list(source.name, overrides, RunMode.RUN)
    except UNREADABLE as error:
        raise ConfigError(what_hydra_says(error)) from None
    rows = [
        (each.config_path or "", each.package or GLOBAL, "True" if each.is_self else "False", each.parent or "")
        for each in found.defaults
        if not (each.config_path or "").startswith("hydra/") and each.parent != "hydra/config"
    ]
    tree = "Defaults tree\n" + "\n".join(_branch(found.defaults_tree, 0)) + "\n"
    return tree, _table("Defaults list", ("Config path", "Package", "_self_", "Parent"), rows)


def _branch(node: DefaultsTreeNode | InputDefault, depth: int) -> list[str]:
    """The lines of one node and those below it, without Hydra's own files."""
    inner = node.node if isinstance(node, DefaultsTreeNode) else node
    children = (node.children or []) if isinstance(node, DefaultsTreeNode) else []
    if isinstance(inner, VirtualRoot):
        return [line for child in children for line in _branch(child, depth)]
    if isinstance(inner, GroupDefault):
        text = f"{inner.get_override_key()}: {inner.get_name() or 'null'}"
    else:
        text = inner.get_config_path()
    if text.startswith("hydra/"):
        return []
    lines = [line for child in children for line in _branch(child, depth + 1)]
    return ["  " * depth + text + (":" if lines else ""), *lines]


def _table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)]) + "\n"
