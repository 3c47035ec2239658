"""The step of a compiled model: forward pass, loss, gradients and metrics, as in the `train_step` of Keras."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf2dist.data.arrays import Layout, leaves_of
from tf2dist.model.metrics import Metrics
from tf2dist.model.recurrence import origins_of, passes_gradient, reached_from
from tf2dist.model.scopes import CallScope, inlining, is_zero, recording
from tf2dist.model.shards import parts_of
from tf2dist.model.step import Mapping, Step, StepOutput, is_own, without_padding
from tf2dist.model.tables import LookupScope, TableLookups
from tf2dist.tf_internals.keras import build_metrics, compute_loss, losses_of, mask_of, may_mix_examples

MEANS = ("sum_over_batch_size", "mean")  # the reductions of losses that are means over the examples
WEIGHTED_MEAN = "mean_with_sample_weight"  # that of a mean which is divided by the weights of the examples


class ForwardPass(NamedTuple):
    """A batch as the model takes it, the model's outputs, what each loss makes of them, and the loss of the batch."""

    x: Any
    y: Any
    sample_weight: Any
    outputs: Any
    loss_values: list[tuple[keras.losses.Loss, tf.Tensor]]
    loss: tf.Tensor


class ForwardTrace(NamedTuple):
    """Properties of the forward pass and the losses, which show when a step is traced.

    Attributes:
        outputs: symbolic tensors, in whatever structure the model returns them.
        has_custom_gradients: whether the call has any, which may hide variables.
        without_gradient: the trainable variables that get no gradient, or one of zero; without custom gradients as far
            as the operations of the graph tell.
        has_scalar_loss: whether a loss returns one number for a whole batch.
        is_masked: whether a loss leaves out parts of the outputs.
        has_lengths: whether a loss has a value for each place of a sequence, and batches differ in length.
        penalties: the losses that layers add, such as those of regularizers.
        penalizes_batch: whether one of these depends on the batch.
        batch_metrics: the metrics that take a batch as one, of which Keras averages a number for each batch.
    """

    outputs: Any
    has_custom_gradients: bool
    without_gradient: list[keras.Variable]
    has_scalar_loss: bool
    is_masked: bool
    has_lengths: bool
    penalties: list[tf.Tensor]
    penalizes_batch: bool
    batch_metrics: list[keras.metrics.Metric]

    @property
    def divides_by_parts(self) -> bool:
        """Whether a loss that is a mean is divided by more than the number of examples."""
        return self.is_masked or self.has_lengths


