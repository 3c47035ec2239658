"""The training loop of mode=sync_replicas, on the coordinator: every step is the mean of K gradients.

The parameter servers decide alone what is in a step; see `servers`. The coordinator supplies the workers with calls,
opens the servers for a training and closes them at its end.
"""

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
from tf2dist.model.evaluate import Evaluation
from tf2dist.model.source import Source
from tf2dist.training.hooks import Change
from tf2dist.training.loop import PauseRequest, PauseRequests, Progress, Report, WorkersAway, never, saved_facts
from tf2dist.training.parameter_server.evaluating import evaluate_split
from tf2dist.training.parameter_server.reading import PackedRead
from tf2dist.training.parameter_server.serving import say_farewell
from tf2dist.training.parameter_server.sync_replicas_counters import Counts
from tf2dist.training.parameter_server.sync_replicas_origin import GRADIENTS_ARRAY
from tf2dist.training.parameter_server.sync_replicas_prepare import Prepared, prepare
from tf2dist.training.parameter_server.sync_replicas_schedule import Scheduler

FAREWELL_TIMEOUT_SECS = 5.0


class ReplicasLoop:
    """Runs on the coordinator, made with `build`; see `loop.Loop`."""

    def __init__(self, config: RunConfig, cluster: Cluster, prepared: Prepared, report: Report) -> None:
        graphs, step, origin = prepared.graphs, prepared.step, prepared.origin
        self._config, self._cluster, self._report = config, cluster, report
        self._coordinator, self._graphs, self._named = prepared.coordinator, graphs, prepared.named
        self._read_all = PackedRead(prepared.named, graphs.parts)
        self._sizes, self._origin = prepared.sizes, origin
        self.sharding, self.target_step = graphs.sharding, prepared.target_step
        self.model, self.metrics = step.model, step.metrics
        self.leads = True
        self.earlier_updates, self.new_optimizer = graphs.earlier_updates, graphs.new_optimizer
        self.restored_from, self.start = prepared.restored_from, prepared.start
        self._random_states = step.random_states
        self.advice = advice_on(step, self.optimizer)
        self._trained: dict[str, np.ndarray] = {}  # the weights that `finalize` has replaced
        self._scheduler = Scheduler(prepared.coordinator, graphs, cluster.num_workers, config.grace_secs)
        self._evaluate_function = None if cluster.shares_host else graphs.evaluate_function()

        # What has been read from the counters so far.
        self._counts = graphs.deciding.counts()
        self.progress = self._progress(math.nan)
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
    ) -> "ReplicasLoop":
        return cls(config, cluster, prepare(config, cluster, task, source, splits, start, strategy), report)

    def train(self, until_step: int, pause_request: PauseRequests = never) -> PauseRequest:
        """Trains until exactly `until_step` steps have been made in the whole run; see `loop.Loop`."""
        began_at = self.progress.global_step

        # A change is made after a step, so a request for one waits until there is a step.
        def requests() -> PauseRequest:
            found = pause_request()
            return found if self.progress.global_step > began_at else found & ~PauseRequest.CHANGE

        try:
            # The last call of an evaluation may have returned its result and still count as in flight.
            requested = self._scheduler.finish(requests)
            self._graphs.deciding.open(until_step)
            self._scheduler.begin(self._graphs.deciding.counts())
            requested |= self._train(until_step, requests)
            self._graphs.deciding.close()
            # The calls in flight can change nothing any more, so a stop does not wait for them.
            if PauseRequest.STOP not in requested:
                requested |= self._scheduler.finish(requests)
        except WorkersAway:
            requested = PauseRequest.STOP
        except NotFiniteError:
            self._graphs.deciding.close()
            raise
        self._align_servers()
        self._read()
        return requested

    def _train(self, until_step: int, pause_request: PauseRequests) -> PauseRequest:
        scheduler, deciding = self._scheduler, self._graphs.deciding
        self._changed_at, seen = time.monotonic(), (-1, -1)
        while True:
            scheduler.check()
            counts = self._read()
            missing = until_step - counts.step
            requested = pause_request()  # before the end is checked: a short epoch may have no other look
            if missing <= 0 or requested:
                return requested
            before, seen = seen, (counts.step, int(counts.pushed.sum()))
            is_stalled = seen == before
            if is_stalled:
                deciding.wake()
            scheduler.fill(counts, missing, is_stalled)
            time.sleep(scheduler.secs_to_next_look(missing))

    def _align_servers(self) -> None:
        """Brings the last step to all ps: the worker that knew of it may be lost."""
        last = self._graphs.deciding.close()
        for server in self._graphs.following:
            server.follow(last.step.bits, last.made_by)

    def combine(self, request: PauseRequest) -> PauseRequest:
        return request

    def _read(self) -> Counts:
        """Reads the counters of the ps into `progress`."""
        before, self._counts = self._counts, self._graphs.deciding.counts()
        counts, now = self._counts, time.monotonic()
        loss, steps = counts.sums[0] - before.sums[0], counts.step - before.step
        # A sum that is not finite once stays so, so a single bad step is noticed however seldom this looks.
        if not np.isfinite(counts.sums[0]):
            message = f"the loss is {counts.sums[0]} before global step {counts.step}; try a lower learning rate"
            raise NotFiniteError(message)
        if steps:
            self._scheduler.steps_per_sec = steps / (now - self._changed_at)
            self._changed_at = now
            self.progress = self._progress(float(loss / steps))
            self._report(self.progress)
        return counts

    def _progress(self, loss: float) -> Progress:
        counts = self._counts
        return Progress(
            global_step=counts.step,
            local_steps=tuple(map(int, counts.aggregated)),
            examples=self._origin.examples + int(counts.sums[1]),
            loss=loss,
            metrics=counts.sums[2:],
        )

    def evaluate(self, split: str, pause_request: PauseRequests = never) -> Evaluation:
        """Evaluates the split in ranges; each worker that is free takes the next one."""
        function = self._evaluate_function = self._evaluate_function or self._graphs.evaluate_function()
        size, at_once, quiet_secs = self._sizes[split], self._graphs.evaluated_at_once, self._scheduler.quiet_secs()
        return evaluate_split(
            self._coordinator, function, self.metrics, split, size, at_once, pause_request, quiet_secs
        )

    def updates_applied(self) -> int:
        """From the gradients that are in steps; the global step comes from another counter of the ps."""
        gradients = self._graphs.deciding.counts().aggregated.sum() - self._origin.aggregated.sum()
        return self._origin.step + int(gradients) // self._graphs.replicas

    def arrays(self) -> dict[str, np.ndarray]:
        return self._read_all.arrays()

    def random_states(self) -> dict[str, np.ndarray]:
        return self._random_states(self.progress.global_step)

    def apply(self, change: Change) -> None:
        assign(self._named, change.arrays)
        if change.learning_rate is not None:
            for part in self._graphs.parts:
                part.optimizer.learning_rate = change.learning_rate

    def broadcast(self, packed: bytes) -> bytes:
        # The coordinator alone drives the training.
        return packed

    def freeze(self) -> Frozen:
        counts = self._graphs.deciding.counts()
        positions = [int(each) for each in self._origin.offsets + counts.pushed]
        mode = self._config.mode
        facts = saved_facts(self._config, mode, self.progress, self.target_step, self.sharding, positions)
        own = {EARLIER_ARRAY: np.array(self.earlier_updates)} if self.earlier_updates else {}
        own[GRADIENTS_ARRAY] = np.stack([counts.aggregated, counts.dropped])
        step, own, fetch = self.progress.global_step, self._trained | own, self._read_all.freeze()
        return lambda: Snapshot(step, fetch() | own, facts)

    def snapshot(self) -> Snapshot:
        return self.freeze()()

    def finalize(self) -> None:
        self._trained = finalize(self._named, [(part.optimizer, part.trainable) for part in self._graphs.parts])

    def facts(self) -> dict[str, Any]:
        """The gradients of each worker: those that are in the steps, and those that came too late."""
        counts = self._graphs.deciding.counts()
        return {
            "replicas_to_aggregate": self._graphs.replicas,
            "aggregated": counts.aggregated.tolist(),
            "dropped": counts.dropped.tolist(),
        }

    def histograms(self) -> dict[str, np.ndarray]:
        return {}

    @property
    def optimizer(self) -> keras.Optimizer:
        """The optimizer of the first ps; those of the others have the same settings."""
        return self._graphs.parts[0].optimizer

    def finish(self, result: Evaluation | None) -> None:
        say_farewell(self._cluster, {"final": result.headline if result else None}, FAREWELL_TIMEOUT_SECS)

    def abandon(self, reason: str) -> None:
        say_farewell(self._cluster, {"failure": reason}, FAREWELL_TIMEOUT_SECS)
