"""What a ps or an asynchronous worker does: serve the coordinator's calls until its farewell.

Such a task runs no Python for a step: TensorFlow's server runs graphs that the coordinator made.
What the coordinator has to tell this process goes through ``ram://``, TensorFlow's in-memory file
system.
"""

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf2dist.cluster import reachability
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.errors import Interrupted, TaskLostError
from tf2dist.process import heartbeat, profiling
from tf2dist.process.strategy import start_server

FAREWELL = "ram://tf2dist/farewell"
POLL_SECS = 0.1
LOOK_EVERY_SECS = 0.5
GONE_SECS = 15.0  # at least, because it takes seconds to find out


def serve(
    cluster: Cluster, task: Task, server_config: Any, run_dir: Path, startup_timeout_secs: float, silence_secs: float
) -> dict[str, Any]:
    """Serves until the coordinator has written its farewell, which is returned.

    Args:
        silence_secs: a coordinator that does not answer for so long is taken for lost.

    Raises:
        TaskLostError: the coordinator did not come in time, is gone, or has failed.
        Interrupted: the run was stopped.
    """
    start_server(cluster, task, server_config)
    profile = profiling.Responder(profiling.folder_of(run_dir, task))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the coordinator saves first, and says when we may go
    chief, seen, gone_secs = cluster.leader, False, max(GONE_SECS, silence_secs)
    last_seen = time.monotonic()
    next_look = last_seen
    while not (farewell := _farewell()):
        time.sleep(POLL_SECS)
        heartbeat.progress()
        profile.poll()
        now = time.monotonic()
        if now < next_look:
            continue
        next_look = now + LOOK_EVERY_SECS
        if not (problem := reachability.why_unreachable(cluster.address(chief))):
            seen, last_seen = True, time.monotonic()
        elif now - last_seen > (gone_secs if seen else startup_timeout_secs):
            what = "is gone" if seen else f"did not come within {startup_timeout_secs:.0f} s"
            raise TaskLostError(f"{chief} at {cluster.address(chief)} {what} ({problem})")
    profile.finish()
    if "failure" in farewell:
        raise TaskLostError(f"{chief} has failed: {farewell['failure']}")
    if farewell["final"] is None:
        raise Interrupted(signal.SIGTERM)
    return farewell


def _farewell() -> dict[str, Any]:
    """The first farewell that the coordinator has written, or {}; in ram:// a second one would be appended to it."""
    try:
        with tf.io.gfile.GFile(FAREWELL) as file:
            return dict(json.JSONDecoder().raw_decode(file.read())[0])
    except (tf.errors.NotFoundError, json.JSONDecodeError):  # not there, or not whole
        return {}


def say_farewell(cluster: Cluster, farewell: dict[str, Any], timeout_secs: float) -> None:
    """On the coordinator: ends `serve` on every task that can still be reached."""
    threads = [
        threading.Thread(target=_write_farewell, args=(task, json.dumps(farewell)), daemon=True)
        for task in cluster.tasks
        if task.job in ("ps", "worker")
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_secs  # or a task that hangs would make us wait for ever
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _write_farewell(task: Task, text: str) -> None:
    with tf.device(f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0"):
        try:
            tf.io.write_file(FAREWELL, text)
            tf.io.read_file(FAREWELL).numpy()  # makes sure: an operation without a result may be on its way
        except tf.errors.OpError as error:
            print(f"no farewell to {task}: {error}", flush=True)
