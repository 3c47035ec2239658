"""The asynchronous training loop of the coordinator: each worker at its own pace, and an exact end.

The coordinator keeps a few calls in flight for each worker and watches the counters on the parameter servers, which
alone know what has been applied. They refuse every update beyond the end: from calls that run past it, and from calls
that TensorFlow repeats because their worker died.
"""

import functools
import math
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist import data
from tf2dist.checkpoint.snapshot import EARLIER_ARRAY, Frozen, Snapshot, Weights
from tf2dist.checkpoint.state import assign, finalize
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig
from tf2dist.errors import NotFiniteError
from tf2dist.model.checks import advice_on
from tf2dist.model.evaluate import Evaluation, evaluated_sizes
from tf2dist.model.plan import EpochPlan
from tf2dist.model.source import Source
from tf2dist.training.hooks import Change
from tf2dist.training.loop import (
    PauseRequest,
    PauseRequests,
    Progress,
    Report,
    WorkersAway,
    never,
    saved_facts,
)
from tf2dist.training.parameter_server.calls import shut
from tf2dist.training.parameter_server.counters import TOTALS, staleness_of
from tf2dist.training.parameter_server.evaluating import evaluate_split
from tf2dist.training.parameter_server.origin import STALENESS_ARRAY, TOTALS_ARRAY
from tf2dist.training.parameter_server.prepare import Prepared, prepare
from tf2dist.training.parameter_server.reading import PackedRead
from tf2dist.training.parameter_server.schedule import POLL_SECS
from tf2dist.training.parameter_server.server import NEVER
from tf2dist.training.parameter_server.serving import say_farewell
from tf2dist.training.parameter_server.twins import scheduler_for

FAREWELL_TIMEOUT_SECS = 5.0


