"""Entry of a task's process: the fork server calls `main` in a fresh child.

Importing this module imports TensorFlow, Keras and everything that a task needs, which is why
the fork server preloads it.
"""

import signal
import sys
from pathlib import Path
from typing import Any

from tf2dist import config, registry
from tf2dist.cluster import Cluster, Task
from tf2dist.errors import FailureRecord
from tf2dist.forkserver import Send
from tf2dist.run import run_task


def main(payload: dict[str, Any], send: Send) -> int:
    """Runs the task that `payload` describes; returns the exit code.

    Args:
        payload: "config" (YAML), "cluster" (mode and jobs), "task" (job and index), "run_dir",
            "started_at".
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's, which stops us with SIGTERM
    cluster = Cluster(payload["mode"], {job: tuple(addresses) for job, addresses in payload["jobs"].items()})
    task, run_dir = Task(*payload["task"]), Path(payload["run_dir"])
    try:
        run_config = config.from_yaml(payload["config"])
        registry.load_plugins(run_config.plugins)
        run_task(run_config, cluster, task, run_dir, send, payload["started_at"])
    except BaseException as error:
        record = FailureRecord.of(str(task), error)
        record.write(run_dir / "logs")
        print(record.details or record.message, file=sys.stderr, flush=True)
        return record.exit_code
    return 0
