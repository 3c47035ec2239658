"""A ps's or an asynchronous worker's life: serve what the coordinator sends until it says done.

Such a task runs no Python for a step: TensorFlow's server runs graphs that the coordinator made.
What those graphs need from this process, and what the coordinator has to tell it, goes through
``ram://``, TensorFlow's in-memory file system: it belongs to the process, so every worker reads
the arrays that it has loaded itself, wherever they lie on its host.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf2dist.cluster import Cluster, Task
from tf2dist.data import Arrays, Splits
from tf2dist.strategy import start_server

RAM = "ram://tf2dist"
POLL_SECS = 0.1


def publish(splits: Splits) -> None:
    """Makes the arrays of this process readable for the graphs that run in it."""
    parts: dict[str, Arrays] = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    for name, arrays in parts.items():
        for field, array in (("images", arrays.images), ("labels", arrays.labels)):
            with tf.io.gfile.GFile(f"{RAM}/{name}/{field}", "wb") as file:
                file.write(array.tobytes())


def remote_array(split: str, field: str, shape: tuple[int, ...]) -> tf.Tensor:
    """In a graph: the published uint8 array, `shape` without the first dimension."""
    flat = tf.io.decode_raw(tf.io.read_file(f"{RAM}/{split}/{field}"), tf.uint8)
    return tf.reshape(flat, [-1, *shape])


def serve(cluster: Cluster, task: Task, server_config: Any, tell: Callable[[str], None]) -> dict[str, Any]:
    """Serves until the coordinator has written its farewell, which is returned."""
    start_server(cluster, task, server_config)
    tell(f"{task} serves at {cluster.address(task)}")
    while not (farewell := _farewell()):
        time.sleep(POLL_SECS)
    return farewell


def _farewell() -> dict[str, Any]:
    """What the coordinator has written, or nothing yet."""
    try:
        with tf.io.gfile.GFile(f"{RAM}/done") as file:
            return dict(json.loads(file.read()))
    except (tf.errors.NotFoundError, json.JSONDecodeError):  # not there, or not whole
        return {}


def say_done(tasks: list[Task], farewell: dict[str, Any]) -> None:
    """On the coordinator: ends `serve` on every task."""
    text = json.dumps(farewell)
    for task in tasks:
        with tf.device(f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0"):
            tf.io.write_file(f"{RAM}/done", text)
