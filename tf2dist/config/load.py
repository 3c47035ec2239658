"""The command line and ``conf/``, composed by Hydra into one checked `RunConfig`."""

import re
from importlib import resources
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.checks import check
from tf2dist.config import RunConfig, one_line, to_typed
from tf2dist.errors import ConfigError
from tf2dist.hints import for_unknown, nearest

CONF_MODULE = "tf2dist.conf"
VERBATIM = ("run_dir", "init_from", "init_layers", "data.dir")
PLUGIN_GROUPS = ("model", "data", "optimizer")
MAX_OVERRIDE_CHARS = 4096
FORM = "options look like train.steps=1000, and what holds ~ : [ ] or blanks stands in quotes, as in ['~/a b']"
# What Hydra and its parser raise; a number of 5,000 digits and 500 brackets are among the last two.
UNREADABLE = (HydraException, OmegaConfBaseException, ValueError, RecursionError)


def load(overrides: list[str], tf_config: str | None) -> RunConfig:
    """Composes, types and checks the configuration of one command line.

    Args:
        overrides: what follows the command, such as ``["mode=sync", "train.steps=100"]``.
        tf_config: the value of the environment variable TF_CONFIG, which chooses the default cluster.

    Raises:
        ConfigError: with one line that says what is wrong and what would be right.
    """
    if tf_config and not any(override.startswith("cluster=") for override in overrides):
        overrides = [*overrides, "cluster=tf_config"]
    for override in overrides:
        _check_form(override)
    composed = _compose(overrides)
    check_literal(OmegaConf.to_container(composed, resolve=False))
    config = to_typed(composed)
    _check_names(config, overrides)
    if tf_config and config.cluster.kind == "local":
        raise ConfigError(
            "cluster (local): the environment variable TF_CONFIG is set, so this process is one task of another "
            "cluster; leave out cluster=..., or unset TF_CONFIG to train on this machine alone"
        )
    check(config)
    config.plugins = [str(Path(path).resolve()) for path in config.plugins]
    return config


def _check_form(override: str) -> None:
    """What Hydra would take and this command does not: see each line."""
    key = re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0]
    group, _, argument = key.partition(".")
    shown = f"{override[:60]}..." if len(override) > 60 else override
    if len(override) > MAX_OVERRIDE_CHARS:
        raise ConfigError(f"{shown}: is longer than {MAX_OVERRIDE_CHARS} characters; shorten it")
    if override.startswith("~"):
        raise ConfigError(f"{shown}: options cannot be removed; leave it out for the default")
    if group.partition("/")[0] == "hydra" or "@" in override.partition("=")[0]:
        raise ConfigError(f"{shown}: there is no such option; see --help")
    if override.startswith("+") and key in options():
        raise ConfigError(f"{shown}: is no new option; leave out the +, as in {key}=NAME")
    if (group in PLUGIN_GROUPS and argument == "name") or key == "cluster.kind":
        raise ConfigError(f"{shown}: is set by another option; choose with {group}=NAME")


def check_literal(node: Any, name: str = "") -> None:
    """Values are taken as they are written: nothing looks into the environment or into other options.

    Raises:
        ConfigError: a value with ``${...}``, or one that is missing.
    """
    if isinstance(node, dict):
        for key, value in node.items():
            check_literal(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, list):
        for value in node:
            check_literal(value, name)
    elif isinstance(node, str) and "${" in node:
        raise ConfigError(f"{name} ({node}): nothing is filled in for ${{...}}; give the value itself")
    elif node == "???":
        raise ConfigError(f"{name} (???): is missing; give a value")


def _check_names(config: RunConfig, overrides: list[str]) -> None:
    """The names become part of file names, and without plugins only those in conf/ exist."""
    chosen = {"model": config.model.get("name"), "optimizer": config.optimizer.get("name"), "data": config.data.name}
    for group, name in chosen.items():
        if isinstance(name, str) and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", name):
            raise ConfigError(f"{group} ({name}): must be a name of letters, digits, _ . and -, at most 64 of them")
        if not config.plugins and name not in options()[group]:
            raise ConfigError(f"{group} ({name}): there is no such {group}; choose with {group}=NAME")
    # A model of ours takes what its file names; an optimizer takes all that Keras's does.
    known = [] if config.plugins else _file("model", config.model["name"])
    if unknown := [key for key in config.model if known and key not in known]:
        its = ", ".join(key for key in known if key != "name") or "none"
        given = {each.partition("=")[0].lstrip("+") for each in overrides}
        experiment = [each for each in overrides if each.startswith("experiment=") and each != "experiment=null"]
        whose = f"; {experiment[0]} gives it" if experiment and f"model.{unknown[0]}" not in given else ""
        raise ConfigError(f"model.{unknown[0]}: is no option of model={config.model['name']}; it has {its}{whose}")


