"""The graphs of asynchronous training: what a worker does for each call of the coordinator.

In each step a worker pulls all variables of a ps, computes, and pushes their changes to each ps;
within a call, what one step pushes and the next one pulls is one exchange with the ps. A loop
across devices costs a message an iteration, so the steps are unrolled; a transfer costs a call, so
small variables are packed (see `vectors`).
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Splits
from tf2dist.data.pipeline import Sharding
from tf2dist.model.evaluate import chunk_size
from tf2dist.model.packing import transfers_of
from tf2dist.model.plan import EpochPlan
from tf2dist.model.recurrence import decay_of
from tf2dist.model.source import MakeOptimizer
from tf2dist.model.step import ModelStep, step_place
from tf2dist.process.parts import Values, all_parts, cut, join, parts_of
from tf2dist.process.tf_internals import as_one_node
from tf2dist.training.asynchronous.algorithms import algorithm_of
from tf2dist.training.asynchronous.carriers import ByMessage, carrier_of
from tf2dist.training.asynchronous.counters import TOTALS
from tf2dist.training.asynchronous.examples import evaluated_examples
from tf2dist.training.asynchronous.feeds import feed_of
from tf2dist.training.asynchronous.progress_line import print_progress
from tf2dist.training.asynchronous.server import ParameterServer
from tf2dist.training.asynchronous.vectors import PackedCount, Parcel, Pulled, PullLayout
from tf2dist.training.stragglers import stragglers_of

ACCELERATOR = "GPU:0"  # of each worker, which sees no other worker's; without one TensorFlow takes its CPU


class AsyncStep:
    """The parameter servers of a model, and the functions that workers run against them.

    Everything is traced outside the strategy's scope: under it a Keras optimizer asks for a
    replica context, which there is none of on a ps.

    Attributes:
        config: of the run.
        step: of the model.
        decays: of the state that a step changes, by id of the variable; see `recurrence`.
        feed: of the workers.
        evaluated_at_once: how many examples, at most.
        stragglers: the delays that are simulated, and the recording of the steps' times.
        carrier: how pulls and pushes travel.
        may_share_memory: whether large tensors may travel in shared memory: a worker must not push again before a ps
            has answered its last push.
        exchange_secs: how long it may take to trace what the steps of a call exchange with the ps between them.

    Args:
        step: of a model whose variables lie on parameter servers.
        splits, sharding: the data, and how the training set is cut.
        offsets: of each worker, from the steps that the ps have counted to those of its input.
        make_optimizer: for each ps.
        total_steps: updates in the whole run.
        plan: of the epochs.
        earlier_updates: that the optimizer has applied before this run.
    """

    may_share_memory = True
    _ticket: list[tf.Tensor]  # of the call, in the graph that is being made

    def __init__(
        self,
        config: RunConfig,
        step: ModelStep,
        make_optimizer: MakeOptimizer,
        splits: Splits,
        sharding: Sharding,
        offsets: list[int],
        total_steps: int,
        plan: EpochPlan | None = None,
        earlier_updates: int = 0,
    ) -> None:
        self.earlier_updates = earlier_updates
        self.config, self.sharding = config, sharding
        self.stragglers = stragglers_of(config, offsets)
        self.step = step
        self.evaluated_at_once = chunk_size(config.train.batch_size_per_worker, step, plan)
        self.new_optimizer: Callable[[], keras.Optimizer] = functools.partial(make_optimizer, total_steps)
        trainable, state = all_parts(step.trainable), all_parts(step.state)
        self.carrier = (
            carrier_of(config, PullLayout([*trainable, *state]).specs[1:]) if self.may_share_memory else ByMessage()
        )
        self.servers = [
            self._new_server(
                number,
                device,
                [v for v in trainable if v.value.device == device],
                [v for v in state if v.value.device == device],
                self.new_optimizer,
                config.optimizer["name"],
                sharding.num_shards,
                step.metrics.size,
                not (plan and plan.has_hooks),
                earlier_updates,
                algorithm_of(config.algorithm),
                transfers_of(config.cluster.transfer_dtype),
                self.carrier,
            )
            for number, device in enumerate(sorted({v.value.device for v in [*trainable, *state]}))
        ]
        self.feed = feed_of(splits, sharding, offsets, self._local_steps)
        step.loss_scale = self.servers[0].loss_scale
        self.decays: dict[int, float] = {}
        self._compute = self._traced_compute()
        began_at = time.monotonic()
        for server in self.servers:
            server.trace_push(self.decays)
        # An exchange does what a push and a pull do.
        self.exchange_secs = 2 * (time.monotonic() - began_at)

    def _new_server(self, number: int, *arguments: Any) -> ParameterServer:
        """The ps with this number, from 0; `arguments`: those of `ParameterServer`."""
        return ParameterServer(*arguments)

    def facts(self) -> dict[str, Any]:
        """For the summary of the run: what the ps know beside the counters."""
        return {}

    def random_states(self, updates: int) -> dict[str, np.ndarray]:
        """The states of the model's random generators after so many updates, by name; see `ModelStep`."""
        return self.step.random_states(updates)

    def train_function(self, num_steps: int) -> Any:
        """``function(*source, limit)``: `num_steps` steps, of which those above `limit` updates are refused.

        `source`: of `feed`.
        """

        def steps(*arguments: Any) -> None:
            *source, limit = arguments
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            before = self.servers[0].worker_totals(worker)
            indices = self.servers[0].counters.indices(worker)
            local_steps = before[TOTALS.index("steps")]
            with tf.device("CPU:0"):
                batches = self.feed.batches(tuple(source), worker, local_steps, num_steps)
            losses = []
            pulled = self._pull(worker)
            for number, batch in enumerate(batches, 1):
                limit = self._limit(limit, pulled)
                pulled = self.stragglers.delayed(pulled, worker, local_steps, number)
                with tf.device(ACCELERATOR):
                    # Waits for no earlier step: the batches of a call are on their way while it computes.
                    on_device = [tf.identity(leaf) for leaf in batch]
                    pushes, loss = self._compute(pulled, on_device, worker)
                pushes = self.stragglers.computed(pushes, worker)
                if number < num_steps:
                    pulled = self._exchange(pushes, indices, limit, worker, number)
                else:
                    after = self._push(pushes, indices, limit, worker)
                losses.append(loss)
            self._log(worker, before, after, tf.reduce_mean(losses))

        signature = self.feed.signature(num_steps)
        return tf.function(steps, autograph=False).get_concrete_function(*signature, tf.TensorSpec([], tf.int64))

    # How a worker speaks to the ps in a call; other algorithms override these.

    def _pull(self, worker: tf.Tensor) -> list[Parcel]:
        """What the first step of a call pulls from each ps."""
        self._ticket = self.carrier.begin(worker)
        return [server.pulls.take(server.pull(*self._ticket))[0] for server in self.servers]

    def _limit(self, limit: tf.Tensor, pulled: list[Parcel]) -> tf.Tensor:
        """The limit of updates for a step, from that of the step before it in the call."""
        return limit

    def _exchange(
        self, pushes: list[Parcel], indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor, number: int
    ) -> list[Parcel]:
        """Pushes to each ps; returns what the next step pulls. `number`: of the step in its call, from 1."""
        return [
            server.pulls.take(server.exchange(server.pushes.put(push, self._ticket), indices, limit))[0]
            for server, push in zip(self.servers, pushes, strict=True)
        ]

    def _push(self, pushes: list[Parcel], indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        """What the last step of a call pushes to each ps; returns what the first has counted of this worker then."""
        done = [
            server.push(server.pushes.put(push, self._ticket), indices, limit)
            for server, push in zip(self.servers, pushes, strict=True)
        ]
        self.carrier.end(self._ticket, done)
        return done[0]

    def _local_steps(self, worker: tf.Tensor) -> tf.Tensor:
        return self.servers[0].worker_totals(worker)[TOTALS.index("steps")]

    def evaluate_function(self) -> Any:
        """``function(number, first, last)``: the sums over that range of a split; see `ModelStep.evaluate`.

        `number`: of the split in `EVALUATED`.
        """

        def evaluate(number: tf.Tensor, first: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
            pulled = [server.exact_layout.unpack(server.pull_exactly()) for server in self.servers]
            values, _ = self._values_of(pulled)
            examples = evaluated_examples(number, tf.range(first, last), self.step.layout)
            return self.step.evaluate(*self.inputs(values), examples)

        scalar = tf.TensorSpec([], tf.int32)
        return tf.function(evaluate, autograph=False).get_concrete_function(scalar, scalar, scalar)

    def _traced_compute(self) -> Any:
        """The step on a worker, traced once for the functions of any number of steps."""
        if self.config.devices.xla:
            compute = tf.function(self._compute_step, autograph=False, jit_compile=True)
        else:
            compute = as_one_node(self._compute_step)
        pulled = [server.pull_layout.specs for server in self.servers]
        return compute.get_concrete_function(pulled, self.step.layout.batched(None), tf.TensorSpec([], tf.int64))

    def _compute_step(
        self, pulled: list[Parcel], leaves: list[tf.Tensor], worker: tf.Tensor
    ) -> tuple[list[Parcel], tf.Tensor]:
        """On the worker: what was pulled from each ps in, what to push to each ps out, and the loss."""
        values, counts = self.unpack(pulled)
        trainable, state = self.inputs(values)
        output = self.step(trainable, state, leaves, step_place(worker, counts[0].value()))
        gradients = output.gradients
        if self.servers[0].global_clipnorm:
            gradients, _ = tf.clip_by_global_norm(gradients, self.servers[0].global_clipnorm)
        changes = cut(self.step.trainable, gradients)
        for variable, new, old in zip(self.step.state, output.state, state, strict=True):
            if new is not old:
                decay = decay_of(new, old)
                self.note_decay(variable, decay)
                changes |= cut([variable], [new - tf.cast(decay, old.dtype) * old if decay else new])
        pushes = []
        for server, count in zip(self.servers, counts, strict=True):
            layout = server.push_layout(self.decays)
            back = [values[id(v)] for v in layout.pulled]
            pushes.append(layout.pack([changes[id(v)] for v in layout.variables], count, output.sums, back))
        return pushes, output.sums[0]

    def note_decay(self, variable: keras.Variable, decay: float) -> None:
        """Notes in `decays` how the update of a variable of the state depends on its value."""
        self.decays |= {id(part): decay for part in parts_of(variable)}

    def unpack(self, pulled: list[Parcel]) -> tuple[Values, list[PackedCount]]:
        """The values of all parts of variables, and the count of each ps."""
        return self._values_of(
            [server.pull_layout.unpack(parcel) for server, parcel in zip(self.servers, pulled, strict=True)]
        )

    def _values_of(self, pulled: list[Pulled]) -> tuple[Values, list[PackedCount]]:
        values: Values = {}
        for server, one in zip(self.servers, pulled, strict=True):
            values.update({id(v): tensor for v, tensor in zip(server.variables, one.values, strict=True)})
        return values, [one.applied for one in pulled]

    def inputs(self, values: Values) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The values of the trainable variables, and of the state."""
        return join(self.step.trainable, values), join(self.step.state, values)

    def _log(self, worker: tf.Tensor, before: tf.Tensor, after: tf.Tensor, loss: tf.Tensor) -> None:
        """Prints into the worker's own log whenever it has passed a multiple of log_every_steps."""
        steps = TOTALS.index("steps")
        local_step, global_step = tf.cast(after[steps], tf.int64), tf.cast(after[-1], tf.int64)
        every = self.config.train.log_every_steps
        earlier = tf.cast(before[steps], tf.int64)
        print_progress(worker, self.sharding.counted_steps(), global_step, local_step, earlier, loss, every)
