"""The graphs of training with parameter servers: what a worker does for each call of the coordinator.

In each step a worker pulls all variables of a ps, computes, and pushes their changes to each ps;
within a call, what one step pushes and the next one pulls is one exchange with the ps. A transfer
costs a call, so small variables are packed (see `wire`).

A loop across devices costs messages in every iteration, a millisecond or two of all cores, so the steps of a call are
unrolled. How many there are is decided before the first step: a call of another length would be another function.
"""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Layout
from tf2dist.data.passes import NumberedSteps
from tf2dist.model import support
from tf2dist.model.evaluation import chunk_size
from tf2dist.model.model_checks import note_on_phases
from tf2dist.model.packing import narrow_dtype
from tf2dist.model.recurrence import recurrence_of
from tf2dist.model.shards import Values, all_parts, by_id, global_clipping, join, parts_of, split
from tf2dist.model.source import EpochPlan, MakeOptimizer
from tf2dist.model.step import Step, step_place
from tf2dist.tf_internals.tensorflow import as_one_node
from tf2dist.training.loop import steps_to_pause, unrolled_steps
from tf2dist.training.parameter_server.algorithms import algorithm_of
from tf2dist.training.parameter_server.batches import (
    BatchNumbers,
    EndingNumbers,
    Input,
    SharedNumbers,
    WorkerNumbers,
    evaluated_batch,
    evaluated_examples,
    gathered_batches,
    remote_batches,
)
from tf2dist.training.parameter_server.counters import TOTALS, AsyncOrigin, PsOrigin
from tf2dist.training.parameter_server.rows import Routed, Routing
from tf2dist.training.parameter_server.server import NO_UPDATE, ModelPart, ParameterServer, PartSpec
from tf2dist.training.parameter_server.wire import Pulled, Request, WireTensors, add_request
from tf2dist.training.setup import RunPlan, TaskContext
from tf2dist.training.stragglers import Stragglers

ACCELERATOR = "GPU:0"  # of each worker, which sees no other worker's; without one TensorFlow takes its CPU


# Of what was pulled for a step: what `_exchange` or `_push` returns, and the loss.
TrainStep = Callable[[list[WireTensors]], tuple[Any, tf.Tensor]]


@dataclass(frozen=True)
class PsCall:
    """The call of a worker, in the graph that is made for it.

    Attributes:
        worker: its index.
        local_steps: its steps that the ps have counted before the call.
        batches: the numbers of its batches, int64 [steps].
        limits: on each ps for each step, the updates beyond which it is refused; with mode=sync_replicas the ps know.
        indices: where each ps counts the updates of the worker with mode=async.
    """

    worker: tf.Tensor
    local_steps: tf.Tensor
    batches: tf.Tensor
    limits: Sequence[Sequence[tf.Tensor]] = ()
    indices: Sequence[tf.Tensor] = ()


