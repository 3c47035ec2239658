"""Has a process of its own draw the result of a regression; the launching process imports no TensorFlow."""

import os
import subprocess
from pathlib import Path

from tf2dist.config.schema import RunConfig
from tf2dist.interpreter import child_environment, module_command

TIMEOUT_SECS = 60.0
DRAWN = "parabola"  # the data whose runs are drawn


def why_not_drawn(config: RunConfig, run_dir: Path) -> str:
    """Draws regression.png if it belongs to the run; returns why it could not be drawn, or ""."""
    if config.data.name != DRAWN or config.plugins:
        return ""
    environment = {
        **child_environment(),
        "KERAS_BACKEND": "tensorflow",
        "KERAS_NNX_ENABLED": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    try:
        done = subprocess.run(
            module_command("tf2dist.finished.curve", str(run_dir), str(os.getpid())),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=TIMEOUT_SECS,
        )
    except subprocess.TimeoutExpired:
        return f"not done in {TIMEOUT_SECS:.0f} s"
    if done.returncode == 0:
        return ""
    return (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
