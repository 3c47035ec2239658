"""The evaluator's life: evaluate the newest checkpoint of the run directory, whenever there is one, to the last."""

import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tf2dist import pulse
from tf2dist.config import RunConfig
from tf2dist.data import Splits
from tf2dist.evaluate import Evaluation, chunks
from tf2dist.models import build_model
from tf2dist.saving import Checkpoints, Tell
from tf2dist.snapshot import Snapshot, read
from tf2dist.state import assign, check_same, named_variables
from tf2dist.step import ModelStep

POLL_SECS = 1.0
OnEvaluation = Callable[[str, int, Evaluation], None]


class Evaluator:
    """A copy of the model outside of the cluster, which the training neither sees nor waits for."""

    def __init__(self, config: RunConfig, splits: Splits, warn: Tell) -> None:
        self._data, self._splits, self._warn = config.data.name, splits, warn
        self._damaged: set[tuple[str, int, int]] = set()
        self._model = build_model(config.model, splits.image_shape, splits.num_classes, config.seed)
        self._step = ModelStep(self._model)
        self._named = named_variables(self._model, [*self._step.trainable, *self._step.state], [])
        self._evaluate = tf.function(self._step.evaluate, autograph=False)

    def newest(self, checkpoints: Checkpoints, done: int) -> Snapshot | None:
        """The newest checkpoint, if it is beyond the step `done`; one that is gone or damaged may have a successor."""
        try:
            path = checkpoints.paths()[-1]
            which = (path.name, path.stat().st_ino, path.stat().st_mtime_ns)  # the same step may be saved again
            if which in self._damaged or int(path.name.removeprefix("step-")) <= done:
                return None
            return read(path)
        except (IndexError, OSError):
            return None
        except ValueError as error:
            self._damaged.add(which)
            self._warn(f"checkpoint {path.name} is damaged ({error}); waiting for another one")
            return None

    def evaluate(self, snapshot: Snapshot, split: str) -> Evaluation:
        """Evaluates a checkpoint on "test" or "validation".

        Raises:
            CheckpointError: it is of another model or data set.
        """
        weights = Snapshot(snapshot.step, snapshot.of_model(), snapshot.facts)
        check_same(self._named, weights, self._data)
        assign(self._named, weights.arrays)
        arrays = getattr(self._splits, split)
        values = [[v.value for v in variables] for variables in (self._step.trainable, self._step.state)]
        sums = tf.zeros([3], tf.float64)
        for first, last in chunks(len(arrays)):
            sums += self._evaluate(*values, arrays.images[first:last], arrays.labels[first:last])
            pulse.beat()
        return Evaluation.of_sums(sums.numpy(), len(arrays))


def follow(
    evaluator: Evaluator, run_dir: Path, split: str, on_evaluation: OnEvaluation, asked_steps: int | None
) -> None:
    """Evaluates the newest checkpoint whenever there is a new one, until the run has come to its target.

    Those that come and go while another is evaluated are left out.

    Args:
        split: evaluated at every checkpoint; the last one is evaluated on "test" too.
        asked_steps: train.steps, which may ask for more than the run that has left the checkpoint did.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints")
    done = -1
    while True:
        pulse.beat()
        snapshot = evaluator.newest(checkpoints, done)
        if snapshot is None:
            time.sleep(POLL_SECS)
            continue
        done = snapshot.step
        on_evaluation(split, done, evaluator.evaluate(snapshot, split))
        if done >= max(snapshot.facts["target_step"], asked_steps or 0):
            if split != "test":
                on_evaluation("test", done, evaluator.evaluate(snapshot, "test"))
            return
