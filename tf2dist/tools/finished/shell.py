"""The frame of the commands for finished runs: reading arguments, showing errors, and silencing TensorFlow."""

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tf2dist import signals
from tf2dist.errors import ConfigError, TfDistError, nearest, printable
from tf2dist.files import is_folder, is_path, path_of, set_keras_home
from tf2dist.launch.console import prepare_streams, show_lines, write_at_once
from tf2dist.linux import import_lazily
from tf2dist.tf_constants import GPU_GROWTH, KERAS_ON_TENSORFLOW, LOG_LEVEL

# TensorFlow and Keras read it when they are imported.
ENVIRONMENT = {
    LOG_LEVEL: "3",
    **KERAS_ON_TENSORFLOW,
    GPU_GROWTH: "true",  # a training may use the same GPU
}
# Anything else is a file; one whose name looks like an option can be given as ./a=b.
OPTION = re.compile(r"\+?([a-z_]+(?:\.[A-Za-z0-9_]+)?)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class CommandLine:
    """A command line.

    Attributes:
        operands: the arguments after the run directory that are not options, such as files.
        options: the values by name, as they were given.
        data: the options of the data, each as a whole argument.
        step: that of the requested checkpoint; None for the final weights.
        plugins: the paths of the user's own code that is to be run.
    """

    run_dir: Path
    operands: list[str]
    options: dict[str, str]
    data: list[str]
    step: int | None
    plugins: list[str]


def read_command_line(arguments: list[str], known: Sequence[str], max_operands: int | None = None) -> CommandLine:
    """Reads a command line.

    Args:
        known: the options of the command; "data." stands for all that begin with it.
        max_operands: how many may follow the run directory; None for any number.
    """
    operands, options, data = [], {}, []
    for argument in arguments:
        if argument.startswith("-"):
            raise ConfigError(f"{argument}: there is no such flag; see --help")
        match = OPTION.fullmatch(argument)
        if match is None:
            operands.append(argument)
        elif match[1] in known or f"{match[1].partition('.')[0]}." in known:
            options[match[1]] = match[2]
            data += [argument] if match[1].partition(".")[0] == "data" else []
        else:
            # Without "data.": the options that it stands for depend on the data.
            listed = ", ".join(name for name in known if not name.endswith(".")) or "none"
            raise ConfigError(
                f"{match[1]}: there is no such option; the options are {listed}{nearest(match[1], known)}"
            )
    if not operands:
        raise ConfigError("RUN_DIR: is missing; name the directory of a run, see --help")
    run_dir = path_of("RUN_DIR", operands[0])
    if not is_folder(str(run_dir.absolute())):
        raise ConfigError(f"RUN_DIR ({run_dir}): there is no such folder; name the directory of a run")
    if max_operands is not None and len(operands) > 1 + max_operands:
        raise ConfigError(f"{operands[1 + max_operands]}: is one argument too many; see --help")
    step, plugins = _step(options.get("step")), _plugins(options.get("plugins", ""))
    return CommandLine(run_dir.absolute(), operands[1:], options, data, step, plugins)


def one_of(name: str, value: str, known: Sequence[str]) -> str:
    """Returns the given word, which must be one of the known ones."""
    if value not in known:
        raise ConfigError(f"{name} ({value}): must be one of {', '.join(known)}{nearest(value, known)}")
    return value


def _step(text: str | None) -> int | None:
    # `int` would also take "1_000", " 7" and digits of other scripts.
    if text is not None and not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"step ({text}): must be the step of a checkpoint, such as 1000")
    return None if text is None else int(text)


def _plugins(text: str) -> list[str]:
    # Brackets as in training, and without them, since a shell may take those for a pattern.
    items = text.removeprefix("[").removesuffix("]").split(",")
    paths = [path_of("plugins", item.strip()).absolute() for item in items if item.strip()]
    for path in paths:
        if not is_path(str(path)) or not path.is_file():
            raise ConfigError(f"plugins ({path}): there is no such file; name one that is there")
    return [str(path) for path in paths]


def main(work: Callable[[list[str]], None], usage: str) -> NoReturn:
    """Runs a command, writes its error if there is one, and exits; see `errors` for the codes.

    Args:
        work: runs the command; takes its arguments.
        usage: the text of --help.
    """
    # First of all: Ctrl-C while modules are imported would otherwise show a traceback.
    signals.end_at_once()
    prepare_streams()
    set_keras_home()
    silence_stderr()
    import_lazily()
    arguments = sys.argv[1:]
    try:
        if {"--help", "-h"} & set(arguments):
            show_lines(usage.strip())
        else:
            work(arguments)
        code = 0
    except TfDistError as error:
        # If nobody can read it any more, the exit code still tells what happened.
        show_status(f"tf2dist: error: {' '.join(str(error).split())}")
        code = error.exit_code
    sys.exit(code)


def silence_stderr() -> None:
    """Hides everything on the standard error but what this package writes.

    TensorFlow's C++ code writes to descriptor 2 whatever log level is set. So that one leads to /dev/null, and this
    package's messages go to a copy of what it was before.
    """
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    descriptor = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stderr = os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace")
    signals.end_at_once(descriptor)


def show_status(text: str) -> None:
    """Tells the user what goes on, if anybody reads it."""
    with contextlib.suppress(OSError):
        write_at_once(f"{printable(text)}\n", sys.stderr)


def warn(text: str) -> None:
    """Writes a warning for the user."""
    show_status(f"tf2dist: warning: {text}")
