"""The graphs of mode=sync_replicas: what a worker does for each call of the coordinator.

As with mode=async the steps of a call are unrolled, and each is one exchange with each ps; see `servers`.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.data.pipeline import Sharding
from tf2dist.model.evaluate import chunk_size
from tf2dist.model.plan import EpochPlan
from tf2dist.model.source import MakeOptimizer
from tf2dist.model.step import ModelStep, step_place
from tf2dist.process.parts import Values, all_parts, cut, join
from tf2dist.process.tf_internals import as_one_node
from tf2dist.training.call_size import steps_to_pause, unrolled_steps
from tf2dist.training.parameter_server.examples import evaluated_examples
from tf2dist.training.parameter_server.progress_line import print_progress
from tf2dist.training.parameter_server.step import ACCELERATOR
from tf2dist.training.parameter_server.sync_replicas_feeds import SharedArrayFeed
from tf2dist.training.parameter_server.sync_replicas_part import ModelPart
from tf2dist.training.parameter_server.sync_replicas_servers import DecidingServer, FollowingServer
from tf2dist.training.parameter_server.sync_replicas_wire import Pulled
from tf2dist.training.parameter_server.wire import Parcel
from tf2dist.training.stragglers import Stragglers


class ReplicasStep:
    """The parameter servers of a model, and the functions that workers run against them.

    Attributes:
        deciding, following: the servers.
        feed: of the workers.
        evaluated_at_once: how many examples, at most.
        stragglers: the delays that are simulated, and the recording of the steps' times.
        steps_per_call: how many steps a call has.

    Args:
        step: of a model whose variables lie on parameter servers.
        make_optimizer: for each ps.
        sharding: how the training set is cut.
        offsets: of each worker, from the gradients that the ps have counted to the batches of its input.
        replicas: the gradients that make a step.
        total_steps: in the whole run.
        plan: of the epochs.
        earlier_updates: that the optimizer has applied before this run.
    """

    def __init__(
        self,
        config: RunConfig,
        step: ModelStep,
        make_optimizer: MakeOptimizer,
        sharding: Sharding,
        offsets: list[int],
        replicas: int,
        total_steps: int,
        plan: EpochPlan | None = None,
        earlier_updates: int = 0,
    ) -> None:
        self.earlier_updates, self.sharding, self.replicas = earlier_updates, sharding, replicas
        self._config, self._step = config, step
        self.stragglers = Stragglers(config, offsets)
        self.evaluated_at_once = chunk_size(sharding.batch_size, step, plan)
        self.new_optimizer: Callable[[], keras.Optimizer] = functools.partial(make_optimizer, total_steps)
        # As often as a variable is in both: a call may assign a trained one, as spectral normalization does.
        trainable, state = all_parts(step.trainable), all_parts(step.state)
        devices = sorted({v.value.device for v in [*trainable, *state]})
        self.parts = [
            ModelPart(
                device,
                [v for v in trainable if v.value.device == device],
                [v for v in state if v.value.device == device],
                self.new_optimizer,
                len(devices) == 1,
                config.optimizer["name"],
                plan is None,
                earlier_updates,
            )
            for device in devices
        ]
        first, *others = self.parts
        self.deciding = DecidingServer(first, replicas, sharding.num_shards, step.metrics.size)
        self.following = [FollowingServer(part, sharding.num_shards) for part in others]
        self.servers: list[DecidingServer | FollowingServer] = [self.deciding, *self.following]
        self.feed = SharedArrayFeed(step.layout, sharding, offsets, lambda worker: self.deciding.pushed_by(worker)[0])
        step.loss_scale = first.loss_scale
        self._compute = self._traced_compute()
        to_pause = steps_to_pause(config, plan, sharding, total_steps)
        chosen = unrolled_steps(self._compute, step.model, to_pause)
        chosen = min(chosen, self.stragglers.max_steps)
        self.steps_per_call = config.train.steps_per_execution or chosen

    def train_function(self, num_steps: int) -> Any:
        """``function(*source)``: the gradients of `num_steps` steps; `source`: of `feed`."""

        def steps(*source: Any) -> None:
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            before = self.deciding.pushed_by(worker)
            with tf.device("CPU:0"):
                batches = self.feed.shared_batches(source, worker, before[0], num_steps)
            losses = []
            pulled = self._followed(self.deciding.begin(worker))
            for number, (batch, share) in enumerate(batches, 1):
                pulled = self.stragglers.delayed(pulled, worker, before[0], number)
                with tf.device(ACCELERATOR):
                    on_device = [tf.identity(leaf) for leaf in batch]
                    pushes, loss = self._compute(pulled, on_device, share, worker)
                first, *others = self.stragglers.computed(pushes, worker)
                losses.append(loss)
                # The deciding ps must not take a gradient of which another ps has no part.
                laid = [server.lay_down(push, worker) for server, push in zip(self.following, others, strict=True)]
                with tf.control_dependencies(laid):
                    if number == num_steps:
                        after = self.deciding.push(first, worker)
                    else:
                        pulled = self._followed(self.deciding.exchange(first, worker))
            self._log(worker, before[0], after, tf.reduce_mean(losses))

        signature = self.feed.signature(num_steps)
        return tf.function(steps, autograph=False).get_concrete_function(*signature)

    def _followed(self, pulled: Parcel) -> list[Parcel]:
        """What all ps send, from that of the deciding one."""
        _, step, made_by = self.deciding.pull_layout.unpack(pulled)
        return [pulled, *(server.follow(step.bits, made_by) for server in self.following)]

    def evaluate_function(self) -> Any:
        """``function(number, first, last)``: see `AsyncStep.evaluate_function`."""

        def evaluate(number: tf.Tensor, first: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
            values, _ = self._unpack([server.pull() for server in self.servers])
            examples = evaluated_examples(number, tf.range(first, last), self._step.layout)
            return self._step.evaluate(*self._inputs(values), examples)

        scalar = tf.TensorSpec([], tf.int32)
        return tf.function(evaluate, autograph=False).get_concrete_function(scalar, scalar, scalar)

    def _traced_compute(self) -> Any:
        """The step on a worker, traced once for the functions of any number of steps."""
        if self._config.devices.xla:
            compute = tf.function(self._compute_step, autograph=False, jit_compile=True)
        else:
            compute = as_one_node(self._compute_step)
        pulled = [server.pull_layout.specs for server in self.servers]
        share, worker = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64)
        return compute.get_concrete_function(pulled, self._step.layout.batched(None), share, worker)

    def _compute_step(
        self, pulled: list[Parcel], leaves: list[tf.Tensor], share: tf.Tensor, worker: tf.Tensor
    ) -> tuple[list[Parcel], tf.Tensor]:
        """On the worker: what was pulled from each ps in, what to push to each ps out, and the loss."""
        values, first = self._unpack(pulled)
        trainable, state = self._inputs(values)
        output = self._step(trainable, state, leaves, step_place(worker, first.step.value()), share)
        gradients = cut(self._step.trainable, output.gradients)
        # Changes rather than values, as with mode=sync: their weighted sum over the replicas becomes the mean.
        changes = cut(
            self._step.state,
            [tf.cast(new - old, tf.float32) * share for new, old in zip(output.state, state, strict=True)],
        )
        pushes: list[Parcel] = []
        for server in self.servers:
            of_state = [changes[id(v)] for v in server.part.state]
            of_trainable = [gradients[id(v)] for v in server.part.trainable]
            pushes.append(server.push_layout.pack([*of_trainable, *of_state], share, output.sums, first.step))
        return pushes, tf.math.divide_no_nan(output.sums[0], share)

    def _unpack(self, pulled: list[Parcel]) -> tuple[Values, Pulled]:
        """The values of all parts of variables, and what the deciding ps has told."""
        found = [server.pull_layout.unpack(parcel) for server, parcel in zip(self.servers, pulled, strict=True)]
        values: Values = {}
        for server, each in zip(self.servers, found, strict=True):
            values.update({id(v): value for v, value in zip(server.part.variables, each.values, strict=True)})
        return values, found[0]

    def _inputs(self, values: Values) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        return join(self._step.trainable, values), join(self._step.state, values)

    def _log(self, worker: tf.Tensor, before: tf.Tensor, after: tf.Tensor, loss: tf.Tensor) -> None:
        """Prints into the worker's own log whenever it has passed a multiple of log_every_steps."""
        pushed, step = tf.unstack(after)
        every = self._config.train.log_every_steps
        print_progress(worker, self.sharding.counted_steps(), step, pushed, before, loss, every)
