"""What a worker computes in a step: from the values that it has pulled, what it pushes to each ps."""

from typing import Any

import keras
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.model.recurrence import recurrence_of
from tf2dist.model.step import ModelStep, step_place
from tf2dist.process.parts import Values, cut, join, parts_of
from tf2dist.process.tf_internals import as_one_node
from tf2dist.training.parameter_server.examples import evaluated_examples
from tf2dist.training.parameter_server.server import ParameterServer
from tf2dist.training.parameter_server.wire import PackedCount, Parcel, Pulled


class Computation:
    """The step of a model whose variables lie on parameter servers.

    Attributes:
        config: of the run.
        step: of the model.
        servers: those on which its variables lie.
        decays: of the state that a step changes, by id of the variable; see `recurrence`.
    """

    config: RunConfig
    step: ModelStep
    servers: list[ParameterServer]
    decays: dict[int, float]

    def traced_compute(self) -> Any:
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
                decay, term = recurrence_of(new, old)
                self.note_decay(variable, decay)
                changes |= cut([variable], [term])
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
