"""What a call of a model reads and assigns and what its losses return, caught while the call is traced."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf2dist.errors import ConfigError
from tf2dist.process.tf_internals import watches_variables

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
        tables: those that have rows instead of a value; see `lookups`.
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
        self._noted = {id(variable) for variable, _ in mapping if variable.value.trainable}
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
        if id(variable) in self._noted:
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
    def noting_reads(self) -> Iterator[dict[int, tuple[keras.Variable, tf.Tensor]]]:
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
    def is_noting_reads(self) -> bool:
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
        """What `derive(target, sources)` gives for each source; of a variable the sum over its values on the tape."""
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
    """What `building` yields in the block that this thread is in."""
    return getattr(_current, "build", None)
