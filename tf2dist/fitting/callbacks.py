"""Callbacks of `fit`: how they are called, and how their state becomes arrays of numbers for checkpoints.

They are called in the caller's thread when the leader asks for it, on a mirror of its model.

A callback's state is every attribute that has changed since `on_train_begin` and is a number, a string, None, a numpy
array, or a list, tuple or dict of these: plain values only, so that nothing is unpickled. Anything else, such as a file
or a function, is not saved: the callback has to create it again.
"""

import contextlib
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import keras
import ml_dtypes  # noqa: F401  numpy then knows bfloat16 by its name
import numpy as np

from tf2dist.errors import CheckpointError, FitError, first_line
from tf2dist.fitting.mirror import Mirror
from tf2dist.fitting.readers import BATCH_HOOKS, calls_with_weights, has_hook
from tf2dist.fitting.refusals import is_own_hook
from tf2dist.model.own_step import has_own_step
from tf2dist.model.source import EpochPlan
from tf2dist.training.hooks import CallbackEffects, NamedArrays

TEXT = "callbacks"  # the name of the array that holds everything but the arrays, as JSON in UTF-8
ENDED = "ended"  # the name of the array that says that the last hook was called
BEGUN = "begun"  # the name of the array that holds the last epoch whose first hook was called
NUMBERS = "biufc"
# By callback and attribute the value as JSON, in which NaN equals NaN, and 1, 1.0 and True differ; and its arrays.
State = dict[tuple[str, str], tuple[str, dict[str, bytes]]]


class NotPlain(Exception):
    """A value that cannot be saved."""


def state_of(callbacks: Iterable[keras.callbacks.Callback]) -> State:
    """All plain attributes of all callbacks."""
    state: State = {}
    for name, callback in _by_name(callbacks).items():
        for attribute in sorted(vars(callback).keys() - _constructor_arguments(callback)):
            arrays: dict[str, bytes] = {}
            with contextlib.suppress(NotPlain):
                value = _encoded(vars(callback)[attribute], f"{TEXT}/{name}/{attribute}", arrays)
                state[name, attribute] = json.dumps(value), arrays
    return state


def changes_since(before: State, after: State) -> NamedArrays:
    """The part of the state `after` whose attributes are new or differ from those in `before`, for a checkpoint."""
    text: dict[str, dict[str, Any]] = {name: {} for name, _ in after}
    changed: NamedArrays = {}
    for (name, attribute), (value, arrays) in after.items():
        # What has not changed comes from the call of `fit`, which may give another patience when a run is resumed.
        if before.get((name, attribute)) != (value, arrays):
            text[name][attribute] = json.loads(value)
            changed |= {key: _array(data) for key, data in arrays.items()}
    return {TEXT: _array(json.dumps(text).encode()), **changed}


def restore(callbacks: Iterable[keras.callbacks.Callback], state: NamedArrays) -> None:
    """Sets the attributes of the callbacks that the state of a checkpoint contains; all others stay as they are."""
    if TEXT not in state:
        return
    callbacks_by_name = _by_name(callbacks)
    try:
        for name, attributes in json.loads(state[TEXT].tobytes()).items():
            for attribute, value in attributes.items():
                # A run may be resumed without a callback that it had.
                if name in callbacks_by_name:
                    setattr(callbacks_by_name[name], attribute, _decoded(value, state))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"run_dir: the state of the callbacks in its checkpoint cannot be read ({first_line(str(error))}); name "
            "another run_dir"
        ) from None


def _by_name(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, keras.callbacks.Callback]:
    """Callbacks by class and number within the class, so that the order of classes may change between two runs."""
    count: Counter[str] = Counter()
    result = {}
    for callback in callbacks:
        # The name of a class in a function has "<locals>" in it, and arrays are stored as files of these names.
        kind = re.sub(r"[^\w.]", ".", type(callback).__qualname__)
        result[f"{kind}-{count[kind]}"] = callback
        count[kind] += 1
    return result


def _constructor_arguments(callback: keras.callbacks.Callback) -> set[str]:
    """Attributes that are not state: those of every callback, and the arguments by which one of Keras was made."""
    # A user's own class may count in an attribute that is named like an argument; none of Keras's does.
    attributes = set(vars(keras.callbacks.Callback()))
    for kind in type(callback).__mro__:
        if kind.__module__.partition(".")[0] == "keras" and "__init__" in vars(kind):
            attributes |= set(inspect.signature(vars(kind)["__init__"]).parameters)
    return attributes


