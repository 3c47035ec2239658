"""What a model's own `train_step` does: the gradients that it takes, and the updates that it asks of optimizers.

It runs in a scope in which the variables of the model have values, see `CallScope`. To a gradient tape these values are
tensors like others, so the tapes are told of them. An optimizer would assign the variables themselves, so what it is
asked to apply is caught.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.model.call_scope import CallScope
from tf2dist.process.tf_internals import trained_variables

# Of a thread: `scope` is the one that it is in, and `builds` is whether updates are left out.
_current = threading.local()


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
        super().__init__(mapping, trainable, None)
        self._apply = apply
        self._graph = tf.compat.v1.get_default_graph()
        # By id of the tape: the tape, and the values that it watches of each variable, by id.
        self._watched: dict[int, tuple[tf.GradientTape, dict[int, list[tf.Tensor]]]] = {}
        self._recording: list[tf.GradientTape] = []
        self._not_applied: set[int] = set()  # the variables of updates that were caught alone
        self.updates: list[Update] = []
        self.losses_of_tapes: list[tf.Tensor] = []
        self.reads_updated = False

    @property
    def assigns_updated(self) -> list[keras.Variable]:
        return [v for update in self.updates for v in update.variables if id(v) in self.assigned]

    def __enter__(self) -> "TrainScope":
        self._outer, _current.scope = getattr(_current, "scope", None), self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _current.scope = self._outer

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        self.reads_updated = self.reads_updated or id(variable) in self._not_applied
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        super().add_update(update)
        variable, _ = update
        if id(variable) in self.trainable_ids:
            self.assigned.setdefault(id(variable), []).append(self.state_mapping[id(variable)])
            self._watch_new(id(variable))

    def _watch_new(self, key: int) -> None:
        """Tells the tapes that record of the new value of a variable."""
        value = self.state_mapping[key]
        for tape in self._recording:
            tape.watch(value)
            self._watched[id(tape)][1][key].append(value)

    def loss(self) -> tf.Tensor:
        """The sum of what gradients were taken of, float32 []."""
        return tf.add_n([tf.reduce_mean(tf.cast(one, tf.float32)) for one in self.losses_of_tapes])

    # What tapes ask.

    def begin(self, tape: tf.GradientTape) -> None:
        """Makes a tape record what is computed from the values of the trainable variables."""
        values = {key: [self.state_mapping[key]] for key in self.trainable_ids}
        tape.watch(list(values.values()))
        self._watched[id(tape)] = tape, values
        self._recording.append(tape)

    def end(self, tape: tf.GradientTape) -> None:
        self._recording = [one for one in self._recording if one is not tape]

    def differentiated(self, derive: Callable[..., Any], tape: tf.GradientTape, target: Any, sources: Any) -> Any:
        """What `derive(target, sources)` gives for each source; of a variable the sum over its values on the tape."""
        _, values = self._watched.get(id(tape), (tape, {}))
        self.losses_of_tapes += [one for one in tf.nest.flatten(target) if tf.is_tensor(one)]

        flat = tf.nest.flatten(sources)
        parts = derive(target, [values.get(id(source), [source]) for source in flat])
        totals = [_total(part) if id(source) in values else part[0] for source, part in zip(flat, parts, strict=True)]
        return tf.nest.pack_sequence_as(sources, totals)

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
        with self._left():
            values = self._apply(update)
        for variable, value in zip(update.variables, values, strict=True):
            self.state_mapping[id(variable)] = value
            self._watch_new(id(variable))

    @contextlib.contextmanager
    def _left(self) -> Iterator[None]:
        """A block outside of this scope."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def _total(parts: list[Any]) -> Any:
    """The sum of the gradients by several values of a variable; None if there is none."""
    known = [tf.convert_to_tensor(part) for part in parts if part is not None]
    return tf.add_n(known) if known else None


@contextlib.contextmanager
def building() -> Iterator[None]:
    """A block in which optimizers whose updates are intercepted do nothing, so that they make no variables."""
    _current.builds = True
    try:
        yield
    finally:
        _current.builds = False


def intercept_updates(optimizers: list[keras.Optimizer]) -> None:
    """Makes optimizers give their updates to the scope that their thread is in, if it is in one."""

    def intercepted(optimizer: keras.Optimizer) -> Callable[..., Any]:
        apply = type(optimizer).apply

        def in_scope(gradients: Any, trainable_variables: Any = None) -> Any:
            if getattr(_current, "builds", False):
                return None
            if scope := _scope():
                return scope.update(optimizer, gradients, trainable_variables)
            return apply(optimizer, gradients, trainable_variables)

        return in_scope

    for optimizer in optimizers:
        optimizer.apply = intercepted(optimizer)


@functools.cache
def prepare_process() -> None:
    """Makes the gradient tapes of this process know the values in a scope, and refuses unknown optimizers there."""
    kind = tf.GradientTape
    enter, leave = kind.__enter__, kind.__exit__

    def begin(tape: tf.GradientTape) -> tf.GradientTape:
        entered = enter(tape)
        if scope := _scope():
            scope.begin(tape)
        return entered

    def end(tape: tf.GradientTape, *error: Any) -> None:
        if scope := _scope():
            scope.end(tape)
        leave(tape, *error)

    def following(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def derive(tape: tf.GradientTape, target: Any, sources: Any, *more: Any, **options: Any) -> Any:
            if scope := _scope():
                return scope.differentiated(lambda *both: method(tape, *both, *more, **options), tape, target, sources)
            return method(tape, target, sources, *more, **options)

        return derive

    apply = keras.optimizers.Optimizer.apply

    @functools.wraps(apply)
    def known(optimizer: keras.Optimizer, *args: Any, **options: Any) -> Any:
        # Those whose updates are intercepted have an `apply` of their own.
        if _scope() or getattr(_current, "builds", False):
            raise ConfigError(f"applies the optimizer {optimizer.name}, which the model has in none of its attributes")
        return apply(optimizer, *args, **options)

    keras.optimizers.Optimizer.apply = known
    kind.__enter__, kind.__exit__ = begin, end
    kind.gradient, kind.jacobian = following(kind.gradient), following(kind.jacobian)


def _scope() -> TrainScope | None:
    return getattr(_current, "scope", None)
