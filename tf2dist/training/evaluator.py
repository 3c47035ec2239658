"""The evaluator: evaluates each new checkpoint in the run directory, until the last one of the run."""

import contextlib
import errno
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import Snapshot, is_damage, read, unreadable
from tf2dist.checkpoint.state import Named, assign, check_same, finalize, named_variables
from tf2dist.checkpoint.store import Checkpoints, Notify
from tf2dist.cluster.reachability import Wait
from tf2dist.config.schema import RunConfig
from tf2dist.data.splits import Splits
from tf2dist.errors import CheckpointError, DataError
from tf2dist.model.evaluation import Evaluation, chunk_size, chunks, evaluated_sizes
from tf2dist.model.features import finalizes
from tf2dist.model.source import Source, build_step
from tf2dist.process import heartbeat

POLL_SECS = 1.0
LINE_EVERY_SECS = 30.0  # while there is no checkpoint
LAST_SECS = 120.0  # for the last checkpoint, once the leader is done: NFS may show an old listing for a minute
OnEvaluation = Callable[[str, int, Evaluation], None]


class Evaluator:
    """A copy of the model outside of the cluster; the training does not know of it and never waits for it."""

    def __init__(self, config: RunConfig, source: Source, splits: Splits, warn: Notify) -> None:
        if not splits.evaluated:
            raise DataError(f"data ({config.data.name}): has no validation or test set to evaluate; start no evaluator")
        self._data, self._keras, self._splits, self._warn = config.data.name, config.keras, splits, warn
        self._seen: set[tuple[str, int, int]] = set()  # the checkpoints that were read or found damaged
        self._step, self._make_optimizer = build_step(source, splits, config, contextlib.nullcontext())
        self._chunk_size = chunk_size(config.train.batch_size_per_worker, self._step, splits, source.plan)
        self._sizes = evaluated_sizes(splits.sizes(), self._chunk_size, source.plan)
        self._optimizer: keras.Optimizer | None = None
        self._named = self._needed_last = self._variables([])
        self._evaluate = self._step.evaluate_function(splits.evaluated_layout)

    def _variables(self, optimizers: list[keras.Optimizer]) -> Named:
        return named_variables(self._step.model, self._step.variables, optimizers) | self._step.outside

    def newest(self, checkpoints: Checkpoints) -> Snapshot | None:
        """The newest checkpoint; None if it was read before.

        None also if it is damaged, or was removed while it was read: the run may save another one.
        """
        path = checkpoints.folder
        try:
            path = checkpoints.paths()[-1]
            # The name is not enough: a run may save the same step again, whole this time, or as its last one.
            which = (path.name, path.stat().st_ino, path.stat().st_mtime_ns)
            if which in self._seen:
                return None
            snapshot = read(path)
            self._seen.add(which)
            return snapshot
        except IndexError:  # there is none yet
            return None
        except OSError as error:
            # The run may have removed it to make room for a newer one; NFS then says ESTALE.
            if is_damage(error) or error.errno == errno.ESTALE:
                return None
            raise unreadable(path, error) from None
        except ValueError as error:
            self._seen.add(which)
            self._warn(f"checkpoint {path.name} is damaged ({error}); waiting for another one")
            return None

    def _variables_of_last(self, target_step: int) -> Named:
        """The variables that the final weights depend on: the model's, and those of an optimizer that changes them."""
        if self._optimizer is None:
            # Not before: only a checkpoint tells the target, which a learning rate schedule is made for.
            self._optimizer = self._make_optimizer(target_step)
            if finalizes(self._optimizer):
                self._optimizer.build(self._step.trainable)
                self._needed_last = self._variables([self._optimizer])
        return self._needed_last

    def evaluate(self, snapshot: Snapshot, split: str, is_last: bool = False) -> Evaluation:
        """Evaluates a checkpoint on "test" or "validation".

        Args:
            is_last: whether it is the last one of the run. Then the optimizer finalizes the weights, as the run does.
        """
        named = self._variables_of_last(snapshot.facts.target_step) if is_last else self._named
        # All arrays of the model are kept, so that `check_same` notices those that this model does not have.
        needed = {name: array for name, array in snapshot.arrays.items() if name in named or name.startswith("model/")}
        check_same(named, replace(snapshot, arrays=needed), self._data, self._keras)
        assign(named, needed)
        if is_last:
            finalize(named, [(self._optimizer, self._step.trainable)])
        values = [[v.value for v in variables] for variables in (self._step.trainable, self._step.state)]
        sums = tf.zeros([1 + self._step.evaluated.size], tf.float64)
        for batch in self._batches(split):
            sums += self._evaluate(*values, [tf.constant(leaf) for leaf in batch])
            heartbeat.progress()
        return Evaluation.of_sums(self._step.evaluated, sums.numpy(), self._sizes.get(split))

    def _batches(self, split: str) -> Iterator[list[np.ndarray]]:
        """The leaves of the batches of a split."""
        if stream := self._splits.validation_stream:
            return (batch for shard in range(stream.count) for batch in stream.one_pass(shard))
        arrays = getattr(self._splits, split)
        return (arrays[first:last].leaves for first, last in chunks(self._sizes[split], self._chunk_size))


def follow(
    evaluator: Evaluator,
    run_dir: Path,
    splits: Sequence[str],
    on_evaluation: OnEvaluation,
    asked_steps: int | None,
    leader_is_done: Callable[[], bool],
    notify: Notify,
) -> None:
    """Evaluates each new checkpoint, until the run has reached its target.

    Of the checkpoints that appear while another one is evaluated, only the newest is evaluated.

    Args:
        splits: the first one is evaluated at every checkpoint, the others at the last one.
        asked_steps: train.steps, which may be beyond the target of the earlier run that has saved the checkpoint.
        notify: takes a line for the user while there is no checkpoint.

    Raises:
        CheckpointError: the leader is done, and no last checkpoint has come.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints")
    first: Wait | None = Wait(math.inf, notify, every_secs=LINE_EVERY_SECS)
    last: Wait | None = None
    while True:
        heartbeat.progress()
        is_over = leader_is_done()  # asked before the look, which then finds what the leader has saved
        snapshot = evaluator.newest(checkpoints)
        # Polling works on every file system, network ones included, where notifications do not come from other hosts.
        if snapshot is None:
            if first:
                first.notify(f"a checkpoint in {checkpoints.folder}")
            if is_over:
                last = last or Wait(LAST_SECS, notify)
            if last and last.is_over:
                raise CheckpointError(
                    f"run_dir ({run_dir}): the leader has ended, and its last checkpoint is not here, or is damaged; "
                    "give the evaluator the run_dir of the leader"
                )
            time.sleep(POLL_SECS)
            continue
        first = last = None
        done = snapshot.step
        is_last = done >= max(snapshot.facts.target_step, asked_steps or 0)
        for split in splits if is_last else splits[:1]:
            on_evaluation(split, done, evaluator.evaluate(snapshot, split, is_last))
        if is_last:
            return
