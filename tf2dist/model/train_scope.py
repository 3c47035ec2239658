"""The updates that a model's own `train_step` asks of optimizers, caught while it is traced.

It runs in a scope in which the variables of the model have values, see `CallScope`. An optimizer would assign the
variables themselves.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.interpreter import process_wide
from tf2dist.model.call_scope import CallScope, current_build, current_scope
from tf2dist.model.gradients import is_zero
from tf2dist.process.tf_internals import trained_variables


class Update(NamedTuple):
    """What an optimizer is asked to apply; variables without a gradient are left out, as Keras leaves them out.

    Attributes:
        gradients: dense, one for each of `variables`, without the optimizer's scale of the loss.
    """

    optimizer: keras.Optimizer
    variables: list[keras.Variable]
    gradients: list[tf.Tensor]


class TrainScope(CallScope):
    """A scope for a `train_step`.

    Attributes:
        updates: in their order.
        losses_of_tapes: the tensors whose gradients were taken.
        reads_updated: whether a variable is read after an update of it that has not been applied.
        assigns_updated: the variables that are assigned, and trained by an optimizer, too.

    Args:
        apply: applies an update and returns the new values of its variables; None to leave the old ones.
    """

    def __init__(
        self,
        mapping: list[tuple[keras.Variable, tf.Tensor]],
        trainable: list[keras.Variable],
        apply: Callable[[Update], list[tf.Tensor]] | None = None,
    ) -> None:
        super().__init__(mapping, trainable)
        self._apply = apply
        self._graph = tf.compat.v1.get_default_graph()
        self._is_deriving = False  # whether a gradient is being taken, which may take others, as that of `keras.remat`
        self._not_applied: set[int] = set()  # the variables of updates that were caught alone
        self.updates: list[Update] = []
        self.losses_of_tapes: list[tf.Tensor] = []
        self.reads_updated = False

    @property
    def assigns_updated(self) -> list[keras.Variable]:
        return [v for update in self.updates for v in update.variables if id(v) in self.assigned]

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        self.reads_updated = self.reads_updated or id(variable) in self._not_applied
        return super().get_current_value(variable)

    def loss(self) -> tf.Tensor:
        """The sum of what gradients were taken of, float32 []."""
        return tf.add_n([tf.reduce_mean(tf.cast(one, tf.float32)) for one in self.losses_of_tapes])

    def differentiated(self, derive: Callable[..., Any], tape: tf.GradientTape, target: Any, sources: Any) -> Any:
        if self._is_deriving:
            return super().differentiated(derive, tape, target, sources)
        self.losses_of_tapes += [one for one in tf.nest.flatten(target) if tf.is_tensor(one)]
        self._is_deriving = True
        try:
            return super().differentiated(derive, tape, target, sources)
        finally:
            self._is_deriving = False

    # What optimizers are asked.

    def update(self, optimizer: keras.Optimizer, gradients: Any, variables: Any = None) -> None:
        """Takes an update in place of an optimizer."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ConfigError("applies an optimizer within a tf.cond or tf.while_loop, so not in every step alike")
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ConfigError(
                "applies a LossScaleOptimizer, which leaves out updates; give its inner optimizer, and to compile "
                "auto_scale_loss=False"
            )
        scale = optimizer.loss_scale_factor
        every = zip(trained_variables(optimizer) if variables is None else variables, gradients, strict=True)
        pairs = [(variable, tf.convert_to_tensor(gradient)) for variable, gradient in every if gradient is not None]
        if not pairs:
            raise ConfigError(f"applies {optimizer.name} to variables of which no loss gives a gradient; leave it out")
        if strangers := [variable for variable, _ in pairs if id(variable) not in self.trainable_ids]:
            raise ConfigError(f"applies an optimizer to {strangers[0]}, which is no trainable variable of the model")
        unscaled = [gradient / scale if scale else gradient for _, gradient in pairs]
        update = Update(optimizer, [variable for variable, _ in pairs], unscaled)
        self.updates.append(update)
        if self._apply is None:
            self._not_applied |= set(map(id, update.variables))
            return
        with self.left():
            values = self._apply(update)
        for variable, value in zip(update.variables, values, strict=True):
            self.state_mapping[id(variable)] = value
            self.watch_new(id(variable))


def intercept_updates(optimizers: list[keras.Optimizer]) -> None:
    """Makes optimizers give their updates to the scope that their thread is in, if it is in one."""

    def intercepted(optimizer: keras.Optimizer) -> Callable[..., Any]:
        apply = type(optimizer).apply

        def in_scope(gradients: Any, trainable_variables: Any = None) -> Any:
            if (build := current_build()) is not None:
                variables = trained_variables(optimizer) if trainable_variables is None else trainable_variables
                pairs = zip(variables, gradients, strict=False)
                build.update({id(variable): variable for variable, gradient in pairs if not is_zero(gradient)})
                return None
            if isinstance(scope := current_scope(), TrainScope):
                return scope.update(optimizer, gradients, trainable_variables)
            return apply(optimizer, gradients, trainable_variables)

        # Or AutoGraph would convert it where a `tf.function` of the user's calls it.
        unconverted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(in_scope)
        return unconverted

    with process_wide:
        _refuse_unknown_optimizers()
    for optimizer in optimizers:
        optimizer.apply = intercepted(optimizer)


@functools.cache
def _refuse_unknown_optimizers() -> None:
    """Makes optimizers of this process whose updates are not intercepted refuse them in a scope."""
    apply = keras.optimizers.Optimizer.apply

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(apply)
    def known(optimizer: keras.Optimizer, *args: Any, **options: Any) -> Any:
        # Those whose updates are intercepted have an `apply` of their own.
        if isinstance(current_scope(), TrainScope) or current_build() is not None:
            raise ConfigError(f"applies the optimizer {optimizer.name}, which the model has in none of its attributes")
        return apply(optimizer, *args, **options)

    keras.optimizers.Optimizer.apply = known
