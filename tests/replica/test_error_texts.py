"""The texts by which errors about other tasks are told apart, by tasks that are really lost; probes try the others."""

import re
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import FailureRecord, TaskLostError
from tf2dist.linux import unused_ports
from tf2dist.testing import SyncWorker, SyncWorkers, WorkerError
from tf2dist.tf_internals import error_texts

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
    from tf2dist.tf_internals import error_texts
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


@pytest.mark.thorough
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


def refuse(values: Any) -> Any:
    raise ValueError("bad values")


def checked(values: Any) -> Any:
    tf.debugging.assert_less(values, 9)
    return values


IN_LAYERS: dict[str, Any] = {
    "division": lambda x: x // (x - 12),
    "shapes": lambda x: x + tf.boolean_mask(x, tf.reduce_max(x, 1) < 9),
    "function": lambda x: tf.ensure_shape(tf.numpy_function(refuse, [x], tf.int32), x.shape),
    "assertion": checked,
}
LINES = {kind: function.__code__.co_firstlineno for kind, function in IN_LAYERS.items()}
LINES |= {"function": refuse.__code__.co_firstlineno + 1, "assertion": checked.__code__.co_firstlineno + 1}


@pytest.mark.parametrize(
    ("kind", "worst", "reason"),
    [
        ("embedding", 12, r"id 12 is not in \[0, 10\), in the layer outer/items"),
        ("embedding", -11, r"id -11 is not in \[0, 10\), in the layer outer/items"),
        ("division", 12, "Integer division by zero, in the layer outer/mine_1"),
        ("shapes", 12, r"Incompatible shapes: \[4,2\] vs. \[3,2\], in the layer outer/mine_1"),
        ("function", 12, "ValueError: bad values, in the layer outer/mine_1"),
        ("assertion", 12, "assertion failed: .*, in the layer outer/mine_1"),
        ("labels", 0, "Received a label value of 10 which .* range of .*, in the loss sparse_categorical_crossentropy"),
    ],
)
def test_an_error_of_a_graph_names_the_layer_and_the_place(kind: str, worst: int, reason: str) -> None:
    x = np.full([4, 2], 3, np.int32)
    x[2, 1] = worst
    of_kind = keras.layers.Embedding(10, 3, name="items")
    if kind in IN_LAYERS:
        of_kind = keras.layers.Lambda(IN_LAYERS[kind], output_shape=(2,), name="mine_1")
    layers = [of_kind, keras.layers.Rescaling(1.0), keras.layers.Flatten(), keras.layers.Dense(5)]
    model = keras.Sequential([keras.Input([2], dtype="int32"), *layers], name="outer")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        model.fit(x, np.array([1, 10 if kind == "labels" else 0, 1, 1]), verbose=0)
    message = FailureRecord.of("worker-0", error.value).message
    # Without code of its own in the model, the last place is where this test calls it; a task has no such place.
    expected = rf"InvalidArgumentError: {reason} \({__file__}:{LINES.get(kind, '[0-9]+')}\)"
    assert re.fullmatch(expected, message), message
