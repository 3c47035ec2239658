"""The training step of all modes: forward pass, loss, gradients and metrics as a pure function of its inputs."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Layout, leaves_of
from tf2dist.model.batch_attention import num_calls
from tf2dist.model.gradients import is_zero
from tf2dist.model.interception import prepare_process
from tf2dist.model.metrics import Metrics
from tf2dist.model.recurrence import decay_of, reached_from
from tf2dist.model.scopes import CallScope, inlining, recording
from tf2dist.model.shards import parts_of, read_rows
from tf2dist.model.tables import LookupScope, TableLookups
from tf2dist.model.trace import Trace
from tf2dist.tf_internals import build_metrics, compute_loss, losses_of, mask_of, own_layers_of_keras, seeds_of

MEANS = ("sum_over_batch_size", "mean")  # the reductions of losses that are means over the examples
WEIGHTED_MEAN = "mean_with_sample_weight"  # that of a mean which is divided by the weights of the examples
OUTSIDE = "outside/"  # the names of variables that are not the model's begin so
WORKER_STRIDE = 1 << 32  # between the seeds of two workers; the seeds of a model's layers are smaller


class StepOutput(NamedTuple):
    """What one worker contributes to a step.

    Attributes:
        gradients: one for each trainable variable, of the worker's share of the loss.
        state: the new values of `ModelStep.state`, such as moving averages.
        sums: float32 [2 + Metrics.size]: the worker's share of the loss, the number of its examples, and what they
            add to the metrics.
        weight: float32 []: by which the gradients and the loss in `sums` are multiplied. That is the worker's share of
            the examples, so that the parts of all workers add up, unless `ModelStep.weighs_losses`: then the total has
            to be divided by the weights of all workers.
    """

    gradients: list[tf.Tensor]
    state: list[tf.Tensor]
    sums: tf.Tensor
    weight: tf.Tensor


class ForwardPass(NamedTuple):
    """A batch as the model takes it, the model's outputs, what each loss makes of them, and the loss of the batch."""

    x: Any
    y: Any
    sample_weight: Any
    outputs: Any
    loss_values: list[tuple[keras.losses.Loss, tf.Tensor]]
    loss: tf.Tensor


