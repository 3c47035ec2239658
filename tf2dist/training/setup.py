"""Stages that prepare a run in every mode: what its task is given, its batches, its length, its tables, its values."""

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from tf2dist.checkpoint.snapshot import Snapshot, Weights
from tf2dist.checkpoint.state import (
    Named,
    has_sharding,
    input_position,
    named_variables,
    names_by_row,
    restore,
    take_over,
)
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig
from tf2dist.data.location import DEFAULT_EPOCHS
from tf2dist.data.passes import UNKNOWN_STEPS, NumberedSteps, Sharding
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError
from tf2dist.messages import ToLauncher
from tf2dist.model.source import EpochPlan, Source
from tf2dist.model.step import Step
from tf2dist.training.hooks import Hooks

EPOCH_ARRAY = "epoch/position"  # the name of an `EpochPosition` in a snapshot


@dataclass(frozen=True)
class TaskContext:
    """A task and its run, as the task's process is told when it starts.

    Attributes:
        task: which one of `cluster` this process is.
        source: the model and the data.
        run_dir: the leader writes the result into it.
        to_launcher: takes progress, lines for the user and the result.
        started_at: `time.time()` of the user's command.
        hooks: the way to the callbacks of a call of `fit`; only the leader uses it.
    """

    config: RunConfig
    cluster: Cluster
    task: Task
    source: Source
    run_dir: Path
    to_launcher: ToLauncher
    started_at: float
    hooks: Hooks | None

    @functools.cached_property
    def splits(self) -> Splits:
        """The data, or this task's view of them; loaded when they are asked for first."""
        return self.source.load()


@dataclass(frozen=True)
class RunPlan:
    """The length of a run, and its batches.

    Attributes:
        sharding: how the training set is cut into batches.
        start: the snapshot that the run continues from; None for a new run.
        target_step: the global step at which the run ends.
    """

    sharding: Sharding
    start: Snapshot | None
    target_step: int

    @classmethod
    def of(
        cls, context: TaskContext, mode: str, num_shards: int, batch_size: int, start: Snapshot | Weights | None
    ) -> "RunPlan":
        """The plan of a run; for `num_shards` and `batch_size` see `sharding_of`."""
        config, plan = context.config, context.source.plan
        sharding = sharding_of(config, mode, context.splits, plan, num_shards, batch_size)
        resumed = start if isinstance(start, Snapshot) else None
        return cls(sharding, resumed, target_step(config, plan, sharding, resumed))


def sharding_of(
    config: RunConfig, mode: str, splits: Splits, plan: EpochPlan | None, num_shards: int, batch_size: int
) -> Sharding:
    """The way in which the training set is cut into batches, or the batches of streams are counted; see `Sharding`.

    Args:
        mode: of the loop that takes the batches.
        num_shards: workers, or with mode=sync replicas.
        batch_size: of a shard.
    """
    shuffle = plan is None or plan.shuffle
    is_sync, replicas = mode != "async", None
    if splits.stream:
        assert plan, "streams come from a call of `fit`"
        batches = (plan.steps_per_epoch or UNKNOWN_STEPS) * (num_shards if is_sync else 1)
        return Sharding(batches * batch_size, batch_size, num_shards, config.seed, is_sync)
    if mode == "sync_replicas" and (batches := config.batches_per_update(num_shards)) != num_shards:
        replicas = batches
    return Sharding(len(splits.train), batch_size, num_shards, config.seed, is_sync, shuffle, replicas)


def target_step(config: RunConfig, plan: EpochPlan | None, sharding: Sharding, start: Snapshot | None) -> int:
    """The global step at which the run ends."""
    step = start.step if start else 0
    if plan:
        # A callback may have ended the epochs of this run early, so the end follows from where its epoch began.
        return max(step, EpochPosition.of(start, plan, sharding).end_of(plan.epochs - 1))
    if config.train.steps is not None:
        if config.train.steps < step:
            raise ConfigError(
                f"train.steps ({config.train.steps}): the run in run_dir is at step {step} already; ask for more, or "
                "name another run_dir"
            )
        return config.train.steps
    epochs = config.train.epochs or DEFAULT_EPOCHS.get(config.data.name, DEFAULT_EPOCHS["mnist"])
    end = max(1, math.ceil(epochs * sharding.num_examples))
    # A snapshot beyond the end has nothing left to train, as when the number of epochs was lowered.
    steps = NumberedSteps(sharding, input_position(start, sharding)).steps_to(end)
    return step + sharding.updates_in(steps)


