"""The synchronous training loop: every worker holds the model, and gradients are all-reduced; see `sync_step`."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import InputFacts, Snapshot, Weights
from tf2dist.checkpoint.state import input_facts, values
from tf2dist.data.arrays import Arrays
from tf2dist.data.passes import NumberedSteps
from tf2dist.model.evaluation import Evaluation, chunks
from tf2dist.process import heartbeat
from tf2dist.tf_internals.keras import counter_of
from tf2dist.training.loop import (
    Loop,
    PauseRequest,
    PauseRequests,
    Progress,
    Report,
    never,
    steps_in_call_secs,
)
from tf2dist.training.setup import TaskContext
from tf2dist.training.synchronous.sync_setup import SyncRun, prepare
from tf2dist.training.synchronous.workers import Workers


class SyncLoop(Loop):
    """The loop on every worker, made with `build`; see `loop.Loop`."""

    mode = "sync"

    def __init__(self, context: TaskContext, run: SyncRun, report: Report) -> None:
        self._splits, self._origin, self._graphs = context.splits, run.origin, run.graphs
        self._workers, self._optimizer, self._feed = run.graphs.workers, run.graphs.optimizer, run.graphs.feed
        super().__init__(context, run, report)
        self.leads = context.task == context.cluster.leader
        self._counted = counter_of(self.optimizer)
        layout = self._splits.evaluated_layout
        self._evaluate = tf.function(self._sums_of, autograph=False, input_signature=[layout.batched(None)])
        self._evaluated_at_once = run.evaluated_at_once
        self._secs_per_step = 0.0  # the mean of all workers; 0 while unknown
        self._own_secs = 0.0  # of a step on this worker; 0 while unknown
        step, none = self._origin.step, np.zeros(self.metrics.size)
        self.progress = Progress(step, self._local_steps(step), self._origin.examples, math.nan, none)

    @classmethod
    def build(
        cls,
        context: TaskContext,
        start: Snapshot | Weights | None,
        report: Report,
        strategy: tf.distribute.MultiWorkerMirroredStrategy,
    ) -> "SyncLoop":
        workers = Workers(context.cluster, context.task, strategy)
        return cls(context, prepare(context, workers, start), report)

    def _local_steps(self, step: int) -> tuple[int, ...]:
        return (step - self._origin.earlier_steps,) * self._workers.count

    def train(self, until_step: int, pause_request: PauseRequests = never) -> PauseRequest:
        """Takes exactly as many steps as are missing; every worker must call this with the same `until_step`."""
        requested = PauseRequest.NOTHING
        self._feed.prepare(self.progress.global_step - self._origin.step)
        while self.progress.global_step < until_step and not requested and not self.epoch_has_ended:
            before = self.progress.global_step
            started = time.monotonic()
            # These numbers are summed over all replicas with the gradients. So all workers learn of a request at the
            # same step, and get the same mean of their times.
            shared = [*pause_request().to_floats(), self._own_secs / self._workers.num_replicas]
            loss, examples, *rest = self._graphs.run_steps(self._steps_per_call(), until_step - before, shared)
            step = int(self._graphs.applied.numpy())
            count = step - before
            # What was shared is the same in each of the steps, so its sum is `count` times that of one step.
            metrics = self.progress.metrics + np.array(rest[: self.metrics.size])
            requests, secs = rest[self.metrics.size : -1], rest[-1]
            requested = PauseRequest.of_sums(requests)
            self._secs_per_step = secs / count
            self._own_secs = (time.monotonic() - started) / count
            # The loss is the sum over all workers, so all of them stop here at the same step.
            if not np.isfinite(loss):
                raise self.loss_error(loss, step, metrics)
            self.progress = Progress(
                global_step=step,
                local_steps=self._local_steps(step),
                examples=self.progress.examples + int(examples),
                loss=float(loss / count),
                metrics=metrics,
            )
            self._log(count)
            self.report(self.progress)
        return requested

    @property
    def epoch_has_ended(self) -> bool:
        return self._feed.num_ended > 0

    @property
    def num_unread(self) -> int:
        return self._workers.count - self._feed.num_ended if self.epoch_has_ended else 0

    def begin_epoch(self) -> None:
        self._feed.begin_pass(self.progress.global_step - self._origin.step)

    def _steps_per_call(self) -> int:
        """The same number on all workers, because it follows from the mean of their times."""
        if self.config.train.steps_per_execution:
            return self.config.train.steps_per_execution
        measured = steps_in_call_secs(self._secs_per_step) if self._secs_per_step else 1
        return min(measured, self._graphs.stragglers.max_steps)

    def combine(self, request: PauseRequest) -> PauseRequest:
        # Each worker gets its signals at a moment of its own; acting on them alone, it would leave the others waiting.
        return PauseRequest.of_sums(list(self._workers.add_up(np.array(request.to_floats()))))

    def _clear_counted_metrics(self) -> None:
        pass  # every worker adds them up in its own `progress`

    def _log(self, count: int) -> None:
        """Prints the worker's line whenever it has passed a multiple of log_every_steps."""
        step, every = self.progress.global_step, self.config.train.log_every_steps
        if step // every != (step - count) // every:
            worker = self._workers.index
            epoch, own_step = (step - 1) // self.sharding.steps_per_pass, self.progress.local_steps[worker]
            where = "" if self.sharding.ends_with_data else f"epoch={epoch}, "
            where = f"worker={worker}, {where}global_step={step}"
            print(f"{where}, local_step={own_step}, loss={self.progress.loss:.4f}", flush=True)

    def evaluate(self, split: str, pause_request: PauseRequests = never) -> Evaluation:
        """Every worker evaluates its own part of the split; the sums are added up over all workers."""
        sums = np.zeros(1 + self.step.evaluated.size)
        for batch in self._evaluated_batches(split):
            sums += self._evaluate([tf.constant(leaf) for leaf in batch]).numpy()
            heartbeat.progress()
        # Other workers may have more to evaluate, or be slower; each reports its own progress.
        heartbeat.extend_deadline(heartbeat.START_SECS)
        total = self._workers.add_up(sums)
        heartbeat.extend_deadline(0.0)
        return Evaluation.of_sums(self.step.evaluated, total, self.sizes.get(split))

    def _sums_of(self, leaves: list[tf.Tensor]) -> tf.Tensor:
        """Evaluates a batch; see `Step.evaluate`."""
        layout = self._splits.evaluated_layout
        with tf.device("CPU:0"):
            lookups = self.step.lookups.look_up(leaves, training=False, layout=layout)
        trainable, state = self.step.values(lookups.ids)
        return self.step.evaluate(trainable, state, leaves, layout, lookups.positions)

    def _evaluated_batches(self, split: str) -> Iterator[list[np.ndarray]]:
        """The leaves of the batches that this worker evaluates."""
        index = self._workers.index
        if stream := self._splits.validation_stream:
            return stream.one_pass(index)
        arrays: Arrays = getattr(self._splits, split)
        ranges = chunks(self.sizes[split], self._evaluated_at_once, index, self._workers.count)
        return (arrays[first:last].leaves for first, last in ranges)

    def updates_applied(self) -> int:
        """The count of the optimizer; the global step comes from a counter of our own."""
        return int(self._counted.numpy()) - self.earlier_updates

    def _optimizers(self) -> list[tuple[keras.Optimizer, list[keras.Variable]]]:
        return [(self._optimizer, self.step.trainable)]

    def _freeze_arrays(self) -> Callable[[], dict[str, np.ndarray]]:
        arrays = values(self.named, self.by_row, self.config.run_dir, heartbeat.progress)
        return lambda: arrays

    def broadcast(self, packed: bytes) -> bytes:
        return self._workers.broadcast(packed)

    def _state(self) -> tuple[InputFacts, dict[str, np.ndarray]]:
        steps = self.progress.global_step - self._origin.step
        if self._splits.stream:  # all workers have taken the same steps of their streams
            positions = [self._feed.position(steps)] * self.sharding.num_shards
            return input_facts(self.sharding, positions=positions), self._graphs.arrays()
        position = NumberedSteps(self.sharding, self._origin.begin).position(steps)
        return input_facts(self.sharding, position), self._graphs.arrays()

    def abandon(self, reason: str) -> None:
        """Does nothing: the heartbeats of TensorFlow's coordination service tell the others."""

    def facts(self) -> dict[str, Any]:
        return {"algorithm": self.config.algorithm.kind, **self._graphs.facts()}

    def finish(self, result: Evaluation | None) -> None:
        self._workers.wait_for_all()
        if result:
            print(f"worker={self._workers.index}, final {result.headline}", flush=True)
        self._workers.leave_last()