class PsGraphs(abc.ABC):
    """The parameter servers of a run, and the functions that workers run against them: the rule of its mode.

    The rule says when the ps apply an update, and what that asks of a run. Everything is traced outside the strategy's
    scope: under it a Keras optimizer asks for a replica context, which there is none of on a ps.

    Attributes:
        way: by which it trains, with what it refuses.
        ways_on_several_ps: with what it refuses there in addition.
        origin: where the run begins.
        servers: those on which the variables lie.
        evaluated_at_once: how many examples, at most.
        evaluated_batches: how many so far, by which the coordinator sees the workers' progress.
        stragglers: the delays that are simulated, and the recording of the steps' times.
        steps_per_call: how many steps a call has.

    Args:
        plan: of the run.
        step: of a model whose variables lie on the ps.
        make_optimizer: for each ps.
        earlier_updates: that the optimizer has applied before this run.
    """

    way: support.Way
    ways_on_several_ps: tuple[support.Way, ...] = (support.SEVERAL_PS,)
    origin: PsOrigin
    servers: Sequence[ModelPart]

    def __init__(
        self, context: TaskContext, plan: RunPlan, step: Step, make_optimizer: MakeOptimizer, earlier_updates: int
    ) -> None:
        config, epochs = context.config, context.source.plan
        self.config, self.step, self.sharding, self.splits = config, step, plan.sharding, context.splits
        self.stragglers = Stragglers(config)
        self.evaluated_at_once = chunk_size(config.train.batch_size_per_worker, step, self.splits, epochs)
        self.new_optimizer: Callable[[], keras.Optimizer] = functools.partial(make_optimizer, plan.target_step)
        self._make_servers(self._parts(earlier_updates))
        self.routing = Routing(step.tables, [server.tables for server in self.servers])
        with tf.device(self.servers[0].device):
            self.evaluated_batches = tf.Variable(0, dtype=tf.int64, trainable=False, name="evaluated_batches")
        self._input = self._make_input(plan.start)
        step.loss_scale = self.servers[0].loss_scale
        self._compute = self._traced_compute()
        self._route = self._traced_route()
        to_pause = self._steps_of_worker(steps_to_pause(config, epochs, plan.sharding, plan.target_step))
        travelling = [variable for server in self.servers for variable in server.variables]
        chosen = min(unrolled_steps(self._compute, travelling, to_pause), self.stragglers.max_steps)
        self.steps_per_call = self._asked_steps(epochs) or chosen

    def _asked_steps(self, epochs: EpochPlan | None) -> int | None:
        """The steps in a call that the user asks for; in `fit` each worker gets a part of every epoch in any case."""
        asked = self.config.train.steps_per_execution
        if not (asked and epochs):
            return asked
        return min(asked, max(1, math.ceil(self._steps_of_worker(self.sharding.updates_per_pass))))

    def _parts(self, earlier_updates: int) -> list[PartSpec]:
        """The part of the model that each ps gets."""
        # As often as a variable is in both: a call may assign a trained one, as spectral normalization does.
        trainable, state = all_parts(self.step.trainable), all_parts(self.step.state)
        tables = set(map(id, all_parts(self.step.tables)))
        devices = sorted({v.value.device for v in [*trainable, *state]})
        return [
            PartSpec(
                device=device,
                trainable=[v for v in trainable if v.value.device == device],
                state=[v for v in state if v.value.device == device],
                make_optimizer=self.new_optimizer,
                num_workers=self.sharding.num_shards,
                num_metrics=self.step.metrics.size if device == devices[0] else 0,  # the sums are read from one ps
                earlier_updates=earlier_updates,
                narrow=narrow_dtype(self.config.cluster.transfer_dtype),
                tables=[v for v in trainable if v.value.device == device and id(v) in tables],
            )
            for device in devices
        ]

    def train_function(self, num_steps: int) -> Any:
        """``function(*limit)``: `num_steps` steps; `limit`: see `PsCall`, if any."""

        def steps(*limit: tf.Tensor) -> None:
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            with tf.device("CPU:0"):
                call = self._begin(num_steps, worker, *limit)
                batches = self._input(worker, call.batches)
                routed = [self._route(batch) for batch in batches]
            sent: Any = self._pull(call, routed[0].requests)
            losses = [tf.zeros([])]
            for number, batch in enumerate(batches, 1):
                with tf.device(ACCELERATOR):
                    # Waits for no earlier step: the batches of a call are on their way while it computes.
                    on_device = [tf.identity(leaf) for leaf in batch]
                train = functools.partial(self._train_step, call, number, on_device, routed)
                sent, loss = self._train_if_open(call, sent, train, losses[-1], is_last=number == num_steps)
                losses.append(loss)
            self._log(call, sent, tf.reduce_mean(losses[1:]))

        return tf.function(steps, autograph=False).get_concrete_function(*self._limit_types())

    def _train_step(
        self, call: PsCall, number: int, batch: list[tf.Tensor], routed: list[Routed], pulled: list[WireTensors]
    ) -> tuple[Any, tf.Tensor]:
        """One step of a call; returns what the next one pulls, or what `_push` does if it is the last, and the loss.

        Args:
            number: of the step in its call, from 1.
            routed: of all steps of the call.
        """
        pulled = self.stragglers.delayed(pulled, call.worker, call.local_steps, number)
        with tf.device(ACCELERATOR):
            pushes, loss = self._compute(pulled, batch, call.worker, routed[number - 1])
        pushes = self.stragglers.computed(pushes, call.worker)
        if number < len(routed):
            return self._exchange(call, pushes, number, routed[number].requests), loss
        return self._push(call, pushes, number), loss

    def evaluate_function(self) -> Any:
        """``function(number, first, last)``: the sums over that range of a split; see `Step.evaluate`.

        `number`: of the split in `EVALUATED`.
        """

        def evaluate(number: tf.Tensor, first: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
            values = self._pull_exactly()
            examples = evaluated_examples(number, tf.range(first, last), layout)
            return self._evaluated(values, examples, layout)

        layout = self.splits.evaluated_layout
        scalar = tf.TensorSpec([], tf.int32)
        return tf.function(evaluate, autograph=False).get_concrete_function(scalar, scalar, scalar)

    def evaluate_stream_function(self) -> Any:
        """``function(shard)``: the sums over that part of the stream to validate on; see `Step.evaluate`."""
        layout = self.splits.evaluated_layout

        def evaluate(shard: tf.Tensor) -> tf.Tensor:
            values = self._pull_exactly()

            def batch(leaves: list[tf.Tensor], sums: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
                sums += self._evaluated(values, leaves, layout)
                return evaluated_batch(shard, False, layout), sums

            begin = evaluated_batch(shard, True, layout), tf.zeros([1 + self.step.evaluated.size], tf.float64)
            shapes = [spec.shape for spec in layout.batched(None)], begin[1].shape
            return tf.while_loop(lambda leaves, _: tf.shape(leaves[0])[0] > 0, batch, begin, shapes)[1]

        return tf.function(evaluate, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))

    def _pull_exactly(self) -> Values:
        """Values for an evaluation, all but the rows of tables."""
        values: Values = {}
        for server in self.servers:
            values |= by_id(server.variables, server.exact_layout.unpack(server.pull_exactly()).values)
        return values

    def _evaluated(self, values: Values, leaves: list[tf.Tensor], layout: Layout) -> tf.Tensor:
        """The sums over some examples; see `Step.evaluate`."""
        with tf.device("CPU:0"):
            routed = self.routing.route(self.step.lookups.look_up(leaves, False, layout))
        for server, request in zip(self.servers, routed.requests, strict=True):
            values = values | by_id(server.tables, server.rows_exactly(request))
        trainable, state = self.inputs(values)
        sums = self.step.evaluate(trainable, state, leaves, layout, routed.positions)
        with tf.control_dependencies([sums]):
            self.evaluated_batches.assign_add(1)
        return sums

    # What a rule decides.

    @classmethod
    @abc.abstractmethod
    def check_model(cls, context: TaskContext, step: Step) -> str:
        """Raises ConfigError for a model that cannot be trained so; returns `PreparedRun.note`."""

    @classmethod
    def why_no_rows(cls, config: RunConfig, optimizer: keras.Optimizer) -> str:
        """Why tables travel as a whole; empty if their rows may, see `model.row_choice`."""
        return ""

    @abc.abstractmethod
    def restore(self) -> None:
        """Lets the ps go on counting from `origin`; to be called before any push."""

    @abc.abstractmethod
    def read_counters(self) -> None:
        """Calls every function that the coordinator calls during a training."""

    @abc.abstractmethod
    def _make_servers(self, parts: list[PartSpec]) -> None:
        """Sets `servers`, one for each part."""

    @abc.abstractmethod
    def _make_input(self, start: Snapshot | None) -> Input:
        """Sets `origin`; returns the input of the workers, which begins there."""

    def _steps_of_worker(self, global_steps: int) -> float:
        """How many of so many global steps a worker takes part in."""
        return global_steps

    def _limit_types(self) -> list[tf.TensorSpec]:
        """The type of the limit, if a call has one."""
        return []

    def batch_types(self) -> list[tf.TensorSpec]:
        """The types of a batch of the input."""
        return self.step.layout.batched(None)

    @abc.abstractmethod
    def _compute_step(
        self, pulled: list[WireTensors], leaves: list[tf.Tensor], worker: tf.Tensor, routed: Routed
    ) -> tuple[list[WireTensors], tf.Tensor]:
        """On the worker: what was pulled from each ps in, what to push to each ps out, and the loss."""

    # How a worker speaks to the ps in a call.

    @abc.abstractmethod
    def _begin(self, num_steps: int, worker: tf.Tensor, *limit: tf.Tensor) -> PsCall:
        """Asks the ps which batches the call takes, and how many steps of the worker they have counted.

        The call of a lost worker begins anew on another one: with new batch numbers, another pull, and new numbers of
        updates. Nothing that the lost worker has computed is sent again.
        """

    @abc.abstractmethod
    def _pull(self, call: PsCall, requests: list[Request]) -> list[WireTensors]:
        """Pulls from each ps for the first step of a call; `requests`: of rows, see `Routed`."""

    def _train_if_open(
        self, call: PsCall, pulled: list[WireTensors], train: TrainStep, loss: tf.Tensor, *, is_last: bool
    ) -> tuple[Any, tf.Tensor]:
        """What `train` returns for what was pulled; or the like without a step, where the ps have said that it is over.

        Args:
            loss: of the step before, which the worker's log then shows.
            is_last: whether the step is the last one of its call.
        """
        return train(pulled)

    @abc.abstractmethod
    def _exchange(
        self, call: PsCall, pushes: list[WireTensors], number: int, requests: list[Request]
    ) -> list[WireTensors]:
        """Pushes to each ps; returns what the next step pulls.

        Args:
            number: of the step in its call, from 1.
            requests: of the rows that the next step pulls.
        """

    @abc.abstractmethod
    def _push(self, call: PsCall, pushes: list[WireTensors], number: int) -> tf.Tensor:
        """Pushes of the last step of a call, `number`, to each ps; returns what is counted then."""

    @abc.abstractmethod
    def _position(self, counted: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The worker's own steps and the global step, int64, in what `_push` returns."""

    # What all have in common.

    def _traced_compute(self) -> Any:
        """The step on a worker, traced once for the functions of any number of steps."""
        if self.config.devices.xla:
            compute = tf.function(self._compute_step, autograph=False, jit_compile=True)
        else:
            compute = as_one_node(self._compute_step)
        pulled = [server.pull_layout.specs for server in self.servers]
        requests: list[Request] = [server.pull_layout.rows.request_types for server in self.servers]
        routed = Routed(requests, [tf.TensorSpec([None], tf.int32) for _ in self.step.tables])
        return compute.get_concrete_function(pulled, self.batch_types(), tf.TensorSpec([], tf.int64), routed)

    def _traced_route(self) -> Callable[[list[tf.Tensor]], Routed]:
        """Whom to ask for the rows of a batch. Traced in each of 50 steps, it would make a run begin 2 s later."""

        def route(batch: list[tf.Tensor]) -> Routed:
            return self.routing.route(self.step.lookups.look_up(batch[: len(self.step.layout.specs)]))

        return as_one_node(route).get_concrete_function(self.batch_types()) if self.step.tables else route

    def unpack(self, pulled: list[WireTensors], requests: list[Request]) -> tuple[list[Pulled], Values]:
        """Reads what was pulled from each ps; returns that, and the values of all parts: of tables the rows."""
        parts = zip(self.servers, pulled, requests, strict=True)
        unpacked = [server.pull_layout.unpack(buckets, request) for server, buckets, request in parts]
        values: Values = {}
        for server, one in zip(self.servers, unpacked, strict=True):
            values |= by_id([*server.variables, *server.tables], [*one.values, *one.rows])
        return unpacked, values

    def inputs(self, values: Values) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The values of the trainable variables, of tables the rows; and of the state."""
        return self.routing.join(self.step.trainable, values), join(self.step.state, values)

    def divide(self, gradients: list[tf.Tensor], requests: list[Request]) -> Values:
        """The gradients of the parts of variables; of tables those of the rows."""
        return self.routing.split(self.step.trainable, gradients, requests)

    def _log(self, call: PsCall, after: tf.Tensor, loss: tf.Tensor) -> None:
        """Prints into the worker's own log whenever it has passed a multiple of log_every_steps."""
        local_step, global_step = self._position(after)
        epoch = tf.maximum(global_step - 1, 0) // self.sharding.updates_per_pass
        where = {"worker": call.worker} | ({} if self.sharding.ends_with_data else {"epoch": epoch})
        numbers = where | {"global_step": global_step, "local_step": local_step}
        texts = [f"{name}=" for name in numbers], [tf.as_string(number) for number in numbers.values()]
        parts = [part for pair in zip(*texts, [", "] * len(numbers), strict=True) for part in pair]
        line = tf.strings.join([*parts, "loss=", tf.as_string(loss, precision=4)])
        every = self.config.train.log_every_steps
        tf.cond(local_step // every != call.local_steps // every, lambda: tf.print(line), tf.no_op)


class AsyncGraphs(PsGraphs):
    """The graphs of mode=async, in which each ps applies an update as soon as it has come, as an algorithm says."""

    way = support.ASYNC
    origin: AsyncOrigin
    servers: Sequence[ParameterServer]

    def __init__(self, *args: Any) -> None:
        self._decays: dict[int, float] = {}  # of the state that a step changes, by id of the variable
        super().__init__(*args)
        for server in self.servers:
            server.trace_functions(self._decays)

    @classmethod
    def check_model(cls, context: TaskContext, step: Step) -> str:
        support.check_step(support.ASYNC, context.source.name, step)
        return note_on_phases(step)

    @classmethod
    def why_no_rows(cls, config: RunConfig, optimizer: keras.Optimizer) -> str:
        return algorithm_of(config).why_no_rows

    def restore(self) -> None:
        for server in self.servers:
            server.restore(self.origin.counts)

    def read_counters(self) -> None:
        tf.identity(self.servers[0].counts())

    def _steps_of_worker(self, global_steps: int) -> float:
        return global_steps / self.sharding.num_shards

    def _make_servers(self, parts: list[PartSpec]) -> None:
        algorithm = algorithm_of(self.config)
        self.servers = [ParameterServer(part, algorithm) for part in parts]
        # Each ps sees only some of the gradients.
        self._clip = global_clipping(self.new_optimizer(), self.step.trainable)

    def _make_input(self, start: Snapshot | None) -> Input:
        server, sharding, layout = self.servers[0], self.sharding, self.splits.layout
        self.origin = origin = AsyncOrigin.of(start, sharding, self.step.metrics.size)
        if self.splits.stream:
            kind = EndingNumbers if sharding.ends_with_data else WorkerNumbers
            self.batch_numbers: BatchNumbers = kind(server, origin.offsets, sharding)
            return lambda worker, numbers: remote_batches(worker, numbers[0], numbers.shape[0], layout)
        steps = NumberedSteps(sharding, origin.begin)
        self.batch_numbers = SharedNumbers(server, steps, sharding)
        return lambda _, numbers: gathered_batches(tf.stack(steps.ranges(numbers), 1), sharding, layout)

    def _limit_types(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([], tf.int64)]

    def _compute_step(
        self, pulled: list[WireTensors], leaves: list[tf.Tensor], worker: tf.Tensor, routed: Routed
    ) -> tuple[list[WireTensors], tf.Tensor]:
        unpacked, values = self.unpack(pulled, routed.requests)
        trainable, state = self.inputs(values)
        place = step_place(worker, unpacked[0].applied.value())
        output = self.step(trainable, state, leaves, place, positions=routed.positions)
        clipped = self._clip(by_id(self.step.trainable, output.gradients))
        changes = self.divide(list(clipped.values()), routed.requests)
        for variable, new, old in zip(self.step.state, output.state, state, strict=True):
            if new is not old:
                decay, term = recurrence_of(new, old)
                self._decays |= {id(part): decay for part in parts_of(variable)}
                changes |= split([variable], [term])
        pushes = []
        for server, one, request in zip(self.servers, unpacked, routed.requests, strict=True):
            layout = server.push_layout(self._decays)
            back, sums = [values[id(v)] for v in layout.pulled], output.sums[: server.num_sums]
            own, rows = ([changes[id(v)] for v in variables] for variables in (layout.variables, layout.tables))
            pushes.append(layout.pack(own, one.applied, sums, back, rows, request))
        return pushes, output.sums[0]

    def _begin(self, num_steps: int, worker: tf.Tensor, *limit: tf.Tensor) -> PsCall:
        (own,) = limit
        local_steps, first, count = tf.unstack(self.batch_numbers.next_batches(worker, num_steps))
        # The last call before a pause may have fewer batches. What it computes beyond them, from one of them, counts
        # for nothing.
        numbers = first + tf.minimum(tf.range(num_steps, dtype=tf.int64), tf.maximum(count - 1, 0))
        limits = []
        for server in self.servers:
            with tf.device(server.device):  # a tensor of the worker's would cost a transfer in each step
                has_batch = tf.range(num_steps, dtype=tf.int64) < count
                limits.append(tf.unstack(tf.where(has_batch, own, NO_UPDATE)))
        return PsCall(
            worker, local_steps, numbers, limits, [server.counters.indices(worker) for server in self.servers]
        )

    def _pull(self, call: PsCall, requests: list[Request]) -> list[WireTensors]:
        return [server.pull(*request) for server, request in zip(self.servers, requests, strict=True)]

    def _exchange(
        self, call: PsCall, pushes: list[WireTensors], number: int, requests: list[Request]
    ) -> list[WireTensors]:
        with tf.device("CPU:0"):  # where the ids are
            pushes = [add_request(push, request) for push, request in zip(pushes, requests, strict=True)]
        parts = zip(self.servers, pushes, call.indices, call.limits, strict=True)
        return [server.exchange(push, indices, limits[number - 1]) for server, push, indices, limits in parts]

    def _push(self, call: PsCall, pushes: list[WireTensors], number: int) -> tf.Tensor:
        parts = zip(self.servers, pushes, call.indices, call.limits, strict=True)
        first, *_ = [server.push(push, indices, limits[number - 1]) for server, push, indices, limits in parts]
        return first

    def _position(self, counted: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(counted[TOTALS.index("steps")], tf.int64), tf.cast(counted[-1], tf.int64)
