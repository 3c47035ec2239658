"""The asynchronous twin, from the coordinator: workers at their own pace, an exact end.

The coordinator keeps a few calls in flight for each worker and watches the counters on the
parameter servers, which alone know what has been applied: a call that is repeated because its
worker died, or that runs past the end, is refused there update by update.
"""

import functools
import math
import time
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist import data
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.checkpoint.state import finalize, input_facts, input_positions, named_variables, restore, values
from tf2dist.cluster.spec import Cluster, Task
from tf2dist.config.schema import RunConfig
from tf2dist.data.pipeline import Sharding
from tf2dist.errors import NotFiniteError
from tf2dist.model.checks import advice_on_outputs, check_assigned
from tf2dist.model.evaluate import Evaluation, chunk_size, chunks
from tf2dist.model.models import build_step
from tf2dist.process import heartbeat
from tf2dist.process.strategy import parameter_server_strategy
from tf2dist.training.asynchronous.calls import counts_of, quiet_secs, results, shut, wait_for_calls
from tf2dist.training.asynchronous.counters import MAX_STALENESS, TOTALS, Counts
from tf2dist.training.asynchronous.serving import say_farewell
from tf2dist.training.asynchronous.step import AsyncStep
from tf2dist.training.call_size import Trial, worthwhile_steps
from tf2dist.training.loop import PauseRequest, PauseRequests, Progress, Report, WorkersAway, never, target_step

POLL_SECS, MAX_POLL_SECS = 0.05, 0.2
STEPS_ON_HOSTS = 10  # of a call
TRACED_SHARE = 0.25  # of the time that a function of one step takes to make, for every step of a longer one, about
FAREWELL_TIMEOUT_SECS = 5.0
TOTALS_ARRAY, STALENESS_ARRAY = "async_totals", "async_staleness"  # in a snapshot


@dataclass(frozen=True)
class _Start:
    """Where a run begins.

    Attributes:
        counts: those of the ps; totals of zero if the snapshot has none for as many workers.
        positions: of each worker's input, int [workers].
        earlier_steps, earlier_examples: those of the run that the totals do not hold.
    """

    counts: Counts
    positions: np.ndarray
    earlier_steps: int
    earlier_examples: int

    @classmethod
    def of(cls, start: Snapshot | None, sharding: Sharding) -> "_Start":
        step, examples = (start.step, int(start.facts.get("examples", 0))) if start else (0, 0)
        totals = np.zeros((sharding.num_shards, len(TOTALS)))
        staleness = np.zeros(MAX_STALENESS + 1, np.int64)
        shapes = {TOTALS_ARRAY: totals.shape, STALENESS_ARRAY: staleness.shape}
        if start and all(start.arrays.get(name, np.empty(0)).shape == shape for name, shape in shapes.items()):
            totals, staleness = start.arrays[TOTALS_ARRAY], start.arrays[STALENESS_ARRAY]
        counts, positions = Counts(step, totals, staleness), np.array(input_positions(start, sharding))
        return cls(counts, positions, step - int(counts.steps.sum()), examples - counts.examples)


