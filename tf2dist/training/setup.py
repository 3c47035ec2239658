"""What a task is given for its run."""

from dataclasses import dataclass
from pathlib import Path

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig
from tf2dist.messages import ToLauncher
from tf2dist.model.source import Source
from tf2dist.training.hooks import Hooks


@dataclass(frozen=True)
class TaskContext:
    """A task and its run, as the task's process is told when it starts.

    Attributes:
        task: which one of `cluster` this process is.
        source: the model and the data.
        run_dir: the leader writes the result into it.
        to_launcher: takes progress, lines for the user and the result.
        started_at: `time.time()` of the user's command.
        hooks: the way to callbacks; used by the leader if the source has a plan of epochs.
    """

    config: RunConfig
    cluster: Cluster
    task: Task
    source: Source
    run_dir: Path
    to_launcher: ToLauncher
    started_at: float
    hooks: Hooks
