"""The text of ``--help``, made from the configuration files and their comments."""

import re
import textwrap
from importlib import resources

from tf2dist.config.choices import CONF_MODULE, HIDDEN, options

HEAD = """\
Train a Keras 3 model on many workers.

  tf2dist mode=async cluster=local3    on this machine: 1 ps, 3 workers, 1 coordinator
  tf2dist mode=sync  cluster=local3    on this machine: 3 workers
  TF_CONFIG='{...}' tf2dist mode=async one task, on this host, of a cluster of many

Choices, as name=choice:
"""
TAIL = """
  --help       this text
  --cfg        the configuration that the other arguments make, and nothing else
  --version    the version

python -m tf2dist.doctor, with the same arguments, starts no training and says what would stand in the way.
"""
GROUPS_WITH_OPTIONS = {
    "cluster": "local",
    "train": "default",
    "checkpoint": "default",
    "devices": "default",
}
OPTION_CHARS = 36
LINE = re.compile(r"^(\w+):\s*(.*?)\s*(?:#\s*(.*))?$")


def help_text(line_chars: int) -> str:
    """The whole text, in lines of at most so many characters where they can be broken."""
    choices = {group: [name for name in names if name not in HIDDEN] for group, names in sorted(options().items())}
    lines = [f"  {group:10} {', '.join(names)}\n" for group, names in choices.items() if names]
    described = [*_described("config.yaml", "")]
    for group, file in GROUPS_WITH_OPTIONS.items():
        described += _described(f"{group}/{file}.yaml", f"{group}.")
    for group, default in (("data", "mnist"), ("model", "dnn"), ("optimizer", "adam")):
        described += _of_choices(group, sorted(choices[group], key=lambda name: name != default))
    rows = [_row(option, comment, line_chars) + "\n" for option, comment in described]
    return "".join([HEAD, *lines, "\nOptions, as name=value, with their defaults:\n", *rows, TAIL])


def _row(option: str, comment: str, line_chars: int) -> str:
    """The comments stand in a column; a long one goes on below its beginning."""
    column = min(OPTION_CHARS, line_chars // 2)
    indent = " " * (column + 4)
    text = textwrap.fill(comment, line_chars, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(option) > column:
        return f"  {option}\n{text}".rstrip()
    return f"  {option:{column}}  {text.lstrip()}".rstrip()


def _of_choices(group: str, names: list[str]) -> list[tuple[str, str]]:
    """The options of all choices of a group, with the first's default; whose they are, and other defaults, follow."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for name in names:
        for option, comment in _described(f"{group}/{name}.yaml", f"{group}."):
            key, _, default = option.partition("=")
            found.setdefault(key, []).append((name, default, comment))
    described = []
    for key, owners in found.items():
        _, default, comment = owners[0]
        others = [f"{name}: {its}" for name, its, _ in owners if its != default]
        whose = [name for name, its, _ in owners if its == default] if len(owners) < len(names) else []
        of = f" ({', '.join([*whose, *others])})" if whose or others else ""
        described.append((f"{key}={default}", f"{comment}{of}".strip()))
    return described


def _described(file: str, prefix: str) -> list[tuple[str, str]]:
    """The options in a configuration file, as ("name=default", comment)."""
    task, found = "", []
    for line in resources.files(CONF_MODULE).joinpath(file).read_text().splitlines():
        match = LINE.match(line.strip())
        if line.startswith(("defaults", "#", "  -")) or not match or match[1] in ("name", "kind"):
            continue
        key, default, comment = match.groups()
        task = task if line.startswith(" ") else ""
        if not default:  # a section: what follows it is indented
            task = f"{key}."
            continue
        found.append((f"{prefix}{task}{key}={default}", comment or ""))
    return found
