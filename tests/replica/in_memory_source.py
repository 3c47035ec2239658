"""A model and data that a test passes to a training loop directly, and hooks that record their calls."""

from collections.abc import Callable
from dataclasses import dataclass, field

import keras
import numpy as np

from tf2dist.data.splits import Splits, checked
from tf2dist.model.source import EpochPlan
from tf2dist.training.hooks import CallbackEffects, Hooks, NamedArrays


@dataclass
class InMemorySource:
    """A `Source` whose model and data come from a test; nothing is sent to other tasks."""

    make: Callable[[], keras.Model]
    splits: Splits
    plan: EpochPlan | None = None
    name: str = "given"  # of the model, in messages

    def load(self) -> Splits:
        return checked("given", self.splits)

    def build(self, splits: Splits) -> keras.Model:
        return self.make()


class AsOfFit(InMemorySource):
    """Its validation set need not have the weights of the training set."""

    def load(self) -> Splits:
        return self.splits


@dataclass
class RecordingHooks(Hooks):
    """Hooks that record their calls, and return the answers that a test has chosen."""

    # By the kind of the call and its epoch.
    answers: dict[tuple[str, int], CallbackEffects] = field(default_factory=dict)
    calls: list[tuple[str, int, int, dict[str, float]]] = field(default_factory=list)
    arrays: NamedArrays = field(default_factory=dict)
    reads_progress: bool = False

    def wanted(self) -> bool:
        return False

    def post(
        self,
        kind: str,
        epoch: int,
        step: int,
        logs: dict[str, float],
        learning_rates: tuple[float, ...],
        arrays: Callable[[bool], NamedArrays],
        state: NamedArrays,
    ) -> None:
        self.calls.append((kind, epoch, step, logs))
        self.arrays = arrays(True)

    def answer(self, timeout_secs: float) -> CallbackEffects | None:
        kind, epoch, *_ = self.calls[-1]
        return self.answers.get((kind, epoch), CallbackEffects())

    def history(self) -> dict[str, list[float]]:
        """The metrics in the form of `keras.callbacks.History.history`."""
        logs = [logs for kind, _, _, logs in self.calls if kind == "epoch"]
        return {name: [log[name] for log in logs] for name in logs[0]}


def weights_of(model: keras.Model) -> list[np.ndarray]:
    """The weights without the states of random generators, whose seeds differ from run to run."""
    return [v.numpy() for v in model.weights if "seed_generator" not in v.path]
