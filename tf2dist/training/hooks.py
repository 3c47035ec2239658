"""The interface to what follows a run, and may change it between two steps: the callbacks of `fit`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tf2dist.checkpoint.snapshot import pack, unpack

NamedArrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Change:
    """What callbacks want to change.

    Attributes:
        stop: whether the run ends here.
        is_interrupted: whether a signal came while the callbacks ran; then the run is saved and stopped.
        learning_rate: the new one; None to leave it.
        arrays: new values of variables, by name, such as "model/hidden1/kernel".
        state: the state of the callbacks, which the next checkpoints keep; None to leave it.
    """

    stop: bool = False
    is_interrupted: bool = False
    learning_rate: float | None = None
    arrays: NamedArrays = field(default_factory=dict)
    state: NamedArrays | None = None

    def to_bytes(self) -> bytes:
        """For the other synchronous workers, which save no checkpoints and so need no state of the callbacks."""
        return pack([self.stop, self.is_interrupted, self.learning_rate], self.arrays)

    @classmethod
    def from_bytes(cls, packed: bytes) -> "Change":
        (stop, is_interrupted, learning_rate), arrays = unpack(packed)
        return cls(stop, is_interrupted, learning_rate, arrays)


class Hooks(Protocol):
    """On the leader: the way to the callbacks and back."""

    def wanted(self) -> bool:
        """Whether a callback wants the training to pause, to change something."""

    def post(
        self,
        kind: str,
        epoch: int,
        step: int,
        logs: dict[str, float],
        learning_rate: float,
        arrays: Callable[[], NamedArrays],
        state: NamedArrays,
    ) -> None:
        """Calls the callbacks without waiting for them; `answer` returns what they want.

        Args:
            kind: "begin" before the first step, "epoch" at the end of an epoch, "pause" after `wanted`, "end" after
                the last step, with the weights that are evaluated.
            epoch: counted from 0; for "begin" the epoch that comes.
            step: the global step.
            logs: the metrics of the epoch by name, as in Keras.
            arrays: returns the values of all variables by name, and the states of random generators.
            state: the state of the callbacks in the checkpoint that the run continues from; for "begin" only.
        """

    def answer(self, timeout_secs: float) -> Change | None:
        """What the callbacks want; None if they are not done within `timeout_secs`."""


class NoHooks:
    """The hooks of a task that is not the leader: no callbacks."""

    def wanted(self) -> bool:
        return False

    def post(self, kind: str, epoch: int, step: int, logs: dict[str, float], *_: object) -> None:
        pass

    def answer(self, timeout_secs: float) -> Change | None:
        # At once: this task gets the answer, and waits for it, in the leader's broadcast.
        return None
