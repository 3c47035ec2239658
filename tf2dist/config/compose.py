"""Composes configurations with Hydra, from the files in ``conf/`` and those of the user, with errors that are one line.

It also says what ``conf/`` offers: the choices in each group, and the options that belong to each choice.
"""

import contextlib
import difflib
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.config.decode import DEFAULT_RUN_DIR, as_written, defaults, flatten
from tf2dist.config.schema import OPTIONS, SECTIONS
from tf2dist.errors import ConfigError, brief_reason, nearest
from tf2dist.files import expand
from tf2dist.linux import process_wide, without_warnings

PLUGIN_GROUPS = ("model", "data", "optimizer")


@functools.cache
def conf_folder() -> Traversable:
    """The folder conf/."""
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


MAIN = "config"  # conf/config.yaml
OPTIONS_NODE = "tf2dist_options"  # the defaults of the schema, with which conf/config.yaml begins
TEXTS = ("hydra.run.dir", "hydra.sweep.dir", *(name for name, option in OPTIONS.items() if option.is_text))
SWEEPER_PARAMS = "hydra.sweeper.params"
FORM = "options look like train.steps=1000; put values with ~ : [ ] or blanks in quotes, as in ['~/a b']"
# What Hydra and its parser raise: the last three for a name of 4,000 letters, a number of 5,000 digits, 500 brackets.
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Where the configuration files are.

    Attributes:
        folder: ``--config-dir``, whose files come after those in ``conf/``.
        name: ``--config-name``, the primary configuration file.
        path: ``--config-path``, whose files come before those in ``conf/``.
    """

    folder: str | None = None
    name: str = MAIN
    path: str | None = None

    def search_path(self) -> ConfigSearchPath:
        search_path = create_config_search_path(_address(self.path))
        anchor = SearchPathQuery(provider="schema")
        search_path.prepend("tf2dist" if self.path else "main", f"file://{conf_folder()}", anchor)
        if folder := _address(self.folder):
            search_path.prepend("command-line", folder, anchor)
        return search_path

    def flags(self) -> list[str]:
        """The flags that give the same source in any working directory."""
        addresses = {"--config-dir": _address(self.folder), "--config-path": _address(self.path)}
        flags = [f"{flag}={address.removeprefix('file://')}" for flag, address in addresses.items() if address]
        return [*flags, *([f"--config-name={self.name}"] if self.name != MAIN else [])]


def _address(folder: str | None) -> str | None:
    """A folder as Hydra's search path names it."""
    if folder is None or folder.startswith("pkg://"):
        return folder
    path = expand(folder)
    return f"file://{path.absolute()}" if path else None


