"""Serving on a ps or an asynchronous worker: the coordinator's calls until its shutdown message.

Such a task runs no Python for a step: TensorFlow's server executes graphs that the coordinator has made. The
coordinator sends its shutdown message through ``ram://``, TensorFlow's in-memory file system, which needs no port and
no disk.
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
from tf2dist.errors import Interrupted, LeaderLostError
from tf2dist.process import heartbeat, profiling
from tf2dist.process.strategy import start_server

SHUTDOWN_FILE = "ram://tf2dist/shutdown"
POLL_SECS = 0.1
LOOK_EVERY_SECS = 0.5
GONE_SECS = 15.0  # the least time without an answer after which the coordinator is taken for lost


def serve(
    cluster: Cluster, task: Task, server_config: Any, run_dir: Path, startup_timeout_secs: float, silence_secs: float
) -> dict[str, Any]:
    """Serves until the coordinator has written its shutdown message, which is returned.

    Args:
        startup_timeout_secs: how long the coordinator may take to come, beyond the starts of it and of a worker.
        silence_secs: a coordinator that does not answer for so long is taken for lost.
    """
    start_server(cluster, task, server_config)
    profile = profiling.Responder(profiling.folder_of(run_dir, task))
    # A stop reaches all tasks at once, but the coordinator needs the servers to save; its shutdown message ends them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    chief, seen, gone_secs = cluster.leader, False, max(GONE_SECS, silence_secs)
    # It opens its port only after it has loaded the data and checked its checkpoint, and after all workers have loaded
    # theirs. If it fails before that, the launcher ends this task.
    limit_secs = startup_timeout_secs + 2 * heartbeat.START_SECS
    last_seen = time.monotonic()
    next_look = last_seen
    while not (message := _shutdown_message()):
        time.sleep(POLL_SECS)
        heartbeat.progress()
        profile.poll()
        now = time.monotonic()
        # A look opens a connection, so it is taken less often than the shutdown message is read.
        if now < next_look:
            continue
        next_look = now + LOOK_EVERY_SECS
        if not (problem := reachability.why_unreachable(cluster.address(chief))):
            seen, limit_secs, last_seen = True, gone_secs, time.monotonic()
        elif now - last_seen > limit_secs:
            what = "is gone" if seen else f"did not come within {limit_secs:.0f} s"
            raise LeaderLostError(f"{chief} at {cluster.address(chief)} {what} ({problem})")
    profile.finish()
    if "failure" in message:
        raise LeaderLostError(f"{chief} has failed: {message['failure']}")
    if message["final"] is None:  # the run was stopped and saved, so all tasks end with the code of a signal
        raise Interrupted(signal.SIGTERM)
    return message


def _shutdown_message() -> dict[str, Any]:
    """The first shutdown message that the coordinator has written; {} if there is none yet."""
    try:
        with tf.io.gfile.GFile(SHUTDOWN_FILE) as file:
            # `raw_decode` reads one value only: in ram:// a second shutdown message is appended to the first.
            return dict(json.JSONDecoder().raw_decode(file.read())[0])
    except (tf.errors.NotFoundError, json.JSONDecodeError):  # it is not there, or not whole yet
        return {}


def send_shutdown(cluster: Cluster, message: dict[str, Any], timeout_secs: float) -> None:
    """On the coordinator: ends `serve` on every task that can still be reached."""
    # One deadline for all of them, or the time would grow with the number of tasks that hang.
    deadline = time.monotonic() + timeout_secs
    # A thread for each, since an operation on a task that is cut off does not return.
    threads = [
        threading.Thread(target=_write_shutdown, args=(cluster, task, json.dumps(message), deadline), daemon=True)
        for task in cluster.tasks
        if task.job in ("ps", "worker")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _write_shutdown(cluster: Cluster, task: Task, text: str, deadline: float) -> None:
    """Writes the shutdown message until it is there, until the task does not listen any more, or until the deadline."""
    while True:
        try:
            with tf.device(f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0"):
                tf.io.write_file(SHUTDOWN_FILE, text)
                # An operation without a result may return before it has run; reading the file waits until it is there.
                tf.io.read_file(SHUTDOWN_FILE).numpy()
            return
        except tf.errors.OpError as error:
            # A task that has its message may end before it is read back. TensorFlow raises that error in any of these
            # threads, as they share its executor, so it says nothing about this task.
            if reachability.why_unreachable(cluster.address(task)):
                return
            if time.monotonic() > deadline:
                print(f"no shutdown message to {task}: {error}", flush=True)
                return
            time.sleep(POLL_SECS)  # a worker that has just come is not known to TensorFlow yet