def _array(data: bytes) -> np.ndarray:
    # Of bytes: a checkpoint refuses arrays that are not finite, but here infinity is a value like any other.
    return np.frombuffer(data, np.uint8)


def _encoded(value: Any, key_prefix: str, arrays: dict[str, bytes]) -> Any:
    """The value in a form for JSON; numpy arrays go into `arrays`, under the names of their places."""
    # A subclass such as an enum could not be read back as what it was; its number can.
    if value is None or isinstance(value, bool | int | float | str):
        return value if type(value) in (type(None), bool, int, float, str) else _number(value)
    if isinstance(value, np.generic):
        return _number(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in NUMBERS and value.dtype.name != "bfloat16":
            raise NotPlain
        arrays[key_prefix] = np.asarray(value).tobytes()  # a masked array would give other bytes for what it masks
        return {"array": [key_prefix, value.dtype.name, list(value.shape)]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encoded(item, f"{key_prefix}/{n}", arrays) for n, item in enumerate(value)]}
    # No subclass: a defaultdict would come back without its default. Pairs, since keys in JSON are strings only.
    if type(value) is dict:
        pairs = [
            [_encoded(key, f"{key_prefix}/{n}-key", arrays), _encoded(value[key], f"{key_prefix}/{n}", arrays)]
            for n, key in enumerate(value)
        ]
        return {"dict": pairs}
    raise NotPlain


def _number(value: Any) -> Any:
    """A number or string of numpy, or of a subclass, as Python's own type."""
    kinds = ((bool, np.bool_), (int, int | np.integer), (float, float | np.floating), (str, str))
    for kind, numbers in kinds:
        if isinstance(value, numbers):
            return kind(value)
    raise NotPlain


def _decoded(value: Any, arrays: NamedArrays) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    # The copy is the callback's own, and can be written to; what `frombuffer` gives cannot.
    if kind == "array":
        name, dtype, shape = content
        return np.frombuffer(arrays[name].tobytes(), np.dtype(dtype)).reshape(shape).copy()
    if kind == "dict":
        return {_decoded(key, arrays): _decoded(item, arrays) for key, item in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"a value of kind {kind}")
    decoded = [_decoded(item, arrays) for item in content]
    return decoded if kind == "list" else tuple(decoded)


HISTORY = (keras.callbacks.History, keras.callbacks.ProgbarLogger)  # of every call
Logs = Mapping[str, Any]


