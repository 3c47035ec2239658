"""Which devices a task may use: the tasks of a host divide its GPUs, and local ones share its cores."""

import os
import socket
from collections.abc import Sequence

import tensorflow as tf

from tf2dist.cluster.addresses import canonical_host
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import DevicesConfig
from tf2dist.errors import ConfigError
from tf2dist.tf_constants import CALL_THREADS
from tf2dist.tf_internals.tensorflow import keep_threads_from_spinning, limit_gpu_memory, optimize_graphs_for_cpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
# How many GPUs a SLURM step has on this node, and which of them this task sees, by numbers that no cgroup shifts.
GPUS_OF_STEP, SEEN_OF_STEP = "SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS"


def choose_gpus(num_gpus: int, cluster: Cluster, task: Task, *, divided: bool = True) -> list[int]:
    """The GPUs of this task, by their numbers among those that it sees.

    Args:
        divided: whether the tasks of one host divide these GPUs; False if the user has chosen them for this task.
    """
    if task.job == "evaluator":
        return _free_gpus(num_gpus, cluster, task, divided=divided)[:1]
    # The coordinator and a ps compute no gradients. TensorFlow in such a process would still reserve GPU memory.
    if task not in cluster.training_tasks or not num_gpus:
        return []
    neighbours = _neighbours(cluster, task) if divided else [task]
    number, count = neighbours.index(task), len(neighbours)
    # A step of an asynchronous worker is one batch on one device, and its strategy refuses workers with unequal counts.
    if cluster.is_managed or cluster.has_coordinator or num_gpus < count:
        return [number % num_gpus]
    # Synchronous workers need equally many.
    gpus_per_task = num_gpus // count
    return list(range(number * gpus_per_task, (number + 1) * gpus_per_task))


def _neighbours(cluster: Cluster, task: Task) -> list[Task]:
    """The tasks that compute gradients on the host of this task."""
    host = canonical_host(cluster.address(task)) if task in cluster.tasks else None
    return [other for other in cluster.training_tasks if canonical_host(cluster.address(other)) == host]


def _free_gpus(num_gpus: int, cluster: Cluster, task: Task, *, divided: bool) -> list[int]:
    """The GPUs that no worker on the host of this task uses."""
    neighbours = _neighbours(cluster, task) if divided else []
    used = {gpu for other in neighbours for gpu in choose_gpus(num_gpus, cluster, other)}
    return [gpu for gpu in range(num_gpus) if gpu not in used]


def configure(config: DevicesConfig, cluster: Cluster, task: Task) -> tf.compat.v1.ConfigProto:
    """Applies the choice to this process. Must be called before TensorFlow initializes its devices.

    Returns:
        The same choice for `tf.distribute.Server`, which ignores `tf.config`.
    """
    server_config = tf.compat.v1.ConfigProto()
    num_gpus = claim_gpus(config, cluster, task, server_config)
    # The coordinator of many hosts does not know the devices of the workers, for which it makes the graphs.
    if not num_gpus and (cluster.is_managed or cluster.mode == "sync"):
        optimize_graphs_for_cpus()
    # On a host of its own a task keeps TensorFlow's defaults. The affinity counts the cores that this process may use
    # in a container or under a scheduler, which can be fewer than the machine has.
    if cluster.is_managed:
        if task.job == "worker" and cluster.has_coordinator and shares_a_core(cluster.num_workers):
            execute_calls_in_one_thread()
        share_cores(server_config, len(os.sched_getaffinity(0)), cluster.num_workers)
    return server_config


def claim_gpus(config: DevicesConfig, cluster: Cluster, task: Task, server_config: tf.compat.v1.ConfigProto) -> int:
    """Makes TensorFlow use this task's GPUs alone; see `configure`.

    Returns:
        How many GPUs this process could use.
    """
    gpus = tf.config.list_physical_devices("GPU")
    divided = are_divided(cluster)
    chosen = choose_gpus(len(gpus), cluster, task, divided=divided)
    tf.config.set_visible_devices([gpus[number] for number in chosen], "GPU")
    options = server_config.gpu_options
    options.visible_device_list = ",".join(map(str, chosen))
    # An empty list of visible devices means all of them, so a task without GPUs gets a device count of 0.
    if not chosen:
        server_config.device_count["GPU"] = 0
    elif config.gpu_memory_fraction is None:
        # By default TensorFlow reserves nearly all memory of a GPU at once, so a second worker would find none.
        options.allow_growth = True
        for number in chosen:
            tf.config.experimental.set_memory_growth(gpus[number], True)
    else:
        options.per_process_gpu_memory_fraction = config.gpu_memory_fraction
        check_fraction(config.gpu_memory_fraction, len(gpus), cluster, task, divided=divided)
        limit_gpu_memory(config.gpu_memory_fraction)
    if chosen:
        print(f"computes on {', '.join(f'GPU {name}' for name in names_of(chosen))}", flush=True)
    return len(gpus)


