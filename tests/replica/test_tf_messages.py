"""The texts by which TensorFlow's errors are told apart, tested with errors that it really raises."""

import subprocess
import sys

import pytest
import tensorflow as tf

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import TaskLostError
from tf2dist.linux import unused_ports
from tf2dist.process import tf_messages
from tf2dist.process.strategy import start_server
from tf2dist.testing import SyncWorker, SyncWorkers, WorkerError


def test_devices_in_use_are_recognized() -> None:
    tf.constant(0)  # initializes the devices
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    with pytest.raises(RuntimeError) as error:
        tf.config.threading.set_intra_op_parallelism_threads(threads + 1)
    assert tf_messages.devices_are_in_use(str(error.value))
    with pytest.raises(RuntimeError) as error:
        tf.config.set_visible_devices([], "CPU")
    assert tf_messages.devices_are_in_use(str(error.value))


def test_a_failure_of_xla_is_recognized() -> None:
    function = tf.function(lambda x: tf.strings.as_string(x), autograph=False, jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        function(tf.constant(1.0))
    assert tf_messages.is_xla_failure(str(error.value))
    assert tf_messages.xla_reason(str(error.value)).startswith("AsString (No registered")


def test_a_taken_port_is_recognized(sync_workers: SyncWorkers) -> None:
    """Runs in a separate process: the first server in a process sets the number of threads for all its servers."""

    def start_twice(worker: SyncWorker) -> str:
        start_server(worker.cluster, worker.task, tf.compat.v1.ConfigProto())
        with pytest.raises(tf.errors.UnknownError) as error:
            start_server(worker.cluster, worker.task, tf.compat.v1.ConfigProto())
        return str(error.value)

    assert tf_messages.port_is_taken(sync_workers(start_twice, num_workers=1)[0])


SERVER_THAT_DIES = """if True:
    import os, sys
    import tensorflow as tf
    from tf2dist.cluster.spec import Cluster, Task
    from tf2dist.process.strategy import start_server
    cluster = Cluster("async", {"worker": ("localhost:" + sys.argv[1],)})
    start_server(cluster, Task("worker", 0), tf.compat.v1.ConfigProto())
    print("ready", flush=True)
    sys.stdin.read()
"""
ITS_CLIENT = """if True:
    import sys
    import tensorflow as tf
    from tf2dist.process import tf_messages
    tf.config.experimental_connect_to_host("localhost:" + sys.argv[1])
    with tf.device("/job:worker/task:0/device:CPU:0"):
        value = tf.Variable(1.0)
        print("connected", flush=True)
        sys.stdin.read()
        try:
            value.assign_add(1.0).numpy()
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            print(tf_messages.line_of_loss(str(error)))
"""


def test_a_lost_server_is_recognized() -> None:
    (port,) = unused_ports(1)

    def python(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(port)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with python(SERVER_THAT_DIES) as server, python(ITS_CLIENT) as client:
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        assert client.stdout
        assert client.stdout.readline() == "connected\n"
        server.kill()
        server.wait()
        told, _ = client.communicate(timeout=60)
    assert told.strip(), "the message is not recognized as a loss"


def test_a_worker_that_never_joins_is_named(sync_workers: SyncWorkers) -> None:
    def join_alone(worker: SyncWorker) -> str:
        from tf2dist.process.strategy import multi_worker_mirrored_strategy

        (absent,) = unused_ports(1)
        two = Cluster("sync", {"worker": (*worker.cluster.jobs["worker"], f"127.0.0.1:{absent}")})
        with pytest.raises(TaskLostError) as error:
            multi_worker_mirrored_strategy(two, worker.task, timeout_secs=2)
        return f"{error.value}, {absent}"

    (told,) = sync_workers(join_alone, num_workers=1)
    text, _, port = told.rpartition(", ")
    assert text == f"after 2 s still waiting for worker-1 at 127.0.0.1:{port}; see startup_timeout_secs"


def test_a_worker_without_heartbeats_is_named(sync_workers: SyncWorkers) -> None:
    def freeze_one(worker: SyncWorker) -> None:
        import os
        import signal

        from tf2dist.process.strategy import broadcast, multi_worker_mirrored_strategy

        strategy = multi_worker_mirrored_strategy(worker.cluster, worker.task, 60, heartbeat_secs=2)
        if worker.index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        broadcast(strategy, b"something")

    with pytest.raises(WorkerError) as error:
        sync_workers(freeze_one, num_workers=2, timeout_secs=60)
    assert tf_messages.silent_tasks(str(error.value)) == [Task("worker", 1)], error.value


def test_a_data_error_is_found_among_several_errors() -> None:
    """TensorFlow words the error of two workers at once differently from that of one."""
    expected = "data (load): shard 1 of 2: KeyError: 'no such file'"
    several = "2 root error(s) found.\n  (0) UNKNOWN:   "
    for text in (
        f"UnknownError: DataError: {expected}",
        f"{several}DataError: {expected}\nTraceback (most recent call last):",
    ):
        assert tf_messages.data_error(text) == expected
    assert tf_messages.data_error(f"{several}KeyError: 1") == ""