class Callbacks:
    """The callbacks of one run, in the order in which `keras.Model.fit` calls them.

    Attributes:
        is_over: whether `on_train_end` was called.
        needs_pauses: whether a callback has batch hooks in which it may read or change the weights.
        has_batch_hooks: whether a callback is called after batches at all.

    Args:
        callbacks: as `keras.Model.fit` takes them.
        verbose: 2 for a line at the end of each epoch, as Keras prints it.
        steps: the number of steps in an epoch; None if it is not known.
    """

    def __init__(self, callbacks: Any, mirror: Mirror, plan: EpochPlan, verbose: int, steps: int | None) -> None:
        self._mirror, self._plan, self._steps = mirror, plan, steps
        # The live progress of verbose=1 is the console's; Keras's own bar would mix with it.
        shows = verbose == 2
        self._list = keras.callbacks.CallbackList(
            callbacks,
            add_history=True,
            add_progbar=shows,
            verbose=verbose,
            epochs=plan.epochs,
            steps=steps,
            model=mirror.model,
        )
        self.history: keras.callbacks.History = mirror.model.history
        self.has_batch_hooks = any(has_hook(callback, BATCH_HOOKS) for callback in self._list.callbacks)
        self.needs_pauses = "pause" in calls_with_weights(self._list.callbacks)
        self.is_over = False
        # The state of the callbacks after `on_train_begin`: what differs from it later goes into checkpoints, and a
        # run whose tasks all start again begins from it.
        self._at_begin: State | None = None
        self._epoch, self._begun = plan.initial_epoch, -1
        self._ended_with: NamedArrays = {}  # the state in the checkpoint of a run that had ended, until more is trained
        self._step = 0  # the global step after which hooks were called last
        self._begun_at = 0  # the global step before the epoch, or at which this process has joined it
        self._logs: dict[str, Any] = {}
        self._not_finite: dict[str, Any] = {}

    @property
    def wants_to_stop(self) -> bool:
        """Whether a callback has set `stop_training`; in `on_epoch_begin` that ends the epoch early, as in Keras."""
        return bool(self.model.stop_training)

    def ended_by(self) -> str:
        """Which callback has set `stop_training`, as far as that can be seen."""
        user_callbacks = [callback for callback in self._list.callbacks if not isinstance(callback, HISTORY)]
        # Only those of Keras's kind record that it was they.
        recorded = [callback for callback in user_callbacks if getattr(callback, "stopped_epoch", 0)] or user_callbacks
        return type(recorded[0]).__name__ if len(recorded) == 1 else "a callback"

    def advice(self) -> str:
        """A line on batch hooks that are not called for every step, as they are in Keras; empty if there is none."""
        wanting = [type(callback) for callback in self._list.callbacks if _wants_batches(callback)]
        if not wanting:
            return ""
        names = dict.fromkeys(kind.__name__ for kind in wanting)
        has = "has" if len(names) == 1 else "have"
        text = (
            f"callbacks: {', '.join(names)} {has} hooks of batches, which are called at most about ten times a second "
            "and not for every step"
        )
        # Those of Keras set no learning rate after batches.
        if all(kind.__module__.startswith("keras.") and kind is not keras.callbacks.LambdaCallback for kind in wanting):
            return text
        return f"{text}; for a learning rate that follows the steps give the optimizer a schedule"

    @property
    def model(self) -> keras.Model:
        return self._mirror.model

    def begin(
        self, epoch: int, arrays: NamedArrays, learning_rates: tuple[float, ...], step: int, state: NamedArrays
    ) -> CallbackEffects:
        """Calls the hooks before the first step; called again whenever all tasks were started again.

        Args:
            epoch: the first to run, counted from 0; that at which the plan ends if there is none.
            state: of the callbacks, from the checkpoint from which the run continues; empty without one.
        """
        self._mirror.put(arrays, learning_rates, step)
        self._step = step
        if step == 0:
            self._mirror.restore_outside()
        # None where the tasks, in Keras the first step, have been made before.
        settings = self._mirror.layer_settings() if self._at_begin is None and step == 0 else None
        if self._at_begin is None:
            # A model that was trained before may still have it from a callback of that training.
            self.model.stop_training = False
            self._list.on_train_begin()
            self._at_begin = state_of(self._list.callbacks)
        else:
            # The run repeats what came after the checkpoint, so the callbacks must forget it: first everything since
            # `on_train_begin`, which is not called twice, then back to the state of the checkpoint.
            restore(self._list.callbacks, changes_since({}, self._at_begin))
            self.is_over = False
        restore(self._list.callbacks, state)
        self._ended_with = state if ENDED in state else {}
        self._begin_epoch(epoch)
        if settings is not None:
            self._mirror.check_layer_settings(settings)
        if BEGUN in state and int(state[BEGUN]) == epoch:
            # The checkpoint was made after this hook, which is called again for what no checkpoint holds, such as a
            # file. What it does to weights, rates and its own numbers has been done already.
            self._mirror.put(arrays, learning_rates, step)
            restore(self._list.callbacks, state)
        return self._effects()

    def after_epoch(
        self, epoch: int, logs: Logs, arrays: NamedArrays, learning_rates: tuple[float, ...], step: int
    ) -> CallbackEffects:
        """Calls the hooks after an epoch and its validation, and those that begin the next epoch, if there is one."""
        self._mirror.put(arrays, learning_rates, step)
        self._epoch, self._step, self._logs, self._ended_with = epoch, step, dict(logs), {}
        # Keras gives the hooks of a validation its metrics without the prefix, as it does for `evaluate`.
        validation = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
        if validation:
            self._list.on_test_begin()
            # The cluster has validated already. Comparing all weights takes time, so it is done only for callbacks
            # that could have changed one.
            if (
                any(is_own_hook(callback, "on_test_begin") for callback in self._list.callbacks)
                and self._mirror.changes()[0]
            ):
                raise FitError(
                    "callbacks: on_test_begin has changed weights, but the cluster has already validated with its own; "
                    "change them in on_epoch_begin or on_epoch_end"
                )
            self._list.on_test_end(validation)
        self._end_epoch(step)
        stop = self.wants_to_stop
        if not stop:
            self._begin_epoch(epoch + 1)
        return self._effects(stop)

    def pause(self, logs: Logs, arrays: NamedArrays, learning_rates: tuple[float, ...], step: int) -> CallbackEffects:
        """Calls the batch hooks while the cluster pauses at one exact step."""
        self._mirror.put(arrays, learning_rates, step)
        self.call_batch_hooks(step, logs)
        return self._effects(self.wants_to_stop)

    def on_progress(self, step: int, logs: Logs) -> None:
        """Calls the batch hooks if a step was taken since any hooks were called, and the training has not ended."""
        # Progress is also told before the first step, and again after the hooks of an epoch and of the whole training.
        if step > self._step and self._at_begin is not None and not self.is_over:
            self.call_batch_hooks(step, logs)

    def call_batch_hooks(self, step: int, logs: Logs) -> None:
        """Calls the hooks before and after a batch; `batch` is the global step."""
        self._step = step
        # Both hooks come together: this process learns of a step only after it was taken.
        self._list.on_train_batch_begin(step)
        self._list.on_train_batch_end(step, dict(logs))

    def note_not_finite(self, logs: Logs) -> None:
        """Takes the metrics of the epoch in which the cluster has stopped with such a loss."""
        self._not_finite = dict(logs)

    def end_not_finite(self, step: int) -> None:
        """Ends the training as Keras does with `TerminateOnNaN`, after the cluster has stopped with such a loss."""
        if self.is_over:
            return
        # With mode=sync the leader may have been ended by the error of another worker, before it could tell.
        names = self._logs or ({} if has_own_step(self.model) else self.model.get_metrics_result())
        logs = self._not_finite or dict.fromkeys(["loss", *names], math.nan)
        # NaN makes `TerminateOnNaN` set `stop_training`, also if the loss of a validation was the one.
        of_training = {name: value for name, value in logs.items() if not name.startswith("val_")}
        self.call_batch_hooks(step, {**of_training, "loss": math.nan})
        self._logs = logs
        self._end_epoch(step)
        self.end()

    def after_last_step(self, arrays: NamedArrays, learning_rates: tuple[float, ...], step: int) -> CallbackEffects:
        """Calls `on_train_end`, with the weights that the cluster evaluates next."""
        self._mirror.put(arrays, learning_rates, step)
        self.end()
        if self._ended_with:  # what the hook does to weights, rates and its own numbers has been done already
            self._mirror.put(arrays, learning_rates, step)
            restore(self._list.callbacks, self._ended_with)
        effects = self._effects()
        return replace(effects, state={**(effects.state or {}), ENDED: np.array(True)})

    def end(self) -> None:
        """Calls `on_train_end` if the training has begun and has not ended yet."""
        if self._at_begin is not None and not self.is_over:
            # Set first: a hook that raises must not be called a second time.
            self.is_over = True
            self._list.on_train_end(dict(self._logs) or None)

    def _begin_epoch(self, epoch: int) -> None:
        if epoch < self._plan.epochs:
            self._epoch = self._begun = epoch
            self._begun_at = self._step
            self._list.on_epoch_begin(epoch)

    def _end_epoch(self, step: int) -> None:
        for callback in self._list.callbacks:
            if isinstance(callback, keras.callbacks.ProgbarLogger) and self._steps is None:
                # Its batch hook tells it the length, in the first epoch alone; here not every step calls that hook.
                callback.seen, callback.target = step - self._begun_at, None
        self._list.on_epoch_end(self._epoch, self._logs)

    def _effects(self, stop: bool = False) -> CallbackEffects:
        """Changes that callbacks have made since the cluster's variables were copied into the mirror."""
        arrays, rates = self._mirror.changes()
        state = changes_since(self._at_begin or {}, state_of(self._list.callbacks)) | {BEGUN: np.array(self._begun)}
        return CallbackEffects(stop, learning_rates=rates, arrays=arrays, state=state)


def _wants_batches(callback: keras.callbacks.Callback) -> bool:
    """Whether what a callback does depends on how often its batch hooks are called."""
    if type(callback) is keras.callbacks.TensorBoard:
        return bool(callback.update_freq != "epoch" or callback.write_steps_per_second)
    if type(callback) is keras.callbacks.LambdaCallback:
        return has_hook(callback, BATCH_HOOKS)
    return "pause" in calls_with_weights([callback])
