"""What the launching process needs of a call of `fit`, whose own code runs in another thread."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tf2dist.messages import HookAnswer, HookCall, PauseWanted, Progress

Heard = HookCall | Progress
Send = Callable[[HookAnswer | PauseWanted], None]


# Only a protocol stands here: `fit` itself imports TensorFlow, and this room must not.
class Caller(Protocol):
    """A call of `fit`: what its tasks need, and where the leader's messages go.

    Attributes:
        job: the folder with the data and the model, on this host.
        identity: what must be equal on every host, in a form that people can read.
        sys_path: where the tasks find the caller's modules.
    """

    job: Path
    identity: dict[str, Any]
    sys_path: list[str]

    def connect(self, send: Send) -> None:
        """Takes the function that sends a message to the leader, from any thread."""

    def hear(self, message: Heard) -> None:
        """Takes a message of the leader; must not wait."""