@dataclass(frozen=True)
class EpochPosition:
    """The place of a run among its epochs.

    Attributes:
        epoch: the number of the epoch that is under way, or whose callbacks are still to be called.
        first_step: the global step at which that epoch began.
        num_steps: the steps of every epoch.
    """

    epoch: int
    first_step: int
    num_steps: int

    @classmethod
    def of(cls, start: Snapshot | None, plan: EpochPlan, sharding: Sharding) -> "EpochPosition":
        """The position at which the run continues.

        If an epoch has another number of steps than before, one that is a pass still ends with the pass, and any other
        continues at the same fraction of it.
        """
        num_steps = plan.steps_per_epoch or sharding.updates_per_pass  # one pass over the data by the whole cluster
        if start is None or EPOCH_ARRAY not in start.arrays:
            return cls(plan.initial_epoch, start.step if start else 0, num_steps)
        epoch, first_step, before = map(int, start.arrays[EPOCH_ARRAY])
        done = start.step - first_step
        if UNKNOWN_STEPS in (num_steps, before):
            # An epoch that ends with the data has no fraction. One that had or gets a number begins again.
            done = done if num_steps == before else 0
        elif 0 < done < before and plan.steps_per_epoch is None and not has_sharding(start, sharding):
            left = NumberedSteps(sharding, input_position(start, sharding)).to_pass_end
            done = num_steps - sharding.updates_in(left)
        else:
            done = round(done * num_steps / before)
        # The epoch is moved, not the step: the global step of a run must never change.
        return cls(epoch, start.step - done, num_steps)

    def end_of(self, epoch: int) -> int:
        """The global step at which an epoch ends."""
        return self.first_step + (epoch - self.epoch + 1) * self.num_steps

    def next(self, step: int) -> "EpochPosition":
        """The position in the next epoch, if this one ends at `step`: a callback may end it early."""
        return EpochPosition(self.epoch + 1, step, self.num_steps)

    def to_array(self) -> np.ndarray:
        """For a snapshot."""
        return np.array([self.epoch, self.first_step, self.num_steps])


@dataclass(frozen=True)
class StartValues:
    """The variables of a run, which have the values that it begins with.

    Attributes:
        named: the variables of the model and of the optimizers by their names in a snapshot.
        by_row: the names of the arrays that are read and assigned piece by piece; see `names_by_row`.
        restored_from: a line for the user about what was restored; empty for nothing.
    """

    named: Named
    by_row: Collection[str]
    restored_from: str

    @classmethod
    def assigned(
        cls,
        config: RunConfig,
        step: Step,
        optimizers: list[keras.Optimizer],
        start: Snapshot | Weights | None,
        synchronize: Callable[[Named, Collection[str]], None] | None = None,
    ) -> "StartValues":
        """Assigns them: those of a compiled model's optimizer, then those of the snapshot, which is younger.

        Args:
            synchronize: called first, with `named` and `by_row`; makes the variables of all workers equal.
        """
        named = named_variables(step.model, step.variables, optimizers) | step.outside
        by_row = names_by_row(named, step.tables)
        if synchronize:
            synchronize(named, by_row)
        if step.earlier_optimizer is not None:
            take_over(named, step.model, step.variables, step.earlier_optimizer, by_row)
        return cls(named, by_row, restore(named, start, config, by_row))


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready for its first step.

    Attributes:
        step: the step of the model.
        new_optimizer: makes an optimizer like that of the run, without its state.
        earlier_updates: the updates that the optimizer had applied before this run.
        note: for the user, about what differs from Keras in this mode; empty for nothing.
        sizes: in examples, of the splits to evaluate.
    """

    plan: RunPlan
    step: Step
    new_optimizer: Callable[[], keras.Optimizer]
    earlier_updates: int
    values: StartValues
    note: str
    sizes: dict[str, int]
