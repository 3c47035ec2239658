"""Draws training.png at the end of a run, for the command and for `fit`; matplotlib is imported only then."""

import contextlib
import gc
import logging
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

from tf2dist.cluster.spec import Place
from tf2dist.config.schema import RunConfig
from tf2dist.errors import brief_reason
from tf2dist.launch.console import Console
from tf2dist.linux import without_warnings

SILENT_SECS = 3.0  # of drawing, after which a line says so; usually it takes one


def draw_training(config: RunConfig, place: Place, console: Console) -> None:
    """Draws training.png from what a run has left, whether it is done or not; if that fails, warns and goes on."""
    if not (config.figure and place.leads and config.run_dir and Path(config.run_dir, "metrics.jsonl").exists()):
        return
    note = threading.Timer(SILENT_SECS, console.note, ["drawing training.png"])
    with contextlib.suppress(RuntimeError):  # no thread can be started
        note.start()
    try:
        with quiet_matplotlib():
            from tf2dist.tools import plotting  # importing matplotlib takes longer than all that a run imports before

            with new_cycles_collected():
                plotting.draw_run(Path(config.run_dir))
    except Exception as error:  # a damaged installation of matplotlib may raise anything
        again = shlex.join(["python", "-m", "tf2dist.plot", config.run_dir])
        console.warn(f"training.png could not be drawn ({brief_reason(error)}); {again} draws it")
    finally:
        note.cancel()


@contextlib.contextmanager
def new_cycles_collected() -> Iterator[None]:
    """Frees what a block has made, and what only refers to itself.

    A figure does, and holds 8 MB. Python looks at old objects again only when a program has made a quarter more of
    them, and one that calls `fit` in a loop would hold ten figures until then.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # or the first looks of the collector, while the figure is in use, would count it among old objects
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            gc.collect(1)


@contextlib.contextmanager
def quiet_matplotlib() -> Iterator[None]:
    """Keeps from the user that a font lacks a character, or that matplotlib has no folder for its cache."""
    logger = logging.getLogger("matplotlib")
    with without_warnings():
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
