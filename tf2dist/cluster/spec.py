"""The cluster as a small immutable value: its tasks and their addresses."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tf2dist.config.schema import PS_MODES

ALL_JOBS = ("chief", "ps", "worker", "evaluator")
JOBS = dict.fromkeys(PS_MODES, ALL_JOBS) | {"sync": ("chief", "worker", "evaluator")}


@dataclass(frozen=True, order=True)
class Task:
    """One process of the cluster."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job}-{self.index}"

    @classmethod
    def parse(cls, name: str) -> "Task":
        """The task of a name such as "worker-0", which is what `str` makes of it."""
        job, _, index = name.rpartition("-")
        return cls(job, int(index))


@dataclass(frozen=True)
class Cluster:
    """Addresses ("host:port") by job and index; every process of a run has an equal value.

    In modes with parameter servers the task `chief` is the coordinator and computes no gradients; in mode sync a chief
    is the first of the workers.

    Attributes:
        is_managed: whether one launcher starts and owns all tasks, which divide the devices of one host; otherwise each
            is started by a command of its own.
        min_workers: with how many workers a run with parameter servers begins; None for all.
    """

    mode: str
    jobs: dict[str, tuple[str, ...]]
    is_managed: bool = False
    min_workers: int | None = None

    @property
    def num_workers(self) -> int:
        """How many tasks compute gradients."""
        return len(self.training_tasks)

    @property
    def has_coordinator(self) -> bool:
        """Whether one task drives the workers, which serve; otherwise each of them drives its own training."""
        return self.mode in PS_MODES

    @property
    def num_ps(self) -> int:
        return len(self.jobs.get("ps", ()))

    @property
    def training_tasks(self) -> list[Task]:
        """The tasks that compute gradients, in the order of their shards."""
        # TensorFlow numbers a synchronous chief before the workers, and the shards follow its numbers.
        jobs = ("worker",) if self.has_coordinator else ("chief", "worker")
        return [task for task in self.tasks if task.job in jobs]

    @property
    def tasks(self) -> list[Task]:
        # Sorted, so that all hosts have the same order, however their TF_CONFIG orders the jobs.
        return [Task(job, index) for job in sorted(self.jobs) for index in range(len(self.jobs[job]))]

    @property
    def open_files(self) -> int:
        """How many files a process of the cluster must be allowed to have open at once."""
        # With three tasks 30 are enough. A ps, and the first synchronous worker, have two for each other task.
        return max(64, 40 + 2 * len(self.tasks))

    @property
    def leader(self) -> Task:
        """The task that saves and reports for all: the coordinator, or the first of the workers."""
        # Without a chief TensorFlow also takes worker 0 for the leader.
        return Task("chief", 0) if self.jobs.get("chief") else Task("worker", 0)

    def address(self, task: Task) -> str:
        return self.jobs[task.job][task.index]

    def label(self, task: Task) -> str:
        """A task with its address, for errors: "worker 0 (host:2222)"."""
        return f"{task.job} {task.index} ({self.address(task)})"

    def awaited(self, there: Collection[Task]) -> list[Task]:
        """The tasks without which a run does not begin, of those that are not there."""
        # Nobody waits for an evaluator: it reads checkpoints, and may be started at any time.
        missing = [task for task in self.tasks if task not in there and task.job != "evaluator"]
        workers = sum(task.job == "worker" for task in there)
        if self.min_workers is not None and workers >= self.min_workers:
            return [task for task in missing if task.job != "worker"]
        return missing

    def can_lose(self, task: Task) -> bool:
        """Whether the others go on when a task is lost, and take it back when it returns."""
        return can_lose(self.mode, task.job)

    def at_ports(self, ports: Iterable[int]) -> "Cluster":
        """The same tasks on this machine, each at the next of these ports."""
        # An address instead of "localhost", which may resolve to ::1 in one process and to 127.0.0.1 in another.
        free = iter(ports)
        jobs = {job: tuple(f"127.0.0.1:{next(free)}" for _ in addresses) for job, addresses in self.jobs.items()}
        return replace(self, jobs=jobs)

    def tf_jobs(self) -> dict[str, list[str]]:
        """The cluster as TensorFlow gets it, without the evaluator."""
        # TensorFlow waits for every task in its cluster, while an evaluator may come and go at any time.
        return {job: list(addresses) for job, addresses in self.jobs.items() if job != "evaluator"}


class Place(NamedTuple):
    """A cluster, and the one task in it that this command runs; the leader, where it runs all of them."""

    cluster: Cluster
    task: Task

    @property
    def has_address(self) -> bool:
        """Whether the cluster lists the task; an evaluator that it does not list meets nobody and only reads files."""
        return self.task in self.cluster.tasks

    @property
    def has_peers(self) -> bool:
        """Whether this command meets those of the other tasks."""
        return self.has_address and not self.cluster.is_managed

    @property
    def leads(self) -> bool:
        """Whether the task is the one that saves and makes the result."""
        return self.task == self.cluster.leader

    @property
    def needs_others(self) -> bool:
        """Whether the run ends without one of the other tasks; if this one does not lead, the leader is such a task."""
        return any(task != self.task and not self.cluster.can_lose(task) for task in self.cluster.tasks)


def can_lose(mode: str, job: str) -> bool:
    """Whether a run goes on without a task of this job."""
    # A worker with parameter servers has no state of its own: all of it is on the ps. Without them it is part of every
    # step.
    return job == "evaluator" or (mode in PS_MODES and job == "worker")
