"""A run on one host, as its launching process knows it, and who has asked for it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tf2dist.cluster.spec import Place
from tf2dist.config.schema import RunConfig
from tf2dist.launch.console import Console
from tf2dist.messages import HookAnswer, HookCall, PauseWanted, ProgressMessage
from tf2dist.signals import StopRequest

SessionMessage = HookCall | ProgressMessage
Send = Callable[[HookAnswer | PauseWanted], None]


# Only a protocol stands here: `fit` itself imports TensorFlow, and this room must not.
class Session(Protocol):
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

    def on_message(self, message: SessionMessage) -> None:
        """Takes a message of the leader; must not wait."""


@dataclass(frozen=True)
class HostRun:
    """A run, as far as it is this host's: all tasks of a managed cluster, or one task of another.

    Attributes:
        place: the cluster, and the task of this host.
        run_dir: exists.
        started_at: `time.time()` of the user's command.
        stop: the request to this process that the run should end; it may come at any time.
        session: of `fit`; None for the command line.
    """

    config: RunConfig
    place: Place
    run_dir: Path
    console: Console
    started_at: float
    stop: StopRequest
    session: Session | None = None

    @property
    def may_leave(self) -> bool:
        """Whether SIGTERM to this process ends the task of this host alone, and not the whole job."""
        cluster, task = self.place
        return self.config.task.on_term == "leave" and self.place.has_peers and cluster.can_lose(task)
