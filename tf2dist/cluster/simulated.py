"""Checks the options simulate.* against the workers of the cluster."""

from tf2dist.cluster.spec import HostTask, Task
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError


def check_simulated(config: RunConfig, host_task: HostTask | None) -> None:
    """Checks that there are as many delays as workers, and that there is the worker that pauses.

    Args:
        host_task: the cluster; None for a local one.

    Raises:
        ConfigError: there are not.
    """
    workers = [Task("worker", index) for index in range(config.cluster.num_workers)]
    if host_task:
        workers = host_task.cluster.training_tasks
    names = [str(task) for task in workers]
    delays, pause = config.simulate.delay_secs, config.simulate.parsed_pause
    if delays and len(delays) != len(names):
        shown = f"[{','.join(f'{secs:g}' for secs in delays)}]"
        raise ConfigError(
            f"simulate.delay_secs ({shown}): has {len(delays)} numbers for {len(names)} workers; give each worker one"
        )
    if pause and pause.task not in names:
        raise ConfigError(
            f"simulate.pause ({config.simulate.pause}): there is no worker {pause.task} in this cluster; the workers "
            f"are {names[0]} to {names[-1]}"
        )