class CompiledStep(Step):
    """The step of a model that is trained by its losses.

    Attributes:
        forward_trace: what the forward pass shows.
        hidden: the trainable variables that get no gradient here, and one in the step of `keras.Model.fit`.
    """

    forward_trace: ForwardTrace

    def __init__(self, model: keras.Model, layout: Layout) -> None:
        super().__init__(model, layout)
        self.lookups = TableLookups(model, layout, self.all_variables, self._call_with)
        self._takes_training = "training" in inspect.signature(model.call).parameters
        self.divide_variables(list(model.trainable_variables))
        self._build_metrics()
        reductions = [getattr(loss, "reduction", None) for loss in self.losses]
        self.sums_losses = "sum" in reductions and not self.has_own_loss
        self.keep(self.traced(self._run))
        by_keras = self._by_keras(self.forward_trace.without_gradient)
        is_certain = self.forward_trace.has_custom_gradients
        self.hidden = [v for v, gradients in by_keras if is_certain and not all(map(is_zero, gradients))]
        if left_out := {id(variable) for variable, gradients in by_keras if all(one is None for one in gradients)}:
            # As in Keras no optimizer touches them, whatever it does to weights with a gradient of zero.
            self.divide_variables([v for v in self.trainable if id(v) not in left_out])
            self.keep(self.traced(self._run))
        self.weighs_losses = self._weighs_losses(reductions)

    def _build_metrics(self) -> None:
        # A compiled model knows its losses and the variables of its metrics only when these are built. Of a model with
        # a loss of its own a trace in training has built them, unless only evaluations use them, or nothing does.
        are_unused = self.has_own_loss and not self.losses
        # Keras builds them in a scope of its own, in which a traced function would leave its tensors.
        with inlining():
            build_metrics(self.model, self.layout.symbolic())
        self.metrics, self.evaluated = Metrics(self.model, hides_outputs=are_unused), Metrics(self.model)

    @property
    def losses(self) -> list[Any]:
        """The losses that the model was compiled with."""
        return losses_of(self.model)

    @property
    def depends_on_batches(self) -> bool:
        losses, trace = self.losses, self.forward_trace
        are_means = len(losses) <= 1 and all(getattr(loss, "reduction", "") in MEANS for loss in losses)
        takes_batches = trace.has_scalar_loss or trace.penalizes_batch or bool(trace.batch_metrics)
        takes_batches = takes_batches or any(map(may_mix_examples, [*losses, *self.single_metrics]))
        return self.has_own_loss or takes_batches or trace.is_masked or not are_means

    @property
    def has_own_loss(self) -> bool:
        return is_own(self.model, "compute_loss")

    @property
    def num_parts(self) -> int:
        return len(self._unproven([None, *self.forward_trace.penalties]))

    def _unproven(self, parts: list[Any]) -> list[Any]:
        """The losses and penalties that may be no means over the batch."""
        losses, trace = self.losses, self.forward_trace
        # What is divided by more than the number of examples is no mean over them either, and is weighted.
        are_means = not trace.divides_by_parts and all(getattr(loss, "reduction", "") in MEANS for loss in losses)
        may_mix = are_means and any(map(may_mix_examples, losses))
        if trace.has_scalar_loss or self.has_own_loss or may_mix:
            return parts
        return parts[1:] if trace.penalizes_batch else []

    def _weighs_losses(self, reductions: list[Any]) -> bool:
        """Whether the total is divided by the weights of all workers; see `Step`.

        The parts of the outputs are those that a mask leaves, the places of batches of several lengths, or the weights
        of the examples.
        """
        if self.has_own_loss or self.forward_trace.has_scalar_loss:  # which is divided by nothing
            return False
        if len(reductions) != 1 or len(leaves_of(self.forward_trace.outputs)) != 1:
            return False
        return reductions == [WEIGHTED_MEAN] or (self.forward_trace.divides_by_parts and reductions[0] in MEANS)

    def _call_with(self, values: list[tf.Tensor], leaves: list[tf.Tensor], training: bool, layout: Layout) -> None:
        """Calls the model with values for `all_variables`."""
        with LookupScope(list(zip(self.all_variables(), values, strict=True)), self.trainable):
            self._forward(leaves, training, layout)

    def __call__(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        place: tf.Tensor,
        share: tf.Tensor | None = None,
        positions: Sequence[tf.Tensor] = (),
    ) -> StepOutput:
        """Calls the model and its compiled losses on a gradient tape; see `Step`."""
        with (
            self._scope(trainable, state, place) as scope,
            tf.GradientTape() as tape,
            self._reading(trainable, positions),
        ):
            tape.watch([value for v, value in zip(self.trainable, trainable, strict=True) if self.lookups.is_table(v)])
            forward = self._forward(leaves, training=True)
            # The workers' parts add up to the loss of the whole step: sums as they are, means weighted by the shares.
            weight = tf.ones([]) if share is None else self._weight(forward, share)
            part = forward.loss if share is None or self.sums_losses else forward.loss * weight
            # Scaled on the tape, so that the backward pass itself computes with the larger numbers.
            scaled = part if self.loss_scale is None else part * tf.cast(self.loss_scale, part.dtype)
        gradients = self._gradients(tape, scaled, trainable, scope)
        new_state = [scope.get_current_value(variable) for variable in self.state]

        # The metrics come after the tape has ended: no gradient flows through them, so nothing of them is recorded.
        with scope:
            # The metric of the loss averages over examples. There a worker's sum has to stand for the whole step's.
            whole = forward.loss / share if self.sums_losses and share is not None else forward.loss
            count = self._update_metrics(forward, whole)
            changes = self.metrics.changes(scope, share)
        sums = tf.concat([[tf.cast(part, tf.float32), count], *changes], 0)
        return StepOutput(gradients, new_state, without_padding(sums, share), weight)

    def parts(self, leaves: list[tf.Tensor], training: bool, number: int = 0) -> list[tf.Tensor]:
        """The loss of a batch and those that layers add."""
        place = tf.constant([0, number], tf.int64)
        lookups = self.lookups.look_up(leaves, training)
        trainable, state = self.values(lookups.ids)
        with (
            self._scope(trainable, state, place),
            self._reading(trainable, lookups.positions),
        ):
            loss = self._forward(leaves, training, for_training=True).loss
            parts = [tf.reduce_sum(tf.cast(one, tf.float32)) for one in (loss, *self.model.losses)]
            return self._unproven(parts)

    def evaluate(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        layout: Layout | None = None,
        positions: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        """Calls the model and its compiled losses on some examples; see `Step`."""
        # A layer that draws in an evaluation, too, draws the same in each: the result can be repeated.
        place = tf.zeros([2], tf.int64)
        with (
            self._scope(trainable, state, place) as scope,
            self._reading(trainable, positions),
        ):
            forward = self._forward(leaves, training=False, layout=layout)
            count = self._update_metrics(forward, forward.loss)
            # float64, since the caller adds up a whole split: float32 counts examples only up to 2^24.
            return tf.cast(tf.concat([[count], *self.metrics.changes(scope)], 0), tf.float64)

    def _scope(self, trainable: list[tf.Tensor], state: list[tf.Tensor], place: tf.Tensor) -> CallScope:
        """The scope in which the variables of the model have the given values, and random generators the step's.

        The metrics begin with zeros.
        """
        return CallScope(self.scope_values(trainable, state, self.metrics.zeros(), place), self.trainable, self.tables)

    def _reading(self, trainable: list[tf.Tensor], positions: Sequence[tf.Tensor]) -> AbstractContextManager[None]:
        """The block in which layers take their rows from the values of `tables`."""
        pairs = zip(self.trainable, trainable, strict=True) if self.tables else ()
        return self.lookups.reading([value for v, value in pairs if self.lookups.is_table(v)], positions)

    def _forward(
        self, leaves: list[tf.Tensor], training: bool, layout: Layout | None = None, for_training: bool = False
    ) -> ForwardPass:
        """Calls the model on a batch, and computes the loss as Keras does, if asked that of a training in any case."""
        x, y, sample_weight = (layout or self.layout).pack(leaves)
        outputs = self.model(x, training=training) if self._takes_training else self.model(x)
        with recording(self.losses) as loss_values:
            loss = compute_loss(self.model, x, y, outputs, sample_weight, training or for_training)
        return ForwardPass(x, y, sample_weight, outputs, loss_values, loss)

    def _weight(self, forward: ForwardPass, share: tf.Tensor) -> tf.Tensor:
        """The weight of the loss; see `StepOutput.weight`."""
        if not self.weighs_losses:
            return share
        ((loss, value),) = forward.loss_values
        parts, factors = tf.ones_like(value, tf.float32), [mask_of(leaves_of(forward.outputs)[0]), mask_of(value)]
        if loss.reduction == WEIGHTED_MEAN and forward.sample_weight is not None:
            factors += leaves_of(forward.sample_weight)
        for factor in factors:
            if factor is not None:
                parts *= _of_rank(parts, tf.cast(factor, tf.float32))
        # By the number of examples: what is divided by the places of a batch depends on its length.
        return share * tf.reduce_sum(parts) / tf.cast(tf.shape(parts)[0], tf.float32)

    def _update_metrics(self, forward: ForwardPass, loss: tf.Tensor) -> tf.Tensor:
        """Gives the batch to all metrics, as Keras' own steps do; returns its number of examples, float32."""
        count = tf.shape(leaves_of(forward.x)[0])[0]
        self.metrics.loss_tracker.update_state(loss, sample_weight=count)
        self.model.compute_metrics(forward.x, forward.y, forward.outputs, forward.sample_weight)
        return tf.cast(count, tf.float32)

    def _gradients(
        self, tape: tf.GradientTape, loss: tf.Tensor, trainable: list[tf.Tensor], scope: CallScope
    ) -> list[tf.Tensor]:
        """The gradients of the loss; of tables those of their rows."""
        is_table = self.lookups.is_table
        sources = [value if is_table(v) else v for v, value in zip(self.trainable, trainable, strict=True)]
        with scope:  # what `keras.remat` computes a second time needs the same values
            # Zeros for a variable that the loss does not reach: each gradient has its place in the vector that is sent.
            gradients = tape.gradient(loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # Those of a row that is looked up several times are added up, since the norm of all is that of the sums.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if self.loss_scale is None or isinstance(self.loss_scale, keras.Variable):
            return gradients
        return [gradient / self.loss_scale for gradient in gradients]

    def _run(self, mapping: Mapping, leaves: list[tf.Tensor]) -> CallScope:
        """Runs a step to be traced, and notes `forward_trace`."""
        with CallScope(mapping, self.trainable) as scope:
            with tf.GradientTape() as tape:
                forward = self._forward(leaves, training=True)
            if scope.has_custom_gradients:  # which may compute layers again, with random numbers
                gradients = tape.gradient(forward.loss, self.trainable)
                without_gradient = [v for v, g in zip(self.trainable, gradients, strict=True) if is_zero(g)]
            else:  # to trace the gradients, too, takes a third of the time of a deep model
                passing = {operation.name for operation in origins_of(forward.loss, passes_gradient)}
                operations = {id(variable): value.op.name for variable, value in mapping}
                without_gradient = [v for v in self.trainable if operations[id(v)] not in passing]
            self._update_metrics(forward, forward.loss)
            penalties = list(self.model.losses)
            maskable = [*leaves_of(forward.outputs), *(value for _, value in forward.loss_values)]
        reached = reached_from(*leaves)
        self.forward_trace = ForwardTrace(
            outputs=forward.outputs,
            has_custom_gradients=scope.has_custom_gradients,
            without_gradient=without_gradient,
            has_scalar_loss=any(not value.shape.rank for _, value in forward.loss_values),
            is_masked=any(mask_of(tensor) is not None for tensor in maskable),
            has_lengths=self._has_lengths([value for _, value in forward.loss_values]),
            penalties=penalties,
            penalizes_batch=any(penalty.name in reached for penalty in penalties),
            batch_metrics=self.metrics_of_batches(scope, mapping, leaves),
        )
        return scope

    def _by_keras(self, variables: list[keras.Variable]) -> list[tuple[keras.Variable, list[tf.Tensor | None]]]:
        """Variables with the gradients of their parts in the step of `keras.Model.fit`, by a trace."""
        parts = [[part.value for part in parts_of(variable)] for variable in variables]
        found: list[list[tf.Tensor | None]] = []

        def call(leaves: list[tf.Tensor]) -> None:
            with tf.GradientTape() as tape:
                forward = self._forward(leaves, training=True)
            found.extend(tape.gradient(forward.loss, parts))

        if variables:
            tf.function(call, autograph=False).get_concrete_function(self.layout.batched(None))
        return [*zip(variables, found, strict=True)]

    def _has_lengths(self, values: list[tf.Tensor]) -> bool:
        """Whether batches differ in length; `values`: of the losses, before they are reduced. See `ForwardTrace`."""
        if not any(None in spec.shape.as_list() for spec in self.layout.specs):
            return False
        return any(value.shape.rank is None or None in value.shape[1:].as_list() for value in values)


def _of_rank(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Weights that multiply values of as many dimensions or one more or less, as Keras's losses broadcast them."""
    if weights.shape.rank == values.shape.rank - 1:
        return weights[..., None]
    return tf.squeeze(weights, -1) if weights.shape.rank == values.shape.rank + 1 else weights