class Loader(ConfigLoaderImpl):
    """Hydra's loader of configurations; its errors are one line, and options that do not exist are refused.

    Hydra composes every configuration through it: of a run, of each job of a sweep, and those that flags show.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self._composed: DictConfig | None = None

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Composes a configuration."""
        if self._composed is not None:
            composed, self._composed = self._composed, None
            return composed
        self._register_plugins(overrides)
        try:
            composed = super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
        except ERRORS as error:
            raise ConfigError(_explain(error, overrides, config_name, run_mode, self)) from None
        except (AttributeError, AssertionError):
            # What OmegaConf raises for items of a dict that is null, as Hydra declares this one.
            if not (params := [override for override in overrides if name_of(override).startswith(SWEEPER_PARAMS)]):
                raise
            raise ConfigError(
                f"{params[0]}: can be set in a file alone; give the values themselves, as in seed=1,2"
            ) from None
        if config_name is not None:
            if "run_dir" in composed and as_written(composed)["run_dir"] is None:
                composed.run_dir = DEFAULT_RUN_DIR
            self._check(composed, config_name, overrides, run_mode)
        return composed

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Composes the configuration of a job of a sweep."""
        # As Hydra 1.3 does; 1.4 would compose it beside the method above.
        overrides = [*as_written(master_config.hydra.overrides.hydra), *sweep_overrides]
        composed = self.load_configuration(master_config.hydra.job.config_name, overrides, RunMode.RUN)
        OmegaConf.copy_cache(from_config=master_config, to_config=composed)  # such as the time of the sweep
        return composed

    def chooses(self, group: str, config_name: str, overrides: list[str]) -> bool:
        """Whether the command line or a file overrides the choice of conf/config.yaml in a group."""
        self._register_plugins(overrides)
        try:
            defaults_list = self.compute_defaults_list(config_name, overrides, RunMode.MULTIRUN)
            return group in defaults_list.overrides.override_choices
        except ERRORS:
            return True  # with what is wrong there is no configuration, and composing it gives the message

    def keep(self, composed: DictConfig) -> None:
        """Makes a configuration the answer to the next request, since composing it takes a tenth of a second."""
        self._composed = composed

    def _register_plugins(self, overrides: list[str]) -> None:
        """Makes every name of which there is no file, and which a plugin may register, a choice of its own."""
        # Which names a plugin registers is known only when it is loaded, which the launching process does not do.
        if not any(override.startswith("plugins=") for override in overrides):
            return
        for group, _, value in (override.partition("=") for override in overrides):
            if group in PLUGIN_GROUPS:
                for name in set(re.findall(r"[A-Za-z_][\w.-]*", value)):
                    node = {"name": name} | ({"offline": "fail"} if group == "data" else {})
                    if not self.repository.config_exists(f"{group}/{name}"):
                        ConfigStore.instance().store(name, node, group)

    def _check(self, composed: DictConfig, config_name: str, overrides: list[str], run_mode: RunMode) -> None:
        """Refuses options that do not exist, wherever they are given."""
        given_keys = {name_of(override) for override in overrides}
        for key in _unknown(composed):
            is_given = key in given_keys
            file, package = ("", "") if is_given else self._file_with(key, config_name, overrides, run_mode)
            location = f"{key} (in {file}.yaml)" if file else key
            if package and package == key.partition(".")[0]:
                raise ConfigError(f'{location}: there is no such option; begin the file with "# @package _global_"')
            raise ConfigError(f"{location}: there is no such option{_nearest_option(key, composed)}")
        missing = sorted(set(defaults()) - set(map(str, composed)))
        if missing and not any(override.startswith("~") for override in overrides):
            raise ConfigError(
                f"--config-name ({config_name}): lacks {missing[0]} and others; begin the file with "
                f'"defaults: [{MAIN}, _self_]"'
            )
        for group in PLUGIN_GROUPS:
            if OmegaConf.is_dict(composed.get(group)) and "name" not in composed[group]:
                raise ConfigError(f"{group}: its file lacks a name; add a line such as name: mine")

    def _file_with(self, key: str, config_name: str, overrides: list[str], mode: RunMode) -> tuple[str, str]:
        """The last file that sets an option, and the part of the configuration that the file is about."""
        for default in reversed(self.compute_defaults_list(config_name, overrides, mode).defaults):
            package = default.package or ""
            inner = key.removeprefix(f"{package}.") if package else key
            file = self.repository.load_config(default.config_path) if default.config_path else None
            if file is None or (package and inner == key) or not isinstance(file.config, DictConfig):
                continue
            if OmegaConf.select(file.config, inner, throw_on_resolution_failure=False) is not None:
                return default.config_path or "", package
        return "", ""


@contextlib.contextmanager
def open_hydra(source: ConfigSource) -> Iterator[Hydra]:
    """Hydra with ``conf/`` and the user's folders on its search path, in one thread at a time.

    What Hydra holds for the whole process is put back at the end: the caller may use Hydra, too.
    """
    try:
        # Everything below resolves relative paths, and would fail with a traceback.
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the working directory ({error.strerror}): is gone; change to one that exists") from None
    with process_wide:
        stored = ConfigStore.instance().repo
        names = {group: dict(stored.get(group, {})) for group in PLUGIN_GROUPS}
        ConfigStore.instance().store(OPTIONS_NODE, defaults())
        previous, base = HydraConfig.instance().cfg, version.getbase()
        # Hydra 1.3 behaves as this number says, and without it as an older version; 1.4 warns of the number.
        with without_warnings(".*version_base"):
            version.setbase("1.3")
        try:
            # Hydra warns about a file without _self_. It comes last in the merge, which is what its author meant.
            with without_warnings(".*_self_", UserWarning):
                yield Hydra("tf2dist", Loader(source.search_path()))
        finally:
            HydraConfig.instance().cfg = previous
            version.VersionBase.instance().version_base = base
            stored.update(names)  # without those of this command line's plugins


def overrides_of(composed: Any) -> list[str]:
    """The overrides of the command line, as they were written."""
    return list(as_written(composed.hydra.overrides.task))


@contextlib.contextmanager
def hydra_settings(composed: DictConfig) -> Iterator[list[str]]:
    """Makes Hydra's settings known to the resolver ``${hydra:...}``; gives the overrides of the command line."""
    holder: HydraConfig = HydraConfig.instance()
    previous = holder.cfg
    if "hydra" in composed:
        holder.set_config(composed)
        OmegaConf.set_readonly(composed.hydra, False)  # Hydra itself sets some of them later
    try:
        yield overrides_of(holder.cfg) if holder.cfg else []
    finally:
        holder.cfg = previous


