"""Entry of the command: reads the request, refuses it in a line or runs it, and exits with the right code."""

import contextlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tf2dist import __version__
from tf2dist.cluster import parsing
from tf2dist.cluster.addresses import exposure
from tf2dist.cluster.spec import HostTask
from tf2dist.config import completion, keras_settings
from tf2dist.config.arguments import parse
from tf2dist.config.help import help_text
from tf2dist.config.load import load
from tf2dist.config.schema import RunConfig
from tf2dist.config.show import configuration, information
from tf2dist.config.sweeps import sweep_of
from tf2dist.data import location
from tf2dist.errors import RequestError, TfDistError
from tf2dist.launch.command import report, run_command
from tf2dist.launch.console import Console, result_lines
from tf2dist.launch.start import check_alone, check_place, draw_training, run_in_folder
from tf2dist.launch.streams import say
from tf2dist.launch.sweep import run_sweep
from tf2dist.signals import Signals


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs one command line and exits: see `errors` for the codes."""
    run_command(run, argv)


def run(arguments: list[str], started_at: float, signals: Signals) -> None:
    """Runs the action of one command line: prints what a flag asks for, runs a sweep, or trains."""
    request = parse(arguments)
    tf_config = os.environ.get("TF_CONFIG") or None
    if request.action == "--version":
        show(f"tf2dist {__version__}\n")
    elif request.action == "--help":
        show(help_text(shutil.get_terminal_size((120, 24)).columns))
    elif request.action == "--cfg":
        show(configuration(request, tf_config))
    elif request.action == "--info":
        show(information(request, tf_config))
    elif request.action == "--shell-completion":
        show(completion.answer(request.overrides, os.environ.get("COMP_LINE", "")))
    elif request.action == "--multirun":
        sweep = sweep_of(request.overrides, tf_config, request.source, check_alone)
        run_sweep(sweep, request.source.flags(), signals)
    else:
        config = load(request.overrides, tf_config, request.source)
        host_task = None if config.cluster.kind == "local" else parsing.from_config(config, tf_config)
        train(config, host_task, started_at, signals)


def show(text: str) -> None:
    """Prints a text to the standard output; a reader that leaves early is no error.

    Raises:
        TfDistError: it cannot be written, for example because of a full disk.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again at its exit
        if isinstance(error, BrokenPipeError):
            return
        raise TfDistError(f"the standard output cannot be written ({error.strerror})") from None


def train(config: RunConfig, host_task: HostTask | None, started_at: float, signals: Signals) -> None:
    """Checks the request as far as possible without creating anything, then creates the run directory and runs."""
    # What the configuration alone shows, before anything is looked up or downloaded.
    check_alone(config, host_task)

    # The place of this task in a cluster of many hosts.
    console = Console()
    if host_task and host_task.has_address:
        check_place(config, *host_task, console)
    for text in keras_settings.notes(config.keras):
        console.note(text)
    if host_task:
        if host_task.has_address and (text := exposure(*host_task)):
            console.warn(text)
        # Each host sees its own data only. Either all hosts fall back to other data or none does, so none may.
        config.data = replace(config.data, offline="fail")

    # The data, which a ps does not read.
    if host_task is None or host_task.task.job != "ps":
        config.data = location.resolve(config.data, console.warn)
    check_alone(config, host_task)  # again: it may be another data set now

    # The run, and its picture after all that the user waits for.
    code = 0
    try:
        run_dir, summary = run_in_folder(config, host_task, console, started_at, signals)
        if summary:
            show_result(summary, run_dir, console)
    except RequestError:
        raise  # nothing was trained
    except TfDistError as error:
        code = report(error)
    with contextlib.suppress(KeyboardInterrupt):
        draw_training(config, host_task, console)
    if code:
        sys.exit(code)


def show_result(summary: dict[str, Any], run_dir: Path, console: Console) -> None:
    try:
        say(result_lines(summary, str(run_dir)), sys.stdout)
    except BrokenPipeError:
        pass  # the reader has left; the run has ended well all the same
    except OSError as error:
        console.warn(f"the result could not be printed ({error.strerror}); it is in {run_dir}/summary.json")