class AsyncLoop:
    """Runs on the coordinator, made with `build`; see `loop.Loop`."""

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        prepared: Prepared,
        splits: data.Splits,
        plan: EpochPlan | None,
        report: Report,
    ) -> None:
        step, origin, graphs = prepared.step, prepared.origin, prepared.graphs
        self._config, self._cluster, self._report = config, cluster, report
        self._coordinator, self._graphs, self._named = prepared.coordinator, graphs, prepared.named
        self._read_all = functools.cache(lambda: PackedRead(prepared.named, graphs.servers))
        self._sizes = evaluated_sizes(splits.sizes(), graphs.evaluated_at_once, plan)
        self._origin = origin
        self.sharding = graphs.sharding
        self.target_step = prepared.target_step
        self.model = step.model
        self.leads = True
        self.earlier_updates = graphs.earlier_updates
        self.new_optimizer = graphs.new_optimizer
        self.restored_from, self.start = prepared.restored_from, prepared.start
        self.metrics = step.metrics
        self._random_states = graphs.random_states
        self.advice = advice_on(step, self.optimizer)
        self._trained: dict[str, np.ndarray] = {}  # the weights that `finalize` has replaced

        make_scheduler = scheduler_for(config.algorithm.kind)
        self._scheduler = make_scheduler(self._coordinator, graphs, cluster, config.grace_secs)
        self._evaluate_function = None
        if not cluster.shares_host:  # there no function may be made during the training; see `prepare`
            self._evaluate_function = graphs.evaluate_function()
            self._read_all()

        # What has been read from the counters so far.
        counts = origin.counts
        local_steps, examples = tuple(map(int, counts.steps)), origin.earlier_examples + counts.examples
        self.progress = Progress(counts.applied, local_steps, examples, math.nan, np.array(counts.metrics))
        self._reported = counts.totals.sum(axis=0)
        self._changed_at = time.monotonic()

    @classmethod
    def build(
        cls,
        config: RunConfig,
        cluster: Cluster,
        task: Task,
        source: Source,
        splits: data.Splits,
        start: Snapshot | Weights | None,
        report: Report,
        strategy: tf.distribute.ParameterServerStrategy | None = None,
    ) -> "AsyncLoop":
        prepared = prepare(config, cluster, task, source, splits, start, strategy)
        return cls(config, cluster, prepared, splits, source.plan, report)

    def train(self, until_step: int, pause_request: PauseRequests = never) -> PauseRequest:
        """Trains until exactly `until_step` updates have been applied in the whole run; see `loop.Loop`."""
        began_at = self.progress.global_step

        # A change is made after a step, so a request for one waits until there is a step.
        def requests() -> PauseRequest:
            found = pause_request()
            return found if self.progress.global_step > began_at else found & ~PauseRequest.CHANGE

        try:
            requested = self._train(until_step, requests)
        except WorkersAway:
            # The calls stay in flight, and must not change what is saved now should their workers come back.
            shut(self._graphs.servers, until_step)
            self._read()
            return PauseRequest.STOP
        except NotFiniteError:
            self._scheduler.release()
            raise
        self._read()
        # Without a request the loop has ended since all ps have applied `until_step` updates.
        if requested:
            self._align_servers()
        return requested

    def _train(self, until_step: int, pause_request: PauseRequests) -> PauseRequest:
        scheduler, seen = self._scheduler, (0, 0)
        scheduler.begin(until_step)
        self._changed_at = time.monotonic()
        # The last call of an evaluation may have returned its result and still count as in flight.
        scheduler.finish(pause_request)
        for server in self._graphs.servers:
            server.stop_at.assign(NEVER)
        while True:
            # Asked before the counters are read: if all calls were done then, the counters hold all their updates.
            idle = scheduler.all_done()
            before, seen = seen, (self._read(), self.progress.global_step)
            admitted, applied = seen
            missing = until_step - applied
            requested = pause_request()  # before the end is checked: a short epoch may have no other look
            if missing <= 0 or requested:
                break
            # A worker that TensorFlow has given up may still push. As long as the counters move, its updates count.
            if idle and admitted > applied and seen != before:
                time.sleep(POLL_SECS)
                continue

            # All calls are done and steps are missing: updates were refused, or were admitted and then lost with their
            # worker. The ps forget those, or the numbers that they took would never be given to other updates.
            if idle:
                for server in self._graphs.servers:
                    server.forget_refused()
                scheduler.begin_again(applied)
                admitted = applied
            # Updates that a ps has begun to apply are neither to be scheduled nor in flight.
            scheduler.fill(admitted, until_step - admitted)
            self._read_all()  # is made here at the first time, while the workers prepare their first step
            time.sleep(scheduler.secs_to_next_look(missing))
        # A stop does not wait for the calls in flight, which may have many slow steps.
        if PauseRequest.STOP in requested and missing > 0 and scheduler.cut():
            return requested
        # At the end of the training the calls have nothing left to do; at another request they run to their end.
        return requested | scheduler.finish(pause_request)

    def _align_servers(self) -> None:
        """Brings all ps to the same count: a worker that died may have pushed to only some of them."""
        applied = [server.counters.now().applied for server in self._graphs.servers]
        for server in self._graphs.servers:
            server.forget_refused()
        # The ps that are ahead refuse these updates, so they reach only those that are behind.
        if min(applied) < max(applied):
            self.train(max(applied))

    def combine(self, request: PauseRequest) -> PauseRequest:
        return request

    def _read(self) -> int:
        """Reads the counters of the ps into `progress`; returns the updates that the first ps has admitted."""
        counts = [server.counts().numpy() for server in self._graphs.servers]
        # Every ps counts all updates, so the totals of one of them are those of the run.
        _, totals, metrics = self._graphs.servers[0].counters.split_heads(counts[0][1:])
        steps, loss, examples = new = totals.sum(axis=0)
        # A sum that is not finite once stays so, so a single bad update is noticed however seldom this looks.
        if not np.isfinite(loss):
            step = self._origin.earlier_steps + int(steps)
            raise NotFiniteError(f"the loss is {loss} before global step {step}; try a lower learning rate")
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
            self._report(self.progress)
        self._reported = new
        return int(counts[0][0])

    def evaluate(self, split: str, pause_request: PauseRequests = never) -> Evaluation:
        """Evaluates the split in ranges; each worker that is free takes the next one."""
        function = self._evaluate_function = self._evaluate_function or self._graphs.evaluate_function()
        size, at_once, quiet_secs = self._sizes[split], self._graphs.evaluated_at_once, self._scheduler.quiet_secs()
        return evaluate_split(
            self._coordinator, function, self.metrics, split, size, at_once, pause_request, quiet_secs
        )

    def updates_applied(self) -> int:
        """The sum of all workers' steps; the global step comes from another counter of the ps."""
        return self._origin.earlier_steps + int(self._graphs.servers[0].counters.now().steps.sum())

    def arrays(self) -> dict[str, np.ndarray]:
        return self._read_all().arrays()

    def random_states(self) -> dict[str, np.ndarray]:
        return self._random_states(self.progress.global_step)

    def apply(self, change: Change) -> None:
        assign(self._named, change.arrays)
        if change.learning_rate is not None:
            for server in self._graphs.servers:
                server.optimizer.learning_rate = change.learning_rate

    def broadcast(self, packed: bytes) -> bytes:
        # The coordinator alone drives the training.
        return packed

    def freeze(self) -> Frozen:
        counts = self._graphs.servers[0].counters.now()
        # Only steps that were applied move the input: a batch of a refused update is seen again after a resume.
        positions = list(map(int, self._origin.offsets + counts.steps))
        facts = saved_facts(self._config, "async", self.progress, self.target_step, self.sharding, positions)
        own = {EARLIER_ARRAY: np.array(self.earlier_updates)} if self.earlier_updates else {}
        own |= {TOTALS_ARRAY: counts.totals, STALENESS_ARRAY: counts.staleness}
        step, own, fetch = self.progress.global_step, self._trained | own, self._read_all().freeze()
        return lambda: Snapshot(step, fetch() | own, facts)

    def snapshot(self) -> Snapshot:
        return self.freeze()()

    def finalize(self) -> None:
        servers = self._graphs.servers
        self._trained = finalize(self._named, [(server.optimizer, server.trainable) for server in servers])

    def facts(self) -> dict[str, Any]:
        """The staleness of the updates: how many others were applied between a worker's pull and its push."""
        counts = self._graphs.servers[0].counters.now().staleness
        return {
            "algorithm": self._config.algorithm.kind,
            "staleness": staleness_of(counts),
            "staleness_counts": np.trim_zeros(counts, "b").tolist(),
            **self._graphs.facts(),
        }

    def histograms(self) -> dict[str, np.ndarray]:
        return {"staleness": self._graphs.servers[0].counters.now().staleness}

    @property
    def optimizer(self) -> keras.Optimizer:
        """The optimizer of the first ps; those of the others have the same settings."""
        return self._graphs.servers[0].optimizer

    def finish(self, result: Evaluation | None) -> None:
        say_farewell(self._cluster, {"final": result.headline if result else None}, FAREWELL_TIMEOUT_SECS)

    def abandon(self, reason: str) -> None:
        say_farewell(self._cluster, {"failure": reason}, FAREWELL_TIMEOUT_SECS)
