"""Draws the result of a regression in a process of its own, since the launching process never imports TensorFlow."""

import os
import shlex
import subprocess
from pathlib import Path

from tf2dist.config.schema import RunConfig
from tf2dist.interpreter import child_environment, module_command
from tf2dist.launch.console import Console

TIMEOUT_SECS = 60.0
DRAWN = "parabola"  # the data whose runs are drawn


def draw_result(config: RunConfig, run_dir: Path, console: Console) -> None:
    """Draws regression.png if the run is a regression; a signal ends that, and no more: the run is done."""
    if config.data.name != DRAWN or config.plugins:
        return
    try:
        console.note("drawing regression.png; Ctrl-C leaves it out")
        reason = _draw(run_dir)
    except KeyboardInterrupt:
        reason = "stopped by a signal"
    if reason:
        again = shlex.join(["python", "-m", "tf2dist.finished.curve", str(run_dir)])
        console.warn(f"regression.png could not be drawn ({reason}); {again} draws it")


def _draw(run_dir: Path) -> str:
    """Returns why it could not be drawn, or "" for no problem."""
    try:
        done = subprocess.run(
            module_command("tf2dist.finished.curve", str(run_dir), str(os.getpid())),
            # Without GPUs: it is a single pass over a few hundred points.
            env={**child_environment(), "CUDA_VISIBLE_DEVICES": "-1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends this process's wait, which then ends that one
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=TIMEOUT_SECS,
        )
    except subprocess.TimeoutExpired:
        return f"not done in {TIMEOUT_SECS:.0f} s"
    if done.returncode == 0:
        return ""
    # Libraries may print before it: the reason is the last line.
    return (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
