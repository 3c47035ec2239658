"""Entry of a task's process: the fork server calls `main` in a fresh child.

Importing this module imports TensorFlow, Keras and everything that a task needs, which is why
the fork server preloads it.
"""

import re
import signal
import traceback
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf2dist import config, registry
from tf2dist.cluster import Cluster, Task
from tf2dist.errors import FailureRecord, TaskLostError, first_line
from tf2dist.forkserver import Send
from tf2dist.run import run_task
from tf2dist.stopping import end_on_sigterm


def main(payload: dict[str, Any], send: Send) -> int:
    """Runs the task that `payload` describes; returns the exit code.

    Args:
        payload: "config" (YAML), "mode" and "jobs" of the cluster, "task" (job and index), "run_dir",
            "started_at".
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's, which stops us with SIGTERM
    end_on_sigterm()
    cluster = Cluster(payload["mode"], {job: tuple(addresses) for job, addresses in payload["jobs"].items()})
    task, run_dir = Task(*payload["task"]), Path(payload["run_dir"])
    try:
        run_config = config.from_yaml(payload["config"])
        registry.load_plugins(run_config.plugins)
        run_task(run_config, cluster, task, run_dir, send, payload["started_at"])
    except BaseException as error:
        traceback.print_exc()  # the log gets everything
        record = FailureRecord.of(str(task), in_our_terms(error))
        record.write(run_dir / "logs")
        return record.exit_code
    return 0


def in_our_terms(error: BaseException) -> BaseException:
    """TensorFlow's ways to say that a peer is gone, as one."""
    lost = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.DeadlineExceededError)
    if lost and re.search(r"/job:|peer|[Ss]ocket|heartbeat", str(error)):
        return TaskLostError(f"lost another task: {first_line(str(error))}")
    return error