def prepare_overrides(hydra: Hydra, name: str, overrides: list[str], tf_config: str | None) -> list[str]:
    """The overrides of a command line for Hydra: paths quoted, and the cluster of TF_CONFIG chosen if no other is.

    Args:
        name: of the primary configuration file.
    """
    for override in overrides:
        key = name_of(override)
        group, _, argument = key.partition(".")
        declared = OPTIONS.get(key)
        # Hydra itself refuses to add what has a value, and takes null for none.
        has_value = declared and not override.startswith("++") and not isinstance(declared.default, list)
        if override[0:1] == "+" and (key in groups() or has_value):
            raise ConfigError(f"{override[:60]}: is an option already; leave out the +")
        # The name alone would leave the arguments of another choice in place.
        if argument and (declared.is_choice if declared else argument == "name" and group in PLUGIN_GROUPS):
            raise ConfigError(f"{override[:60]}: is set by another option; choose with {group}=NAME")
    ready = [quoted(override) for override in overrides]
    if tf_config and not cast(Loader, hydra.config_loader).chooses("cluster", name, ready):
        ready.append("cluster=tf_config")
    return ready


def quoted(override: str) -> str:
    """The override, with a path in quotes where Hydra's grammar cannot read it without, or takes it for a number."""
    key, _, value = override.partition("=")
    if key not in TEXTS or not value:
        return override
    try:
        parsed = OverridesParser.create().parse_override(override).value()
    except ERRORS:
        pass
    else:
        # Of 20260101_120000 and of 1.50 a number would not keep the form; a bool is an int, too.
        if key == "plugins" or not isinstance(parsed, int | float):
            return override
    if key != "plugins":
        return f"{key}={in_quotes(value)}"
    if value[0] + value[-1] != "[]" or any(sign in value[1:-1] for sign in "'\"\\[]{}"):
        return override
    return f"plugins=[{','.join(in_quotes(path.strip()) for path in value[1:-1].split(','))}]"


def in_quotes(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def name_of(override: str) -> str:
    """The name of the option or group that an override sets, adds with a plus, or deletes with a tilde."""
    return re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0]


def _unknown(composed: DictConfig) -> Iterator[str]:
    """The dotted names in a configuration that the schema does not have."""
    known = {*groups(), *OPTIONS, *SECTIONS}
    # Unresolved: an option may refer to something that is known only later.
    for name, value in as_written(composed).items():
        if name == "hydra":
            continue
        if name not in known:
            inner = next(iter(value), "") if isinstance(value, dict) else ""
            yield f"{name}.{inner}" if inner else str(name)
        elif name not in PLUGIN_GROUPS and isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value if f"{name}.{key}" not in known)


def _nearest_option(key: str, composed: DictConfig) -> str:
    """The end of the message about an unknown option: the best guess, or what exists instead."""
    # The groups, and the options that exist with the choices of this command line, or with others.
    known, others = [*groups(), *_leaves(as_written(composed))], choices_by_option()
    section, _, name = key.rpartition(".")
    names = {option: option.rpartition(".")[2] for option in known}
    # From the most certain guess to the vaguest: a wrong section is more likely than a wrong name.
    if same_name := [option for option in known if names[option] == name]:
        return f"; did you mean {same_name[0]}?"
    if unchosen := [option for option in others if option == key or (not section and option.endswith(f".{name}"))]:
        return f"; {unchosen[0]} is an option of {' and '.join(others[unchosen[0]])}"
    in_section = [option for option in known if section and option.startswith(f"{section}.")]
    if longer := [option for option in in_section or known if names[option].startswith(f"{name}_")]:
        return f"; did you mean {longer[0]}?"
    close = difflib.get_close_matches(name, [names[option] for option in in_section or known], n=1, cutoff=0.6)
    if close:
        return f"; did you mean {next(option for option in in_section or known if names[option] == close[0])}?"
    return f"; it has {', '.join(names[option] for option in in_section)}" if in_section else "; see --help"


def _leaves(tree: dict[str, Any]) -> Iterator[str]:
    """The dotted names of all known options, except for those that only a choice sets."""
    for option, _ in flatten({key: value for key, value in tree.items() if key != "hydra"}):
        section, _, key = option.rpartition(".")
        declared = OPTIONS.get(option)
        if not declared.is_choice if declared else section in PLUGIN_GROUPS and key != "name":
            yield option


