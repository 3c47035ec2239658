"""A coordinator sends the shutdown message to servers in processes of their own, while its operations on one fail.

It comes to them later than the time for which tasks wait for one another once they have started.

Prints the exit code of each server as JSON: a server that gets none does not end, and is killed.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import tensorflow as tf

from tf2dist.cluster import reachability
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.process.strategy import parameter_server_strategy
from tf2dist.training.parameter_server import serving

LIMIT_SECS = 60.0
LOST = Task("worker", 1)


def main(ports: list[str]) -> None:
    first, ps, *workers = (f"127.0.0.1:{port}" for port in ports)
    cluster = Cluster("async", {"chief": (first,), "ps": (ps,), "worker": tuple(workers)})
    servers = [task for task in cluster.tasks if task.job != "chief"]
    pids = {task: started(cluster, task) for task in servers}
    reachability.wait_for_peers(cluster, servers, LIMIT_SECS, 0.0, print)
    time.sleep(2 * serving.LOOK_EVERY_SECS)
    parameter_server_strategy(cluster, cluster.leader)
    os.kill(pids[LOST], signal.SIGKILL)
    reachability.wait_until_gone(cluster, [LOST], LIMIT_SECS)
    for _ in range(4):
        threading.Thread(target=fail_without_end, daemon=True).start()
    serving.send_shutdown(cluster, {"final": "accuracy=1.0000"}, LIMIT_SECS)
    print(json.dumps({str(task): end_of(pid) for task, pid in pids.items()}), flush=True)
    os._exit(0)  # at once: TensorFlow waits for the servers, which are gone


def started(cluster: Cluster, task: Task) -> int:
    """Forks a server, as long as TensorFlow has no threads here."""
    if pid := os.fork():
        return pid
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    serving.serve(cluster, task, tf.compat.v1.ConfigProto(), Path(), startup_timeout_secs=0.0, silence_secs=LIMIT_SECS)
    os._exit(0)


def fail_without_end() -> None:
    while True:
        try:
            with tf.device(f"/job:{LOST.job}/replica:0/task:{LOST.index}/device:CPU:0"):
                tf.io.read_file(serving.SHUTDOWN_FILE).numpy()
        except tf.errors.OpError:
            pass


def end_of(pid: int) -> int:
    """The exit code of a process; that of a signal is negative."""
    deadline = time.monotonic() + serving.GONE_SECS / 2
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)  # the interval between two checks
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


if __name__ == "__main__":
    main(sys.argv[1:])
