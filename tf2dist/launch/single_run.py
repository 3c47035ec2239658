"""One run of a command line, from what Hydra has composed to its result and its picture."""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hydra import main as hydra_main
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig

from tf2dist.cluster.addresses import exposure_warning
from tf2dist.cluster.sources import find_place
from tf2dist.cluster.spec import Place
from tf2dist.config import keras_settings
from tf2dist.config.compose import ERRORS, Loader, hydra_message, setting
from tf2dist.config.load import to_config
from tf2dist.config.schema import RunConfig
from tf2dist.config.tree import as_written
from tf2dist.data import location
from tf2dist.errors import ConfigError, RequestError, TfDistError
from tf2dist.files import is_path
from tf2dist.interpreter import without_warnings
from tf2dist.launch.command import report
from tf2dist.launch.console import Console, print_lines, result_lines
from tf2dist.launch.run_dir import locked, make_run_dir
from tf2dist.launch.start import check_alone, check_place, draw_training, run_in_folder
from tf2dist.signals import Signals


def start_run(
    hydra: Hydra, name: str, overrides: list[str], composed: DictConfig, started_at: float, signals: Signals
) -> None:
    """Checks what Hydra has composed, and runs it once; exits with the code of a run that has failed.

    Args:
        name: of the primary configuration file.
        overrides: of the command line, from which Hydra has composed.

    Raises:
        RequestError: it cannot be run; nothing has been trained.
    """
    config, place = checked(composed, os.environ)
    config.run_dir = run_dir_of(composed, config)
    console = Console()
    prepare(config, place, console)
    # Made before Hydra does, so that it is accessible by its owner alone, and no other run is disturbed.
    run_dir = make_run_dir(config)
    config.run_dir = composed.hydra.run.dir = str(run_dir)
    if place.leads:
        with locked(run_dir):
            pass
    cast(Loader, hydra.config_loader).keep(composed)
    begun = []

    def task(_: DictConfig) -> int:
        begun.append(True)
        return train(config, place, console, started_at, signals)[1]

    try:
        code = hydra.run(name, task, overrides).return_value
    except ERRORS as error:
        if begun:
            raise
        if not isinstance(error, OSError):  # of a callback, for example
            raise ConfigError(hydra_message(error)) from None
        raise ConfigError(
            f"run_dir ({run_dir}): .hydra in it cannot be written ({error.strerror}); make room, or name another"
        ) from None
    if code:
        sys.exit(code)


def run_dir_of(composed: DictConfig, config: RunConfig) -> str | None:
    """The directory of a run, which has two names: ours and Hydra's.

    Raises:
        ConfigError: they differ.
    """
    if as_written(composed.hydra.run)["dir"] == "${run_dir}":
        return config.run_dir
    hydra_dir = setting(composed, "hydra.run.dir")
    if config.run_dir not in (None, hydra_dir):
        raise ConfigError(
            f"hydra.run.dir ({hydra_dir}): is another name of run_dir, which is {config.run_dir}; give one"
        )
    if not is_path(hydra_dir):
        raise ConfigError(
            f"hydra.run.dir ({hydra_dir}): is not a valid name of a directory; leave it out for the default"
        )
    return hydra_dir


def rerun(pickled: str, started_at: float, signals: Signals) -> None:
    """Runs what Hydra's callback `PickleJobInfoCallback` has saved of a run, in the same directory."""
    with without_warnings(category=UserWarning):  # that other arguments are ignored
        try:
            composed, run_dir = unpickled(pickled)
        except Exception as error:  # unpickling may raise anything
            reason = hydra_message(error)
            raise ConfigError(
                f"--experimental-rerun ({pickled}): cannot be read ({reason}); name a config.pickle"
            ) from None
    config, place = checked(composed, os.environ)
    config.run_dir = run_dir
    console = Console()
    prepare(config, place, console)
    if code := train(config, place, console, started_at, signals)[1]:
        sys.exit(code)


def unpickled(path: str) -> tuple[DictConfig, str]:
    """The configuration and the directory of a run."""
    runs = []

    def take(composed: DictConfig) -> None:
        runs.append((composed, str(HydraConfig.get().runtime.output_dir)))

    setup_globals()  # Hydra's resolvers, which it does not make known here
    argv = sys.argv
    sys.argv = [argv[0], f"--experimental-rerun={path}"]  # where Hydra reads it
    try:
        hydra_main(version_base="1.3", config_path=None)(take)()
    finally:
        sys.argv = argv
    return runs[0]


def checked(composed: DictConfig, environ: Mapping[str, str]) -> tuple[RunConfig, Place]:
    """The configuration, and the place of this process in the cluster. Raises RequestError."""
    config = to_config(composed, environ.get("TF_CONFIG"))
    return config, find_place(config, environ)


def prepare(config: RunConfig, place: Place, console: Console) -> None:
    """Checks the request as far as possible without creating anything, and finds or downloads the data.

    Raises:
        RequestError: it cannot be run.
    """
    # What the configuration alone shows, before anything is looked up or downloaded.
    check_alone(config, place)

    # The place of this task among those of other commands.
    if place.has_peers:
        check_place(config, *place, console)
    for text in keras_settings.notes(config.keras):
        console.note(text)
    if place.has_peers and (text := exposure_warning(*place)):
        console.warn(text)
    # Each command sees its host's data only. Either all fall back to other data or none does, so none may.
    if not place.cluster.is_managed:
        config.data = replace(config.data, offline="fail")

    # The data, which a ps does not read.
    if place.task.job != "ps":
        config.data = location.resolve(config.data, console.warn)
    check_alone(config, place)  # again: it may be another data set now


def train(
    config: RunConfig, place: Place, console: Console, started_at: float, signals: Signals
) -> tuple[dict[str, Any], int]:
    """Runs, tells an error, and draws the picture after all that the user waits for; returns summary and exit code."""
    summary: dict[str, Any] = {}
    code = 0
    try:
        run_dir, summary = run_in_folder(config, place, console, started_at, signals)
        if summary:
            show_result(summary, run_dir, console)
    except TfDistError as error:
        code = report(error)
        if isinstance(error, RequestError):  # nothing was trained
            return summary, code
    with contextlib.suppress(KeyboardInterrupt):
        draw_training(config, place, console)
    return summary, code


def show_result(summary: dict[str, Any], run_dir: Path, console: Console) -> None:
    try:
        print_lines(result_lines(summary, str(run_dir)), sys.stdout)
    except BrokenPipeError:
        pass  # the reader has left; the run has ended well all the same
    except OSError as error:
        console.warn(f"the result could not be printed ({error.strerror}); it is in {run_dir}/summary.json")
