"""The training loops of the coordinator: each worker at its own pace, and an exact end.

The coordinator keeps a few calls in flight for each worker and watches the counters on the parameter servers, which
alone know what has been applied. They refuse every update beyond the end: from calls that run past it, and from calls
that TensorFlow repeats because their worker died.
"""

import abc
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import InputFacts, Snapshot, Weights
from tf2dist.data.passes import UNKNOWN_STEPS
from tf2dist.model.evaluation import Evaluation, chunks
from tf2dist.process import heartbeat
from tf2dist.training.loop import Loop, PauseRequest, PauseRequests, Progress, Report, WorkersAway, never
from tf2dist.training.parameter_server.async_setup import PsRun, prepare
from tf2dist.training.parameter_server.batches import EVALUATED
from tf2dist.training.parameter_server.counters import (
    STALENESS_ARRAY,
    TOTALS,
    TOTALS_ARRAY,
    AsyncOrigin,
    PsOrigin,
    staleness_of,
)
from tf2dist.training.parameter_server.graphs import AsyncGraphs, PsGraphs
from tf2dist.training.parameter_server.reading import PackedRead
from tf2dist.training.parameter_server.schedule import (
    MIN_LOOK_SECS,
    AsyncScheduler,
    Scheduler,
    close_servers,
    wait_for_calls,
)
from tf2dist.training.parameter_server.server import NEVER
from tf2dist.training.parameter_server.serving import send_shutdown
from tf2dist.training.setup import TaskContext

SHUTDOWN_TIMEOUT_SECS = 5.0


class PsLoop(Loop):
    """Runs on the coordinator, made with `build`; see `loop.Loop`.

    Attributes:
        graphs_class: the rule by which the ps apply an update.
        scheduler_class: of the calls to the workers.
    """

    graphs_class: type[PsGraphs]
    scheduler_class: type[Scheduler]
    _graphs: PsGraphs
    _scheduler: Scheduler
    _origin: PsOrigin
    leads = True

    def __init__(self, context: TaskContext, run: PsRun, report: Report) -> None:
        self._coordinator = run.coordinator
        self._graphs = graphs = run.graphs
        self._scheduler = self.scheduler_class(
            run.coordinator, graphs, context.cluster.num_workers, context.config.grace_secs
        )
        self._origin, self._stream = graphs.origin, graphs.splits.validation_stream
        self.read_all = functools.cache(
            lambda: PackedRead(self.named, graphs.servers, self.by_row, self.config.run_dir)
        )
        self._evaluate_function = functools.cache(
            graphs.evaluate_stream_function if self._stream else graphs.evaluate_function
        )
        super().__init__(context, run, report)
        if not context.cluster.is_managed:  # there no function may be made during the training; see `async_setup`
            self._evaluate_function()
            self.read_all()
        self._changed_at = time.monotonic()  # when the workers were last seen to have made progress

    @classmethod
    def build(
        cls,
        context: TaskContext,
        start: Snapshot | Weights | None,
        report: Report,
        strategy: tf.distribute.ParameterServerStrategy | None = None,
    ) -> "PsLoop":
        return cls(context, prepare(cls.graphs_class, context, start, strategy), report)

    def train(self, until_step: int, pause_request: PauseRequests = never) -> PauseRequest:
        """Trains until exactly `until_step` updates have been applied in the whole run; see `loop.Loop`."""
        began_at = self.progress.global_step

        # A change is made after a step, so a request for one waits until there is a step.
        def requests() -> PauseRequest:
            requested = pause_request()
            return requested if self.progress.global_step > began_at else requested & ~PauseRequest.CHANGE

        try:
            requested = self._train(until_step, requests)
        except WorkersAway:
            self._give_up_calls(until_step)
            return PauseRequest.STOP
        self._settle(requested)
        return requested

    @abc.abstractmethod
    def _train(self, until_step: int, pause_request: PauseRequests) -> PauseRequest:
        """Trains as `train` does, but for its last moments."""

    @abc.abstractmethod
    def _settle(self, requested: PauseRequest) -> None:
        """Brings all ps to the same step, and reads the counters."""

    @abc.abstractmethod
    def _give_up_calls(self, until_step: int) -> None:
        """Makes sure that the calls in flight change nothing any more, and reads the counters."""

    def combine(self, request: PauseRequest) -> PauseRequest:
        return request

    def evaluate(self, split: str, pause_request: PauseRequests = never) -> Evaluation:
        """Evaluates the split in ranges, or a stream in shards; each worker that is free takes the next one."""
        function = self._evaluate_function()
        if self._stream:
            arguments = [(tf.constant(shard),) for shard in range(self._stream.count)]
        else:
            number, ranges = EVALUATED.index(split), chunks(self.sizes[split], self._graphs.evaluated_at_once)
            arguments = [tuple(map(tf.constant, (number, first, last))) for first, last in ranges]
        parts = [self._coordinator.schedule(function, args=each) for each in arguments]
        # A stop discards the evaluation, which may take longer than the time that the stop has.
        quiet_secs = self._scheduler.quiet_secs()
        wait_for_calls(self._coordinator, pause_request, self._evaluated_batches, quiet_secs, outlasts_stop=False)
        heartbeat.progress()
        total = sum(map(self._coordinator.fetch, parts), np.zeros(1 + self.step.evaluated.size))
        return Evaluation.of_sums(self.step.evaluated, total, self.sizes.get(split))

    def _evaluated_batches(self) -> int:
        return int(self._graphs.evaluated_batches)

    def _optimizers(self) -> list[tuple[keras.Optimizer, list[keras.Variable]]]:
        """The optimizers of all ps, which have the same settings."""
        return [(server.optimizer, server.trainable) for server in self._graphs.servers]

    def _freeze_arrays(self) -> Callable[[], dict[str, np.ndarray]]:
        return self.read_all().freeze()

    def broadcast(self, packed: bytes) -> bytes:
        # The coordinator alone drives the training.
        return packed

    def finish(self, result: Evaluation | None) -> None:
        send_shutdown(self.cluster, {"final": result.headline if result else None}, SHUTDOWN_TIMEOUT_SECS)

    def abandon(self, reason: str) -> None:
        send_shutdown(self.cluster, {"failure": reason}, SHUTDOWN_TIMEOUT_SECS)