def are_divided(cluster: Cluster) -> bool:
    """Whether the tasks of this host divide the GPUs that this one sees; otherwise all of these are for it alone."""
    seen = os.environ.get(VISIBLE)
    # Unless it is asked to bind them, SLURM sets the variable in every task to all GPUs that the step has on this node.
    return cluster.is_managed or seen is None or str(len(seen.split(","))) == os.environ.get(GPUS_OF_STEP)


def advice_on_gpus(cluster: Cluster, task: Task) -> str:
    """A line about GPUs that an asynchronous worker of many hosts leaves unused; "" if it leaves none."""
    if cluster.is_managed or not cluster.has_coordinator or task.job != "worker":
        return ""
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    num_tasks = len(_neighbours(cluster, task)) if are_divided(cluster) else 1
    if num_gpus <= num_tasks:
        return ""
    return f"{task} uses one of the {num_gpus} GPUs that it sees; start a worker for each"


def check_fraction(fraction: float, num_gpus: int, cluster: Cluster, task: Task, *, divided: bool) -> None:
    """Raises ConfigError if the tasks on this task's GPU would together take more memory than it has."""

    def gpus_of(other: Task) -> list[int]:
        return choose_gpus(num_gpus, cluster, other, divided=divided)

    # What shares a GPU by the user's own choice is not known here.
    neighbours = _neighbours(cluster, task) if divided else [task]
    sharing = [other for other in neighbours if set(gpus_of(other)) & set(gpus_of(task))]
    if fraction * len(sharing) > 1:
        raise ConfigError(
            f"devices.gpu_memory_fraction ({fraction}): {len(sharing)} workers share a GPU, so it must be at most "
            f"{100 // len(sharing) / 100}; or leave it out, and the memory grows as needed"
        )


def names_of(gpus: Sequence[int]) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES of the GPUs with these numbers among those that this process sees."""
    chosen, of_step = _listed(VISIBLE), _listed(SEEN_OF_STEP)
    # Where a cgroup hides the other GPUs, each task's own begin at 0.
    chosen = of_step if len(of_step) == len(chosen) else chosen
    return [chosen[number] if number < len(chosen) else str(number) for number in gpus]


def _listed(variable: str) -> list[str]:
    return [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]


def own_gpus() -> list[str]:
    """The GPUs that this process uses, each by a name that no other GPU of the cluster has."""
    # A container that has a GPU for itself sees it as number 0, and has a host name of its own.
    devices = tf.config.list_physical_devices("GPU")
    numbers = [devices.index(gpu) for gpu in tf.config.get_visible_devices("GPU")]
    return [f"{socket.gethostname()}/{name}" for name in names_of(numbers)]


def shares_a_core(num_workers: int) -> bool:
    """Whether each worker of a host has a single thread to compute with, and no GPU; see `share_cores`."""
    return len(os.sched_getaffinity(0)) < 2 * num_workers and not tf.config.list_physical_devices("GPU")


def execute_calls_in_one_thread() -> None:
    """Makes this task execute what the coordinator calls in one thread.

    TensorFlow takes the number of these threads from the configuration of the coordinator. Where that leaves it open,
    as ours does, it is that of this variable, or else one for each core. TensorFlow hands operations that are ready
    from one thread to another; where tasks share a core, that takes a tenth of the time of a model with hundreds of
    small operations.
    """
    os.environ[CALL_THREADS] = "1"


def share_cores(server_config: tf.compat.v1.ConfigProto, num_cores: int, num_workers: int) -> None:
    """Limits a task to its share of the host's cores, in `server_config` and in this process.

    By default every process has a thread for each core, and idle threads spin while they wait for work: with
    three workers on two cores that took a third of all CPU time.
    """
    # At least 1, since TensorFlow reads 0 as its default.
    num_threads = max(1, num_cores // num_workers)
    server_config.intra_op_parallelism_threads = num_threads
    server_config.experimental.disable_thread_spinning = True
    tf.config.threading.set_intra_op_parallelism_threads(num_threads)
    keep_threads_from_spinning()
