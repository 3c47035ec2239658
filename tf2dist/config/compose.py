"""Composes the command line and the files into one plain tree by Hydra, or says in one line why not."""

import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tf2dist.config import interpolation
from tf2dist.config.choices import HIDDEN, PLUGIN_GROUPS, choices_by_option, groups
from tf2dist.config.hints import for_unknown
from tf2dist.config.schema import SECTIONS
from tf2dist.config.source import Source, check_complete, opened, what_hydra_says, why_missing
from tf2dist.errors import ConfigError, nearest

VERBATIM = (
    "run_dir",
    "init_from",
    "init_layers",
    "data.dir",
)  # paths and patterns, which Hydra's grammar would misread: brackets, blanks and ~ mean something there
MAX_OVERRIDE_CHARS = 4096  # far more than any real override has
CALL = re.compile(r"\w+\s*\(.*\)\s*")
MANY = ", or --multirun for a run of each"
FORM = "options look like train.steps=1000; put values with ~ : [ ] or blanks in quotes, as in ['~/a b']"
# What Hydra and its parser raise: the last three for a name of 4,000 letters, a number of 5,000 digits, 500 brackets.
UNREADABLE = (HydraException, OmegaConfBaseException, OSError, ValueError, RecursionError)


def compose(overrides: list[str], source: Source) -> dict[str, Any]:
    """The tree of all options: the schema's defaults, the settings of the choices, and the overrides, all resolved.

    Raises:
        ConfigError: an override or a file cannot be used; says why, and names the nearest known option if there is one.
    """
    tree = interpolation.resolve(unresolved(overrides, source), overrides)
    check_complete(source, tree)
    return tree


def unresolved(overrides: list[str], source: Source) -> DictConfig:
    """The same tree before interpolation, with its ``${...}``. Raises ConfigError as `compose` does."""
    parts = for_hydra(overrides, source)
    try:
        return _hydra(parts, source)
    except MissingConfigException as error:
        if error.missing_cfg_file == source.name:
            raise why_missing(source) from None
        raise ConfigError(_explain(error, parts, source)) from None
    except UNREADABLE as error:
        raise ConfigError(_explain(error, parts, source)) from None


def for_hydra(overrides: list[str], source: Source) -> list[str]:
    """The overrides in the form that Hydra needs. Raises ConfigError for those that this command does not accept."""
    for override in overrides:
        _check_form(override)
    return [part for override in overrides for part in _checked_choice(override, overrides, source)]


def _hydra(overrides: list[str], source: Source) -> DictConfig:
    with opened(source) as hydra:
        tree = hydra.compose_config(source.name, overrides, RunMode.RUN, from_shell=False)
    # Hydra's own settings are no options of a run, and would not fit the schema.
    with open_dict(tree):
        del tree["hydra"]
    return tree


def _check_form(override: str) -> None:
    """Refuses overrides that Hydra would accept and this command does not; each message says why."""
    key = re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0]
    group, _, argument = key.partition(".")
    value = override.partition("=")[2]
    shown = f"{override[:60]}..." if len(override) > 60 else override
    if len(override) > MAX_OVERRIDE_CHARS:
        raise ConfigError(f"{shown}: is longer than {MAX_OVERRIDE_CHARS} characters; shorten it")
    if override.startswith("~"):
        raise ConfigError(f"{shown}: options cannot be removed; leave it out for the default")
    if group.partition("/")[0] == "hydra" or "@" in override.partition("=")[0]:
        instead = {"hydra.run.dir": "give run_dir=DIR", "hydra.mode": "give --multirun"}.get(key, "see --help")
        instead = "it is for --multirun; add that" if key.startswith("hydra.sweep.") else instead
        raise ConfigError(f"{shown}: there is no such option; {instead}")
    if override.startswith("+") and key in groups():
        raise ConfigError(f"{shown}: is an existing option; leave out the +, as in {key}=NAME")
    # The name alone would leave the arguments of another choice in place.
    if (group in PLUGIN_GROUPS and argument == "name") or key in ("cluster.kind", "algorithm.kind"):
        raise ConfigError(f"{shown}: is set by another option; choose with {group}=NAME")
    if "=" in override and key in SECTIONS - {*groups(), "keras"}:  # the old form keras={epsilon: 1e-5} is accepted
        is_task = key == "task"
        way_out = "two options; give task.type and task.index" if is_task else "several options; give them one by one"
        raise ConfigError(f"{key} ({value}): holds {way_out}, see --help")
    if value.count("${") > value.count("}"):
        raise ConfigError(f"{key} ({value}): has ${{ without }}; close it, as in ${{train.steps}}")
    if key not in VERBATIM and CALL.fullmatch(value):  # a sweep, or a function that Hydra evaluates, such as shuffle
        raise ConfigError(f"{key} ({value}): is a function, and a run takes one value; give the value itself{MANY}")


