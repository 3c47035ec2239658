"""Entry of a task's process: the fork server calls `main` in a fresh child.

Importing this module imports TensorFlow, Keras and everything that a task needs, which is why
the fork server preloads it.
"""

import contextlib
import io
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf2dist import config, pulse, registry
from tf2dist.cluster import Cluster, Task
from tf2dist.errors import FailureRecord, TaskLostError, TrainingError, first_line
from tf2dist.forkserver import Send
from tf2dist.run import run_task
from tf2dist.stopping import end_on_sigterm

SIGNS_OF_LOSS = re.compile(r"/job:|peer|[Ss]ocket|[Hh]eartbeat|Stream ID")


class LossyLog(io.TextIOWrapper):
    """A task's output: on a full disk it loses lines, and the training goes on."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def main(payload: dict[str, Any], send: Send) -> int:
    """Runs the task that `payload` describes; returns the exit code.

    Args:
        payload: "config" (YAML), "mode" and "jobs" of the cluster, "task" (job and index), "run_dir",
            "started_at".
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's, which stops us with SIGTERM
    end_on_sigterm()
    sys.stdout, sys.stderr = (LossyLog(stream.buffer) for stream in (sys.stdout, sys.stderr))
    cluster = Cluster(payload["mode"], {job: tuple(addresses) for job, addresses in payload["jobs"].items()})
    task, run_dir = Task(*payload["task"]), Path(payload["run_dir"])
    try:
        run_config = config.from_yaml(payload["config"])
        pulse.start(send, run_config.watchdog_secs)
        registry.load_plugins(run_config.plugins)
        run_task(run_config, cluster, task, run_dir, send, payload["started_at"])
    except BaseException as error:
        traceback.print_exc()  # the log gets everything
        record = FailureRecord.of(str(task), in_our_terms(error))
        with contextlib.suppress(OSError):  # a full disk; the launcher sees the exit code
            record.write(run_dir / "logs")
        return record.exit_code
    return 0


def in_our_terms(error: BaseException) -> BaseException:
    """TensorFlow's ways to say that a peer is gone, or the memory, as one."""
    error = getattr(error, "original_exception", error)  # of what the coordinator has made on a worker
    if isinstance(error, tf.errors.ResourceExhaustedError | MemoryError):
        return TrainingError(f"out of memory; try a smaller train.batch_size_per_worker ({first_line(str(error))})")
    if "Could not start gRPC server" in str(error):
        return TaskLostError("could not open its port; another program may have taken it in this moment")
    lost = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.DeadlineExceededError)
    if lost and SIGNS_OF_LOSS.search(str(error)):
        return TaskLostError(_loss(str(error)))
    return error


def _loss(text: str) -> str:
    """The one line of TensorFlow's many that tells who is lost, or at least how."""
    silent = text.partition("stopped sending heartbeats")[2].partition("The tasks have crashed")[0]
    if names := dict.fromkeys(re.findall(r"/job:(\w+)/replica:0/task:(\d+)", silent)):
        return f"lost {', '.join(f'{job}-{index}' for job, index in names)}: sent no heartbeats"
    line = next(line for line in text.splitlines() if SIGNS_OF_LOSS.search(line))
    return f"lost another task: {line.strip()}"