def _explain(error: Exception, overrides: list[str], config_name: str | None, run_mode: RunMode, loader: Loader) -> str:
    """One line that says why Hydra could not compose a configuration."""
    if isinstance(error, yaml.YAMLError):
        return yaml_message(error)
    if isinstance(error, MissingConfigException):
        return _missing(error, overrides, config_name, loader)
    parsed = []
    # Hydra's errors do not always say which override they are about, so each is parsed by itself to find it.
    for text in overrides:
        unreadable = f"{' '.join(text.split())}: cannot be read; {FORM}"
        if not name_of(text):  # Hydra accepts =3, in which the name is missing.
            return unreadable
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except ERRORS:
            return unreadable
    single = [override for override in parsed if run_mode == RunMode.RUN or not override.is_sweep_override()]
    if problem := next(filter(None, map(_wrong_kind, single)), ""):
        return problem
    try:
        # The choices alone: they decide which options exist.
        choices = [text for text in overrides if name_of(text) in groups() and text[0] not in "+~"]
        tree = ConfigLoaderImpl.load_configuration(loader, config_name, choices, RunMode.MULTIRUN)
    except ERRORS:
        return hydra_message(error)
    problems = (_problem(override, tree, overrides, loader) for override in single)
    return next(filter(None, problems), hydra_message(error))


def _wrong_kind(override: Override) -> str:
    """Says that an override has several values, or none, where there must be one; "" if it has one."""
    key, value = override.key_or_group, str(override.input_line).partition("=")[2]
    if override.is_sweep_override() and not key.startswith("hydra"):
        is_list = isinstance(OPTIONS[key].default, list) if key in OPTIONS else key == "model.hidden_units"
        instead = f"write a list in brackets, {key}=[{value}]" if is_list else "give one of them"
        return f"{key} ({value}): is several values; {instead}, or add --multirun for a run of each"
    if key in groups() and override.value() is None:
        return f"{key} ({value}): must be one of {', '.join(groups()[key])}"
    return ""


def _problem(override: Override, tree: DictConfig, overrides: list[str], loader: Loader) -> str:
    """The mistake in one override, or ""; `tree`: the configuration of the choices that were made."""
    key, value = override.key_or_group, str(override.input_line).partition("=")[2]
    if override.is_add() or override.is_force_add() or override.is_delete() or key.startswith("hydra"):
        return ""
    if (
        key in groups()
        or key in _leaves(as_written(tree))
        or OmegaConf.select(tree, key, throw_on_missing=False) is not None
    ):
        return ""
    if loader.get_group_options(key):
        return f"{key} ({value}): is not a group of tf2dist; write +{override.input_line} for one of yours"
    suggestion = _nearest_option(key, tree)
    has_plugins = any(other.startswith("plugins=") for other in overrides)
    if has_plugins and key.partition(".")[0] in PLUGIN_GROUPS and "mean" not in suggestion:
        return f"{key}: there is no such option; write +{key} if a plugin of yours has it"
    return f"{key}: there is no such option{suggestion}"


def _missing(error: MissingConfigException, overrides: list[str], config_name: str | None, loader: Loader) -> str:
    """The message about the name of a file that is not there."""
    missing_file = error.missing_cfg_file or ""
    if missing_file == config_name:
        known = sorted({name for source in loader.get_sources() if source.provider not in ("hydra", "schema")
                        for name in source.list("", ObjectType.CONFIG) if not name.startswith("__")})  # fmt: skip
        suggestion = nearest(missing_file, known) or "; add --config-dir"
        return f"--config-name ({missing_file[:60]}): there is no such file{suggestion}"
    group, _, name = missing_file.rpartition("/")
    offered = sorted(error.options or loader.get_group_options(group))
    location = ""
    # The files that the command line chooses, of which one may name it in its list of defaults.
    chosen_files = [
        f"{name_of(override)}/{override.partition('=')[2]}" for override in overrides if name_of(override) != group
    ]
    for path in [config_name or MAIN, *chosen_files]:
        file = loader.repository.load_config(path)
        if file and any(entry.get_name() == name for entry in file.defaults_list or () if hasattr(entry, "value")):
            location = f" (in {path}.yaml)"
    return f"{group} ({name}): must be one of {', '.join(offered)}{nearest(name, offered)}{location}"


def setting(composed: DictConfig, name: str) -> str:
    """A setting of Hydra's own. Raises ConfigError if its ``${...}`` cannot be resolved."""
    try:
        with hydra_settings(composed):
            return str(OmegaConf.select(composed, name))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{name}: cannot be filled in ({brief_reason(error)})") from None


def yaml_message(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    location = f"{mark.name}, line {mark.line + 1}" if mark else "a configuration file"
    return f"{location}: cannot be read ({getattr(error, 'problem', None) or brief_reason(error)}); correct the file"


def hydra_message(error: Exception) -> str:
    """The message of an error of Hydra, on one line."""
    # Some of its errors have no text of their own, only a cause.
    cause = error.__cause__ if isinstance(error.__cause__, Exception) and not str(error) else error
    return " ".join(str(cause).split()) or type(cause).__name__
