"""What the two training loops have in common: the signature, and what they tell about themselves."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import keras

from tf2dist.config import RunConfig
from tf2dist.data import Sharding
from tf2dist.evaluate import Evaluation
from tf2dist.sources import DEFAULT_EPOCHS


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        global_step: updates applied to the model.
        local_steps: steps of each worker that are part of them.
        examples: seen by all workers.
        loss: mean over the steps since the last report; NaN if there were none.
        accuracy: on the training examples of these steps.
    """

    global_step: int
    local_steps: tuple[int, ...]
    examples: int
    loss: float
    accuracy: float


Report = Callable[[Progress], None]


def target_step(config: RunConfig, updates_per_epoch: int) -> int:
    """The global step at which the run ends."""
    if config.train.steps is not None:
        return config.train.steps
    epochs = config.train.epochs or DEFAULT_EPOCHS.get(config.data.name, DEFAULT_EPOCHS["mnist"])
    return max(1, math.ceil(epochs * updates_per_epoch))


class Loop(Protocol):
    """One task's view of the training; made with ``(config, cluster, task, splits, report)``."""

    model: keras.Model
    sharding: Sharding
    progress: Progress
    target_step: int

    @property
    def updates_per_epoch(self) -> int:
        """Global steps in which the whole cluster passes over the training set once."""

    def train(self, until_step: int) -> None:
        """Trains until exactly `until_step` updates have been applied."""

    def evaluate(self, split: str) -> Evaluation:
        """Evaluates "test" or "validation", every example exactly once."""

    def updates_applied(self) -> int:
        """Counted where they are applied, independently of `progress`."""

    def facts(self) -> dict[str, Any]:
        """What only this mode can tell, for summary.json."""

    def finish(self, accuracy: float) -> None:
        """Ends the training on every task; each logs the final accuracy."""

    def abandon(self, reason: str) -> None:
        """Tells those who wait for this task that it has failed, as far as it can."""
