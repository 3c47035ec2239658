"""The arguments of the command: flags, named as Hydra's, and overrides of options."""

import difflib
from dataclasses import dataclass, field

from tf2dist.config.source import MAIN, Source
from tf2dist.errors import ConfigError

# Hydra's own short forms, some with two letters after one dash.
SHORT = {
    "-h": "--help",
    "-c": "--cfg",
    "-i": "--info",
    "-m": "--multirun",
    "-r": "--run",
    "-p": "--package",
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-cp": "--config-path",
    "-sc": "--shell-completion",
}
ACTIONS = ("--version", "--help", "--run", "--multirun", "--cfg", "--info", "--shell-completion")
SUBJECTS = {  # what may follow a flag; the first is the default
    "--cfg": ("job",),
    "--info": ("all", "config", "defaults", "defaults-tree", "searchpath"),
}
VALUES = {"--config-dir": "DIR", "--config-name": "NAME", "--package": "SECTION"}  # what must follow a flag
REFUSED = {
    "--config-path": "conf/ is part of tf2dist; add a folder of your own with --config-dir DIR",
    "--hydra-help": "Hydra's own settings have no use here; see --help",
    "--experimental-rerun": "run the same command again, with run_dir=DIR",
}
# Known, so that they are refused by name instead of being read as overrides.
OTHERS_OF_HYDRA = {"--cfg": ("hydra", "all"), "--info": ("plugins",)}


@dataclass(frozen=True, slots=True)
class Arguments:
    """One parsed command line.

    Attributes:
        action: one of `ACTIONS`; ``--run`` by default.
        subject: the word after ``--cfg`` or ``--info``.
        package: the part of the configuration that ``--cfg`` shows; None for all of it.
        is_resolved: whether ``--cfg`` shows values instead of ``${...}``.
    """

    overrides: list[str]
    action: str = "--run"
    subject: str = ""
    package: str | None = None
    is_resolved: bool = False
    source: Source = field(default_factory=Source)


def parse(arguments: list[str]) -> Arguments:
    """Parses one command line.

    Raises:
        ConfigError: a flag is unknown, lacks its value, or contradicts another one.
    """
    overrides: list[str] = []
    flags: dict[str, str] = {}
    rest = list(arguments)
    # Flags and overrides may come in any order, as with Hydra.
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flag, separator, value = argument.partition("=")
        flag = SHORT.get(flag, flag)
        _check_known(flag, argument)
        flags[flag] = _value(flag, value if separator else None, rest)
    return _checked(overrides, flags)


def _check_known(flag: str, argument: str) -> None:
    if flag in REFUSED:
        raise ConfigError(f"{argument}: is not supported; {REFUSED[flag]}")
    known = [*ACTIONS, *VALUES, "--resolve"]
    if flag not in known:
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
        instead = f"did you mean {close[0]}?" if close else "options look like train.steps=1000, see --help"
        raise ConfigError(f"{argument}: there is no such flag; {instead}")


def _value(flag: str, given: str | None, rest: list[str]) -> str:
    """The value of a flag, after a = or as the next argument, which is removed from `rest`."""
    if flag in SUBJECTS:
        subjects, others = SUBJECTS[flag], OTHERS_OF_HYDRA[flag]
        if given is None:
            # The next argument is the subject only if it is one; it may as well be an override.
            given = rest.pop(0) if rest and rest[0] in (*subjects, *others) else subjects[0]
        if given not in subjects:
            raise ConfigError(f"{flag} ({given}): must be {' or '.join(subjects)}")
        return given
    if flag in VALUES:
        if given is None and rest and not rest[0].startswith("-"):
            given = rest.pop(0)
        if not given:
            raise ConfigError(f"{flag}: needs a value; give {flag} {VALUES[flag]}")
        return given
    if given is not None:
        raise ConfigError(f"{flag} ({given}): takes no value; leave it out")
    return ""


def _checked(overrides: list[str], flags: dict[str, str]) -> Arguments:
    """The whole command line; raises ConfigError if its flags contradict each other."""
    # In the order of `ACTIONS`: --version and --help win over everything else, as users expect of any command.
    asked = [action for action in ACTIONS if action in flags]
    if len(asked) > 1 and asked[0] not in ("--version", "--help"):
        raise ConfigError(f"{asked[1]}: cannot be combined with {asked[0]}; leave out one of them")
    action = asked[0] if asked else "--run"
    for flag in ("--package", "--resolve"):
        # Without the check the training would start, although the user wanted to see something.
        if flag in flags and action not in ("--cfg", "--help"):
            raise ConfigError(f"{flag}: is for --cfg; add that")
    return Arguments(
        overrides,
        action,
        flags.get(action, ""),
        flags.get("--package"),
        "--resolve" in flags,
        Source(flags.get("--config-dir"), flags.get("--config-name", MAIN)),
    )
