"""mode=sync_replicas: the rule by which every step is the mean of K gradients, its calls and its loop.

The parameter servers decide alone what is in a step; see `sync_replicas_servers`. The coordinator supplies the workers
with calls, opens the servers for a training and closes them at its end.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import InputFacts, Snapshot
from tf2dist.checkpoint.state import input_facts
from tf2dist.config.schema import RunConfig
from tf2dist.data.passes import NumberedSteps
from tf2dist.errors import NotFiniteError
from tf2dist.model import support
from tf2dist.model.model_checks import check_batches
from tf2dist.model.shards import parts_of, split
from tf2dist.model.step import Step, step_place
from tf2dist.tf_internals.keras import inner_optimizers
from tf2dist.training.loop import PauseRequest, PauseRequests, Progress, Report
from tf2dist.training.parameter_server.async_loop import PsLoop
from tf2dist.training.parameter_server.async_setup import PsRun
from tf2dist.training.parameter_server.batches import Batches, Input, gathered_batches, own_number
from tf2dist.training.parameter_server.graphs import PsCall, PsGraphs, TrainStep
from tf2dist.training.parameter_server.rows import Routed
from tf2dist.training.parameter_server.schedule import MAX_LOOK_SECS, Scheduler, longest_silence
from tf2dist.training.parameter_server.server import PartSpec
from tf2dist.training.parameter_server.sync_replicas_counters import (
    GRADIENTS_ARRAY,
    GradientCounts,
    SyncReplicasOrigin,
)
from tf2dist.training.parameter_server.sync_replicas_servers import DecidingServer, FollowingServer
from tf2dist.training.parameter_server.wire import Request, WireTensors
from tf2dist.training.setup import TaskContext


class SyncReplicasGraphs(PsGraphs):
    """The graphs of mode=sync_replicas; see `sync_replicas_servers`.

    Attributes:
        server_class: of the ps that decides.
        deciding, following: the servers.
        replicas: the gradients that make a step.
        steps: of the input, by their numbers.
    """

    way = support.SYNC_REPLICAS
    ways_on_several_ps = (support.SEVERAL_PS, support.SYNC_REPLICAS_ON_SEVERAL_PS)
    server_class = DecidingServer
    origin: SyncReplicasOrigin
    servers: Sequence[DecidingServer | FollowingServer]

    @classmethod
    def check_model(cls, context: TaskContext, step: Step) -> str:
        name = context.source.name
        support.check_step(support.SYNC_REPLICAS, name, step)
        if context.config.batches_per_update(context.cluster.num_workers) == 1:
            return ""
        support.check_step(support.SEVERAL, name, step)
        support.check_step(support.SEVERAL_REPLICAS, name, step)
        return check_batches(name, step, context.splits, gathers=False)

    @classmethod
    def why_no_rows(cls, config: RunConfig, optimizer: keras.Optimizer) -> str:
        # The optimizer of a ps gets the rows of each table apart.
        clips = any(inner.global_clipnorm for inner in inner_optimizers(optimizer))
        return "global_clipnorm is the norm of all gradients together" if clips else ""

    def restore(self) -> None:
        self.deciding.restore(self.origin.step, self.origin.aggregated, self.origin.dropped)
        for server in self.following:
            server.restore(self.origin.step)

    def read_counters(self) -> None:
        self.deciding.close()
        self.deciding.counts()

    def _make_servers(self, parts: list[PartSpec]) -> None:
        numbers = self.step.lookups.num_lookups(self.config.train.batch_size_per_worker)
        pairs = zip(self.step.tables, numbers, strict=True)
        of_parts = {id(part): number for table, number in pairs for part in parts_of(table)}
        (first, own), *others = [(part, [of_parts[id(table)] for table in part.tables]) for part in parts]
        self.replicas = self.config.batches_per_update(self.sharding.num_shards)
        self.deciding = self.server_class(first, self.replicas, own)
        self.following = [FollowingServer(*other) for other in others]
        self.servers = [self.deciding, *self.following]

    def _make_input(self, start: Snapshot | None) -> Input:
        self.origin = SyncReplicasOrigin.of(start, self.sharding)
        self.steps = NumberedSteps(self.sharding, self.origin.begin)
        return self._batches_with_shares

    def _batches_with_shares(self, worker: tf.Tensor, numbers: tf.Tensor) -> Batches:
        """In the graph of a call; see `Input`. To the leaves of each batch its share is added, float32 [].

        The workers cut an epoch as with mode=sync: each has the same number of batches. So in its last step a worker
        may have fewer examples than the others, or one of padding, and the share says how much its gradient counts: 1
        for a full batch, 0 for padding.
        """
        first, last = self.steps.ranges(numbers)
        begin, count = self.sharding.share(first, last, worker)
        begin = tf.minimum(begin, last - 1)  # of padding
        ranges = tf.stack([begin, begin + tf.maximum(count, 1)], 1)
        shares = tf.unstack(tf.cast(count, tf.float32) / self.sharding.batch_size, ranges.shape[0])
        gathered = gathered_batches(ranges, self.sharding, self.step.layout)
        return [[*leaves, share] for leaves, share in zip(gathered, shares, strict=True)]

    def batch_types(self) -> list[tf.TensorSpec]:
        return [*super().batch_types(), tf.TensorSpec([], tf.float32)]

    def _compute_step(
        self, pulled: list[WireTensors], leaves: list[tf.Tensor], worker: tf.Tensor, routed: Routed
    ) -> tuple[list[WireTensors], tf.Tensor]:
        *leaves, share = leaves
        unpacked, values = self.unpack(pulled, routed.requests)
        step = unpacked[0].applied
        trainable, state = self.inputs(values)
        output = self.step(trainable, state, leaves, step_place(worker, step.value()), share, routed.positions)
        # Changes rather than values, as with mode=sync: their weighted sum over the replicas becomes the mean.
        of_state = split(
            self.step.state,
            [tf.cast(new - old, tf.float32) * share for new, old in zip(output.state, state, strict=True)],
        )
        changes = self.divide(output.gradients, routed.requests)
        pushes: list[WireTensors] = []
        for server, request in zip(self.servers, routed.requests, strict=True):
            own = [*(changes[id(v)] for v in server.whole), *(of_state[id(v)] for v in server.state)]
            rows = [changes[id(table)] for table in server.tables]
            pushes.append(server.push_layout.pack(own, share, output.sums, step, rows, request))
        return pushes, tf.math.divide_no_nan(output.sums[0], share)

    def _begin(self, num_steps: int, worker: tf.Tensor, *limit: tf.Tensor) -> PsCall:
        local_steps = self.deciding.pushed_by(worker)[0]
        first = own_number(self.origin.offsets, worker, local_steps)
        return PsCall(worker, local_steps, first + tf.range(num_steps, dtype=tf.int64))

    def _pull(self, call: PsCall, requests: list[Request]) -> list[WireTensors]:
        return self._follow(self.deciding.begin(call.worker, *requests[0]), requests)

    def _train_if_open(
        self, call: PsCall, pulled: list[WireTensors], train: TrainStep, loss: tf.Tensor, *, is_last: bool
    ) -> tuple[Any, tf.Tensor]:
        def skip() -> tuple[Any, tf.Tensor]:
            return (self.deciding.pushed_by(call.worker) if is_last else pulled), loss

        # The steps that calls have left when the training is over change nothing, but those of a large model would send
        # it both ways for minutes over a slow network. To ask costs a small model a third of its rate.
        if all(len(server.push_layout.specs) == 1 for server in self.servers):
            return train(pulled)
        with tf.device("CPU:0"):
            is_open = self.deciding.was_open(pulled[0])
        after: tuple[Any, tf.Tensor] = tf.cond(is_open, lambda: train(pulled), skip)
        return after

    def _exchange(
        self, call: PsCall, pushes: list[WireTensors], number: int, requests: list[Request]
    ) -> list[WireTensors]:
        with tf.control_dependencies(self._leave_at_following(call, pushes)):
            return self._follow(self.deciding.exchange(pushes[0], call.worker, *requests[0]), requests)

    def _push(self, call: PsCall, pushes: list[WireTensors], number: int) -> tf.Tensor:
        with tf.control_dependencies(self._leave_at_following(call, pushes)):
            return self.deciding.push(pushes[0], call.worker)

    def _leave_at_following(self, call: PsCall, pushes: list[WireTensors]) -> list[tf.Tensor]:
        # The deciding ps must not take a gradient of which another ps has no part.
        return [server.keep(push, call.worker) for server, push in zip(self.following, pushes[1:], strict=True)]

    def _follow(self, pulled: WireTensors, requests: list[Request]) -> list[WireTensors]:
        """The tensors that all ps send, from those of the deciding one."""
        last = self.deciding.pull_layout.unpack(pulled)
        parts = zip(self.following, requests[1:], strict=True)
        return [pulled, *(server.follow(last.applied.bits, last.made_by, *request) for server, request in parts)]

    def _position(self, counted: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pushed, step = tf.unstack(counted)
        return pushed, step


class SyncReplicasScheduler(Scheduler):
    """The calls to the workers of mode=sync_replicas: as many to each of them.

    A step may need a gradient of every worker. So no worker may lack a call while another one waits in its own for the
    end of the step, and the calls end all together: when the ps stop to take gradients, nobody waits any more.
    `steps_per_sec` is the rate of global steps.
    """

    graphs: SyncReplicasGraphs

    def begin(self, counts: GradientCounts) -> None:
        """Begins a training; no call may be in flight."""
        self._num_scheduled = counts.begun
        self._first = counts

    def fill(self, counts: GradientCounts, missing: int, is_stalled: bool) -> None:
        """Schedules calls until enough of them wait for a worker.

        Args:
            missing: the global steps that are still to be made.
            is_stalled: whether nothing has been pushed for a while.
        """
        # A call that TensorFlow repeats after its worker was lost has begun twice: then rather too many wait here.
        waiting = self._num_scheduled - counts.begun
        for _ in range(waiting, self.num_workers * self._calls_to_keep(counts, missing, is_stalled)):
            self.schedule_call()
            self._num_scheduled += 1

    def _calls_to_keep(self, counts: GradientCounts, missing: int, is_stalled: bool) -> int:
        """How many calls should wait for each worker."""
        pushes_per_sec = self.steps_per_sec * self.graphs.deciding.quota
        ahead = 1 + int(2 * MAX_LOOK_SECS * pushes_per_sec / self.num_steps)
        # What the calls that have begun will still push. If nothing moves, this is an error of the count: the pushes of
        # a lost worker never came.
        begun, pushed = counts.begun - self._first.begun, counts.pushed.sum() - self._first.pushed.sum()
        running = 0 if is_stalled else max(0, begun * self.num_steps - int(pushed))
        left = missing * self.graphs.deciding.quota - running // self.num_workers
        return min(ahead, max(0, -(-left // self.num_steps)))

    def _sign_of_progress(self) -> Any:
        counts = self.graphs.deciding.counts()
        return counts.begun, int(counts.pushed.sum()), counts.refused

    def quiet_secs(self) -> float:
        # All workers take part in a step.
        return longest_silence(self.steps_per_sec, 1, self.grace_secs)


class SyncReplicasLoop(PsLoop):
    """The loop of mode=sync_replicas, in which a global step is the mean of K gradients."""

    mode, graphs_class, scheduler_class = "sync_replicas", SyncReplicasGraphs, SyncReplicasScheduler
    _graphs: SyncReplicasGraphs
    _scheduler: SyncReplicasScheduler
    _origin: SyncReplicasOrigin

    def __init__(self, context: TaskContext, run: PsRun, report: Report) -> None:
        super().__init__(context, run, report)
        self._counts = self._graphs.deciding.counts()  # as they were read last
        self.progress = self._progress(math.nan)

    def _train(self, until_step: int, pause_request: PauseRequests) -> PauseRequest:
        scheduler, deciding = self._scheduler, self._graphs.deciding
        deciding.open(until_step)
        scheduler.begin(deciding.counts())
        try:
            requested = self._supply(until_step, pause_request)
        except NotFiniteError:
            deciding.close()  # or the workers would wait for the end of a step that will have none
            raise
        deciding.close()
        # The calls in flight can change nothing any more, so a stop does not wait for them.
        if PauseRequest.STOP not in requested:
            requested |= scheduler.finish(pause_request)
        return requested

    def _supply(self, until_step: int, pause_request: PauseRequests) -> PauseRequest:
        """Supplies the workers with calls until all steps are made, or until a pause is requested."""
        scheduler, seen = self._scheduler, (-1, -1)
        self._changed_at = time.monotonic()
        while True:
            scheduler.all_done()  # raises the error of a call that has failed
            counts = self._read()
            missing = until_step - counts.step
            requested = pause_request()  # before the end is checked: a short epoch may have no other look
            if missing <= 0 or requested:
                return requested
            before, seen = seen, (counts.step, int(counts.pushed.sum()))
            is_stalled = seen == before
            if is_stalled:
                self._graphs.deciding.wake()
            scheduler.fill(counts, missing, is_stalled)
            self.read_all()  # is made here at the first time, while the workers prepare their first step
            time.sleep(scheduler.secs_to_next_look(missing))

    def _settle(self, requested: PauseRequest) -> None:
        self._align_servers()
        self._read()

    def _give_up_calls(self, until_step: int) -> None:
        self._align_servers()
        self._read()

    def _align_servers(self) -> None:
        """Brings the last step to all ps: the worker that knew of it may be lost."""
        last = self._graphs.deciding.close()
        for server in self._graphs.following:
            server.follow(last.applied.bits, last.made_by, *server.pull_layout.rows.no_rows())

    def _read(self) -> GradientCounts:
        """Reads the counters of the ps into `progress`."""
        before, self._counts = self._counts, self._graphs.deciding.counts()
        counts, now = self._counts, time.monotonic()
        loss, steps = counts.sums[0] - before.sums[0], counts.step - before.step
        # A sum that is not finite once stays so, so a single bad step is noticed however seldom this looks.
        if not np.isfinite(counts.sums[0]):
            raise self.loss_error(counts.sums[0], counts.step, counts.sums[2:])
        if steps:
            self._scheduler.steps_per_sec = steps / (now - self._changed_at)
            self._changed_at = now
            self.progress = self._progress(float(loss / steps))
            self.report(self.progress)
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

    def _clear_counted_metrics(self) -> None:
        self._graphs.deciding.counters.clear_metrics()

    def updates_applied(self) -> int:
        """From the gradients that are in steps; the global step comes from another counter of the ps."""
        gradients = self._graphs.deciding.counts().aggregated.sum() - self._origin.aggregated.sum()
        return self._origin.step + int(gradients) // self._graphs.replicas

    def _state(self) -> tuple[InputFacts, dict[str, np.ndarray]]:
        counts = self._graphs.deciding.counts()
        steps, own = counts.step - self._origin.step, {GRADIENTS_ARRAY: np.stack([counts.aggregated, counts.dropped])}
        if not self.sharding.is_by_worker:  # a step has a batch of every worker
            return input_facts(self.sharding, self._graphs.steps.position(steps)), own
        positions = self._origin.offsets + counts.pushed
        position = self._graphs.steps.position(round(positions.mean()))
        return input_facts(self.sharding, position, positions.tolist()), own

    def facts(self) -> dict[str, Any]:
        """The gradients of each worker: those that are in the steps, and those that came too late."""
        counts = self._graphs.deciding.counts()
        return {
            "replicas_to_aggregate": self._graphs.replicas,
            "aggregated": counts.aggregated.tolist(),
            "dropped": counts.dropped.tolist(),
        }
