"""The asynchronous twin, from the coordinator: workers at their own pace, an exact end.

The coordinator keeps a few calls in flight for each worker and watches the counters on the
parameter servers, which alone know what has been applied: a call that is repeated because its
worker died, or that runs past the end, is refused there update by update.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist import data, pulse
from tf2dist.async_step import AsyncStep
from tf2dist.call_size import Trial
from tf2dist.cluster import Cluster, Task
from tf2dist.config import RunConfig
from tf2dist.counters import MAX_STALENESS, TOTALS, Counts
from tf2dist.errors import NotFiniteError
from tf2dist.evaluate import Evaluation, chunks
from tf2dist.loop import Progress, Report, Wish, target_step
from tf2dist.models import build_model
from tf2dist.pipeline import Sharding
from tf2dist.serving import say_farewell
from tf2dist.snapshot import Snapshot
from tf2dist.state import begin, input_facts, input_positions, named_variables, values
from tf2dist.strategy import parameter_server_strategy

POLL_SECS, MAX_POLL_SECS = 0.05, 0.2
STEPS_ON_HOSTS = 10  # of a call
TRACE_SECS = 0.7  # of a function with many steps, about
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
        if start and start.arrays.get(TOTALS_ARRAY, np.empty(0)).shape == totals.shape:
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
    ) -> None:
        self._cluster, self._report = cluster, report
        self._sizes = {"test": len(splits.test), "validation": len(splits.validation)}
        num_workers, batch_size = cluster.num_workers, config.train.batch_size_per_worker
        self.sharding = Sharding(len(splits.train), batch_size, num_workers, config.seed, whole_batch_loss=False)
        self.target_step = target_step(config, self.sharding, start)
        self._strategy = parameter_server_strategy(cluster, task)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        with self._strategy.scope():  # puts the variables on the ps, round robin
            self.model = build_model(config.model, splits.image_shape, splits.num_classes, config.seed)
        self._start = _Start.of(start, self.sharding)
        counts = self._start.counts
        self._offsets = self._start.positions - counts.steps
        offsets = [int(offset) for offset in self._offsets]
        self._graphs = AsyncStep(config, self.model, splits.image_shape, self.sharding, offsets, self.target_step)
        variables = [variable for server in self._graphs.servers for variable in server.variables]
        self._named = named_variables(self.model, variables, [server.optimizer for server in self._graphs.servers])
        self.begun_with = begin(self._named, start, config)
        for server in self._graphs.servers:
            server.begin(counts)
        # TensorFlow tells all hosts of a new function, and the whole process stands still if one of them is cut off: on
        # many hosts the calls keep a fixed size, and every function is made before the training: one of TensorFlow's
        # own, too, which copies what workers return.
        with tf.device(f"/job:{task.job}"):
            tf.identity(self._graphs.servers[0].counts())
        chosen = config.train.steps_per_execution or (None if config.cluster.kind == "local" else STEPS_ON_HOSTS)
        self._is_sized = chosen is not None
        self._num_steps = num_steps = chosen or 1
        self._train_function, self._iterator = self._graphs.train_function(num_steps), self._make_iterator(num_steps)
        self._evaluate_functions = {split: self._graphs.evaluate_function(split) for split in self._sizes}
        examples = self._start.earlier_examples + counts.examples
        self.progress = Progress(counts.applied, tuple(map(int, counts.steps)), examples, math.nan, math.nan)
        self._reported, self._read_at = counts.totals.sum(axis=0), time.monotonic()
        self._steps_per_sec = 0.0

    def train(self, until_step: int, wish: Callable[[], Wish] = lambda: Wish.NOTHING) -> Wish:
        """Applies exactly `until_step` updates in all, then waits for the calls in flight."""
        limit, wished, trial = tf.constant(until_step, tf.int64), Wish.NOTHING, Trial()
        scheduled, first_admitted, seen = 0, 0, (0, 0)
        self._coordinator.join()  # the last call of an evaluation may have its result and not be done yet
        while True:
            idle = self._coordinator.done()  # raises what a worker has raised
            before, seen = seen, (self._read(), self.progress.global_step)
            admitted, missing = seen[0], until_step - self.progress.global_step
            if missing <= 0 or (wished := wish()):
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
            if not self._is_sized and (size := trial.size(time.monotonic(), self.progress.local_steps)):
                self._resize(size, limit, missing - in_flight)
                continue
            while in_flight < min(missing, self._window()):
                self._coordinator.schedule(self._train_function, args=(self._iterator, limit))
                scheduled, in_flight = scheduled + 1, in_flight + self._num_steps
            time.sleep(self._pause(missing))
        self._coordinator.join()  # calls that have nothing left to do, or that a wish lets run out
        self._read()
        if wished:
            self._level()
        return wished

    def _resize(self, num_steps: int, limit: tf.Tensor, missing: int) -> None:
        """Makes the calls longer, once the first ones have shown how long a step takes."""
        self._is_sized = True
        if num_steps > self._num_steps:
            for _ in range(0, min(missing, int(TRACE_SECS * self._steps_per_sec)), self._num_steps):  # go on meanwhile
                self._coordinator.schedule(self._train_function, args=(self._iterator, limit))
            function = self._graphs.train_function(num_steps)
            self._coordinator.join()
            self._num_steps, self._train_function, self._iterator = num_steps, function, self._make_iterator(num_steps)

    def _make_iterator(self, num_steps: int) -> Any:
        """An element for each call of `num_steps`; it begins where the updates of a worker have ended."""
        dataset = tf.function(functools.partial(self._graphs.dataset, num_steps), autograph=False)
        return iter(self._coordinator.create_per_worker_dataset(dataset))

    def _level(self) -> None:
        """Brings all ps to the same count: a worker that died may have pushed to some of them only."""
        applied = [server.counters.now().applied for server in self._graphs.servers]
        for server in self._graphs.servers:
            server.forget_refused()
        if min(applied) < max(applied):
            self.train(max(applied))

    def agree(self, wish: Wish) -> Wish:
        return wish

    def _pause(self, missing: int) -> float:
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
        if delta_steps > 0 or applied != before.global_step:
            self._steps_per_sec = delta_steps / (now - self._read_at)
            self.progress = Progress(
                global_step=applied,
                local_steps=tuple(map(int, totals[:, TOTALS.index("steps")])),
                examples=self._start.earlier_examples + int(examples),
                loss=float(delta_loss / delta_steps) if delta_steps else before.loss,
                accuracy=float(delta_correct / delta_examples) if delta_examples else before.accuracy,
            )
            self._report(self.progress)
        self._reported, self._read_at = new, now
        return int(counts[0][0])

    def evaluate(self, split: str) -> Evaluation:
        """Every worker evaluates some ranges of the split, whoever is free the next."""
        ranges = [(tf.constant(first), tf.constant(last)) for first, last in chunks(self._sizes[split])]
        sums = [self._coordinator.schedule(self._evaluate_functions[split], args=pair) for pair in ranges]
        total = np.zeros(3)
        for part in sums:
            total += self._coordinator.fetch(part)
            pulse.beat()
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
        return Snapshot(self.progress.global_step, values(self._named) | own, facts)

    def facts(self) -> dict[str, Any]:
        """How many updates others applied between a worker's pull and its push, at every update."""
        histogram = self._graphs.servers[0].counters.now().staleness
        total, bins = max(1, histogram.sum()), np.arange(MAX_STALENESS + 1)
        quantiles = {f"p{q}": int(np.searchsorted(histogram.cumsum(), total * q / 100)) for q in (50, 99)}
        largest = int(bins[histogram > 0].max(initial=0))
        return {"staleness": {"mean": float((histogram * bins).sum() / total), **quantiles, "max": largest}}

    def finish(self, accuracy: float | None) -> None:
        say_farewell(self._cluster, {"final_accuracy": accuracy}, FAREWELL_TIMEOUT_SECS)

    def abandon(self, reason: str) -> None:
        say_farewell(self._cluster, {"failure": reason}, FAREWELL_TIMEOUT_SECS)
