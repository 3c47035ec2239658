"""Scopes in which a call of a model is traced: they catch its reads, assignments, losses and updates by optimizers.

In a `CallScope` the variables of the model have values, and what the call assigns and what its losses return is
caught. A model's own `train_step` runs in a `TrainScope`, which also catches the updates that it asks of optimizers: an
optimizer would assign the variables themselves.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.linux import process_wide
from tf2dist.tf_internals.keras import trained_variables
from tf2dist.tf_internals.tensorflow import watches_variables

WAY_OUT = "pass it as an argument to the function that uses it"  # if a gradient is zero here and not in Keras

# Of a thread: `scope` is the one that it is in; `inlines` see `inlining`, and `build` see `building`.
_current = threading.local()


@contextlib.contextmanager
def recording(losses: list[keras.losses.Loss]) -> Iterator[list[tuple[keras.losses.Loss, tf.Tensor]]]:
    """Records what the losses return in the block, before Keras reduces it to a number."""
    values: list[tuple[keras.losses.Loss, tf.Tensor]] = []

    def record_call(loss: keras.losses.Loss) -> Any:
        call = loss.call

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            value = call(*args, **kwargs)
            values.append((loss, value))
            return value

        return wrapper

    # One object may serve several outputs; wrapped twice, it would be recorded twice.
    unique_losses = {id(loss): loss for loss in losses}.values()
    for loss in unique_losses:
        # Python looks up `call` on the object first, but `__call__`, which reduces the values, on the class alone.
        loss.call = record_call(loss)
    try:
        yield values
    finally:
        for loss in unique_losses:
            del loss.call  # the method of the class shows again


class CallScope(keras.StatelessScope):  # type: ignore[misc]
    """Catches the values that a call assigns, so that the variables themselves do not change.

    The values of variables are tensors like others, so tapes that record in the scope are told of them, see
    `interception`. In TensorFlow no gradient flows through an assignment: the gradient of an assigned variable is the
    sum of the gradients by its value before the call and by the assigned values, each taken as independent.

    Attributes:
        trainable_ids: the ids of the trainable variables.
        assigned: the values that the call assigns to each trainable variable, by the variable's id.
        num_updates: how often the call assigns each variable, by its id.
        foreign: the paths of assigned variables that have no value here.
        has_custom_gradients: whether the call has called a function with a custom gradient.
        outside: the other variables that the call reads and that have no value here, in the order of the first reads.

    Args:
        tables: those that have rows instead of a value; see `tables`.
    """

    def __init__(
        self,
        mapping: list[tuple[keras.Variable, tf.Tensor]],
        trainable: list[keras.Variable],
        tables: Sequence[keras.Variable] = (),
    ) -> None:
        # Without a scope that collects them, layers drop what the call gives to `add_loss`.
        super().__init__(mapping, collect_losses=True)
        self._known = {id(variable) for variable, _ in mapping}
        self._tables = set(map(id, tables))
        # To TensorFlow a variable stays trainable if Keras has frozen its layer.
        self._recorded = {id(variable) for variable, _ in mapping if variable.value.trainable}
        self.trainable_ids = set(map(id, trainable)) - self._tables
        # By id of the tape: the tape, and the values that it watches of each variable, by id.
        self._watched: dict[int, tuple[tf.GradientTape, dict[int, list[tf.Tensor]]]] = {}
        self._recording: list[tf.GradientTape] = []
        self._reads: list[dict[int, tuple[keras.Variable, tf.Tensor]]] = []
        self.assigned: dict[int, list[tf.Tensor]] = {}
        self.num_updates: dict[int, int] = {}
        self.foreign: list[str] = []
        self.has_custom_gradients = False
        self.outside: list[keras.Variable] = []

    def __enter__(self) -> "CallScope":
        self._outer, _current.scope = current_scope(), self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _current.scope = self._outer

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """A block in the scope, also if it is in it already: Keras would not leave a scope that is entered twice."""
        return contextlib.nullcontext() if current_scope() is self else self

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """A block outside of this scope, which the thread is in."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Keras calls this in place of each read; None for a variable whose own value is meant."""
        if id(variable) in self._tables:  # its rows alone are here, and a gradient for the whole would be lost
            raise ConfigError(f"model: {variable.path} is read as a whole in one call, and only looked up in others")
        if id(variable) not in self._known and all(variable is not outside for outside in self.outside):
            self.outside.append(variable)
        value = super().get_current_value(variable)
        if id(variable) in self._recorded:
            for read in self._reads:
                read.setdefault(id(variable), (variable, value))
        return value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Keras calls this in place of each assignment."""
        variable, value = update
        # Here the value is an ordinary tensor, through which a gradient would flow to what it was computed from.
        super().add_update((variable, tf.stop_gradient(value)))
        self.num_updates[id(variable)] = self.num_updates.get(id(variable), 0) + 1
        if id(variable) not in self._known:
            self.foreign.append(variable.path)
        if id(variable) in self.trainable_ids:
            self.assigned.setdefault(id(variable), []).append(self.state_mapping[id(variable)])
            self.watch_new(id(variable))

    @contextlib.contextmanager
    def recording_reads(self) -> Iterator[dict[int, tuple[keras.Variable, tf.Tensor]]]:
        """In a function with a custom gradient: the variables that it reads, with their values, by id.

        They are those that TensorFlow would give to its gradient.
        """
        read: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self._reads.append(read)
        try:
            yield read
        finally:
            self._reads.pop()

    @property
    def is_recording_reads(self) -> bool:
        return bool(self._reads)

    def watch_new(self, key: int) -> None:
        """Tells the tapes that record of the new value of a variable."""
        value = self.state_mapping[key]
        for tape in self._recording:
            tape.watch(value)
            self._watched[id(tape)][1][key].append(value)

    # What tapes ask.

    def begin(self, tape: tf.GradientTape) -> None:
        """Makes a tape record what is computed from the values of the trainable variables, unless it shall not."""
        if not watches_variables(tape):
            return
        values = {key: [self.state_mapping[key]] for key in self.trainable_ids}
        tape.watch(list(values.values()))
        self._watched[id(tape)] = tape, values
        self._recording.append(tape)

    def end(self, tape: tf.GradientTape) -> None:
        self._recording = [one for one in self._recording if one is not tape]

    def differentiated(self, derive: Callable[..., Any], tape: tf.GradientTape, target: Any, sources: Any) -> Any:
        """The results of `derive(target, sources)` for each source; of a variable the sum over its values on tape."""
        _, values = self._watched.get(id(tape), (tape, {}))
        flat = tf.nest.flatten(sources)
        parts = derive(
            target, [values.get(id(source), [self.state_mapping.get(id(source), source)]) for source in flat]
        )
        return tf.nest.pack_sequence_as(sources, [_total(part) for part in parts])


def _total(parts: list[Any]) -> Any:
    """The sum of the gradients by several values of a variable; None if there is none."""
    known = [part for part in parts if part is not None]
    return tf.add_n([tf.convert_to_tensor(part) for part in known]) if len(known) > 1 else next(iter(known), None)


def current_scope() -> CallScope | None:
    """The scope that this thread is in."""
    return getattr(_current, "scope", None)


@contextlib.contextmanager
def inlining() -> Iterator[None]:
    """A block in which a `tf.function` is a part of its caller, as in a scope; see `interception`."""
    before, _current.inlines = inlines(), True
    try:
        yield
    finally:
        _current.inlines = before


def inlines() -> bool:
    """Whether a `tf.function` that this thread calls is a part of its caller."""
    return current_scope() is not None or getattr(_current, "inlines", False)


@contextlib.contextmanager
def building() -> Iterator[dict[int, keras.Variable]]:
    """A block in which optimizers whose updates are intercepted do nothing, so that they make no variables.

    Yields:
        The variables for which they are given gradients, by id.
    """
    _current.build = {}
    try:
        with inlining():
            yield _current.build
    finally:
        _current.build = None


def current_build() -> dict[int, keras.Variable] | None:
    """The dict that `building` yields in the block that this thread is in."""
    return getattr(_current, "build", None)


class Update(NamedTuple):
    """An update that an optimizer is asked to apply; variables without a gradient are left out, as in Keras.

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


def is_zero(gradient: Any) -> bool:
    """Whether a gradient, a symbolic tensor or None for none, is zero whatever the batch is."""
    if gradient is None:
        return True
    if not isinstance(gradient, tf.Tensor):  # of some rows of a table
        return False
    if gradient.op.type == "ZerosLike":
        return True
    value = tf.get_static_value(gradient)
    return value is not None and not value.any()


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
