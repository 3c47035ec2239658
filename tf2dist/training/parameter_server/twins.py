"""The graphs and the calls that an algorithm needs: most need those of plain training."""

from tf2dist.training.parameter_server.bounded.scheduler import BoundedScheduler
from tf2dist.training.parameter_server.bounded.step import BoundedStep
from tf2dist.training.parameter_server.downpour.step import DownpourStep
from tf2dist.training.parameter_server.schedule import Scheduler
from tf2dist.training.parameter_server.step import AsyncStep

# By the names of the option algorithm.
STEPS: dict[str, type[AsyncStep]] = {"bounded": BoundedStep, "downpour": DownpourStep}
SCHEDULERS: dict[str, type[Scheduler]] = {"bounded": BoundedScheduler}


def step_for(algorithm: str) -> type[AsyncStep]:
    return STEPS.get(algorithm, AsyncStep)


def scheduler_for(algorithm: str) -> type[Scheduler]:
    """Of the graphs that `step_for` names."""
    return SCHEDULERS.get(algorithm, Scheduler)
