"""The texts by which errors about other tasks are told apart, by tasks that are really lost; probes try the others."""

import subprocess
import sys

import pytest

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import TaskLostError
from tf2dist.linux import unused_ports
from tf2dist.process.tf_internals import error_texts
from tf2dist.testing import SyncWorker, SyncWorkers, WorkerError

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
    from tf2dist.process.tf_internals import error_texts
    tf.config.experimental_connect_to_host("localhost:" + sys.argv[1])
    with tf.device("/job:worker/task:0/device:CPU:0"):
        value = tf.Variable(1.0)
        print("connected", flush=True)
        sys.stdin.read()
        try:
            value.assign_add(1.0).numpy()
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            print(error_texts.line_of_loss(str(error)))
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
    assert error_texts.silent_tasks(str(error.value)) == [Task("worker", 1)], error.value


def test_a_data_error_is_found_among_several_errors() -> None:
    """TensorFlow words the error of two workers at once differently from that of one, and one in its own process."""
    expected = "data (load): shard 1 of 2: KeyError: 'no such file'"
    several = "2 root error(s) found.\n  (0) UNKNOWN:   "
    for text in (
        f"UnknownError: DataError: {expected}",
        f"{several}DataError: {expected}\nTraceback (most recent call last):",
        f"{{{{function_node __inference_steps_1}}}} DataError: {expected}",
    ):
        assert error_texts.data_error(text) == expected
    assert error_texts.data_error(f"{several}KeyError: 1") == ""
