"""What the commands on a finished run have in common: their arguments, their errors, and a quiet TensorFlow."""

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
from tf2dist.config.paths import settle_home
from tf2dist.errors import ConfigError, TfDistError, nearest
from tf2dist.launch.streams import prepare, say

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "KERAS_BACKEND": "tensorflow",
    "KERAS_NNX_ENABLED": "0",  # a keras.json may enable it; it is for JAX and needs another package
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # a training may use the same GPU
}
OPTION = re.compile(r"\+?([a-z_]+(?:\.[A-Za-z0-9_]+)?)=(.*)", re.DOTALL)  # a file may have such a name: ./a=b


@dataclass(frozen=True)
class Request:
    """A command line.

    Attributes:
        operands: what stands behind the run directory, such as files.
        options: by name, as they were given.
        data: those of the data, each as a whole argument.
        step: of the checkpoint asked for.
        plugins: the files of the user's own code that are to be run.
    """

    run_dir: Path
    operands: list[str]
    options: dict[str, str]
    data: list[str]
    step: int | None
    plugins: list[str]


def request(arguments: list[str], known: Sequence[str], max_operands: int | None = None) -> Request:
    """Reads a command line.

    Args:
        known: the options that the command has; "data." stands for all that begin so.
        max_operands: that may stand behind the run directory; None: any number.

    Raises:
        ConfigError: something in it is unknown, missing or too much.
    """
    operands, options, data = [], {}, []
    for argument in arguments:
        if argument.startswith("-"):
            raise ConfigError(f"{argument}: there is no such flag; see --help")
        found = OPTION.fullmatch(argument)
        if found is None:
            operands.append(argument)
        elif found[1] in known or f"{found[1].partition('.')[0]}." in known:
            options[found[1]] = found[2]
            data += [argument] if found[1].partition(".")[0] == "data" else []
        else:
            its = ", ".join(name for name in known if not name.endswith("."))
            raise ConfigError(f"{found[1]}: there is no such option; there is {its}{nearest(found[1], known)}")
    if not operands:
        raise ConfigError("RUN_DIR: is missing; name the directory of a run, see --help")
    run_dir = Path(operands[0]).expanduser()
    if not run_dir.is_dir():
        raise ConfigError(f"RUN_DIR ({run_dir}): there is no such folder; name the directory of a run")
    if max_operands is not None and len(operands) > 1 + max_operands:
        raise ConfigError(f"{operands[1 + max_operands]}: is one too many; see --help")
    step, plugins = _step(options.get("step")), _plugins(options.get("plugins", ""))
    return Request(run_dir.absolute(), operands[1:], options, data, step, plugins)


def one_of(name: str, given: str, known: Sequence[str]) -> str:
    """A word that must be one of some words.

    Raises:
        ConfigError: it is not.
    """
    if given not in known:
        raise ConfigError(f"{name} ({given}): must be one of {', '.join(known)}{nearest(given, known)}")
    return given


def _step(given: str | None) -> int | None:
    if given is not None and not re.fullmatch(r"[0-9]{1,18}", given):
        raise ConfigError(f"step ({given}): must be the step of a checkpoint, such as 1000")
    return None if given is None else int(given)


def _plugins(given: str) -> list[str]:
    words = given.removeprefix("[").removesuffix("]").split(",")
    paths = [Path(word.strip()).expanduser().absolute() for word in words if word.strip()]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"plugins ({path}): there is no such file; name one that is there")
    return [str(path) for path in paths]


def main(work: Callable[[list[str]], None], usage: str) -> NoReturn:
    """Runs one command line, writes its error if there is one, and exits; see `errors` for the codes.

    Args:
        work: does it, given the arguments.
        usage: for --help.
    """
    signals.end_at_once()
    prepare()
    settle_home()
    hide_chatter()
    arguments = sys.argv[1:]
    try:
        if {"--help", "-h"} & set(arguments):
            say(usage.strip(), sys.stdout)
        else:
            work(arguments)
        code = 0
    except BrokenPipeError:  # the reader of our output has left, and `say` has closed it
        code = 0
    except TfDistError as error:
        with contextlib.suppress(OSError):  # nobody can read it; the code is still the answer
            say(f"tf2dist: error: {' '.join(str(error).split())}", sys.stderr)
        code = error.exit_code
    sys.exit(code)


def hide_chatter() -> None:
    """Lets nothing on the standard error but what we write; TensorFlow writes to its descriptor, whatever one sets."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    descriptor = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stderr = os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace")
    signals.end_at_once(descriptor)


def warn(text: str) -> None:
    """Writes a warning for the user."""
    with contextlib.suppress(OSError):
        say(f"tf2dist: warning: {text}", sys.stderr)