def _file(group: str, name: str) -> list[str]:
    """The keys of one configuration file."""
    return list(OmegaConf.create(resources.files(CONF_MODULE).joinpath(group, f"{name}.yaml").read_text()))


def options() -> dict[str, list[str]]:
    """The names that may follow ``group=`` on the command line, by group."""
    groups = [entry for entry in resources.files(CONF_MODULE).iterdir() if entry.is_dir()]
    return {
        group.name: sorted(Path(file.name).stem for file in group.iterdir() if file.name.endswith(".yaml"))
        for group in groups
        if group.name != "__pycache__"
    }


def _compose(overrides: list[str]) -> Any:
    """Composes to an untyped configuration, or explains in one line what cannot be composed."""
    parsed = [part for override in overrides for part in _checked_choice(override, overrides)]
    try:
        return _hydra(parsed)
    except UNREADABLE as error:
        raise ConfigError(_explain(error, parsed)) from None


def _hydra(overrides: list[str]) -> Any:
    GlobalHydra.instance().clear()  # of a caller that uses Hydra itself, a test for example
    with initialize_config_module(CONF_MODULE, version_base="1.3"):
        return compose("config", overrides)


def _checked_choice(override: str, overrides: list[str]) -> list[str]:
    """One override as Hydra is to get it: paths quoted, ``group=name`` checked, a plugin's name as its group's file."""
    key, separator, value = override.partition("=")
    if key in VERBATIM and value not in ("", "null") and value[0] not in "'\"":
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        return [f"{key}='{quoted}'"]  # to Hydra's grammar brackets and spaces mean something
    names = options().get(key)
    if override == "experiment=null":
        return []
    if key.lstrip("+") == "task" and separator:
        raise ConfigError(f"task ({value}): holds two options; give task.type and task.index, see --help")
    if not separator or names is None or value in names:
        return [override]
    if key in PLUGIN_GROUPS and any(other.startswith("plugins=") for other in overrides):
        return [f"{key}=plugin", f"{key}.name={value}"]
    public = [name for name in names if name not in ("plugin", "default")]
    if not public:
        raise ConfigError(f"{key} ({value}): holds several options; give them one by one, see --help")
    raise ConfigError(f"{key} ({value}): must be one of {', '.join(public)}{nearest(value, public)}")


def _explain(error: Exception, overrides: list[str]) -> str:
    """One line for what Hydra could not compose, with the nearest known key."""
    parsed = []
    for text in overrides:
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except UNREADABLE:
            return f"{' '.join(text.split())}: cannot be read; {FORM}"
    groups = {group: names for group, names in options().items() if set(names) - {"plugin", "default"}}
    try:
        known = [*groups, *_leaves(_hydra([text for text in overrides if text.partition("=")[0] in options()]))]
    except UNREADABLE:
        return one_line(error)
    its = {*options(), *(f"{group}.name" for group in PLUGIN_GROUPS)}
    for override in parsed:
        key = override.key_or_group
        if override.is_sweep_override():
            value = str(override.input_line).partition("=")[2]
            return f"{key} ({value}): has a comma; write a list in brackets, {key}=[{value}], and a number with a point"
        if key not in known and key not in its and not override.is_add() and not override.is_force_add():
            if f"{key.partition('.')[0]}=plugin" in overrides and not key.startswith("data."):
                return f"{key}: there is no such option; write +{key} if a plugin of yours has it"
            return f"{key}: there is no such option{for_unknown(key, known, _of_choices())}"
    return one_line(error)


def _of_choices() -> dict[str, list[str]]:
    """The options that come with a choice, and the choices: "model.dropout" with "model=cnn"."""
    found: dict[str, list[str]] = {}
    for group in PLUGIN_GROUPS:
        for name in options()[group]:
            for key in _file(group, name):
                if name != "plugin" and key != "name":
                    found.setdefault(f"{group}.{key}", []).append(f"{group}={name}")
    return found


def _leaves(cfg: Any, prefix: str = "") -> list[str]:
    """The dotted names of all options below a node that hold a value of the user's."""
    names = []
    for key in cfg:
        node = cfg._get_node(key)
        if OmegaConf.is_dict(node):
            names += _leaves(node, f"{prefix}{key}.")
        elif key not in ("name", "kind"):
            names.append(f"{prefix}{key}")
    return names
