"""A process that draws the data of a regression with one input as points, and the run's model as a curve."""

import os
import sys
from pathlib import Path

import numpy as np

from tf2dist.config import tree
from tf2dist.errors import first_line
from tf2dist.finished.shell import hide_chatter
from tf2dist.linux import die_with_parent

NUM_POINTS = 200  # of the curve


def main() -> None:
    """Draws regression.png in the run directory ``sys.argv[1]``, for the parent process ``sys.argv[2]`` if given.

    Prints its path. If that fails, it prints the reason and exits with code 1.
    """
    if len(sys.argv) > 2:
        die_with_parent(int(sys.argv[2]))
    hide_chatter()
    try:
        print(draw(Path(sys.argv[1])))
    except Exception as error:  # the parent makes one warning of this line
        print(first_line(str(error)) or type(error).__name__, flush=True)
        # Not `sys.exit`, which waits for TensorFlow's threads.
        os._exit(1)


def draw(run_dir: Path) -> Path:
    """Draws regression.png; returns its path.

    Raises:
        RequestError: the model or the data cannot be loaded.
    """
    # After `hide_chatter`: these import TensorFlow.
    from tf2dist import data
    from tf2dist.finished.loading import load_model
    from tf2dist.finished.pictures import draw_curve

    model = load_model(run_dir)
    points = data.load(tree.from_yaml((run_dir / "config.yaml").read_text()).data).train
    x, y = points.x.reshape(-1), points.y.reshape(-1)
    line = np.linspace(x.min(), x.max(), NUM_POINTS, dtype=np.float32)
    return draw_curve(run_dir, x, y, line, model.predict(line[:, None], verbose=0).reshape(-1))


if __name__ == "__main__":
    main()
