"""What follows a run from another process, and may change it between two steps: the callbacks of `fit`."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

NamedArrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Change:
    """What callbacks want to be changed.

    Attributes:
        stop: whether the run ends here.
        is_interrupted: a signal came while they were waited for; so the run is saved and stopped.
        learning_rate: None to leave it.
        arrays: new values of variables, by name, such as "model/hidden1/kernel".
        state: of the callbacks, which the next checkpoints keep; None to leave it.
    """

    stop: bool = False
    is_interrupted: bool = False
    learning_rate: float | None = None
    arrays: NamedArrays = field(default_factory=dict)
    state: NamedArrays | None = None

    def to_bytes(self) -> bytes:
        """For the other synchronous workers, which need no state of callbacks."""
        head = [self.stop, self.is_interrupted, self.learning_rate]
        with io.BytesIO() as buffer:
            np.savez(buffer, **self.arrays)  # type: ignore[arg-type]
            return json.dumps(head).encode() + b"\n" + buffer.getvalue()

    @classmethod
    def from_bytes(cls, packed: bytes) -> "Change":
        head, _, body = packed.partition(b"\n")
        stop, is_interrupted, learning_rate = json.loads(head)
        with io.BytesIO(body) as buffer, np.load(buffer, allow_pickle=False) as arrays:
            return cls(stop, is_interrupted, learning_rate, dict(arrays))


class Hooks(Protocol):
    """On the leader: the way to the callbacks and back."""

    def wanted(self) -> bool:
        """Whether a callback wants a pause soon, to change something."""

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
        """Calls the callbacks; `answer` gives what they want.

        Args:
            kind: "begin" before the first step, "epoch" at the end of one, "pause" after `wanted`, "end" after the
                last step, with the weights that are evaluated.
            epoch: counted from 0; for "begin" the one that comes.
            step: the global step.
            logs: of the epoch, as in Keras.
            arrays: gives the values of all variables by name, and the states of random generators.
            state: of the callbacks, from the checkpoint that the run goes on from; for "begin" only.
        """

    def answer(self, timeout_secs: float) -> Change | None:
        """What the callbacks want; None if they are not done within the time."""


class NoHooks:
    """No callbacks: those of a task that is not the leader."""

    def wanted(self) -> bool:
        return False

    def post(self, kind: str, epoch: int, step: int, logs: dict[str, float], *_: object) -> None:
        pass

    def answer(self, timeout_secs: float) -> Change | None:
        return None
