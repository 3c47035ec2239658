"""The leader's report: progress to the launcher, numbers to the writers, the result to summary.json."""

import json
import os
import platform
import time
from pathlib import Path

import keras
import tensorflow as tf

from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.evaluate import Evaluation
from tf2dist.forkserver import Send
from tf2dist.loop import Loop, Progress
from tf2dist.metrics import JsonlWriter, TensorBoardWriter, Writers

WRITE_EVERY_SECS = 1.0
SEND_EVERY_SECS = 0.1


class Reporter:
    """Follows one run.

    Args:
        started_at: `time.time()` of the user's command, from which start-up is counted.
    """

    def __init__(self, run_dir: Path, task: Task, send: Send, started_at: float) -> None:
        self._run_dir, self._send, self._started_at = run_dir, send, started_at
        self._writers = Writers(
            JsonlWriter(run_dir / "metrics.jsonl", str(task)), TensorBoardWriter(run_dir / "tensorboard")
        )
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)
        self._written_at = self._sent_at = 0.0
        self._written_step = 0
        self.target_step = 0

    def on_progress(self, progress: Progress) -> None:
        """Takes a look at the run as often as the loop likes."""
        now = time.time()
        self._first = self._first or (now, progress.global_step)
        self._last = (now, progress.global_step)
        if now - self._sent_at >= SEND_EVERY_SECS or progress.global_step >= self.target_step:
            self._sent_at = now
            scalars = {"step": progress.global_step, "loss": progress.loss, "accuracy": progress.accuracy}
            self._send({"event": "progress", "target_step": self.target_step, **scalars})
        if now - self._written_at >= WRITE_EVERY_SECS or progress.global_step >= self.target_step:
            rate = (progress.global_step - self._written_step) / (now - (self._written_at or self._started_at))
            self._written_at, self._written_step = now, progress.global_step
            scalars = {"loss": progress.loss, "accuracy": progress.accuracy, "steps_per_sec": rate}
            self._writers.write(progress.global_step, scalars)

    def on_evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        self._writers.write(step, {f"{split}_accuracy": evaluation.accuracy, f"{split}_loss": evaluation.loss})

    def steps_per_sec(self) -> float:
        """The rate between the first and the last look, without start-up, tracing and evaluation at the end."""
        if self._first is None or self._last[0] <= self._first[0]:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    def finish(
        self, config: RunConfig, cluster: Cluster, loop: Loop, validation: Evaluation | None, test: Evaluation
    ) -> None:
        """Writes summary.json, whole or not at all, and sends it to the launcher."""
        progress, rate = loop.progress, self.steps_per_sec()
        summary = {
            "mode": config.mode,
            "model": config.model["name"],
            "optimizer": config.optimizer["name"],
            "data": config.data.name,
            "seed": config.seed,
            "cluster": {"worker": cluster.num_workers, "ps": cluster.num_ps},
            "target_step": self.target_step,
            "global_step": progress.global_step,
            "updates_applied": loop.updates_applied(),
            "examples_seen": progress.examples,
            "epochs": round(progress.examples / loop.sharding.num_examples, 4),
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "test_examples": test.num_examples,
            "validation_accuracy": validation.accuracy if validation else None,
            "steps_per_sec": round(rate, 2),
            "examples_per_sec": round(rate * progress.examples / max(1, progress.global_step), 1),
            "startup_secs": round((self._first[0] if self._first else time.time()) - self._started_at, 3),
            "wall_secs": round(time.time() - self._started_at, 3),
            "workers": [{"index": i, "local_steps": steps} for i, steps in enumerate(progress.local_steps)],
            "restarts": 0,
            **loop.facts(),
            "versions": {
                "python": platform.python_version(),
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            },
        }
        part = self._run_dir / "summary.json.part"
        part.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        os.replace(part, self._run_dir / "summary.json")
        self._writers.close()
        self._send({"event": "result", "summary": summary})
