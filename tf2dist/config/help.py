"""The text of ``--help``, made from the schema and the files in ``conf/``."""

import textwrap

from tf2dist.config.checks import ARGUMENTS
from tf2dist.config.compose import groups, keys, values
from tf2dist.config.schema import OPTIONS, RunConfig

HEAD = """\
Train a Keras 3 model on many workers.

  tf2dist mode=async cluster=local3    on this machine: 1 ps, 3 workers, 1 coordinator
  tf2dist mode=sync  cluster=local3    on this machine: 3 workers
  tf2dist mode=sync_replicas           as mode=async, but a step is the mean of the workers' gradients
  TF_CONFIG='{...}' tf2dist mode=async on each of many hosts: one task of the cluster

Choices, as name=choice:
"""
TAIL = """
  --multirun, -m            every combination, one run after the other, with a table of the results: mode=async,sync
                            optimizer=glob(*) seed=range(3)
  --config-dir, -cd DIR     a folder with configuration files of your own, such as DIR/experiment/mine.yaml
  --config-path, -cp DIR    the same, and its files come before those of tf2dist with the same names
  --config-name, -cn NAME   the primary configuration file, instead of ours; begin it with "defaults: [config, _self_]"
  --cfg, -c job|hydra|all   print the configuration that the other arguments make;
                            --package, -p SECTION: only a part of it; --resolve: with values for ${...}
  --info, -i                print where it comes from; searchpath, defaults-tree, defaults, config or plugins: only that
  --shell-completion, -sc   install=bash, zsh or fish, as in eval "$(tf2dist -sc install=bash)"
  --hydra-help              print the settings of Hydra itself, such as hydra/launcher
  --help, -h                print this text
  --version                 print the version

The flags are those of Hydra, https://hydra.cc. A value may refer to other options, as in run_dir=runs/${model.name},
and to environment variables, as in ${oc.env:HOME}.
python -m tf2dist.doctor, with the same arguments, trains nothing and reports what would prevent the run.
"""
CHOICES = ("mode", "cluster", "data", "model", "optimizer", "algorithm", "experiment")
# The order of the options: what everybody looks for comes first. "": those outside of all sections.
SECTIONS = (
    *("", "train", "sync_replicas", "checkpoint", "data", "model", "optimizer", "algorithm"),
    *("cluster", "task", "devices", "keras", "simulate"),
)
OPTION_CHARS = 36  # wider names are rare; they get a line of their own


def help_text(line_chars: int) -> str:
    """The whole text; descriptions are wrapped at `line_chars` characters."""
    choices = [f"  {group:10} {', '.join(groups()[group])}\n" for group in CHOICES]
    config = RunConfig()
    defaults = {"data": config.data.name, "model": config.model["name"], "optimizer": config.optimizer["name"]}
    descriptions = []
    for section in SECTIONS:
        if default := defaults.get(section):
            # The default choice first, since its values are those that apply if nothing is given.
            names = [default, *(name for name in sorted(groups()[section]) if name != default)]
            descriptions += _of_choices(section, names)
        else:
            descriptions += _of_section(section)
    rows = [_row(option, text, line_chars) + "\n" for option, text in descriptions]
    return "".join([HEAD, *choices, "\nOptions, as name=value, with their defaults:\n", *rows, TAIL])


def _row(option: str, text: str, line_chars: int) -> str:
    """One option and its description, which is wrapped within a column of its own."""
    column = min(OPTION_CHARS, line_chars // 2)
    indent = " " * (column + 4)
    filled = textwrap.fill(text, line_chars, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(option) > column:
        return f"  {option}\n{filled}".rstrip()
    return f"  {option:{column}}  {filled.lstrip()}".rstrip()


def _of_section(section: str) -> list[tuple[str, str]]:
    """The options of a section, as ("name=default", description)."""
    return [
        (f"{name}={option.default_text}", option.help)
        for name, option in OPTIONS.items()
        if name.rpartition(".")[0] == section and not option.is_choice
    ]


def _of_choices(group: str, names: list[str]) -> list[tuple[str, str]]:
    """The options of all choices of a group, as ("name=default", description).

    The default is that of the first choice with the option. The description also names the choices with the option,
    unless all have it, and the defaults that differ.
    """
    owners: dict[str, dict[str, str]] = {}  # by option: the choices that have it, with their defaults
    for name in names:
        for key in keys(group, name):
            declared = OPTIONS.get(f"{group}.{key}")
            default = values(group, name).get(key) or (declared.default_text if declared else "")
            owners.setdefault(key, {})[name] = default
    descriptions = []
    for key, defaults in owners.items():
        default = next(iter(defaults.values()))
        other_defaults = [f"{name}: {value}" for name, value in defaults.items() if value != default]
        with_default = (
            [name for name, value in defaults.items() if value == default] if len(defaults) < len(names) else []
        )
        note = f" ({', '.join([*with_default, *other_defaults])})" if with_default or other_defaults else ""
        text = (OPTIONS.get(f"{group}.{key}") or ARGUMENTS[key]).help
        descriptions.append((f"{group}.{key}={default}", f"{text}{note}".strip()))
    return descriptions
