"""The callbacks of `fit`, called in the caller's thread when the leader asks, on a mirror of its model."""

from collections.abc import Mapping
from typing import Any

import keras

from tf2dist.errors import FitError
from tf2dist.fitting.mirror import Mirror
from tf2dist.fitting.refusals import is_own_hook
from tf2dist.fitting.state import changes_since, give_back, state_of
from tf2dist.model.plan import EpochPlan
from tf2dist.training.hooks import Change, NamedArrays

BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
# Keras's own that neither look at the weights after a batch nor change anything: they are called without a pause.
ONLY_LOOK = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
)
Logs = Mapping[str, Any]


class Callbacks:
    """The callbacks of one run, in the order in which `keras.Model.fit` calls them.

    Attributes:
        is_over: whether `on_train_end` was called.
        wants_pauses: whether a callback is called after batches, and may look at the weights then or change them.
        looks_at_batches: whether a callback is called after batches at all.

    Args:
        callbacks: as `keras.Model.fit` takes them.
        verbose: 2 for a line at the end of each epoch, as Keras prints it.
        steps: of an epoch; None if not known.
    """

    def __init__(self, callbacks: Any, mirror: Mirror, plan: EpochPlan, verbose: int, steps: int | None) -> None:
        self._mirror, self._plan = mirror, plan
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
        self.looks_at_batches = any(map(_has_batch_hook, self._list.callbacks))
        self.wants_pauses = any(_has_batch_hook(each) and not _only_looks(each) for each in self._list.callbacks)
        self.is_over = False
        self._at_begin: NamedArrays | None = None
        self._epoch = plan.initial_epoch
        self._logs: dict[str, Any] = {}

    @property
    def wants_to_stop(self) -> bool:
        """Whether a callback has set `stop_training`; set when an epoch begins, it ends that one early, as in Keras."""
        return bool(self.model.stop_training)

    @property
    def model(self) -> keras.Model:
        return self._mirror.model

    def begin(self, epoch: int, arrays: NamedArrays, learning_rate: float, step: int, state: NamedArrays) -> Change:
        """Before the first step, and again after all tasks were started again.

        Args:
            epoch: the first to run, from 0.
            state: of the callbacks, from the checkpoint from which the run goes on; empty for none.
        """
        self._mirror.put(arrays, learning_rate, step)
        if self._at_begin is None:
            self.model.stop_training = False
            self._list.on_train_begin()
            self._at_begin = state_of(self._list.callbacks)
        else:
            give_back(self._list.callbacks, self._at_begin)  # what came after the checkpoint has not happened
            self.is_over = False
        give_back(self._list.callbacks, state)
        self._begin_epoch(epoch)
        return self._change()

    def epoch(self, epoch: int, logs: Logs, arrays: NamedArrays, learning_rate: float, step: int) -> Change:
        """After an epoch, and after its validation if there was one; begins the next one, unless it was the last."""
        self._mirror.put(arrays, learning_rate, step)
        self._epoch, self._logs = epoch, dict(logs)
        validation = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
        if validation:
            self._list.on_test_begin()
            if any(is_own_hook(each, "on_test_begin") for each in self._list.callbacks) and self._mirror.changes()[0]:
                raise FitError(
                    "callbacks: on_test_begin has changed weights, and the validation was made with those of the "
                    "cluster; change them in on_epoch_begin or on_epoch_end"
                )
            self._list.on_test_end(validation)
        self._list.on_epoch_end(epoch, self._logs)
        stop = self.wants_to_stop
        if not stop:
            self._begin_epoch(epoch + 1)
        return self._change(stop)

    def pause(self, logs: Logs, arrays: NamedArrays, learning_rate: float, step: int) -> Change:
        """At one exact step, for callbacks that are called after batches."""
        self._mirror.put(arrays, learning_rate, step)
        self.batch(step, logs)
        return self._change(self.wants_to_stop)

    def batch(self, step: int, logs: Logs) -> None:
        """Calls the hooks of a batch; the number of the batch is that of the global step."""
        self._list.on_train_batch_begin(step)
        self._list.on_train_batch_end(step, dict(logs))

    def not_finite(self, step: int) -> None:
        """Does what Keras does about a loss that is not finite, for `TerminateOnNaN`, after the cluster has stopped."""
        logs = {"loss": float("nan")}
        self.batch(step, logs)
        self._list.on_epoch_end(self._epoch, logs)
        self._logs = logs
        self.end()

    def last(self, arrays: NamedArrays, learning_rate: float, step: int) -> Change:
        """After the last step, with the weights that are evaluated."""
        self._mirror.put(arrays, learning_rate, step)
        self.end()
        return self._change()

    def end(self) -> None:
        """Ends the training, once, if it has begun."""
        if self._at_begin is not None and not self.is_over:
            self.is_over = True
            self._list.on_train_end(dict(self._logs) or None)

    def _begin_epoch(self, epoch: int) -> None:
        if epoch < self._plan.epochs:
            self._epoch = epoch
            self._list.on_epoch_begin(epoch)

    def _change(self, stop: bool = False) -> Change:
        """What has changed since the cluster's variables were put into the mirror."""
        arrays, rate = self._mirror.changes()
        state = changes_since(self._at_begin or {}, state_of(self._list.callbacks))
        return Change(stop, learning_rate=rate, arrays=arrays, state=state)


def _has_batch_hook(callback: keras.callbacks.Callback) -> bool:
    return any(
        name in vars(callback) or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name)
        for name in BATCH_HOOKS
    )


def _only_looks(callback: keras.callbacks.Callback) -> bool:
    """Whether it is called after batches without looking at the weights; a user's subclass may do anything."""
    if type(callback) is keras.callbacks.ModelCheckpoint:
        return bool(callback.save_freq == "epoch")
    return type(callback) in ONLY_LOOK
