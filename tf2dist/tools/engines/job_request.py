"""Requests to all engines: the tasks in the order of their ranks, and their command."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath

import tf2dist
from tf2dist.cluster.spec import Task
from tf2dist.config import for_fit
from tf2dist.config.schema import PS_MODES, RunConfig
from tf2dist.errors import LOST_TASK_CODES, ConfigError

FAILED_FOR_GOOD = (1, 2, 3)  # the exit codes of errors that a restart does not mend
LOST = (137, *LOST_TASK_CODES)  # by SIGKILL, and of the tasks that have lost another one
STOPPED = 143  # saved, or left, after SIGTERM: by an eviction, a time limit or the user
SECS_BEYOND_GRACE = 30  # for ending the processes and for the last messages
RUNS = PurePosixPath("/runs")  # where containers have their run directories
# With what makes it a comment or a text, so that a template is a program by itself.
PLACEHOLDER = re.compile(r'# @([A-Z_]+)@|"@([A-Z_]+)@"|@([A-Z_]+)@')
MAX_VARIABLE = 128_000  # characters of an environment variable: 128 KiB, with its name


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A request of the user to an engine.

    Attributes:
        config: the checked options of the run.
        arguments: flags and options of the command as the user has written them, without the size of the cluster.
        program: the user's own command, whose calls of `fit` get the options; (): `python -m tf2dist`.
        gpus: of each worker.
        cpus: of each worker; None for the engine's default.
        memory: of each worker, as Kubernetes writes it; None for no limit.
        queue: of Kueue.
        lines: further lines of an sbatch script.
        restarts: how often the engine starts lost tasks again.
    """

    config: RunConfig
    arguments: Sequence[str]
    num_workers: int
    program: Sequence[str] = ()
    name: str = "tf2dist"
    image: str = f"tf2dist:{tf2dist.__version__}"
    gpus: int = 0
    cpus: int | None = None
    memory: str | None = None
    queue: str | None = None
    lines: Sequence[str] = ()
    restarts: int = 10

    @property
    def has_ps(self) -> bool:
        return self.config.mode in PS_MODES

    @property
    def tasks(self) -> list[Task]:
        """All tasks, by rank."""
        counts = {"worker": self.num_workers}
        if self.has_ps:
            counts = {"chief": 1, "ps": self.config.cluster.num_ps} | counts
        return [Task(job, index) for job, count in counts.items() for index in range(count)]

    def command(self, *more: str) -> list[str]:
        """The command of every task, with further options."""
        options = [*self.arguments, *more]
        if not self.program:
            return ["python", "-m", "tf2dist", *options]
        return ["env", f"{for_fit.VARIABLE}={for_fit.joined(options)}", *self.program]

    def container_command(self, *options: str) -> list[str]:
        """The command of every task in a container, whose run directory is in the mounted volume."""
        run_dir = [] if self.config.run_dir else [f"run_dir={self.mounted_run_dir}"]
        return self.command(*run_dir, *options, "cluster=ranks")

    def addresses(self, hosts: Sequence[str]) -> str:
        """The variable that tells the tasks in containers the names of all, by rank."""
        text = ",".join(hosts)
        if len(text) > MAX_VARIABLE:
            raise ConfigError(
                f"cluster.num_workers ({self.num_workers}): the addresses of all tasks have {len(text):,} characters, "
                f"of which Linux takes {MAX_VARIABLE:,}; give fewer, or a shorter --name"
            )
        return text

    @property
    def mounted_run_dir(self) -> PurePosixPath:
        """The run directory in a container."""
        path = PurePosixPath(self.config.run_dir or RUNS / self.name)
        if not path.is_absolute() or len(path.parts) < 3:
            raise ConfigError(
                f"run_dir ({path}): its parent is where the volume is mounted; give a path such as /runs/{path.name}"
            )
        return path

    @property
    def stop_secs(self) -> int:
        """Seconds that a task may take from SIGTERM to its end."""
        return math.ceil(self.config.grace_secs) + SECS_BEYOND_GRACE


def check_mode(request: JobRequest, *, needs_ps: bool, other: str) -> None:
    """Refuses the modes that another engine serves."""
    if request.has_ps != needs_ps:
        raise ConfigError(f"mode ({request.config.mode}): is not for this engine; render {other}, or choose another")


def filled(template: str, **values: object) -> str:
    """The text of a file in `templates`, with a value for each placeholder such as @NAME@."""
    text = resources.files(__package__).joinpath("templates", template).read_text(encoding="utf-8")
    return PLACEHOLDER.sub(lambda match: str(values[match[match.lastindex or 0].lower()]), text)
