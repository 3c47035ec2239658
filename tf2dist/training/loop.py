"""What the two training loops have in common: the signature, and what they tell about themselves."""

import enum
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import keras
import numpy as np

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.config.schema import RunConfig
from tf2dist.data.location import DEFAULT_EPOCHS
from tf2dist.data.pipeline import Sharding
from tf2dist.errors import ConfigError
from tf2dist.model.evaluate import Evaluation


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        global_step: updates applied to the model.
        local_steps: steps of each worker that are part of them.
            Those taken before by a cluster of another mode or size are not.
        examples: seen by all workers, in the whole run.
        loss: mean over the steps since the last report; NaN if there were none.
        accuracy: on the training examples of these steps.
    """

    global_step: int
    local_steps: tuple[int, ...]
    examples: int
    loss: float
    accuracy: float


Report = Callable[[Progress], None]


class PauseRequest(enum.Flag):
    """Why a training should pause."""

    NOTHING = 0
    SAVE = enum.auto()
    STOP = enum.auto()

    def to_floats(self) -> list[float]:
        """Something that can be added up: the sum is not zero where one worker's is not."""
        return [float(one in self) for one in PauseRequest]

    @classmethod
    def of_sums(cls, sums: list[float]) -> "PauseRequest":
        requested = [one for one, total in zip(PauseRequest, sums, strict=True) if total > 0]
        return functools.reduce(operator.or_, requested, cls.NOTHING)


PauseRequests = Callable[[], PauseRequest]  # asked every now and then during a training or an evaluation


def never() -> PauseRequest:
    return PauseRequest.NOTHING


class WorkersAway(Exception):
    """A stop is requested, and no worker does what it was given."""


def target_step(config: RunConfig, sharding: Sharding, start: Snapshot | None) -> int:
    """The global step at which the run ends.

    Raises:
        ConfigError: the run is beyond it already.
    """
    step = start.step if start else 0
    if config.train.steps is not None:
        if config.train.steps < step:
            raise ConfigError(
                f"train.steps ({config.train.steps}): the run in run_dir is at step {step} already; ask for more, or "
                "name another run_dir"
            )
        return config.train.steps
    epochs = config.train.epochs or DEFAULT_EPOCHS.get(config.data.name, DEFAULT_EPOCHS["mnist"])
    target = max(1, math.ceil(epochs * sharding.updates_per_epoch))
    if start is None or not start.is_resumed or start.facts["input"]["sharding"] == asdict(sharding):
        return max(target, step)
    # Another cluster has made some of the passes, in steps of another size.
    done: float = start.facts["examples"] / start.facts["input"]["sharding"]["num_examples"]
    return step + max(0, math.ceil((epochs - done) * sharding.updates_per_epoch))


class Loop(Protocol):
    """One task's view of the training; made with ``build(config, cluster, task, splits, start, report, strategy)``.

    `strategy` may be None: then `build` joins the cluster, before the first operation of TensorFlow.

    Attributes:
        restored_from: how it has made use of `start`, for the user.
        advice: a warning about the model, for the user; empty for none.
    """

    model: keras.Model
    sharding: Sharding
    progress: Progress
    target_step: int
    restored_from: str
    advice: str

    @property
    def optimizer(self) -> keras.Optimizer:
        """One that has the learning rate of all."""

    def train(self, until_step: int, pause_request: PauseRequests = never) -> PauseRequest:
        """Trains until exactly `until_step` updates have been applied, or until a pause is requested.

        Args:
            pause_request: asked every now and then; answered soon, at an exact step where all tasks stand.

        Returns:
            What was requested by whatever task; nothing if `until_step` was reached.
        """

    def combine(self, request: PauseRequest) -> PauseRequest:
        """The requests of all tasks that drive the training; to be called by all while none trains."""

    def snapshot(self) -> Snapshot:
        """The state at `progress.global_step`; on the leader, while none trains."""

    def finalize(self) -> None:
        """Gives the model its final weights, such as the optimizer's moving averages; snapshots are as before.

        To be called by all tasks that drive the training.
        """

    def evaluate(self, split: str, pause_request: PauseRequests = never) -> Evaluation:
        """Evaluates "test" or "validation", every example exactly once.

        Raises:
            WorkersAway: a stop is requested, and this cannot come to an end.
        """

    def updates_applied(self) -> int:
        """Counted where they are applied, independently of `progress`."""

    def facts(self) -> dict[str, Any]:
        """What only this mode can tell, for summary.json."""

    def histograms(self) -> dict[str, np.ndarray]:
        """What only this mode can count: how often 0, 1, 2, ... came up, for TensorBoard; while none trains."""

    def finish(self, accuracy: float | None) -> None:
        """Ends the training on every task; each logs the final accuracy, None if it was stopped before."""

    def abandon(self, reason: str) -> None:
        """Tells those who wait for this task that it has failed, as far as it can."""