def _checked_choice(override: str, overrides: list[str], source: Source) -> list[str]:
    """One override in the form that Hydra needs.

    Paths are quoted and ``group=name`` is checked; for a name that a plugin may register, the file `HIDDEN` is chosen.
    """
    key, separator, value = override.partition("=")
    if key == "plugins" or key in VERBATIM:
        return [quoted(override)]
    if override == "experiment=null":  # Hydra would look for a file of that name
        return []
    known = source.names(key)
    # Hydra's message for an unknown choice has many lines, and suggests nothing.
    if not separator or key not in groups() or value in known:
        return [override]
    offered = [name for name in known if name != HIDDEN]
    names = ", ".join(offered)
    if "," in value:
        raise ConfigError(f"{key} ({value}): must be one of {names}; a run takes one of them, so give one{MANY}")
    # Which names a plugin registers is known only when it is loaded, which the launching process does not do.
    if key in PLUGIN_GROUPS and any(other.startswith("plugins=") for other in overrides):
        return [f"{key}={HIDDEN}", f"{key}.name={value}"]
    raise ConfigError(f"{key} ({value}): must be one of {names}{nearest(value, offered)}")


def quoted(override: str) -> str:
    """The override with its path in quotes, since brackets and blanks have a meaning in Hydra's grammar."""
    key, _, value = override.partition("=")
    if key == "plugins":
        return f"{key}={_quoted_list(value)}"
    if key in VERBATIM and value not in ("", "null") and value[0] not in "'\"":
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"{key}='{escaped}'"
    return override


def _quoted_list(value: str) -> str:
    """The paths of a list in brackets, quoted for Hydra; unchanged if there are quotes or brackets inside already."""
    inside = value[1:-1].strip() if value[:1] + value[-1:] == "[]" else ""
    if not inside or any(sign in inside for sign in "'\"\\[]{}"):
        return value
    paths = [path.strip() for path in inside.split(",")]
    return "[" + ",".join(path if path in ("", "null") else f"'{path}'" for path in paths) + "]"


def _explain(error: Exception, overrides: list[str], source: Source) -> str:
    """One line that says why Hydra could not compose the overrides, with the nearest known option."""
    parsed = []
    # Hydra's errors do not always say which override they are about, so each is parsed by itself to find it.
    for text in overrides:
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except UNREADABLE:
            return f"{' '.join(text.split())}: cannot be read; {FORM}"
    try:
        # The choices alone: they decide which options exist.
        tree = _hydra([text for text in overrides if text.partition("=")[0] in groups()], source)
        chosen = _leaves(OmegaConf.to_container(tree))
    except UNREADABLE:
        return what_hydra_says(error)
    for override in parsed:
        if (key := override.key_or_group) not in groups() and not override.is_add() and source.names(key):
            return (
                f"{key} ({override.value()}): is not a group of tf2dist; write +{override.input_line} for one of yours"
            )
    problems = (_problem(override, chosen, overrides) for override in parsed)
    return next(filter(None, problems), what_hydra_says(error))


def _problem(override: Override, chosen: dict[str, Any], overrides: list[str]) -> str:
    """What is wrong with one override, or ""; `chosen`: the options of the choices that were made, with values."""
    key, known = override.key_or_group, [*groups(), *chosen]
    if override.is_sweep_override():
        value = str(override.input_line).partition("=")[2]
        if key in known and not isinstance(chosen.get(key), list):
            return f"{key} ({value}): has a comma, and a run takes one value; give one, and a number with a point{MANY}"
        return f"{key} ({value}): has a comma; write a list in brackets, {key}=[{value}], and a number with a point"
    names = [f"{group}.name" for group in PLUGIN_GROUPS]
    if key in [*known, *names] or override.is_add() or override.is_force_add():
        return ""
    group = key.partition(".")[0]
    meant = for_unknown(key, known, choices_by_option())
    if f"{group}={HIDDEN}" in overrides and not (group == "data" and "mean" in meant):
        return f"{key}: there is no such option; write +{key} if a plugin of yours has it"
    return f"{key}: there is no such option{meant}"


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """All options below a node by dotted name, with their values, except for those that only a choice sets."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{key}.")
        elif key not in ("name", "kind"):
            found[f"{prefix}{key}"] = value
    return found
