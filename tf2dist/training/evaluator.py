"""What the evaluator does: evaluate the newest checkpoint of the run directory again and again, until the last one."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import keras
import tensorflow as tf

from tf2dist.checkpoint.snapshot import Snapshot, read
from tf2dist.checkpoint.state import Named, assign, check_same, finalize, finalizes, named_variables
from tf2dist.checkpoint.store import Checkpoints, Notify
from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Splits
from tf2dist.model.evaluate import Evaluation, chunk_size, chunks
from tf2dist.model.source import Source, build_step
from tf2dist.process import heartbeat

POLL_SECS = 1.0
OnEvaluation = Callable[[str, int, Evaluation], None]


class Evaluator:
    """A copy of the model outside of the cluster, which the training neither sees nor waits for."""

    def __init__(self, config: RunConfig, source: Source, splits: Splits, warn: Notify) -> None:
        self._data, self._keras, self._splits, self._warn = config.data.name, config.keras, splits, warn
        self._damaged: set[tuple[str, int, int]] = set()
        self._step, self._make_optimizer = build_step(source, splits, config, contextlib.nullcontext())
        self._chunk_size = chunk_size(config.train.batch_size_per_worker, self._step)
        self._optimizer: keras.Optimizer | None = None
        self._named = self._needed_last = named_variables(self._step.model, self._step.variables, [])
        self._evaluate = self._step.evaluate_function()

    def newest(self, checkpoints: Checkpoints, done: int) -> Snapshot | None:
        """The newest checkpoint, if it is beyond the step `done`; else None.

        None, too, if it is damaged or was removed while we read it: the run may save another one.
        """
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

    def _variables_of_last(self, target_step: int) -> Named:
        """The variables that the final weights need: the model's, and those of an optimizer that changes them."""
        if self._optimizer is None:
            self._optimizer = self._make_optimizer(target_step)
            if finalizes(self._optimizer):
                self._optimizer.build(self._step.trainable)
                self._needed_last = named_variables(self._step.model, self._step.variables, [self._optimizer])
        return self._needed_last

    def evaluate(self, snapshot: Snapshot, split: str, is_last: bool = False) -> Evaluation:
        """Evaluates a checkpoint on "test" or "validation".

        Args:
            is_last: whether it is the run's last one, whose weights the optimizer may change, as in the run itself.

        Raises:
            CheckpointError: it is of another model or data set.
        """
        target_step = snapshot.facts.target_step or snapshot.step
        named = self._variables_of_last(target_step) if is_last else self._named
        # All arrays of the model are kept, so that `check_same` sees any that this model does not have.
        needed = {name: array for name, array in snapshot.arrays.items() if name in named or name.startswith("model/")}
        check_same(named, replace(snapshot, arrays=needed), self._data, self._keras)
        assign(named, needed)
        if is_last:
            finalize(named, [(self._optimizer, self._step.trainable)])
        arrays = getattr(self._splits, split)
        values = [[v.value for v in variables] for variables in (self._step.trainable, self._step.state)]
        sums = tf.zeros([1 + self._step.metrics.size], tf.float64)
        for first, last in chunks(len(arrays), self._chunk_size):
            sums += self._evaluate(*values, [tf.constant(leaf) for leaf in arrays[first:last].leaves])
            heartbeat.progress()
        return Evaluation.of_sums(self._step.metrics, sums.numpy(), len(arrays))


def follow(
    evaluator: Evaluator, run_dir: Path, split: str, on_evaluation: OnEvaluation, asked_steps: int | None
) -> None:
    """Evaluates the newest checkpoint whenever there is a new one, until the run has reached its target.

    Checkpoints that come while another one is evaluated are skipped, except for the newest.

    Args:
        split: evaluated at every checkpoint; the last one is evaluated on "test" too.
        asked_steps: train.steps, which may be more than the target of the run that has left the checkpoint.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints")
    done = -1
    while True:
        heartbeat.progress()
        snapshot = evaluator.newest(checkpoints, done)
        if snapshot is None:
            time.sleep(POLL_SECS)
            continue
        done = snapshot.step
        is_last = done >= max(snapshot.facts.target_step or 0, asked_steps or 0)
        on_evaluation(split, done, evaluator.evaluate(snapshot, split, is_last))
        if is_last:
            if split != "test":
                on_evaluation("test", done, evaluator.evaluate(snapshot, "test", is_last))
            return
