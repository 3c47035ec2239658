"""Entry of a task's process: the fork server calls `main` in a fresh child.

Importing this module imports TensorFlow, Keras and everything that a task needs, which is why
the fork server preloads it.
"""

import contextlib
import io
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config import decode, schema
from tf2dist.errors import ConfigError, DataError, FailureRecord, TaskLostError, TrainingError, first_line
from tf2dist.files import write_whole
from tf2dist.fitting.ranges import predict_ranges
from tf2dist.fitting.shipping import ShippedSource
from tf2dist.messages import Done, ToLauncher
from tf2dist.model.source import RegisteredSource, Source
from tf2dist.process import heartbeat, inbox
from tf2dist.process.inbox import end_on_sigterm
from tf2dist.run import run_task
from tf2dist.tf_internals import error_texts
from tf2dist.training import stragglers
from tf2dist.training.hooks import Hooks
from tf2dist.training.setup import TaskContext


class LossyLog(io.TextIOWrapper):
    """A task's output: on a full disk it loses lines, and the training goes on."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def main(payload: dict[str, Any], to_launcher: ToLauncher) -> int:
    """Runs the task that `payload` describes; returns the exit code.

    Args:
        payload: "config" (its tree), "cluster" (its fields), "task" (job and index), "run_dir",
            "started_at", "job" (the folder of a call of `fit`, or None).
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is for the launcher, which stops us with SIGTERM
    end_on_sigterm()
    sys.stdout, sys.stderr = (LossyLog(stream.buffer, errors="backslashreplace") for stream in (sys.stdout, sys.stderr))
    jobs = {job: tuple(addresses) for job, addresses in payload["cluster"]["jobs"].items()}
    cluster = Cluster(**payload["cluster"] | {"jobs": jobs})
    task, run_dir = Task(*payload["task"]), Path(payload["run_dir"])
    try:
        run_config = decode.to_dataclass(schema.RunConfig, payload["config"])
        heartbeat.start(to_launcher, run_config.watchdog_secs, stragglers.longest_secs(run_config))
        set_up_keras(run_config.keras)
        mail = inbox.listen(cluster)
        source: Source = RegisteredSource(run_config)
        hooks: Hooks | None = None
        if payload["job"]:
            job = Path(payload["job"])
            source = ShippedSource(job)
            hooks = Hooks(to_launcher, mail, job, source.calls_with_weights, source.reads_progress)
        predicts = isinstance(source, ShippedSource) and not source.plan
        started_at, run = payload["started_at"], predict_ranges if predicts else run_task
        run(TaskContext(run_config, cluster, task, source, run_dir, to_launcher, started_at, hooks))
    except BaseException as error:
        traceback.print_exc()  # the log gets everything
        record = FailureRecord.of(str(task), as_own_error(error))
        with contextlib.suppress(OSError):  # on a full disk; the launcher still sees the exit code
            write_whole(record.path(run_dir / "logs", record.task), record.as_json())
        return record.exit_code
    to_launcher.send(Done())  # exit code 0 without this message: other code has ended the process
    return 0


def set_up_keras(settings: schema.KerasConfig) -> None:
    """Gives Keras the settings of the configuration; on its import it has read this host's keras.json instead."""
    if settings.floatx:
        keras.config.set_floatx(settings.floatx)
        keras.config.set_dtype_policy(settings.floatx)
    if settings.image_data_format:
        keras.config.set_image_data_format(settings.image_data_format)
    if settings.epsilon:
        keras.config.set_epsilon(settings.epsilon)


def as_own_error(error: BaseException) -> BaseException:
    """TensorFlow's error as one of ours, if it is known: a lost task, no memory, a layer that XLA cannot compile."""
    error = getattr(error, "original_exception", error)  # the coordinator wraps what a worker has raised
    text = str(error)
    if isinstance(error, tf.errors.ResourceExhaustedError | MemoryError):
        return TrainingError(f"out of memory; try a smaller train.batch_size_per_worker ({first_line(text)})")
    if error_texts.devices_are_in_use(text):
        return ConfigError(
            f"plugins: TensorFlow has its devices before they are loaded ({first_line(text)}); leave that out of "
            "the plugin, and use the options devices.*"
        )
    if error_texts.is_xla_failure(text):
        reason = error_texts.xla_reason(text)
        return ConfigError(f"devices.xla (true): XLA cannot compile the model: {reason}; leave it out")
    if error_texts.port_is_taken(text):
        return TaskLostError("could not open its port; another program may have taken it in this moment")
    if line := error_texts.data_error(text):
        return DataError(line)
    lost = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.DeadlineExceededError)
    if lost and (silent := error_texts.silent_tasks(text)):
        return TaskLostError(f"lost {', '.join(map(str, silent))}: sent no heartbeats")
    if lost and (line := error_texts.line_of_loss(text)):
        return TaskLostError(f"lost another task: {line}")
    return error
