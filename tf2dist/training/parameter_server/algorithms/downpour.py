"""algorithm=downpour: a worker pushes, and fetches, only once in several batches.

J. Dean, G. Corrado, R. Monga, K. Chen, M. Devin, Q. Le, M. Mao, M. Ranzato, A. Senior, P. Tucker, K. Yang, A. Ng: Large
Scale Distributed Deep Networks, NIPS 2012, algorithm 7.1. A worker fetches the weights once in `algorithm.n_fetch`
batches. In between it goes on with weights of its own, which each gradient changes as plain SGD would, with the
learning rate that the ps had at the fetch. Once in `algorithm.n_push` batches it pushes the sum of their gradients.

A push is one update and one step, and it counts everywhere as such: the input gives a worker the examples of `n_push`
batches for each step, and the worker cuts them. In the last step of a pass there are fewer batches, or a shorter one.

The optimizer of the ps gets the sum, as in the paper, not the mean. With SGD an update so moves the weights as far as
its batches would one by one; of a worker that is alone, the run is that of plain SGD. Optimizers that divide by the
size of the gradients, such as Adam, make a step of the same size for a sum as for a mean: for them an update of
several batches is one of a larger batch. Schedules and weight decay are applied once per update.

What belongs to a single gradient is done on the worker for each batch: all clipping, random numbers, and the state of
layers. A recurrence ``new = decay * old + term``, such as a moving average, is pushed as that of all its batches
together, with the power of `decay`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.model.recurrence import decay_of
from tf2dist.model.step import step_place
from tf2dist.process.parts import Values, cut, parts_of
from tf2dist.process.tf_internals import as_one_node
from tf2dist.training.parameter_server.algorithms.plain import Algorithm
from tf2dist.training.parameter_server.counters import TOTALS
from tf2dist.training.parameter_server.server import ParameterServer, PartSpec
from tf2dist.training.parameter_server.step import AsyncStep, Call
from tf2dist.training.parameter_server.wire import PackedCount, Parcel, Pulled

EXAMPLES = 2 + TOTALS.index("examples")  # their place in what an update adds, after the first two of the ones
Gradients = tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]  # of a batch, with its new state and its sums


class Clipping(NamedTuple):
    """How single gradients are clipped; at most one of the two is given.

    Attributes:
        norm: the largest L2 norm.
        value: the largest absolute value of an element.
    """

    norm: float | None
    value: float | None

    @classmethod
    def taken_from(cls, optimizer: keras.Optimizer) -> "Clipping":
        """Leaves the optimizer without clipping."""
        found = cls(optimizer.clipnorm, optimizer.clipvalue)
        optimizer.clipnorm = optimizer.clipvalue = None
        return found

    def clipped(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.norm:
            return [tf.clip_by_norm(gradient, self.norm) for gradient in gradients]
        if self.value:
            return [tf.clip_by_value(gradient, -self.value, self.value) for gradient in gradients]
        return gradients


class DownpourServer(ParameterServer):
    """A ps of which a worker gets the learning rate with the variables.

    Attributes:
        clipping: of the gradient of each batch, by the worker: the optimizer gets sums of them.

    """

    pulled_others = (1,)

    def __init__(self, part: PartSpec, algorithm: Algorithm) -> None:
        super().__init__(part, algorithm)
        config = algorithm.config
        self._n_push, self._batch_size = config.algorithm.n_push, config.train.batch_size_per_worker
        if self.optimizer.gradient_accumulation_steps:
            raise ConfigError(
                f"optimizer.gradient_accumulation_steps ({self.optimizer.gradient_accumulation_steps}): makes one "
                "update of several, as algorithm=downpour makes one of several batches; leave it out, and give "
                "algorithm.n_push"
            )
        self.clipping = Clipping.taken_from(self.optimizer)

    def power(self, decay: float, batches: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """``decay ** batches``; the same on the worker and on the ps, and `decay` itself for one batch."""
        # From a table: the power that TensorFlow computes may differ in its last digit.
        return tf.gather(tf.constant(decay ** np.arange(self._n_push + 1), dtype), batches)

    def _others(self, applied: PackedCount) -> list[tf.Tensor]:
        return [tf.reshape(self.learning_rate(applied), [1])]

    def _factor(self, decay: float, dtype: tf.DType, added: tf.Tensor) -> tf.Tensor:
        batches = tf.cast(tf.math.ceil(added[EXAMPLES] / self._batch_size), tf.int32)
        return self.power(decay, batches, dtype)


class DownpourStep(AsyncStep):
    """See `AsyncStep`. `sharding` cuts the training set into the examples of whole updates.

    Each call begins with a pull, and it has no others than those after every `n_fetch` batches in it.
    """

    servers: Sequence[DownpourServer]

    def _make_servers(self, parts: list[PartSpec]) -> None:
        self.servers = [DownpourServer(part, self.algorithm) for part in parts]

    def _whole_rounds(self, num_steps: int) -> int:
        # Each call begins with a fetch. A worker holds the examples of all its batches in memory.
        round_of = self.config.algorithm.updates_per_fetch
        return max(1, num_steps // self.config.algorithm.n_push // round_of) * round_of

    def facts(self) -> dict[str, Any]:
        algorithm = self.config.algorithm
        return {"n_push": algorithm.n_push, "n_fetch": algorithm.n_push * algorithm.updates_per_fetch}

    def random_states(self, updates: int) -> dict[str, np.ndarray]:
        return super().random_states(updates * self.config.algorithm.n_push)

    # How a worker speaks to the ps in a call.

    def _exchange(self, call: Call, pushes: list[Parcel], number: int) -> list[Parcel]:
        """Pushes, and returns what the next step computes with: the worker's own weights, or those of the ps."""
        if number % self.config.algorithm.updates_per_fetch:
            self._push(call, pushes)
            return pushes[len(self.servers) :]
        with tf.control_dependencies(call.pushed):
            pulled = super()._exchange(call, pushes[: len(self.servers)], number)
        call.pushed = []
        return pulled

    def _push(self, call: Call, pushes: list[Parcel]) -> tf.Tensor:
        # After the push before it has reached all ps: at the limit they may then differ by no more than one update of
        # each worker. The next step waits for neither.
        pairs = zip(self.servers, pushes[: len(self.servers)], strict=True)
        with tf.control_dependencies(call.pushed):
            call.pushed = [server.push(push, call.indices, call.limit) for server, push in pairs]
        return call.pushed[0]

    # What it computes.

    def _traced_compute(self) -> Any:
        # XLA needs fixed shapes, and the last batch of a pass is shorter: what it compiles is a single batch.
        self._gradients = self._compute_batch
        if self.config.devices.xla:
            self._gradients = tf.function(self._compute_batch, autograph=False, jit_compile=True)
        pulled = [server.pull_layout.specs for server in self.servers]
        compute = as_one_node(self._compute_step)
        return compute.get_concrete_function(pulled, self.batch_types(), tf.TensorSpec([], tf.int64))

    def _compute_batch(
        self, trainable: list[tf.Tensor], state: list[tf.Tensor], leaves: list[tf.Tensor], place: tf.Tensor
    ) -> Gradients:
        output = self.step(trainable, state, leaves, place)
        for variable, new, old in zip(self.step.state, output.state, state, strict=True):
            if new is not old:
                self.note_decay(variable, decay_of(new, old))
        # The loop demands shapes that do not change, and a gradient of a look-up has the form of its rows.
        gradients = [tf.ensure_shape(one, value.shape) for one, value in zip(output.gradients, trainable, strict=True)]
        if self.servers[0].global_clipnorm:
            gradients, _ = tf.clip_by_global_norm(gradients, self.servers[0].global_clipnorm)
        return self.servers[0].clipping.clipped(gradients), output.state, output.sums

    def _compute_step(
        self, pulled: list[Parcel], leaves: list[tf.Tensor], worker: tf.Tensor
    ) -> tuple[list[Parcel], tf.Tensor]:
        """On the worker: what to push to each ps, then what it would pull with the updates of this worker alone.

        The latter only where a step may come without a pull before it. Second, the mean of the losses of the batches.
        """
        unpacked = self.unpack(pulled)
        rates = self._rates(unpacked)
        trainable, state = self.inputs(self.values_of(unpacked))
        first = step_place(worker, unpacked[0].applied.value() * self.config.algorithm.n_push)
        batches, gradients, new_state, sums = self._accrued(trainable, state, leaves, rates, first)

        pushed = cut(self.step.trainable, gradients)
        for variable, new, old in zip(self.step.state, new_state, state, strict=True):
            if decay := self.decays.get(id(parts_of(variable)[0])):
                new = new - self.servers[0].power(decay, batches, old.dtype) * old
            pushed |= cut([variable], [new])
        sums = tf.concat([sums[:1] / tf.cast(batches, tf.float32), sums[1:]], 0)
        pushes = []
        for server, one in zip(self.servers, unpacked, strict=True):
            layout = server.push_layout(self.decays)
            pushes.append(layout.pack([pushed[id(v)] for v in layout.variables], one.applied, sums))
        if self.config.algorithm.updates_per_fetch == 1:
            return pushes, sums[0]

        changed = zip(trainable, gradients, rates, strict=True)
        own = cut(self.step.trainable, self._moved(changed)) | cut(self.step.state, new_state)
        return [*pushes, *self._repacked(unpacked, own)], sums[0]

    def _accrued(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        rates: list[tf.Tensor],
        first: tf.Tensor,
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """The number of batches, the sums of their gradients, the state after them, and the sums of their sums.

        Args:
            trainable, state: the values before the first batch.
            leaves: of the examples of all batches.
            rates: the learning rate of each trainable variable.
            first: the place of the first batch, see `ModelStep`.
        """
        size, num_examples = self.config.train.batch_size_per_worker, tf.shape(leaves[0])[0]

        def add_batch(number: tf.Tensor, gradients: list[tf.Tensor], state: list[tf.Tensor], sums: tf.Tensor) -> Any:
            own = self._moved(zip(trainable, gradients, rates, strict=True))
            batch = [leaf[number * size : (number + 1) * size] for leaf in leaves]
            place = first + tf.stack([tf.zeros([], tf.int64), tf.cast(number, tf.int64)])
            found, state, more = self._gradients(own, state, batch, place)
            added = [gradient + one for gradient, one in zip(gradients, found, strict=True)]
            return number + 1, added, state, sums + more

        none = tf.constant(0), list(map(tf.zeros_like, trainable)), state, tf.zeros([2 + self.step.metrics.size])
        batches, gradients, state, sums = tf.while_loop(
            lambda number, *_: number * size < num_examples, add_batch, none
        )
        return batches, gradients, state, sums

    @staticmethod
    def _moved(changed: Any) -> list[tf.Tensor]:
        """What plain SGD makes of each variable, from its value, the sum of the gradients, and the learning rate."""
        return [value - tf.cast(rate, value.dtype) * gradient for value, gradient, rate in changed]

    def _rates(self, pulled: list[Pulled]) -> list[tf.Tensor]:
        """The learning rate of each trainable variable, float32 []."""
        rates: Values = {}
        for server, one in zip(self.servers, pulled, strict=True):
            rates |= dict.fromkeys(map(id, server.trainable), tf.squeeze(one.others[0]))
        # The parts of a variable lie on several ps, whose optimizers have the same rate.
        return [rates[id(parts_of(v)[0])] for v in self.step.trainable]

    def _repacked(self, pulled: list[Pulled], own: Values) -> list[Parcel]:
        """What each ps would give if it had applied the update of this worker, and no other."""
        found = []
        for server, one in zip(self.servers, pulled, strict=True):
            values = [own[id(v)] for v in server.variables]
            # One more, so that the staleness of the next update is the number of those of others.
            applied = PackedCount.of(one.applied.value() + 1)
            found.append(server.pull_layout.pack(values, applied, *one.others))
        return found


class Downpour(Algorithm):
    """See `Algorithm`: what is pushed is another sum of gradients."""

    graphs = DownpourStep