class ModelStep:
    """Calls a built and compiled Keras model without side effects, so that its variables may live anywhere.

    Attributes:
        model: the model.
        layout: of the data.
        metrics: of the model, in training.
        evaluated: those of an evaluation.
        trace: what a call of it shows.
        trainable: the variables that receive gradients.
        state: the variables to which a call gives new values: the non-trainable ones, and those trainable ones
            that the call assigns, as spectral normalization does. The states of random generators are left out:
            they follow from the worker and the step, so a resumed run repeats them. Worker 0 has those that plain
            Keras would have at this step.
        others, seeds: the variables of the model that are not trained, and those among them of random generators.
        loss_scale: the factor by which the optimizer wants the loss scaled up, against underflow; the gradients
            are divided by it again. If it is a variable, a LossScaleOptimizer divides them.
        earlier_optimizer: the optimizer that has trained the model before; None for a new model.
        sums_losses: whether the losses are sums over the batch instead of means.
        outside: variables that a step reads where they are, since they are not the model's, such as the factor of a
            penalty that a callback changes; by names for checkpoints, which their order gives.
        lookups: of the calls in large tables.
    """

    def __init__(self, model: keras.Model, layout: Layout) -> None:
        prepare_process()
        self.model, self.layout = model, layout
        self.loss_scale: float | keras.Variable | None = None
        self.earlier_optimizer: keras.Optimizer | None = None
        self.lookups = TableLookups(model, layout, self._all_variables, self._call_with)
        self._takes_training = "training" in inspect.signature(model.call).parameters
        self.divide_variables(list(model.trainable_variables))
        self._build_metrics()
        reductions = [getattr(loss, "reduction", None) for loss in self.losses]
        self.sums_losses = "sum" in reductions and not self.has_own_loss
        self.trace = self._trace()
        self._draws = self.trace.draws
        self.state += self.trace.assigned
        self.outside = {f"{OUTSIDE}{number}": [variable] for number, variable in enumerate(self.trace.outside)}

    def divide_variables(self, trainable: list[keras.Variable]) -> None:
        """Divides the variables of the model into the trained ones, the state, and those of random generators."""
        # Variables are looked up by id, here and below: == of Keras variables compares what they hold.
        of_seeds, trained = set(map(id, seeds_of(self.model))), set(map(id, trainable))
        others = [*self.model.non_trainable_variables, *self.model.trainable_variables]
        self.trainable, self.others = trainable, [v for v in others if id(v) not in trained]
        self.seeds = [v for v in self.others if id(v) in of_seeds]
        # Read once, to become constants of the graph: the variables may lie on a ps, and no step changes them.
        with tf.init_scope():  # an own step is divided while it is traced
            self._seed_values = [np.array(v.value) for v in self.seeds]
        self._draws = [0] * len(self.seeds)  # of a step; known once one has been traced
        self.state = [v for v in self.others if id(v) not in of_seeds]

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
        """Whether the metrics of many examples depend on how they are cut into batches, as some of Keras' do."""
        losses, trace = self.losses, self.trace
        are_means = len(losses) <= 1 and all(getattr(loss, "reduction", "") in MEANS for loss in losses)
        return self.has_own_loss or trace.has_scalar_loss or trace.is_masked or trace.penalizes_batch or not are_means

    @property
    def has_own_loss(self) -> bool:
        return has_own_loss(self.model)

    @property
    def num_parts(self) -> int:
        """How many losses `parts` has."""
        return 1 + len(self.trace.penalties)

    @property
    def weighs_losses(self) -> bool:
        """Whether the loss is a mean over parts of the output, of which only the forward pass shows how many there are.

        Such parts are those that a mask leaves, the places of batches of several lengths, or the weights of the
        examples.
        """
        reductions = [getattr(loss, "reduction", None) for loss in self.losses]
        if self.has_own_loss or self.trace.has_scalar_loss:  # which is divided by nothing
            return False
        if len(reductions) != 1 or len(leaves_of(self.trace.outputs)) != 1:
            return False
        return reductions == [WEIGHTED_MEAN] or (self.trace.divides_by_parts and reductions[0] in MEANS)

    @property
    def variables(self) -> list[keras.Variable]:
        """Every variable once; at the end of `state` stand trainable ones again."""
        return [*self.trainable, *self.state[: len(self.state) - len(self.trace.assigned)]]

    def random_states(self, step: int) -> dict[str, np.ndarray]:
        """The states of the random generators after `step` steps, as in plain Keras; named as in `generators`."""
        values = {
            id(v): value + np.array([0, step * draws], value.dtype)
            for v, value, draws in zip(self.seeds, self._seed_values, self._draws, strict=True)
        }
        return {name: values[id(v)] for name, v in generators(self.model).items()}

    @property
    def tables(self) -> list[keras.Variable]:
        """Those trainable variables of which a step takes rows in the place of their values."""
        return self.lookups.tables

    def _all_variables(self) -> list[keras.Variable]:
        """Of the model and its metrics."""
        return [*self.trainable, *self.others, *self.metrics.variables]

    def _call_with(self, values: list[tf.Tensor], leaves: list[tf.Tensor], training: bool, layout: Layout) -> None:
        """Calls the model with values for `_all_variables`."""
        with LookupScope(list(zip(self._all_variables(), values, strict=True)), self.trainable):
            self._forward(leaves, training, layout)

    def values(self, ids: Sequence[tf.Tensor] = ()) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """What the trainable variables and the state hold now.

        Args:
            ids: the rows of `tables` that are read in their places; see `Lookups`.
        """
        rows = {id(table): read_rows(table, own) for table, own in zip(self.tables, ids, strict=True)}
        trainable = [rows[id(v)] if id(v) in rows else tf.convert_to_tensor(v.value) for v in self.trainable]
        return trainable, [tf.convert_to_tensor(v.value) for v in self.state]

    def __call__(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        place: tf.Tensor,
        share: tf.Tensor | None = None,
        positions: Sequence[tf.Tensor] = (),
    ) -> StepOutput:
        """One forward and backward pass at the given values of the variables.

        Args:
            trainable: one for each of `self.trainable`; of `tables` the rows of `Lookups.ids`, and so the gradients.
            leaves: of the worker's batch, see `Layout`.
            place: int64 [2]: the worker, and the number of steps before this one.
            share: the part of the whole step's examples that is in this batch; 0 if they are padding. None: all.
            positions: see `Lookups`.
        """
        with (
            self._scope(trainable, state, self.metrics.zeros(), place) as scope,
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
        if share is not None:  # what padding counts is left out by a choice: a product with 0 would keep a NaN
            sums = tf.where(share > 0, sums, tf.zeros_like(sums))
        return StepOutput(gradients, new_state, sums, weight)

    def parts(self, leaves: list[tf.Tensor], training: bool, number: int = 0) -> list[tf.Tensor]:
        """The loss of a batch and those that layers add.

        Args:
            number: of the step whose random numbers are drawn.
        """
        place = tf.constant([0, number], tf.int64)
        lookups = self.lookups.look_up(leaves, training)
        trainable, state = self.values(lookups.ids)
        with (
            self._scope(trainable, state, self.metrics.zeros(), place),
            self._reading(trainable, lookups.positions),
        ):
            loss = self._forward(leaves, training, for_training=True).loss
            return [tf.reduce_sum(tf.cast(one, tf.float32)) for one in (loss, *self.model.losses)]

    def evaluate(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        layout: Layout | None = None,
        positions: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        """The sums over some examples, float64 [1 + Metrics.size]: their number, and what they add to the metrics.

        Args:
            layout: of the examples, which may have weights where those of the training have none; None: the same.
            positions: see `Lookups`.
        """
        # A layer that draws in an evaluation, too, draws the same in each: the result can be repeated.
        place = tf.zeros([2], tf.int64)
        with (
            self._scope(trainable, state, self.metrics.zeros(), place) as scope,
            self._reading(trainable, positions),
        ):
            forward = self._forward(leaves, training=False, layout=layout)
            count = self._update_metrics(forward, forward.loss)
            # float64, since the caller adds up a whole split: float32 counts examples only up to 2^24.
            return tf.cast(tf.concat([[count], *self.metrics.changes(scope)], 0), tf.float64)

    def evaluate_function(self, layout: Layout | None = None) -> Any:
        """`evaluate`, traced once for any number of examples: Keras' metrics ask whether that number is fixed."""
        signature = (*self.specs_of(self.trainable, self.state), (layout or self.layout).batched(None))

        # Not by functools.partial: TensorFlow would take the layout for an argument.
        def evaluate(trainable: list[tf.Tensor], state: list[tf.Tensor], leaves: list[tf.Tensor]) -> tf.Tensor:
            return self.evaluate(trainable, state, leaves, layout)

        return tf.function(evaluate, autograph=False, input_signature=signature)

    def _scope(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        metrics: list[tf.Tensor],
        place: tf.Tensor,
    ) -> CallScope:
        """The scope in which the variables of the model have the given values, and random generators the step's."""
        return CallScope(self.scope_values(trainable, state, metrics, place), self.trainable, self.tables)

    def _reading(self, trainable: list[tf.Tensor], positions: Sequence[tf.Tensor]) -> AbstractContextManager[None]:
        """The block in which layers take their rows from the values of `tables`."""
        pairs = zip(self.trainable, trainable, strict=True) if self.tables else ()
        return self.lookups.reading([value for v, value in pairs if self.lookups.is_table(v)], positions)

    def scope_values(
        self, trainable: list[tf.Tensor], state: list[tf.Tensor], metrics: list[tf.Tensor], place: tf.Tensor
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The variables of a scope, with their values."""
        values = dict(zip(map(id, self.state), state, strict=True)) | self._generators(place)
        others = [(variable, values[id(variable)]) for variable in self.others]
        of_metrics = list(zip(self.metrics.variables, metrics, strict=True))
        trained = [p for p in zip(self.trainable, trainable, strict=True) if not self.lookups.is_table(p[0])]
        return [*trained, *others, *of_metrics]

    def _generators(self, place: tf.Tensor) -> dict[int, tf.Tensor]:
        """The states of the random generators before a step, by id: a seed and a count of draws."""
        if not self.seeds:
            return {}
        worker, step = tf.unstack(place)
        states = {}
        for variable, value, draws in zip(self.seeds, self._seed_values, self._draws, strict=True):
            # Another seed for each worker, or all would drop the same units; Keras adds 1 to the count for each draw.
            offset = tf.cast(tf.stack([worker * WORKER_STRIDE, step * draws]), variable.dtype)
            states[id(variable)] = tf.constant(value, variable.dtype) + offset
        return states

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
        """See `StepOutput.weight`."""
        if not self.weighs_losses:
            return share
        ((loss, value),) = forward.loss_values
        parts, factors = tf.ones_like(value, tf.float32), [mask_of(leaves_of(forward.outputs)[0]), mask_of(value)]
        if loss.reduction == WEIGHTED_MEAN and forward.sample_weight is not None:
            factors += leaves_of(forward.sample_weight)
        for factor in factors:
            if factor is not None:
                parts *= tf.reshape(tf.cast(factor, tf.float32), tf.shape(parts))
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
        # Those of a row that is looked up several times are added up.
        pairs = zip(self.trainable, gradients, strict=True)
        gradients = [tf.convert_to_tensor(g) if is_table(v) else g for v, g in pairs]
        if self.loss_scale is None or isinstance(self.loss_scale, keras.Variable):
            return gradients
        return [gradient / self.loss_scale for gradient in gradients]

    def _trace(self) -> Trace:
        """Traces one step, to see what the model returns, assigns and draws, and what its metrics do."""
        traces: list[Trace] = []
        calls = num_calls()

        # The values come as arguments of a graph, in which `decay_of` can follow what becomes of the metrics'.
        def call(
            trainable: list[tf.Tensor], state: list[tf.Tensor], metrics: list[tf.Tensor], leaves: list[tf.Tensor]
        ) -> None:
            with self._scope(trainable, state, metrics, tf.zeros([2], tf.int64)) as scope:
                with tf.GradientTape() as tape:
                    forward = self._forward(leaves, training=True)
                # Of other models the gradients are not traced here, which takes a third of the time of a deep one.
                ungraded = []
                if (
                    scope.has_custom_gradients
                ):  # which may hide variables, and compute layers again, with random numbers
                    gradients = tape.gradient(forward.loss, self.trainable)
                    ungraded = [v for v, g in zip(self.trainable, gradients, strict=True) if is_zero(g)]
                self._update_metrics(forward, forward.loss)
                penalties = list(self.model.losses)
                maskable = [*leaves_of(forward.outputs), *(value for _, value in forward.loss_values)]
                new_values = [scope.get_current_value(v) for v in self.metrics.variables]
                changed = self.changed_by_users(scope, state)
            reached = reached_from(*leaves)
            metric_changes = zip(self.metrics.variables, metrics, new_values, strict=True)
            traces.append(
                Trace(
                    outputs=forward.outputs,
                    assigned=[v for v in self.trainable if id(v) in scope.assigned],
                    draws=[scope.num_updates.get(id(v), 0) for v in self.seeds],
                    not_additive=[v for v, old, new in metric_changes if new is not old and decay_of(new, old) != 1],
                    foreign=scope.foreign,
                    outside=scope.outside,
                    bypassed=[],
                    ungraded=ungraded,
                    has_scalar_loss=any(not value.shape.rank for _, value in forward.loss_values),
                    is_masked=any(mask_of(tensor) is not None for tensor in maskable),
                    has_lengths=self._has_lengths([value for _, value in forward.loss_values]),
                    penalties=penalties,
                    penalizes_batch=any(penalty.name in reached for penalty in penalties),
                    decays={id(v): decay_of(new, old) for v, new, old in changed},
                    from_batch=[v for v, new, _ in changed if new.name in reached],
                    gathers=num_calls() > calls,
                )
            )

        signature = (*self.specs_of(self.trainable, self.state, self.metrics.variables), self.layout.batched(None))
        traced = tf.function(call, autograph=False).get_concrete_function(*signature)
        traces[0].note_direct_reads(traced, [*self.trainable, *self.others, *self.metrics.variables])
        return traces[0]

    def graded_by_keras(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        """Those of some trainable variables that have a gradient in the step of `keras.Model.fit`, by a trace."""
        parts = [[part.value for part in parts_of(variable)] for variable in variables]
        found: list[keras.Variable] = []

        def call(leaves: list[tf.Tensor]) -> None:
            with tf.GradientTape() as tape:
                forward = self._forward(leaves, training=True)
            gradients = tape.gradient(forward.loss, parts)
            found.extend(v for v, own in zip(variables, gradients, strict=True) if not all(map(is_zero, own)))

        tf.function(call, autograph=False).get_concrete_function(self.layout.batched(None))
        return found

    def _has_lengths(self, values: list[tf.Tensor]) -> bool:
        """See `Trace`; `values`: of the losses, before they are reduced."""
        if not any(None in spec.shape.as_list() for spec in self.layout.specs):
            return False
        return any(value.shape.rank is None or None in value.shape[1:].as_list() for value in values)

    def changed_by_users(
        self, scope: CallScope, state: list[tf.Tensor]
    ) -> list[tuple[keras.Variable, tf.Tensor, tf.Tensor]]:
        """The state that a call changes, with its new and old values, but for that of Keras's own layers."""
        # Their changes have a mean over the replicas.
        of_keras = [v for layer in own_layers_of_keras(self.model) for v in layer.variables]
        known = {id(v) for v in of_keras if v.aggregation == "none"}
        values = [(v, scope.get_current_value(v), old) for v, old in zip(self.state, state, strict=True)]
        return [(v, new, old) for v, new, old in values if new is not old and id(v) not in known]

    @staticmethod
    def specs_of(*parts: list[keras.Variable]) -> list[list[tf.TensorSpec]]:
        return [[tf.TensorSpec(v.shape, v.dtype) for v in variables] for variables in parts]


def has_own_loss(model: keras.Model) -> bool:
    """Whether a model computes its loss by itself."""
    return type(model).compute_loss is not keras.Model.compute_loss


def generators(model: keras.Model) -> dict[str, keras.Variable]:
    """The states of a model's random generators by name: numbers, as the layers stand in the same order everywhere."""
    return {f"random/{number}": variable for number, variable in enumerate(seeds_of(model))}


def step_place(worker: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """The place of a step, for `ModelStep`: int64 [2]."""
    return tf.stack([tf.cast(worker, tf.int64), tf.cast(step, tf.int64)])
