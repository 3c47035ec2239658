"""The flags of the command: Hydra's own parser, whose errors are one line."""

import argparse
import re
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from tf2dist.config.compose import MAIN, ConfigSource
from tf2dist.errors import ConfigError, nearest
from tf2dist.files import is_folder, is_path

ACTIONS = ("run", "multirun", "cfg", "info", "shell_completion")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags and overrides of one command line, under the names that Hydra gives them."""
    parser = get_args_parser()
    flags = [flag for flag in re.findall(r"--[\w-]+", parser.format_usage()) if flag != "--experimental-rerun"]

    def refuse(message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (\S*)", message):
            flag = unknown[1].partition("=")[0]
            raise ConfigError(f"{unknown[1]}: there is no such flag{nearest(flag, flags) or '; see --help'}")
        raise ConfigError(f"{message.removeprefix('argument ')}; see --help")

    parser.error = refuse  # type: ignore[method-assign]
    try:
        # Flags and overrides in any order, which `parse_args` does not take.
        args = parser.parse_intermixed_args(arguments)
    except RecursionError:
        raise ConfigError(f"{arguments[0][:60]}: cannot be read; see --help") from None
    if args.experimental_rerun is not None:  # it would train with the options that are given here
        raise ConfigError("--experimental-rerun: is not supported; give the options in RUN_DIR/.hydra/overrides.yaml")
    if len(actions := actions_of(args)) > 1:
        raise ConfigError(f"{actions[1]}: cannot be combined with {actions[0]}; leave out one of them")
    for flag, value in (("--package", args.package), ("--resolve", args.resolve)):
        # Without the check the training would start, although the user wanted to see something.
        if value and not (args.cfg or args.help):
            raise ConfigError(f"{flag}: is for --cfg; add that")
    return args


def actions_of(args: argparse.Namespace) -> list[str]:
    """The flags of a command line that say what to do, as they are written."""
    return [f"--{name.replace('_', '-')}" for name in ACTIONS if getattr(args, name)]


def check_for_one_run(args: argparse.Namespace, refusal: str) -> None:
    """Refuses flags that ask for anything but a run. Raises ConfigError.

    Args:
        refusal: what is wrong with such a flag, and the way out.
    """
    if others := [flag for flag in actions_of(args) if flag != "--run"]:
        raise ConfigError(f"{others[0]}: {refusal}")


def source_of(args: argparse.Namespace) -> ConfigSource:
    """The configuration files that a command line names."""
    for flag, folder in (("--config-dir", args.config_dir), ("--config-path", args.config_path)):
        # Before anything that depends on the files in it.
        if folder is not None and not folder.startswith("pkg://") and not is_folder(folder):
            raise ConfigError(f"{flag} ({folder}): there is no such folder; name one with your .yaml files")
    name = args.config_name or MAIN
    if not is_path(name) or name.startswith("/") or ".." in name.split("/"):
        raise ConfigError(f"--config-name ({name[:60]}): there is no such file; name one in --config-dir")
    return ConfigSource(args.config_dir, name, args.config_path)
