"""The training step of both modes: forward pass, loss, gradients and metrics as a pure function of its inputs."""

import inspect
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf2dist.data.layout import Layout, leaves_of
from tf2dist.model.call_scope import CallScope, noting
from tf2dist.model.metrics import Metrics
from tf2dist.model.recurrence import decay_of
from tf2dist.process.tf_internals import build_metrics, losses_of, mask_of, seeds_of

MEANS = ("sum_over_batch_size", "mean")  # the reductions of losses that are means over the examples
WORKER_STRIDE = 1 << 32  # between the seeds of two workers; those of the layers are smaller


class StepOutput(NamedTuple):
    """What one worker contributes to a step.

    Attributes:
        gradients: one for each trainable variable, of the worker's share of the loss.
        state: the new values of `ModelStep.state`, such as moving averages.
        sums: float32 [2 + Metrics.size]: the worker's share of the loss, the examples, the changes of the metrics.
    """

    gradients: list[tf.Tensor]
    state: list[tf.Tensor]
    sums: tf.Tensor


class Trial(NamedTuple):
    """What a call of the model in training shows when it is traced; it is not run.

    Attributes:
        outputs: symbolic tensors, in whatever structure the model gives them.
        assigned: the trainable variables that the call assigns.
        draws: how often the call draws from each of its random generators.
        not_added_up: the metrics' variables that a step does not only add to.
        strangers: what the call assigns and is not the model's own, by name.
        scalar_losses: the names of the losses that give one number for a whole batch.
        is_masked: whether a loss leaves out parts of the outputs.
        has_penalties: whether layers add losses, such as those of regularizers.
    """

    outputs: Any
    assigned: list[keras.Variable]
    draws: list[int]
    not_added_up: list[keras.Variable]
    strangers: list[str]
    scalar_losses: list[str]
    is_masked: bool
    has_penalties: bool


