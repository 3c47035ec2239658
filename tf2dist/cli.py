"""Entry of the command: shows what a flag asks for, runs once or sweeps, and exits with the right code."""

import argparse
import contextlib
import io
import os
import shutil
from typing import NoReturn

from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.types import RunMode
from omegaconf import DictConfig

from tf2dist import __version__
from tf2dist.config.compose import ERRORS, hydra_message, open_hydra, prepare_overrides
from tf2dist.config.flags import parse, source_of
from tf2dist.config.help import help_text
from tf2dist.errors import ConfigError
from tf2dist.launch.console import show
from tf2dist.launch.single_run import run_command, start_run
from tf2dist.launch.sweep import run_sweep, sweep_job
from tf2dist.launch.sweep_report import Failed
from tf2dist.signals import Signals
from tf2dist.tools.end_of_run import draw_training

SWEEP = "hydra.mode=MULTIRUN"


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs one command line and exits: see `errors` for the codes."""
    run_command(run, argv)


def run(arguments: list[str], started_at: float, signals: Signals) -> None:
    """Runs the action of one command line: prints what a flag asks for, runs a sweep, or trains."""
    if "--version" in arguments:
        show(f"tf2dist {__version__}\n")
        return
    args = parse(arguments)
    if args.help:
        show(help_text(shutil.get_terminal_size((120, 24)).columns))
    else:
        source = source_of(args)
        with open_hydra(source) as hydra:
            args.config_name = source.name  # where Hydra looks for it
            if args.cfg or args.info or args.shell_completion or args.hydra_help:
                show(hydra_output(hydra, args))
            else:
                start(hydra, args, started_at, signals)


def hydra_output(hydra: Hydra, args: argparse.Namespace) -> str:
    """The text that Hydra prints for a flag."""
    name = args.config_name
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()) as refusal:
        try:
            if args.shell_completion:
                hydra.shell_completion(name, args.overrides)
            elif args.hydra_help:
                hydra.hydra_help(name, get_args_parser(), args)
            else:
                overrides = prepare_overrides(hydra, name, args.overrides, os.environ.get("TF_CONFIG") or None)
                if args.cfg:
                    hydra.show_cfg(name, overrides, args.cfg, args.package, args.resolve)
                else:
                    hydra.show_info(args.info, name, overrides)
        except SystemExit:  # of --package
            raise ConfigError(" ".join(refusal.getvalue().split())) from None
        except ERRORS as error:
            raise ConfigError(hydra_message(error)) from None
    return text.getvalue()


def start(hydra: Hydra, args: argparse.Namespace, started_at: float, signals: Signals) -> None:
    """Runs what the flags and overrides ask for: once, or in several jobs."""
    name = args.config_name
    overrides = prepare_overrides(hydra, name, args.overrides, os.environ.get("TF_CONFIG") or None)
    is_sweep = args.multirun or SWEEP in overrides
    if not is_sweep:
        composed = hydra.compose_config(name, overrides, RunMode.RUN)
        is_sweep = composed.hydra.mode == RunMode.MULTIRUN  # by a file
    if is_sweep:
        run_sweep(hydra, name, [*overrides, SWEEP], run_job, signals)
    else:
        start_run(hydra, name, overrides, composed, started_at, signals, draw_training)


def run_job(composed: DictConfig) -> float | Failed | None:
    """Runs one job of a sweep, which Hydra's launcher may do in another process."""
    return sweep_job(composed, draw_training)
