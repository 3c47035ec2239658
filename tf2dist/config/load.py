"""The command line and ``conf/``, composed by Hydra into one checked `RunConfig`."""

import os
import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tf2dist.config import arguments, keras_settings
from tf2dist.config.checks import check
from tf2dist.config.choices import CONF_MODULE, HIDDEN, PLUGIN_GROUPS, keys, of_choices, options
from tf2dist.config.hints import for_unknown
from tf2dist.config.schema import RunConfig, one_line, to_typed
from tf2dist.errors import ConfigError, nearest

VERBATIM = ("run_dir", "init_from", "init_layers", "data.dir")
MAX_OVERRIDE_CHARS = 4096
MAX_DIGITS = 308  # of a number that a float can hold
CALL = re.compile(r"\w+\s*\(.*\)\s*")
FORM = "options look like train.steps=1000, and what holds ~ : [ ] or blanks stands in quotes, as in ['~/a b']"
# What Hydra and its parser raise; a name of 4,000 letters, a number of 5,000 digits and 500 brackets are among it.
UNREADABLE = (HydraException, OmegaConfBaseException, OSError, ValueError, RecursionError)


def load(overrides: list[str], tf_config: str | None) -> RunConfig:
    """Composes, types and checks the configuration of one command line.

    Args:
        overrides: what follows the command, such as ``["mode=sync", "train.steps=100"]``.
        tf_config: the value of the environment variable TF_CONFIG, which chooses the default cluster.

    Raises:
        ConfigError: with one line that says what is wrong and what would be right.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the working directory ({error.strerror}): is gone; change to one that exists") from None
    if tf_config and not any(override.startswith("cluster=") for override in overrides):
        overrides = [*overrides, "cluster=tf_config"]
    for override in overrides:
        _check_form(override)
    composed = _compose(overrides)
    check_literal(OmegaConf.to_container(composed, resolve=False))
    config = to_typed(composed)
    _check_names(config, overrides)
    if tf_config and config.cluster.kind != "tf_config":
        instead = "use the lists given here" if config.cluster.kind == "hosts" else "train on this machine alone"
        raise ConfigError(
            f"cluster ({config.cluster.kind}): the environment variable TF_CONFIG is set, so this process is one task "
            f"of another cluster; leave out cluster=..., or unset TF_CONFIG to {instead}"
        )
    check(config)
    config.plugins = [str(Path(path).expanduser().resolve()) for path in config.plugins]
    config.optimizer = arguments.with_floats("optimizer", config.optimizer)
    config.model = arguments.with_floats("model", config.model)
    config.keras = keras_settings.resolve(config.keras)
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
    value = override.partition("=")[2]
    if key not in VERBATIM and CALL.fullmatch(value):  # a sweep, or what Hydra would compute, at random maybe
        raise ConfigError(f"{key} ({value}): is a function, and a run takes one value; give the value itself")


def check_literal(node: Any, name: str = "") -> None:
    """Values are taken as they are written: nothing looks into the environment or into other options.

    Raises:
        ConfigError: a value with ``${...}``, one that is missing, or a number that no float can hold.
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
    elif isinstance(node, int) and abs(node) >= 10**MAX_DIGITS:
        raise ConfigError(f"{name} ({node}): must be a number of at most {MAX_DIGITS} digits; give fewer")


def _check_names(config: RunConfig, overrides: list[str]) -> None:
    """The names become part of file names, and without plugins only those in conf/ exist."""
    chosen = {"model": config.model.get("name"), "optimizer": config.optimizer.get("name"), "data": config.data.name}
    for group, name in chosen.items():
        if isinstance(name, str) and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", name):
            raise ConfigError(f"{group} ({name}): must be a name of letters, digits, _ . and -, at most 64 of them")
        if not config.plugins and name not in options()[group]:
            raise ConfigError(f"{group} ({name}): there is no such {group}; choose with {group}=NAME")
    # A model or data of ours takes what its file names; an optimizer takes all that Keras's does.
    for group, arguments_given in (("model", config.model), ("data", config.data.arguments)):
        known = {"name", *keys(group, chosen[group])}
        if not config.plugins and (unknown := [key for key in arguments_given if key not in known]):
            _refuse_unknown(group, str(chosen[group]), unknown[0], overrides)


def _refuse_unknown(group: str, name: str, key: str, overrides: list[str]) -> None:
    """Raises ConfigError: a choice of ours has no such option; an experiment may have given it."""
    its = ", ".join(keys(group, name)) or "none"
    given = {each.partition("=")[0].lstrip("+") for each in overrides}
    experiment = [each for each in overrides if each.startswith("experiment=") and each != "experiment=null"]
    whose = f"; {experiment[0]} gives it" if experiment and f"{group}.{key}" not in given else ""
    raise ConfigError(f"{group}.{key}: is no option of {group}={name}; it has {its}{whose}")


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
    if key == "plugins":
        return [f"{key}={_quoted_list(value)}"]
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
    public = [name for name in names if name not in HIDDEN]
    if public and "," in value:
        raise ConfigError(f"{key} ({value}): must be one of {', '.join(public)}; a run takes one of them, so give one")
    if key in PLUGIN_GROUPS and any(other.startswith("plugins=") for other in overrides):
        return [f"{key}=plugin", f"{key}.name={value}"]
    if not public:
        raise ConfigError(f"{key} ({value}): holds several options; give them one by one, see --help")
    raise ConfigError(f"{key} ({value}): must be one of {', '.join(public)}{nearest(value, public)}")


def _quoted_list(value: str) -> str:
    """The paths in brackets as Hydra is to get them: quoted, unless somebody has done that already."""
    inside = value[1:-1].strip() if value[:1] + value[-1:] == "[]" else ""
    if not inside or any(sign in inside for sign in "'\"\\[]{}"):
        return value
    paths = [path.strip() for path in inside.split(",")]
    return "[" + ",".join(path if path in ("", "null") else f"'{path}'" for path in paths) + "]"


def _explain(error: Exception, overrides: list[str]) -> str:
    """One line for what Hydra could not compose, with the nearest known key."""
    parsed = []
    for text in overrides:
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except UNREADABLE:
            return f"{' '.join(text.split())}: cannot be read; {FORM}"
    groups = {group: names for group, names in options().items() if set(names) - set(HIDDEN)}
    try:
        chosen = _hydra([text for text in overrides if text.partition("=")[0] in options()])
    except UNREADABLE:
        return one_line(error)
    known = [*groups, *_leaves(chosen)]
    its = {*options(), *(f"{group}.name" for group in PLUGIN_GROUPS)}
    for override in parsed:
        key = override.key_or_group
        if override.is_sweep_override():
            value = str(override.input_line).partition("=")[2]
            if key in known and not OmegaConf.is_list(OmegaConf.select(chosen, key)):
                return f"{key} ({value}): has a comma, and a run takes one value; give one, and a number with a point"
            return f"{key} ({value}): has a comma; write a list in brackets, {key}=[{value}], and a number with a point"
        if key not in known and key not in its and not override.is_add() and not override.is_force_add():
            meant = for_unknown(key, known, of_choices())
            if f"{key.partition('.')[0]}=plugin" in overrides and not (key.startswith("data.") and "mean" in meant):
                return f"{key}: there is no such option; write +{key} if a plugin of yours has it"
            return f"{key}: there is no such option{meant}"
    return one_line(error)


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