class ModelStep:
    """Calls a built and compiled Keras model without side effects, so that its variables may live anywhere.

    Attributes:
        model: the model.
        layout: of the data.
        metrics: of the model.
        trial: what a call of it shows.
        trainable: the variables that receive gradients.
        state: the variables to which a call gives new values: the non-trainable ones, and those trainable ones
            that the call assigns, as spectral normalization does. The states of random generators are left out:
            they follow from the worker and the step, so a resumed run repeats them. Those of worker 0 are what
            they would be in plain Keras at this step.
        loss_scale: what the optimizer wants the loss multiplied by, against underflow; the gradients are divided
            by it again.
        earlier: the optimizer that has trained the model before; None for a new model.
        sums_losses: whether the losses are sums over the batch, not means.
    """

    def __init__(self, model: keras.Model, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self.trainable = list(model.trainable_variables)
        self.loss_scale: float | None = None
        self.earlier: keras.Optimizer | None = None
        self._others = list(model.non_trainable_variables)
        self._seeds = [v for v in self._others if id(v) in set(map(id, seeds_of(model)))]
        self._seed_values = [np.array(v.value) for v in self._seeds]
        self._draws = [0] * len(self._seeds)  # of a step; known once one has been traced
        self._takes_training = "training" in inspect.signature(model.call).parameters
        of_seeds = set(map(id, self._seeds))
        self.state = [v for v in self._others if id(v) not in of_seeds]
        build_metrics(model, layout.symbolic())
        self.sums_losses = any(getattr(loss, "reduction", None) == "sum" for loss in losses_of(model))
        self.metrics = Metrics(model)
        self.trial = self._try()
        self._draws = self.trial.draws
        self.state += self.trial.assigned

    @property
    def depends_on_batches(self) -> bool:
        """Whether the metrics of many examples depend on how they are cut into batches, as some of Keras' do."""
        losses = losses_of(self.model)
        return (
            len(losses) > 1
            or any(getattr(loss, "reduction", "") not in MEANS for loss in losses)
            or bool(self.trial.scalar_losses)
            or self.trial.is_masked
        )

    @property
    def variables(self) -> list[keras.Variable]:
        """Every variable once; at the end of `state` stand trainable ones again."""
        return [*self.trainable, *self.state[: len(self.state) - len(self.trial.assigned)]]

    def values(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """What the trainable variables and the state hold now."""
        trainable, state = (
            [tf.convert_to_tensor(v.value) for v in variables] for variables in (self.trainable, self.state)
        )
        return trainable, state

    def __call__(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        place: tf.Tensor,
        share: tf.Tensor | None = None,
    ) -> StepOutput:
        """One forward and backward pass at the given values of the variables.

        Args:
            leaves: of the worker's batch, see `Layout`.
            place: of this step, int64 [2]: the worker, and the steps before.
            share: of the examples of the whole step that stand in this batch; 0 if they are padding. None: all.
        """
        with tf.GradientTape() as tape:  # noqa: SIM117
            with self._calling(trainable, state, self.metrics.zeros(), place, tape) as scope:
                x, y, sample_weight = self.layout.pack(leaves)
                outputs = self._outputs(x, training=True)
                loss = self._loss(x, y, outputs, sample_weight, training=True)
                part = loss if share is None or self.sums_losses else loss * share
                scaled = part * self.loss_scale if self.loss_scale else part
        gradients = self._gradients(tape, scaled, trainable, scope)
        new_state = [scope.get_current_value(variable) for variable in self.state]
        with scope:
            whole = loss / share if self.sums_losses and share is not None else loss
            count = self._update_metrics(x, y, outputs, sample_weight, whole)
            changes = self.metrics.changes(scope, share)
        sums = tf.concat([[tf.cast(part, tf.float32), count], *changes], 0)
        if share is not None:  # what padding counts is left out, even if it is not a number
            sums = tf.where(share > 0, sums, tf.zeros_like(sums))
        return StepOutput(gradients, new_state, sums)

    def evaluate(self, trainable: list[tf.Tensor], state: list[tf.Tensor], leaves: list[tf.Tensor]) -> tf.Tensor:
        """The sums over some examples, float64 [1 + Metrics.size]: the examples, the changes of the metrics."""
        place = tf.zeros([2], tf.int64)
        with self._calling(trainable, state, self.metrics.zeros(), place, None) as scope:
            x, y, sample_weight = self.layout.pack(leaves)
            outputs = self._outputs(x, training=False)
            loss = self._loss(x, y, outputs, sample_weight, training=False)
            count = self._update_metrics(x, y, outputs, sample_weight, loss)
            return tf.cast(tf.concat([[count], *self.metrics.changes(scope)], 0), tf.float64)

    def evaluate_function(self) -> Any:
        """`evaluate`, traced once for any number of examples: Keras' metrics ask whether that number is fixed."""
        specs = [[tf.TensorSpec(v.shape, v.dtype) for v in variables] for variables in (self.trainable, self.state)]
        signature = (*specs, self.layout.batched(None))
        return tf.function(self.evaluate, autograph=False, input_signature=signature)

    def _calling(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        metrics: list[tf.Tensor],
        place: tf.Tensor,
        tape: tf.GradientTape | None,
    ) -> CallScope:
        """In this scope the model's variables have the given values, and random generators those of the step."""
        if tape:
            tape.watch(trainable)
        values = dict(zip(map(id, self.state), state, strict=True)) | self._generators(place)
        others = [(variable, values[id(variable)]) for variable in self._others]
        of_metrics = list(zip(self.metrics.variables, metrics, strict=True))
        mapping = [*zip(self.trainable, trainable, strict=True), *others, *of_metrics]
        return CallScope(mapping, self.trainable, tape)

    def _generators(self, place: tf.Tensor) -> dict[int, tf.Tensor]:
        """The states of the random generators before a step, by id: a seed and a count of draws."""
        if not self._seeds:
            return {}
        worker, step = tf.unstack(place)
        found = {}
        for variable, value, draws in zip(self._seeds, self._seed_values, self._draws, strict=True):
            before = tf.cast(tf.stack([worker * WORKER_STRIDE, step * draws]), variable.dtype)
            found[id(variable)] = tf.constant(value, variable.dtype) + before
        return found

    def _outputs(self, x: Any, training: bool) -> Any:
        return self.model(x, training=training) if self._takes_training else self.model(x)

    def _loss(self, x: Any, y: Any, outputs: Any, sample_weight: Any, training: bool) -> tf.Tensor:
        """The loss of the batch as Keras computes it in a single process."""
        loss = self.model.compute_loss(x, y, outputs, sample_weight, training=training)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        # Keras divides every mean by the number of replicas, since it adds them up.
        return loss if self.sums_losses or replicas == 1 else loss * tf.cast(replicas, loss.dtype)

    def _update_metrics(self, x: Any, y: Any, outputs: Any, sample_weight: Any, loss: tf.Tensor) -> tf.Tensor:
        """Gives the batch to all metrics, as Keras' own steps do; returns its number of examples, float32."""
        count = tf.shape(leaves_of(x)[0])[0]
        self.metrics.loss_tracker.update_state(loss, sample_weight=count)
        self.model.compute_metrics(x, y, outputs, sample_weight)
        return tf.cast(count, tf.float32)

    def _gradients(
        self, tape: tf.GradientTape, loss: tf.Tensor, trainable: list[tf.Tensor], scope: CallScope
    ) -> list[tf.Tensor]:
        """The gradients of the loss, each summed over a variable's value before the call and the assigned ones."""
        leaves = [[value, *scope.assigned.get(id(v), [])] for v, value in zip(self.trainable, trainable, strict=True)]
        found = tape.gradient(loss, leaves, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients = [parts[0] if len(parts) == 1 else tf.add_n(parts) for parts in found]
        return [gradient / self.loss_scale for gradient in gradients] if self.loss_scale else gradients

    def _try(self) -> Trial:
        """Traces one step, to see what the model returns, assigns and draws, and what its metrics do."""
        found: list[Trial] = []

        def call(
            trainable: list[tf.Tensor], state: list[tf.Tensor], metrics: list[tf.Tensor], leaves: list[tf.Tensor]
        ) -> None:
            with (
                tf.GradientTape() as tape,
                self._calling(trainable, state, metrics, tf.zeros([2], tf.int64), tape) as scope,
            ):
                x, y, sample_weight = self.layout.pack(leaves)
                outputs = self._outputs(x, training=True)
                with noting(losses_of(self.model)) as found_losses:
                    loss = self._loss(x, y, outputs, sample_weight, training=True)
                self._update_metrics(x, y, outputs, sample_weight, loss)
                has_penalties = bool(self.model.losses)
                is_masked = any(
                    mask_of(each) is not None for each in [*leaves_of(outputs), *(value for _, value in found_losses)]
                )
                news = [scope.get_current_value(v) for v in self.metrics.variables]
            kept = zip(self.metrics.variables, metrics, news, strict=True)
            found.append(
                Trial(
                    outputs=outputs,
                    assigned=[v for v in self.trainable if id(v) in scope.assigned],
                    draws=[scope.num_updates.get(id(v), 0) for v in self._seeds],
                    not_added_up=[v for v, old, new in kept if new is not old and decay_of(new, old) != 1],
                    strangers=scope.strangers,
                    scalar_losses=[loss.name for loss, value in found_losses if not value.shape.rank],
                    is_masked=is_masked,
                    has_penalties=has_penalties,
                )
            )

        parts = (self.trainable, self.state, self.metrics.variables)
        specs = [[tf.TensorSpec(v.shape, v.dtype) for v in variables] for variables in parts]
        tf.function(call, autograph=False).get_concrete_function(*specs, self.layout.batched(None))
        return found[0]


def step_place(worker: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """The place of a step, for `ModelStep`: int64 [2]."""
    return tf.stack([tf.cast(worker, tf.int64), tf.cast(step, tf.int64)])
