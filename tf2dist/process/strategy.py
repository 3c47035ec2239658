"""TensorFlow's two strategies and its server, made for a `Cluster`."""

import functools
import itertools
import os
from collections.abc import Collection

import numpy as np
import tensorflow as tf

from tf2dist.cluster import reachability
from tf2dist.cluster.reachability import still_waiting
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import ConfigError, TaskLostError, first_line
from tf2dist.process import heartbeat
from tf2dist.tf_internals.error_texts import late_tasks
from tf2dist.tf_internals.keras import leave_losses_unscaled
from tf2dist.tf_internals.live_tasks import LiveTasks
from tf2dist.tf_internals.tensorflow import exchange, use_coordination_service, wait_at_barrier

LEAVE_TIMEOUT_SECS = 10.0
_calls = itertools.count()


def _resolver(cluster: Cluster, task: Task) -> tf.distribute.cluster_resolver.ClusterResolver:
    spec = tf.train.ClusterSpec(cluster.tf_jobs())
    # Told nothing of GPUs, a synchronous strategy computes on the CPU. Visible ones are counted, since the logical ones
    # are those of all workers as soon as this one has joined.
    accelerators = {"GPU": len(tf.config.get_visible_devices("GPU"))}
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=task.job, task_id=task.index, rpc_layer="grpc", num_accelerators=accelerators
    )


def start_server(cluster: Cluster, task: Task, config: tf.compat.v1.ConfigProto) -> None:
    """Starts the server of a ps or an asynchronous worker; it lasts as long as the process.

    Every call from another task holds a thread of the server while it waits. With the default of one
    thread for each core, a ps with more workers than cores can deadlock silently.
    """
    config.inter_op_parallelism_threads = max(os.cpu_count() or 1, len(cluster.tasks) + 1)
    spec = tf.train.ClusterSpec(cluster.tf_jobs())
    tf.distribute.Server(spec, job_name=task.job, task_index=task.index, protocol="grpc", config=config)


def parameter_server_strategy(cluster: Cluster, task: Task) -> tf.distribute.ParameterServerStrategy:
    """Connects the coordinator to all ps, which must be listening, and to the workers that are; others may follow."""
    live_tasks = LiveTasks(cluster.num_workers, functools.partial(_listening, cluster))
    with live_tasks.connecting():
        strategy = tf.distribute.ParameterServerStrategy(_resolver(cluster, task))
    _make_room_for_copies(3 * len(cluster.tasks))
    live_tasks.follow(tf.distribute.coordinator.ClusterCoordinator(strategy))  # the strategy's only one
    return strategy


def _listening(cluster: Cluster, workers: Collection[int]) -> set[int]:
    """The asynchronous workers of these that listen, by their indices."""
    away = reachability.unreachable(cluster, [Task("worker", index) for index in sorted(workers)])
    return set(workers) - {task.index for task in away}


def _make_room_for_copies(number: int) -> None:
    """Lets the coordinator copy from tasks for the first time in several threads at once.

    For every task, and every type of what is copied from it, TensorFlow makes a function at the first copy, and again
    after a worker came back. It keeps them in a `std::vector` (`function_data_` in
    distributed_runtime/eager/cluster_function_library_runtime.cc) that grows under a lock but is read without one:
    when it moves, a copy that has just begun in another thread reads what is freed, and fails ("Unable to parse
    request") or crashes the coordinator. The vector doubles whenever it is full. One entry more than a power of two,
    made here while nobody copies, leaves room for nearly as many more.
    """

    @tf.function(autograph=False, input_signature=[])
    def no_op() -> None:
        with tf.device("/job:ps/task:0/device:CPU:0"):
            tf.no_op()

    concrete = no_op.get_concrete_function()
    for version in range((1 << number.bit_length()) + 1):
        config = tf.compat.v1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True  # it takes most of the time
        config.experimental.session_metadata.version = version  # another version makes it another function
        tf.raw_ops.PartitionedCall(args=[], Tout=[], f=concrete, config_proto=config.SerializeToString())


