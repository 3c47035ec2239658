"""Which devices a task may use: local workers get the host's GPUs round robin, and share its cores."""

import os
import subprocess
from typing import Any

import tensorflow as tf

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import DevicesConfig
from tf2dist.errors import ConfigError
from tf2dist.process.tf_internals import keep_threads_from_spinning, optimize_graphs_for_cpus

Gpu = Any  # tf.config.PhysicalDevice; choosing needs nothing of it, so a test may pass any object


def choose_gpus(gpus: list[Gpu], cluster: Cluster, task: Task, *, share_host: bool) -> list[Gpu]:
    """The GPUs of this task.

    Args:
        gpus: all GPUs of the host.
        share_host: whether all workers of the cluster are on this host (a local cluster); then
            each gets one, round robin. A worker that has the host for itself gets all.
    """
    # The coordinator and a ps compute no gradients. TensorFlow in such a process would still reserve GPU memory.
    if task not in cluster.training_tasks or not gpus:
        return []
    if not share_host:
        return gpus
    return [gpus[cluster.training_tasks.index(task) % len(gpus)]]


def configure(config: DevicesConfig, cluster: Cluster, task: Task, *, share_host: bool) -> tf.compat.v1.ConfigProto:
    """Applies the choice to this process. Must be called before TensorFlow initializes its devices.

    Args:
        share_host: whether all tasks of the cluster are on this host.

    Returns:
        The same choice for `tf.distribute.Server`, which ignores `tf.config`.

    Raises:
        ConfigError: a fixed share was asked of a GPU whose memory size cannot be read.
    """
    gpus = tf.config.list_physical_devices("GPU")
    mine = choose_gpus(gpus, cluster, task, share_host=share_host)
    tf.config.set_visible_devices(mine, "GPU")
    for gpu in mine:
        # By default TensorFlow reserves nearly all memory of a GPU at once, so a second worker would find none.
        if config.gpu_memory_fraction is None:
            tf.config.experimental.set_memory_growth(gpu, True)
        else:
            # TensorFlow takes a limit in MB only, while the option is a share.
            limit = int(config.gpu_memory_fraction * gpu_memory_mb(gpus.index(gpu)))
            tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=limit)])
    options = tf.compat.v1.GPUOptions(
        visible_device_list=",".join(str(gpus.index(gpu)) for gpu in mine),
        allow_growth=config.gpu_memory_fraction is None,
        per_process_gpu_memory_fraction=config.gpu_memory_fraction or 0.0,
    )
    # An empty list of visible devices means all of them, so a task without GPUs gets a device count of 0.
    server_config = tf.compat.v1.ConfigProto(gpu_options=options, device_count={} if mine else {"GPU": 0})
    # The coordinator of many hosts does not know the devices of the workers, for which it makes the graphs.
    if not gpus and (share_host or cluster.mode == "sync"):
        optimize_graphs_for_cpus()
    # On a host of its own a task keeps TensorFlow's defaults. The affinity counts the cores that this process may use
    # in a container or under a scheduler, which can be fewer than the machine has.
    if share_host:
        if task.job == "ps":
            # One for each worker, beside those that compute: it waits there for the next push; see `exchanges`.
            execute_calls_in_threads(len(os.sched_getaffinity(0)) + cluster.num_workers)
        elif cluster.has_coordinator and task in cluster.training_tasks and shares_a_core(cluster.num_workers):
            execute_calls_in_threads(1)
        share_cores(server_config, len(os.sched_getaffinity(0)), cluster.num_workers)
    return server_config


def shares_a_core(num_workers: int) -> bool:
    """Whether each worker of a host has a single thread to compute with, and no GPU; see `share_cores`."""
    return len(os.sched_getaffinity(0)) < 2 * num_workers and not tf.config.list_physical_devices("GPU")


def execute_calls_in_threads(num_threads: int) -> None:
    """How many threads of this task execute what the coordinator calls.

    TensorFlow takes their number from the configuration of the coordinator. Where that leaves it open, as ours does, it
    is that of this variable, or else one for each core. TensorFlow hands operations that are ready from one thread to
    another; where tasks share a core, that takes a tenth of the time of a model with hundreds of small operations.
    """
    os.environ["TF_NUM_INTEROP_THREADS"] = str(num_threads)


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


def gpu_memory_mb(index: int) -> int:
    """The size of a GPU's memory in MB, as nvidia-smi reports it.

    Args:
        index: among the GPUs that this process sees.

    Raises:
        ConfigError: nvidia-smi does not report it.
    """
    # TensorFlow tells the size of a GPU only after it has initialized it, which is too late to set a limit.
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    # CUDA renumbers the GPUs in this list from 0; nvidia-smi ignores the variable and lists all GPUs of the host.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        which = visible.split(",")[index].strip() if visible else str(index)
        command.append(f"--id={which}")
        return int(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise ConfigError(
            f"devices.gpu_memory_fraction: nvidia-smi does not report the memory of GPU {index}; leave the option out "
            "to let the memory grow as needed"
        ) from None
