"""The asynchronous twin, from the coordinator: workers at their own pace, an exact end.

The coordinator keeps a few calls in flight for each worker and watches the counters on the
parameter servers, which alone know what has been applied: a call that is repeated because its
worker died, or that runs past the end, is refused there update by update.
"""

import math
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist import data
from tf2dist.async_step import AsyncStep
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.errors import NotFiniteError
from tf2dist.evaluate import Evaluation, chunks
from tf2dist.loop import Progress, Report, target_step
from tf2dist.models import build_model
from tf2dist.parameter_server import MAX_STALENESS, TOTALS
from tf2dist.serving import say_farewell
from tf2dist.strategy import parameter_server_strategy

STEPS_PER_EXECUTION = 50
POLL_SECS = 0.05
FAREWELL_TIMEOUT_SECS = 5.0


class AsyncLoop:
    """Runs on the coordinator; see `loop.Loop`."""

    def __init__(self, config: RunConfig, cluster: Cluster, task: Task, splits: data.Splits, report: Report) -> None:
        self._cluster, self._report = cluster, report
        self._sizes = {"test": len(splits.test), "validation": len(splits.validation)}
        num_workers, batch_size = cluster.num_workers, config.train.batch_size_per_worker
        self.sharding = data.Sharding(len(splits.train), batch_size, num_workers, config.seed, whole_batch_loss=False)
        self.target_step = target_step(config, self.updates_per_epoch)
        self._num_steps = config.train.steps_per_execution or STEPS_PER_EXECUTION
        self._strategy = parameter_server_strategy(cluster, task)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        with self._strategy.scope():  # puts the variables on the ps, round robin
            self.model = build_model(config.model, splits.image_shape, splits.num_classes, config.seed)
        self._graphs = AsyncStep(
            config, self.model, splits.image_shape, self.sharding, self._num_steps, self.target_step
        )
        self._iterator = iter(self._coordinator.create_per_worker_dataset(self._graphs.dataset))
        self._train_function = self._graphs.train_function()
        self._evaluate_functions: dict[str, Any] = {}
        self.progress = Progress(0, (0,) * num_workers, 0, math.nan, math.nan)
        self._reported, self._read_at, self._steps_per_sec = np.zeros(len(TOTALS)), time.monotonic(), 0.0

    @property
    def updates_per_epoch(self) -> int:
        return self.sharding.updates_per_epoch

    def train(self, until_step: int) -> None:
        """Applies exactly `until_step` updates in all, then waits for the calls in flight."""
        limit = tf.constant(until_step, tf.int64)
        scheduled = first_admitted = 0
        while True:
            idle = self._coordinator.done()  # raises what a worker has raised
            admitted = self._read()
            missing = until_step - self.progress.global_step
            if missing <= 0:
                break
            if idle:
                for server in self._graphs.servers:
                    server.forget_refused()  # admitted, then lost with their worker
                scheduled, first_admitted = 0, self.progress.global_step
                admitted = first_admitted
            in_flight = scheduled * self._num_steps - (admitted - first_admitted)
            while in_flight < min(missing, self._window()):
                self._coordinator.schedule(self._train_function, args=(self._iterator, limit))
                scheduled, in_flight = scheduled + 1, in_flight + self._num_steps
            time.sleep(POLL_SECS)
        self._coordinator.join()  # calls that have nothing left to do
        self._read()

    def _window(self) -> int:
        """Steps to keep in flight: two calls for each worker, and what is done between three looks."""
        return 2 * self._num_steps * self._cluster.num_workers + int(3 * POLL_SECS * self._steps_per_sec)

    def _read(self) -> int:
        """Reads the counters of the ps into `progress`; returns the updates admitted by the first."""
        counts = [server.counts().numpy() for server in self._graphs.servers]
        totals = counts[0][2:].reshape(-1, len(TOTALS))
        steps, loss, _, examples = new = totals.sum(axis=0)
        if not np.isfinite(loss):
            raise NotFiniteError(f"the loss is {loss} before global step {int(steps)}; try a lower learning rate")
        delta_steps, delta_loss, delta_correct, delta_examples = new - self._reported
        now, before = time.monotonic(), self.progress
        applied = int(min(count[1] for count in counts))  # by all of them: one may be ahead of another
        if delta_steps > 0 or applied != before.global_step:
            self._steps_per_sec = delta_steps / (now - self._read_at)
            self.progress = Progress(
                global_step=applied,
                local_steps=tuple(int(row[0]) for row in totals),
                examples=int(examples),
                loss=float(delta_loss / delta_steps) if delta_steps else before.loss,
                accuracy=float(delta_correct / delta_examples) if delta_examples else before.accuracy,
            )
            self._report(self.progress)
        self._reported, self._read_at = new, now
        return int(counts[0][0])

    def evaluate(self, split: str) -> Evaluation:
        """Every worker evaluates some ranges of the split, whoever is free the next."""
        if split not in self._evaluate_functions:
            self._evaluate_functions[split] = self._graphs.evaluate_function(split)
        ranges = [(tf.constant(first), tf.constant(last)) for first, last in chunks(self._sizes[split])]
        sums = [self._coordinator.schedule(self._evaluate_functions[split], args=pair) for pair in ranges]
        self._coordinator.join()
        return Evaluation.of_sums(np.sum(self._coordinator.fetch(sums), axis=0), self._sizes[split])

    def updates_applied(self) -> int:
        """What every worker's steps add up to; the global step is the ps's own count."""
        return int(self._graphs.servers[0].totals.numpy()[:, TOTALS.index("steps")].sum())

    def facts(self) -> dict[str, Any]:
        """How many updates others applied between a worker's pull and its push, at every update."""
        histogram = self._graphs.servers[0].staleness.numpy()
        total, values = max(1, histogram.sum()), np.arange(MAX_STALENESS + 1)
        quantiles = {f"p{q}": int(np.searchsorted(histogram.cumsum(), total * q / 100)) for q in (50, 99)}
        largest = int(values[histogram > 0].max(initial=0))
        return {"staleness": {"mean": float((histogram * values).sum() / total), **quantiles, "max": largest}}

    def finish(self, accuracy: float) -> None:
        say_farewell(self._cluster, {"final_accuracy": accuracy}, FAREWELL_TIMEOUT_SECS)

    def abandon(self, reason: str) -> None:
        say_farewell(self._cluster, {"failure": reason}, FAREWELL_TIMEOUT_SECS)
