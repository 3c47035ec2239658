"""The graphs of algorithm=downpour: several batches in a step, and steps without a pull in between."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf2dist.model.recurrence import decay_of
from tf2dist.model.step import step_place
from tf2dist.process.parts import Values, cut, parts_of
from tf2dist.process.tf_internals import as_one_node
from tf2dist.training.parameter_server.downpour.servers import DownpourServer
from tf2dist.training.parameter_server.step import AsyncStep
from tf2dist.training.parameter_server.wire import PackedCount, Parcel

Gradients = tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]  # of a batch, with its new state and its sums


class DownpourStep(AsyncStep):
    """See `AsyncStep`. `sharding` cuts the training set into the examples of whole updates.

    Each call begins with a pull, and it has no others than those after every `n_fetch` batches in it.
    """

    servers: list[DownpourServer]  # type: ignore[assignment]
    _pushed: list[tf.Tensor]  # what the last push to each ps returns, in the graph that is being made

    def _new_server(self, number: int, *arguments: Any) -> DownpourServer:
        return DownpourServer(self.config.algorithm.n_push, self.config.train.batch_size_per_worker, *arguments)

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

    def _pull(self, worker: tf.Tensor) -> list[Parcel]:
        self._pushed = []
        return super()._pull(worker)

    def _exchange(
        self, pushes: list[Parcel], indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor, number: int
    ) -> list[Parcel]:
        """Pushes, and returns what the next step computes with: the worker's own weights, or those of the ps."""
        if number % self.config.algorithm.updates_per_fetch:
            self._push(pushes, indices, limit, worker)
            return pushes[len(self.servers) :]
        with tf.control_dependencies(self._pushed):
            pulled = super()._exchange(pushes[: len(self.servers)], indices, limit, worker, number)
        self._pushed = []
        return pulled

    def _push(self, pushes: list[Parcel], indices: tf.Tensor, limit: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        # After the push before it has reached all ps: at the limit they may then differ by no more than one update of
        # each worker. The next step waits for neither.
        with tf.control_dependencies(self._pushed):
            self._pushed = [
                server.push(push, indices, limit)
                for server, push in zip(self.servers, pushes[: len(self.servers)], strict=True)
            ]
        return self._pushed[0]

    # What it computes.

    def traced_compute(self) -> Any:
        # XLA needs fixed shapes, and the last batch of a pass is shorter: what it compiles is a single batch.
        self._gradients = self._compute_batch
        if self.config.devices.xla:
            self._gradients = tf.function(self._compute_batch, autograph=False, jit_compile=True)
        pulled = [server.pull_layout.specs for server in self.servers]
        compute = as_one_node(self._compute_step)
        return compute.get_concrete_function(pulled, self.step.layout.batched(None), tf.TensorSpec([], tf.int64))

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
        values, counts = self.unpack(pulled)
        rates = self._rates(pulled)
        trainable, state = self.inputs(values)
        first = step_place(worker, counts[0].value() * self.config.algorithm.n_push)
        batches, gradients, new_state, sums = self._accrued(trainable, state, leaves, rates, first)

        pushed = cut(self.step.trainable, gradients)
        for variable, new, old in zip(self.step.state, new_state, state, strict=True):
            if decay := self.decays.get(id(parts_of(variable)[0])):
                new = new - self.servers[0].power(decay, batches, old.dtype) * old
            pushed |= cut([variable], [new])
        sums = tf.concat([sums[:1] / tf.cast(batches, tf.float32), sums[1:]], 0)
        pushes = []
        for server, count in zip(self.servers, counts, strict=True):
            layout = server.push_layout(self.decays)
            pushes.append(layout.pack([pushed[id(v)] for v in layout.variables], count, sums))
        if self.config.algorithm.updates_per_fetch == 1:
            return pushes, sums[0]

        changed = zip(trainable, gradients, rates, strict=True)
        own = cut(self.step.trainable, self._moved(changed)) | cut(self.step.state, new_state)
        return [*pushes, *self._repacked(pulled, own, counts)], sums[0]

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

    def _rates(self, pulled: list[Parcel]) -> list[tf.Tensor]:
        """The learning rate of each trainable variable, float32 []."""
        rates: Values = {}
        for server, parcel in zip(self.servers, pulled, strict=True):
            rates |= dict.fromkeys(map(id, server.trainable), tf.squeeze(server.rate(parcel)))
        # The parts of a variable lie on several ps, whose optimizers have the same rate.
        return [rates[id(parts_of(v)[0])] for v in self.step.trainable]

    def _repacked(self, pulled: list[Parcel], own: Values, counts: list[PackedCount]) -> list[Parcel]:
        """What each ps would give if it had applied the update of this worker, and no other."""
        found = []
        for server, parcel, count in zip(self.servers, pulled, counts, strict=True):
            values = [own[id(v)] for v in server.variables]
            # One more, so that the staleness of the next update is the number of those of others.
            applied = PackedCount.of(count.value() + 1)
            found.append(server.pull_layout.pack(values, applied, server.rate(parcel)))
        return found
