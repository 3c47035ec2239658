"""The configuration files: those in ``conf/`` and those in a folder of the user's, read by Hydra.

A user's file is data. It is refused if it contains anything that Hydra would compute, import, or read from the
environment.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.config import interpolation
from tf2dist.config.choices import CONF_MODULE, groups
from tf2dist.config.paths import expand, is_folder, is_path
from tf2dist.config.tree import defaults, first_line
from tf2dist.errors import ConfigError, nearest

MAIN = "config"  # conf/config.yaml
OPTIONS_NODE = "tf2dist_options"  # the defaults of the schema, with which conf/config.yaml begins


@dataclass(frozen=True, slots=True)
class Source:
    """The values of ``--config-dir`` and ``--config-name``.

    Attributes:
        folder: a folder with the user's configuration files, as it was given; or None.
        name: the primary configuration file, without its suffix.
    """

    folder: str | None = None
    name: str = MAIN

    @property
    def path(self) -> Path | None:
        path = expand(self.folder) if self.folder else None
        return path.absolute() if path else None

    def names(self, group: str) -> list[str]:
        """The names that may follow ``group=``: those in ``conf/``, and then those in the user's folder."""
        # Ours come first and hide the user's, as they do on Hydra's search path.
        ours = groups().get(group, [])
        folder = self.path / group if self.path else None
        if folder is None or not group or not is_folder(str(folder)):
            return ours
        files = (file.relative_to(folder).with_suffix("").as_posix() for file in sorted(folder.rglob("*.yaml")))
        return [*ours, *(name for name in files if name not in ours)]

    def flags(self) -> list[str]:
        """The flags that give the same source in any working directory."""
        given = [f"--config-dir={self.path}"] if self.folder else []
        return [*given, *([f"--config-name={self.name}"] if self.name != MAIN else [])]


class UserFolder(FileConfigSource):
    """Hydra's access to the user's folder, which checks each file that is read."""

    @staticmethod
    def scheme() -> str:
        return "tf2dist-folder"

    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.removesuffix(".yaml") + ".yaml"
        try:
            found = super().load_config(config_path)
        except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError, RecursionError) as error:
            why = " ".join(str(error).split())[:120] or type(error).__name__
            raise ConfigError(f"{name} (in {self.path}): cannot be read ({why}); correct the file") from None
        _check_file(name, found)
        return found


def _check_file(name: str, found: ConfigResult) -> None:
    """Refuses a file that contains more than values.

    Raises:
        ConfigError: it changes settings of Hydra itself, or has an interpolation that is a function.
    """
    # Unresolved, since resolving would already call the functions that are looked for.
    content = OmegaConf.to_container(found.config, resolve=False)
    if not isinstance(content, dict):
        raise ConfigError(f"{name} ({type(content).__name__}): must hold options, as in train: {{steps: 100}}")
    # Three ways to Hydra's own settings, which can name a class to import: a key, the package of the whole file, and a
    # choice in the list of defaults.
    package = str(found.header.get("package", ""))
    chosen = yaml.safe_dump(content.get("defaults", []))
    if "hydra" in content or re.match(r"hydra\b", package) or re.search(r"\bhydra\b", chosen):
        raise ConfigError(f"{name} (hydra): settings of Hydra itself are not taken from files; remove them")
    interpolation.check_file(name, content)


@contextlib.contextmanager
def opened(source: Source) -> Iterator[Hydra]:
    """Hydra with ``conf/`` and the user's folder on its search path. Files in ``conf/`` hide those of the same name.

    Raises:
        ConfigError: the folder does not exist, or the name leads out of it.
    """
    if source.folder is not None and not is_folder(source.folder):
        raise ConfigError(f"--config-dir ({source.folder}): there is no such folder; name one with your .yaml files")
    if not is_path(source.name) or ".." in Path(source.name).parts or Path(source.name).is_absolute():
        raise why_missing(source)
    ConfigStore.instance().store(OPTIONS_NODE, defaults())
    GlobalHydra.instance().clear()  # Hydra is a singleton, which the caller may have initialized
    # Hydra's behaviour depends on this number; without it an older version's would apply.
    version.setbase("1.3")
    Plugins.instance().register(UserFolder)
    search_path = create_config_search_path(f"pkg://{CONF_MODULE}")
    if source.folder is not None:
        place = SearchPathQuery(provider="schema")
        search_path.prepend("command-line", f"{UserFolder.scheme()}://{source.path}", place)
    try:
        with warnings.catch_warnings():
            # Hydra warns about a file without _self_. It comes last in the merge, which is what its author meant.
            warnings.simplefilter("ignore", UserWarning)
            yield Hydra.create_main_hydra2("tf2dist", search_path)
    finally:
        GlobalHydra.instance().clear()


def why_missing(source: Source) -> ConfigError:
    """The error for a ``--config-name`` that neither folder has."""
    files = source.path.glob("*.yaml") if source.path else ()
    known = sorted({MAIN, *(file.stem for file in files)})
    where = f"{source.folder} has {', '.join(known)}" if source.folder else "add --config-dir DIR"
    return ConfigError(
        f"--config-name ({source.name[:60]}): there is no such file; {where}{nearest(source.name, known)}"
    )


def check_complete(source: Source, tree: dict[str, Any]) -> None:
    """Refuses a primary file of the user's that does not include ours.

    Raises:
        ConfigError: the tree lacks some of our options.
    """
    if missing := sorted(set(defaults()) - set(tree)):
        raise ConfigError(
            f"--config-name ({source.name}): lacks {missing[0]} and others; begin the file with "
            f'"defaults: [{MAIN}, _self_]"'
        )


def what_hydra_says(error: Exception) -> str:
    """The message of an error of Hydra, on one line."""
    # Some of its errors have no text of their own, only a cause.
    return first_line(error.__cause__ if isinstance(error.__cause__, Exception) and not str(error) else error)
