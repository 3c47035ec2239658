"""The text of ``--help``, made from the schema and the files in ``conf/``."""

import textwrap

from tf2dist.config.choices import groups, keys, public, values
from tf2dist.config.rules import ARGUMENTS
from tf2dist.config.schema import OPTIONS, RunConfig

HEAD = """\
Train a Keras 3 model on many workers.

  tf2dist mode=async cluster=local3    on this machine: 1 ps, 3 workers, 1 coordinator
  tf2dist mode=sync  cluster=local3    on this machine: 3 workers
  TF_CONFIG='{...}' tf2dist mode=async on each of many hosts: its task of the cluster

Choices, as name=choice:
"""
TAIL = """
  --multirun, -m            one run after the other: mode=async,sync optimizer=glob(*) seed=range(3), and a table
  --config-dir, -cd DIR     a folder with configuration files of your own, such as DIR/experiment/mine.yaml
  --config-name, -cn NAME   the file from which the configuration begins; it begins with "defaults: [config, _self_]"
  --cfg, -c                 shows the configuration that the other arguments make;
                            --package, -p SECTION: a part of it; --resolve: with values for ${...}
  --info, -i                shows where it comes from; searchpath, defaults-tree, defaults or config: only that
  --shell-completion, -sc   for bash: eval "$(tf2dist -sc install=bash)"
  --help, -h                this text
  --version                 the version

A value may name other options, as in run_dir=runs/${model.name}. On the command line it may also name variables of the
environment, as in ${oc.env:HOME}.
python -m tf2dist.doctor, with the same arguments, does not train but says what would prevent a run.
"""
SECTIONS = ("task", "keras", "", "cluster", "train", "checkpoint", "devices")  # "": the options outside of all sections
OPTION_CHARS = 36


def help_text(line_chars: int) -> str:
    """The whole text, in lines of at most `line_chars` characters as far as they can be broken."""
    choices = [f"  {group:10} {', '.join(public(group))}\n" for group in sorted(groups())]
    described = [row for section in SECTIONS for row in _of_section(section)]
    chosen = RunConfig()
    defaults = {"data": chosen.data.name, "model": chosen.model["name"], "optimizer": chosen.optimizer["name"]}
    for group, default in defaults.items():
        described += _of_choices(group, sorted(public(group), key=lambda name: name != default))
    rows = [_row(option, text, line_chars) + "\n" for option, text in described]
    return "".join([HEAD, *choices, "\nOptions, as name=value, with their defaults:\n", *rows, TAIL])


def _row(option: str, text: str, line_chars: int) -> str:
    """One option and its text. All texts stand in one column, within which long ones are wrapped."""
    column = min(OPTION_CHARS, line_chars // 2)
    indent = " " * (column + 4)
    filled = textwrap.fill(text, line_chars, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(option) > column:
        return f"  {option}\n{filled}".rstrip()
    return f"  {option:{column}}  {filled.lstrip()}".rstrip()


def _of_section(section: str) -> list[tuple[str, str]]:
    """The options of a section, as ("name=default", text)."""
    return [
        (f"{name}={option.shown}", option.help)
        for name, option in OPTIONS.items()
        if name.rpartition(".")[0] == section and not option.is_choice
    ]


def _of_choices(group: str, names: list[str]) -> list[tuple[str, str]]:
    """The options of all choices of a group, as ("name=default", text).

    The default is that of the first choice that has the option. The text names the choices that have the option, if
    not all do, and other defaults.
    """
    owners: dict[str, dict[str, str]] = {}  # by option: the choices that have it, with their defaults
    for name in names:
        for key in keys(group, name):
            declared = OPTIONS.get(f"{group}.{key}")
            default = values(group, name).get(key) or (declared.shown if declared else "")
            owners.setdefault(key, {})[name] = default
    described = []
    for key, defaults in owners.items():
        default = next(iter(defaults.values()))
        others = [f"{name}: {its}" for name, its in defaults.items() if its != default]
        whose = [name for name, its in defaults.items() if its == default] if len(defaults) < len(names) else []
        of = f" ({', '.join([*whose, *others])})" if whose or others else ""
        text = (OPTIONS.get(f"{group}.{key}") or ARGUMENTS[key]).help
        described.append((f"{group}.{key}={default}", f"{text}{of}".strip()))
    return described