class AsyncLoop(PsLoop):
    """The loop of mode=async, in which a global step is an update that the ps have applied."""

    mode, graphs_class, scheduler_class = "async", AsyncGraphs, AsyncScheduler
    _graphs: AsyncGraphs
    _scheduler: AsyncScheduler
    _origin: AsyncOrigin

    def __init__(self, context: TaskContext, run: PsRun, report: Report) -> None:
        super().__init__(context, run, report)
        # What has been read from the counters so far.
        counts = self._origin.counts
        self.progress = Progress(
            global_step=counts.applied,
            local_steps=tuple(map(int, counts.steps)),
            examples=self._origin.examples,
            loss=math.nan,
            metrics=np.array(counts.metrics),
        )
        self._reported = counts.totals.sum(axis=0)
        # Of an epoch that ends with the data: whether it has, where it began, and the steps of the one before.
        self._has_ended, self._epoch_began_at, self._epoch_steps = False, counts.applied, UNKNOWN_STEPS
        self._has_stopped_early = False

    def _train(self, until_step: int, pause_request: PauseRequests) -> PauseRequest:
        scheduler, seen, self._has_stopped_early = self._scheduler, (0, 0), False
        scheduler.begin(until_step)
        self._changed_at = time.monotonic()
        for server in self._graphs.servers:
            server.stop_at.assign(NEVER)
        self._graphs.batch_numbers.open(until_step - self.progress.global_step)
        while True:
            # Asked before the counters are read: if all calls were done then, the counters hold all their updates.
            idle = scheduler.all_done()
            before, seen = seen, (self._read(), self.progress.global_step)
            numbered, applied = seen
            unused, left = self._graphs.batch_numbers.look(np.array(self.progress.local_steps))
            # That of the first ps, whose counts are those of the workers' steps.
            end = min(until_step, self._origin.earlier_steps + sum(self.progress.local_steps) + left)
            missing = end - applied
            requested = pause_request()  # before the end is checked: a short epoch may have no other look
            if missing <= 0 or not left or requested:
                break
            # A worker that TensorFlow has given up may still push. As long as the counters move, its updates count.
            if idle and numbered > applied and seen != before:
                time.sleep(MIN_LOOK_SECS)
                continue

            # All calls are done and steps are missing: updates were refused, or were numbered and then lost with their
            # worker. The ps forget those, or the numbers that they took would never be given to other updates.
            if idle:
                for server in self._graphs.servers:
                    server.number_on_from_applied()
                self._graphs.batch_numbers.close()
                self._graphs.batch_numbers.open(missing)
                scheduler.begin_again(applied + unused)
                numbered = applied
            # Updates that a ps has numbered are neither to be scheduled nor in flight.
            expected = self._expected(end) - numbered
            scheduler.fill(numbered + unused, expected)
            self.read_all()  # is made here at the first time, while the workers prepare their first step
            time.sleep(scheduler.secs_to_next_look(expected))
        self._has_ended = not left
        # A stop does not wait for the calls in flight, which may have many slow steps.
        if PauseRequest.STOP in requested and missing > 0 and scheduler.stop_early():
            self._has_stopped_early = True
            return requested
        # At the end of the training the calls have nothing left to do; at another request they run to their end.
        return requested | scheduler.finish(pause_request)

    def _expected(self, end: int) -> int:
        """The step up to which calls are given: where the last epoch would end again, while nobody knows the end."""
        if end < self._epoch_began_at + UNKNOWN_STEPS:
            return end
        least = self.progress.global_step + self._scheduler.num_steps * self._scheduler.num_workers
        return max(least, self._epoch_began_at + self._epoch_steps)

    @property
    def epoch_has_ended(self) -> bool:
        return self._has_ended

    def begin_epoch(self) -> None:
        step = self.progress.global_step
        self._epoch_steps, self._epoch_began_at, self._has_ended = step - self._epoch_began_at, step, False
        self._graphs.batch_numbers.begin_epoch(np.array(self.progress.local_steps))

    def _settle(self, requested: PauseRequest) -> None:
        self._read()
        self._graphs.batch_numbers.close()
        # Without a request the loop has ended since all ps have applied the same number of updates, or with the data.
        # After an early stop they have, too, and calls in flight may still push: a number that is given back then must
        # not meet a count that was set.
        if (requested or self._has_ended) and not self._has_stopped_early:
            self._align_servers()

    def _align_servers(self) -> None:
        """Brings all ps to the same count: a worker that died may have pushed to only some of them."""
        applied = [server.counters.now().applied for server in self._graphs.servers]
        for server in self._graphs.servers:
            server.number_on_from_applied()
        # The ps that are ahead refuse these updates, so they reach only those that are behind.
        if min(applied) < max(applied):
            has_ended = self._has_ended
            self._graphs.batch_numbers.repeat_last(True)
            self.train(max(applied))
            self._graphs.batch_numbers.repeat_last(False)
            self._has_ended = has_ended

    def _give_up_calls(self, until_step: int) -> None:
        # The calls stay in flight, and must not change what is saved now should their workers come back.
        close_servers(self._graphs.servers, until_step)
        self._graphs.batch_numbers.close()
        self._read()

    def _read(self) -> int:
        """Reads the counters of the ps into `progress`; returns the updates that the first ps has numbered."""
        counts = [server.counts().numpy() for server in self._graphs.servers]
        # Every ps counts all updates, so the totals of one of them are those of the run.
        _, totals, metrics = self._graphs.servers[0].counters.split_heads(counts[0][1:])
        steps, loss, examples = new = totals.sum(axis=0)
        # A sum that is not finite once stays so, so a single bad update is noticed however seldom this looks.
        if not np.isfinite(loss):
            raise self.loss_error(loss, self._origin.earlier_steps + int(steps), metrics)
        delta_steps, delta_loss, _ = new - self._reported
        now, before = time.monotonic(), self.progress
        applied = int(min(count[1] for count in counts))  # by all ps: one may be ahead of another
        if delta_steps > 0:
            self._scheduler.steps_per_sec = delta_steps / (now - self._changed_at)
            self._changed_at = now
        if delta_steps > 0 or applied != before.global_step:
            self.progress = Progress(
                global_step=applied,
                local_steps=tuple(map(int, totals[:, TOTALS.index("steps")])),
                examples=self._origin.earlier_examples + int(examples),
                loss=float(delta_loss / delta_steps) if delta_steps else before.loss,
                metrics=metrics,
            )
            self.report(self.progress)
        self._reported = new
        return int(counts[0][0])

    def _clear_counted_metrics(self) -> None:
        self._graphs.servers[0].counters.clear_metrics()  # the others count none

    def updates_applied(self) -> int:
        """The sum of all workers' steps; the global step comes from another counter of the ps."""
        return self._origin.earlier_steps + int(self._graphs.servers[0].counters.now().steps.sum())

    def _state(self) -> tuple[InputFacts, dict[str, np.ndarray]]:
        counts = self._graphs.servers[0].counters.now()
        own = {TOTALS_ARRAY: counts.totals, STALENESS_ARRAY: counts.staleness}
        return self._graphs.batch_numbers.facts(counts.steps), own

    def facts(self) -> dict[str, Any]:
        """The staleness of the updates: how many others were applied between a worker's pull and its push."""
        counts = self._graphs.servers[0].counters.now().staleness
        return {
            "algorithm": self.config.algorithm.kind,
            "staleness": staleness_of(counts),
            "staleness_counts": np.trim_zeros(counts, "b").tolist(),
        }

    def histograms(self) -> dict[str, np.ndarray]:
        return {"staleness": self._graphs.servers[0].counters.now().staleness}
