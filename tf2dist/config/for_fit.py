"""How `tf2dist.fit` takes each option: as an argument, in `options`, or from the job that runs its script."""

import re
from collections.abc import Collection, Iterable

from tf2dist.config.checks import LAZY_ROWS
from tf2dist.config.compose import PLUGIN_GROUPS, in_quotes, name_of, quoted
from tf2dist.config.option import COMMAND_LINE
from tf2dist.config.schema import OPTIONS
from tf2dist.errors import FitError

# The options that a job gives to the calls of `fit` in its script, with spaces between them.
VARIABLE = "TF2DIST_FIT_OPTIONS"
# The arguments of `fit` by the options of the command line that they set. Given twice they could contradict each other.
ARGUMENT_OF = {name.removesuffix(".kind"): option.fit for name, option in OPTIONS.items() if option.fit}
# Options by which the command line chooses what `fit` is given as Python objects, with all that begins as they do.
CHOSEN = {name.partition(".")[0] for name, argument in ARGUMENT_OF.items() if argument == COMMAND_LINE}
COMMAND_LINE_ONLY = {"experiment", *PLUGIN_GROUPS, *CHOSEN}
# Those that a job gives although they are arguments: they say where it runs.
OF_JOB = ("mode", "run_dir", "cluster", "cluster.num_ps")

# An option in a text. The quotes and brackets in it are those of Hydra, with everything that is between them.
WORD = re.compile(r"""(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\[[^]]*\]|[^\s'"[])+""")


def joined(overrides: Iterable[str]) -> str:
    """The value of the variable."""
    return " ".join(map(_as_word, map(quoted, overrides)))


def _as_word(override: str) -> str:
    name, _, value = override.partition("=")
    return override if WORD.fullmatch(override) else f"{name}={in_quotes(value)}"


def listed(text: str) -> list[str]:
    """The options in the value of the variable. Raises FitError."""
    if rest := WORD.sub("", text).split():
        raise FitError(f"{VARIABLE} ({text[:200]}): cannot be read at {rest[0][:40]}; close the quotes")
    return WORD.findall(text)


def check(overrides: Iterable[str], subject: str, accepted: Collection[str] = ()) -> None:
    """Refuses options that `fit` is given as arguments.

    Args:
        subject: what the options were given to, for the message.
        accepted: options that are arguments of `fit`, but not refused.
    """
    for override in overrides:
        name = name_of(override)
        if name in accepted:
            continue
        if re.match(r"hydra[./]", name):
            raise FitError(
                f"{subject}: {name} belongs to the command line; leave it out, and name a directory by run_dir"
            )
        if name.partition(".")[0] in COMMAND_LINE_ONLY and name != f"optimizer.{LAZY_ROWS}":
            raise FitError(
                f"{subject}: {name} belongs to the command line; give fit the model, the data and the settings "
                "themselves"
            )
        if name in ARGUMENT_OF:
            raise FitError(f"{subject}: {name} is the argument {ARGUMENT_OF[name]} of fit; give that instead")