class AsyncLoop:
    """Runs on the coordinator; see `loop.Loop`."""

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        task: Task,
        splits: data.Splits,
        start: Snapshot | None,
        report: Report,
        strategy: tf.distribute.ParameterServerStrategy | None = None,
    ) -> None:
        self._config, self._cluster, self._report = config, cluster, report
        self._sizes = {"test": len(splits.test), "validation": len(splits.validation)}
        num_workers, batch_size = cluster.num_workers, config.train.batch_size_per_worker
        self.sharding = Sharding(len(splits.train), batch_size, num_workers, config.seed, whole_batch_loss=False)
        self._chunk_size = chunk_size(batch_size, splits.image_shape)
        self.target_step = target_step(config, self.sharding, start)
        self._strategy = strategy or parameter_server_strategy(cluster, task)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        # The scope puts the variables on the ps, round robin.
        step = build_step(config.model, splits, config.seed, self._strategy.scope())
        check_assigned(config.model["name"], step.trial)
        self.model, self.advice = step.model, advice_on_outputs(step.trial)
        self._start = _Start.of(start, self.sharding)
        counts = self._start.counts
        self._offsets = self._start.positions - counts.steps
        offsets = [int(offset) for offset in self._offsets]
        self._graphs = AsyncStep(config, step, splits.image_shape, self.sharding, offsets, self.target_step)
        variables = [variable for server in self._graphs.servers for variable in server.variables]
        self._named = named_variables(self.model, variables, [server.optimizer for server in self._graphs.servers])
        self.restored_from = restore(self._named, start, config)
        self._trained: dict[str, np.ndarray] = {}
        for server in self._graphs.servers:
            server.restore(counts)
        # TensorFlow tells all hosts of a new function, and the whole process stands still if one of them is cut off: on
        # many hosts the calls keep a fixed size, and every function is made before the training: one of TensorFlow's
        # own, too, which copies what workers return.
        with tf.device(f"/job:{task.job}"):
            tf.identity(self._graphs.servers[0].counts())
        chosen = config.train.steps_per_execution or (None if config.cluster.kind == "local" else STEPS_ON_HOSTS)
        self._is_sized = chosen is not None
        self._num_steps = num_steps = chosen or 1
        begun_at = time.monotonic()
        self._train_function = self._graphs.train_function(num_steps)
        self._trace_secs = time.monotonic() - begun_at
        self._max_trace_secs = config.grace_secs / 2  # nobody looks at a request to stop meanwhile
        self._first_call_secs = 0.0  # not known yet
        self._iterator = self._make_iterator(num_steps)
        self._evaluate_functions = {split: self._graphs.evaluate_function(split) for split in self._sizes}
        examples = self._start.earlier_examples + counts.examples
        self.progress = Progress(counts.applied, tuple(map(int, counts.steps)), examples, math.nan, math.nan)
        self._reported, self._changed_at = counts.totals.sum(axis=0), time.monotonic()
        self._steps_per_sec = 0.0  # of the cluster; not known yet

    def train(self, until_step: int, pause_request: PauseRequests = never) -> PauseRequest:
        """Applies exactly `until_step` updates in all, then waits for the calls in flight."""
        try:
            requested = self._train(until_step, pause_request)
        except WorkersAway:
            shut(self._graphs.servers, until_step)
            self._read()
            return PauseRequest.STOP
        self._read()
        if requested:
            self._align_servers()
        return requested

    def _train(self, until_step: int, pause_request: PauseRequests) -> PauseRequest:
        limit, requested, trial = tf.constant(until_step, tf.int64), PauseRequest.NOTHING, Trial()
        scheduled, first_admitted, seen = 0, 0, (0, 0)
        self._changed_at = time.monotonic()
        self._finish_calls(pause_request)  # the last call of an evaluation may have its result and not be done yet
        while True:
            idle = self._coordinator.done()  # raises what a worker has raised
            before, seen = seen, (self._read(), self.progress.global_step)
            admitted, missing = seen[0], until_step - self.progress.global_step
            if missing <= 0 or (requested := pause_request()):
                break
            if idle and admitted > self.progress.global_step and seen != before:
                time.sleep(POLL_SECS)  # a worker that was given up may still push
                continue
            if idle:
                for server in self._graphs.servers:
                    server.forget_refused()  # admitted, then lost with their worker
                scheduled, first_admitted = 0, self.progress.global_step
                admitted = first_admitted
            in_flight = scheduled * self._num_steps - (admitted - first_admitted)
            if not self._is_sized and (size := self._size(trial, max(until_step, self.target_step))):
                self._resize(size, limit, missing - in_flight, pause_request)
                continue
            while in_flight < min(missing, self._window()):
                self._coordinator.schedule(self._train_function, args=(self._iterator, limit))
                scheduled, in_flight = scheduled + 1, in_flight + self._num_steps
            time.sleep(self._look_again_after_secs(missing))
        # Those calls that have nothing left to do, or that a request lets run out.
        return requested | self._finish_calls(pause_request)

    def _finish_calls(self, pause_request: PauseRequests) -> PauseRequest:
        return wait_for_calls(
            self._coordinator, pause_request, lambda: counts_of(self._graphs.servers), self._quiet_secs()
        )

    def _quiet_secs(self) -> float:
        return quiet_secs(self._steps_per_sec, self._cluster.num_workers, self._config.grace_secs)

    def _size(self, trial: Trial, last_step: int) -> int | None:
        """The steps of a call, once the first ones have shown how long a step takes and how long the graphs took."""
        found = trial.secs_per_step(time.monotonic(), self.progress.local_steps)
        self._first_call_secs = max(self._first_call_secs, trial.first_call_secs)  # in a later training they are there
        if found is None:
            return None
        num_workers = self._cluster.num_workers  # one that is late or lost now takes part later
        steps_left = last_step - self.progress.global_step
        steps = worthwhile_steps(found, num_workers, self._first_call_secs, steps_left)
        return min(steps, max(1, int(self._max_trace_secs / (self._trace_secs * TRACED_SHARE))))

    def _resize(self, num_steps: int, limit: tf.Tensor, missing: int, pause_request: PauseRequests) -> None:
        """Makes the calls longer; the workers go on with short ones while the coordinator makes the function."""
        self._is_sized = True
        if num_steps > self._num_steps:
            meanwhile = int(self._trace_secs * TRACED_SHARE * num_steps * self._steps_per_sec)
            for _ in range(0, min(missing, meanwhile), self._num_steps):
                self._coordinator.schedule(self._train_function, args=(self._iterator, limit))
            function = self._graphs.train_function(num_steps)
            self._finish_calls(pause_request)
            self._num_steps, self._train_function, self._iterator = num_steps, function, self._make_iterator(num_steps)

    def _make_iterator(self, num_steps: int) -> Any:
        """An element for each call of `num_steps`; it begins where the updates of a worker have ended."""
        dataset = tf.function(functools.partial(self._graphs.dataset, num_steps), autograph=False)
        return iter(self._coordinator.create_per_worker_dataset(dataset))

    def _align_servers(self) -> None:
        """Brings all ps to the same count: a worker that died may have pushed to some of them only."""
        applied = [server.counters.now().applied for server in self._graphs.servers]
        for server in self._graphs.servers:
            server.forget_refused()
        if min(applied) < max(applied):
            self.train(max(applied))

    def combine(self, request: PauseRequest) -> PauseRequest:
        return request

    def _look_again_after_secs(self, missing: int) -> float:
        """Seconds to the next look: it takes 2 ms of the workers' cores on a shared host; near the end it is soon."""
        if not self._is_sized:
            return POLL_SECS  # idle workers would look slow
        return min(MAX_POLL_SECS, max(POLL_SECS, missing / (2 * self._steps_per_sec or math.inf)))

    def _window(self) -> int:
        """Steps to keep in flight: two calls for each worker, and what is done between three looks."""
        return 2 * self._num_steps * self._cluster.num_workers + int(3 * MAX_POLL_SECS * self._steps_per_sec)

    def _read(self) -> int:
        """Reads the counters of the ps into `progress`; returns the updates admitted by the first."""
        counts = [server.counts().numpy() for server in self._graphs.servers]
        totals = counts[0][2:].reshape(-1, len(TOTALS))
        steps, loss, _, examples = new = totals.sum(axis=0)
        if not np.isfinite(loss):
            step = self._start.earlier_steps + int(steps)
            raise NotFiniteError(f"the loss is {loss} before global step {step}; try a lower learning rate")
        delta_steps, delta_loss, delta_correct, delta_examples = new - self._reported
        now, before = time.monotonic(), self.progress
        applied = int(min(count[1] for count in counts))  # by all of them: one may be ahead of another
        if delta_steps > 0:
            self._steps_per_sec, self._changed_at = delta_steps / (now - self._changed_at), now
        if delta_steps > 0 or applied != before.global_step:
            self.progress = Progress(
                global_step=applied,
                local_steps=tuple(map(int, totals[:, TOTALS.index("steps")])),
                examples=self._start.earlier_examples + int(examples),
                loss=float(delta_loss / delta_steps) if delta_steps else before.loss,
                accuracy=float(delta_correct / delta_examples) if delta_examples else before.accuracy,
            )
            self._report(self.progress)
        self._reported = new
        return int(counts[0][0])

    def evaluate(self, split: str, pause_request: PauseRequests = never) -> Evaluation:
        """Every worker evaluates some ranges of the split, whoever is free the next."""
        parts = chunks(self._sizes[split], self._chunk_size)
        ranges = [(tf.constant(first), tf.constant(last)) for first, last in parts]
        sums = [self._coordinator.schedule(self._evaluate_functions[split], args=pair) for pair in ranges]
        total = np.zeros(3)
        for part in results(self._coordinator, sums, pause_request, self._quiet_secs()):
            total += part
            heartbeat.progress()
        return Evaluation.of_sums(total, self._sizes[split])

    def updates_applied(self) -> int:
        """What every worker's steps add up to; the global step is the ps's own count."""
        return self._start.earlier_steps + int(self._graphs.servers[0].counters.now().steps.sum())

    def snapshot(self) -> Snapshot:
        counts = self._graphs.servers[0].counters.now()
        facts = {
            "mode": "async",
            "local_steps": list(self.progress.local_steps),
            "target_step": self.target_step,
            "examples": self.progress.examples,
            "input": input_facts(self.sharding, list(map(int, self._offsets + counts.steps))),
        }
        own = {TOTALS_ARRAY: counts.totals, STALENESS_ARRAY: counts.staleness}
        return Snapshot(self.progress.global_step, values(self._named) | self._trained | own, facts)

    def finalize(self) -> None:
        servers = self._graphs.servers
        self._trained = finalize(self._named, [(server.optimizer, server.trainable) for server in servers])

    def facts(self) -> dict[str, Any]:
        """How many updates others applied between a worker's pull and its push, at every update."""
        histogram = self._graphs.servers[0].counters.now().staleness
        total, bins = max(1, histogram.sum()), np.arange(MAX_STALENESS + 1)
        quantiles = {f"p{q}": int(np.searchsorted(histogram.cumsum(), total * q / 100)) for q in (50, 99)}
        largest = int(bins[histogram > 0].max(initial=0))
        return {"staleness": {"mean": float((histogram * bins).sum() / total), **quantiles, "max": largest}}

    def histograms(self) -> dict[str, np.ndarray]:
        return {"staleness": self._graphs.servers[0].counters.now().staleness}

    @property
    def optimizer(self) -> keras.Optimizer:
        """That of the first ps; the others have equal ones."""
        return self._graphs.servers[0].optimizer

    def finish(self, accuracy: float | None) -> None:
        say_farewell(self._cluster, {"final_accuracy": accuracy}, FAREWELL_TIMEOUT_SECS)

    def abandon(self, reason: str) -> None:
        say_farewell(self._cluster, {"failure": reason}, FAREWELL_TIMEOUT_SECS)
