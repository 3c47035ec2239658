"""The graphs of asynchronous training: what a worker does for each call of the coordinator.

In each step a worker pulls all variables of a ps, computes, and pushes their changes to each ps;
within a call, what one step pushes and the next one pulls is one exchange with the ps. A transfer
costs a call, so small variables are packed (see `vectors`).

A loop across devices costs messages in every iteration, a millisecond or two of all cores, so the steps of a call are
unrolled. How many there are is decided before the first step: a call of another length would be another function.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Splits
from tf2dist.data.pipeline import Sharding
from tf2dist.model.evaluate import chunk_size
from tf2dist.model.packing import narrow_dtype
from tf2dist.model.plan import EpochPlan
from tf2dist.model.source import MakeOptimizer
from tf2dist.model.step import ModelStep
from tf2dist.process.parts import all_parts
from tf2dist.training.call_size import steps_to_pause, unrolled_steps
from tf2dist.training.parameter_server.algorithms import algorithm_of
from tf2dist.training.parameter_server.computation import Computation
from tf2dist.training.parameter_server.counters import TOTALS
from tf2dist.training.parameter_server.inputs import feed_of
from tf2dist.training.parameter_server.progress_line import print_progress
from tf2dist.training.parameter_server.server import ParameterServer
from tf2dist.training.parameter_server.wire import Parcel
from tf2dist.training.stragglers import Stragglers

ACCELERATOR = "GPU:0"  # of each worker, which sees no other worker's; without one TensorFlow takes its CPU


class AsyncStep(Computation):
    """The parameter servers of a model, and the functions that workers run against them.

    Everything is traced outside the strategy's scope: under it a Keras optimizer asks for a
    replica context, which there is none of on a ps.

    Attributes:
        feed: of the workers.
        evaluated_at_once: how many examples, at most.
        stragglers: the delays that are simulated, and the recording of the steps' times.
        steps_per_call: how many steps a call has.

    Args:
        step: of a model whose variables lie on parameter servers.
        splits, sharding: the data, and how the training set is cut.
        offsets: of each worker, from the steps that the ps have counted to those of its input.
        make_optimizer: for each ps.
        total_steps: updates in the whole run.
        plan: of the epochs.
        earlier_updates: that the optimizer has applied before this run.
    """

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
        self.stragglers = Stragglers(config, offsets)
        self.step = step
        self.evaluated_at_once = chunk_size(config.train.batch_size_per_worker, step, plan)
        self.new_optimizer: Callable[[], keras.Optimizer] = functools.partial(make_optimizer, total_steps)
        trainable, state = all_parts(step.trainable), all_parts(step.state)
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
                plan is None,
                earlier_updates,
                algorithm_of(config.algorithm),
                narrow_dtype(config.cluster.transfer_dtype),
            )
            for number, device in enumerate(sorted({v.value.device for v in [*trainable, *state]}))
        ]
        self.feed = feed_of(splits, sharding, offsets, self._local_steps)
        step.loss_scale = self.servers[0].loss_scale
        self.decays: dict[int, float] = {}
        self._compute = self.traced_compute()
        to_pause = steps_to_pause(config, plan, sharding, total_steps)
        chosen = unrolled_steps(self._compute, step.model, to_pause / sharding.num_shards)
        chosen = min(chosen, self.stragglers.max_steps)
        self.steps_per_call = config.train.steps_per_execution or self._whole_rounds(chosen)
        for server in self.servers:
            server.trace_push(self.decays)

    def _new_server(self, number: int, *arguments: Any) -> ParameterServer:
        """The ps with this number, from 0; `arguments`: those of `ParameterServer`."""
        return ParameterServer(*arguments)

    def _whole_rounds(self, num_steps: int) -> int:
        """The number of steps that a call may have in place of this one; other algorithms override this."""
        return num_steps

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
            worker, before, indices = self._begin()
            local_steps = before[TOTALS.index("steps")]
            with tf.device("CPU:0"):
                batches = self.feed.batches(tuple(source), worker, local_steps, num_steps)
            losses = []
            pulled = self._pull(worker)
            for number, batch in enumerate(batches, 1):
                limit = self._limit(limit, pulled)
                # Waits for no earlier step: the batches of a call are on their way while it computes.
                pushes, loss = self._computed(pulled, on_device(batch), worker, local_steps, number)
                if number < num_steps:
                    pulled = self._exchange(pushes, indices, limit, worker, number)
                else:
                    after = self._push(pushes, indices, limit, worker)
                losses.append(loss)
            self._log(worker, before, after, tf.reduce_mean(losses))

        signature = self.feed.signature(num_steps)
        return tf.function(steps, autograph=False).get_concrete_function(*signature, tf.TensorSpec([], tf.int64))

    def _begin(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The worker that executes this call, its totals, and where its updates are counted."""
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return worker, self.servers[0].worker_totals(worker), self.servers[0].counters.indices(worker)

    def _computed(
        self, pulled: list[Parcel], batch: list[tf.Tensor], worker: tf.Tensor, local_steps: tf.Tensor, number: Any
    ) -> tuple[list[Parcel], tf.Tensor]:
        """What a step pushes to each ps, and its loss; `number`: of the step in its call, from 1."""
        pulled = self.stragglers.delayed(pulled, worker, local_steps, number)
        with tf.device(ACCELERATOR):
            pushes, loss = self._compute(pulled, batch, worker)
        return self.stragglers.computed(pushes, worker), loss

    # How a worker speaks to the ps in a call; other algorithms override these.

    def _pull(self, worker: tf.Tensor) -> list[Parcel]:
        """What the first step of a call pulls from each ps."""
        return [server.pull() for server in self.servers]

    def _limit(self, limit: tf.Tensor, pulled: list[Parcel]) -> tf.Tensor:
        """The limit of updates for a step, from that of the step before it in the call."""
        return limit

    def _exchange(
        self, pushes: list[Parcel], indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor, number: int
    ) -> list[Parcel]:
        """Pushes to each ps; returns what the next step pulls. `number`: of the step in its call, from 1."""
        return [server.exchange(push, indices, limit) for server, push in zip(self.servers, pushes, strict=True)]

    def _push(self, pushes: list[Parcel], indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        """What the last step of a call pushes to each ps; returns what the first has counted of this worker then."""
        done = [server.push(push, indices, limit) for server, push in zip(self.servers, pushes, strict=True)]
        return done[0]

    def _local_steps(self, worker: tf.Tensor) -> tf.Tensor:
        return self.servers[0].worker_totals(worker)[TOTALS.index("steps")]

    def _log(self, worker: tf.Tensor, before: tf.Tensor, after: tf.Tensor, loss: tf.Tensor) -> None:
        """Prints into the worker's own log whenever it has passed a multiple of log_every_steps."""
        steps = TOTALS.index("steps")
        local_step, global_step = tf.cast(after[steps], tf.int64), tf.cast(after[-1], tf.int64)
        every = self.config.train.log_every_steps
        earlier = tf.cast(before[steps], tf.int64)
        print_progress(worker, self.sharding.counted_steps(), global_step, local_step, earlier, loss, every)


def on_device(batch: list[tf.Tensor]) -> list[tf.Tensor]:
    """In the graph of a worker: the batch, where it computes."""
    with tf.device(ACCELERATOR):
        return [tf.identity(leaf) for leaf in batch]