def multi_worker_mirrored_strategy(
    cluster: Cluster, task: Task, timeout_secs: float, heartbeat_secs: float = 30.0
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Joins the other workers.

    Args:
        heartbeat_secs: a worker without a sign of life for this long is lost to the others; a link that
            was cut and recovers earlier does no harm. TensorFlow's default is 10 s. It must be longer than the
            launchers' limit for silence, or the survivors fail before the launcher knows which task was lost.
    """
    leader = cluster.leader
    num_tasks = {job: len(addresses) for job, addresses in cluster.tf_jobs().items()}
    # Before the strategy is made, which would otherwise start the service with its defaults: the first worker would
    # wait an hour for the others.
    use_coordination_service(
        f"/job:{leader.job}/replica:0/task:{leader.index}", num_tasks, timeout_secs, heartbeat_secs
    )
    try:
        with heartbeat.announce_silence(timeout_secs):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(_resolver(cluster, task))
    except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError) as error:
        # Only the leader's error names the missing tasks; the other workers see only that the leader does not answer.
        names = ", ".join(f"{other} at {cluster.address(other)}" for other in late_tasks(str(error)) or [leader])
        raise TaskLostError(still_waiting(timeout_secs, names)) from error
    _check_equal_gpus(cluster, task, timeout_secs)
    # Otherwise the workers run a collective in every step to find out whether any input has ended, which never happens.
    strategy.extended.experimental_enable_get_next_as_optional = False
    leave_losses_unscaled()  # the shares of the replicas weight them
    return strategy


def _check_equal_gpus(cluster: Cluster, task: Task, timeout_secs: float) -> None:
    """Compares the numbers of GPUs before the first collective, which would hang or fail if they differ."""
    counts = from_all("gpus", str(len(tf.config.get_visible_devices("GPU"))), cluster, task, timeout_secs)
    if len(set(counts)) == 1:
        return
    barrier("gpus are compared", timeout_secs)  # a worker that ended earlier would look lost to the others
    if task == cluster.leader:  # the others read from the service that it hosts
        workers = [other for other in cluster.training_tasks if other != task]
        reachability.wait_until_gone(cluster, workers, LEAVE_TIMEOUT_SECS)
    listed = ", ".join(f"{other} has {count}" for other, count in zip(cluster.training_tasks, counts, strict=True))
    raise ConfigError(
        f"devices (GPUs): {listed}; synchronous workers need equally many: choose them by CUDA_VISIBLE_DEVICES on each "
        "host, which hides all if it is empty"
    )


def from_all(name: str, text: str, cluster: Cluster, task: Task, timeout_secs: float) -> list[str]:
    """The texts of all synchronous workers in order, each of which passes its own; no collective is needed."""
    # The service takes each name once. All workers count alike, since all of them call this in the same order.
    name, names = f"{next(_calls)}-{name}", [str(other) for other in cluster.training_tasks]
    with heartbeat.announce_silence(timeout_secs):
        return exchange(name, text, str(task), names, timeout_secs)


def broadcast(strategy: tf.distribute.MultiWorkerMirroredStrategy, packed: bytes) -> bytes:
    """Sends the leader's bytes to every synchronous worker; all of them must call it.

    The strategy initializes a variable with the first worker's value on all workers. The bytes travel
    as float32, which every device and transport can send; nothing computes with them.
    """

    def of_leader(value: np.ndarray) -> np.ndarray:
        with strategy.scope():
            array: np.ndarray = tf.Variable(value, trainable=False).numpy()
        return array

    # The size first: the variable must have the same shape on all workers, and only the leader knows it.
    size = int(of_leader(np.array(len(packed), np.int64)))
    # Padded to a multiple of four bytes, the size of a float32. A worker's own bytes matter for their length alone.
    padded = packed[:size].ljust(-(-size // 4) * 4, b"\0")
    return of_leader(np.frombuffer(padded, np.float32)).tobytes()[:size] if size else b""


def sum_over_workers(
    strategy: tf.distribute.MultiWorkerMirroredStrategy, num_workers: int, values: tf.Tensor
) -> tf.Tensor:
    """The sum over all synchronous workers of each worker's `values`."""
    # A worker with several GPUs has as many replicas, all with the same values; only its first one contributes.
    replicas_per_worker = strategy.num_replicas_in_sync // num_workers

    def of_first_replica(tensor: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.where(tf.cast(replica, tf.int32) % replicas_per_worker == 0, tensor, tf.zeros_like(tensor))

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(of_first_replica, (values,)), None)


def barrier(name: str, timeout_secs: float) -> None:
    """Waits until every synchronous worker has come to the barrier of this name. Raises TaskLostError."""
    try:
        # The call holds Python's lock until all have come.
        with heartbeat.announce_silence(timeout_secs):
            wait_at_barrier(name, timeout_secs)
    except (tf.errors.InternalError, tf.errors.FailedPreconditionError) as error:
        # Of a job that was suspended and goes on: TensorFlow has missed its heartbeats, this worker's own among them.
        raise TaskLostError(f"lost touch with the other workers: {first_line(str(error))}") from error
