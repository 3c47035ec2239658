"""The messages between a leader and the callbacks of `fit`, in one process; `e2e/test_fit.py` has real runs."""

import functools
import io
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.errors import FitError, TrainingError
from tf2dist.fitting import shipping
from tf2dist.fitting.callbacks import Callbacks
from tf2dist.fitting.mirror import Mirror
from tf2dist.fitting.session import FitSession
from tf2dist.launch.console import Console
from tf2dist.messages import HookAnswer, PauseWanted, ProgressMessage, ToLauncher
from tf2dist.model.source import EpochPlan
from tf2dist.process.inbox import Inbox
from tf2dist.tf_internals.keras import fresh_names, seeds_of
from tf2dist.training.hooks import CallbackEffects, Hooks


class Leader:
    """The leader in the thread of the run, and the launcher that passes messages between it and the caller."""

    def __init__(self, folder: Path, callbacks: list[Any], epochs: int = 2) -> None:
        with fresh_names():
            model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, name="only")])
        model.compile(keras.optimizers.SGD(0.5), "mse")
        self.callbacks = Callbacks(callbacks, Mirror(model), EpochPlan(epochs=epochs), 0, 10)
        self.model, self.inbox = model, Inbox()
        self.session = FitSession(folder, {}, self.callbacks, epochs)
        self.session.connect(self._forward)
        self.to_launcher = ToLauncher("chief-0", self.session.on_message)  # type: ignore[arg-type]
        self.hooks = Hooks(self.to_launcher, self.inbox, folder)
        self.arrays: dict[str, np.ndarray] = {
            "model/only/kernel": np.full((2, 1), 3.0, np.float32),
            "model/only/bias": np.zeros(1, np.float32),
        }
        self.state: dict[str, np.ndarray] = {}

    def _forward(self, message: HookAnswer | PauseWanted) -> None:
        if isinstance(message, HookAnswer):
            self.inbox.answers.put(message)
        else:
            self.inbox.pause_wanted.set()

    def call(self, kind: str, epoch: int, step: int, rates: tuple[float, ...] = (0.5,), **logs: Any) -> CallbackEffects:
        self.hooks.post(kind, epoch, step, logs, rates, lambda _: self.arrays, self.state)
        change = self.hooks.answer(30.0)
        assert change is not None
        return change

    def run(self, script: Callable[["Leader"], Any]) -> Any:
        return self.session.follow(lambda asked: script(self), Console())


class Zeroing(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[0].bias.assign([4.0])
        self.model.optimizer.learning_rate = 0.25


def test_only_changes_by_callbacks_are_sent_back(tmp_path: Path) -> None:
    def script(leader: Leader) -> list[CallbackEffects]:
        return [leader.call("begin", 0, 0), leader.call("epoch", 0, 10, loss=1.0, several=[1.0, 2.0])]

    leader = Leader(tmp_path, [Zeroing()])
    begin, end = leader.run(script)
    assert (begin.arrays, begin.learning_rates, begin.stop) == ({}, (), False)
    assert end.arrays.keys() == {"model/only/bias"}
    assert (end.arrays["model/only/bias"].tolist(), end.learning_rates) == ([4.0], (0.25,))
    assert np.array_equal(leader.model.layers[0].kernel, [[3.0], [3.0]]), (
        "the caller's model does not have the values of the cluster"
    )
    assert int(leader.model.optimizer.iterations) == 10
    assert leader.callbacks.history.history["several"][0].tolist() == [1.0, 2.0]
    assert list(tmp_path.iterdir()) == [], "files that were read were not removed"


class BeforeValidation(keras.callbacks.Callback):  # type: ignore[misc]
    def on_test_begin(self, logs: Any = None) -> None:
        self.model.layers[0].bias.assign([4.0])


class Counts(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.iterations.assign(3)


@pytest.mark.parametrize(
    ("callback", "words"),
    [(BeforeValidation, "on_test_begin has changed weights"), (Counts, "iterations was 10 and is 3 now")],
)
def test_changes_that_come_too_late_for_the_cluster_are_refused(callback: Any, words: str, tmp_path: Path) -> None:
    def script(leader: Leader) -> None:
        leader.call("begin", 0, 0)
        leader.hooks.post("epoch", 0, 10, {"loss": 1.0, "val_loss": 1.0}, (0.5,), lambda _: leader.arrays, {})
        assert leader.hooks.answer(1.0) is None, "the change was not refused by the caller"

    with pytest.raises(FitError, match=words):
        Leader(tmp_path, [callback()]).run(script)


def test_the_states_of_random_generators_are_sent_with_a_model(tmp_path: Path) -> None:
    """Keras does not save them, so a layer without a seed would draw different numbers in each process."""
    layers = [keras.Input([2]), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    data = Arrays(np.zeros((4, 2), np.float32), np.zeros(4, np.float32))
    shipping.ship(tmp_path, model, "it", Splits(data, num_classes=None), EpochPlan())
    model(np.ones((1, 2), np.float32), training=True)
    wanted, found = (np.array(seeds_of(each)[0].value) for each in (model, shipping.load_sent_model(tmp_path)))
    assert found[0] == wanted[0]
    assert (found[1], wanted[1]) == (0, 1), "the copy must have the state at the time of the copy"


def test_variables_without_weight_decay_are_sent_with_a_model(tmp_path: Path) -> None:
    """Keras does not save the list of these variables; the model here was trained before."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, "mse")
    data = Arrays(np.zeros((4, 2), np.float32), np.ones(4, np.float32))
    model.fit(data.x, data.y, verbose=0)
    shipping.ship(tmp_path, model, "it", Splits(data, num_classes=None), EpochPlan())
    for each in (model, shipping.load_sent_model(tmp_path)):
        kernel, bias = (variable.numpy() for variable in each.trainable_variables)
        each.optimizer.apply([np.zeros((2, 1), np.float32), np.zeros(1, np.float32)])
        np.testing.assert_allclose(each.trainable_variables[0], 0.75 * kernel)
        np.testing.assert_array_equal(each.trainable_variables[1], bias)


def test_the_mirror_has_the_random_generators_of_the_training() -> None:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    mirror = Mirror(model)
    mirror.put({"random/0": np.array([3, 20], np.uint32)}, (0.01,), 10)
    assert np.array(seeds_of(model)[0].value).tolist() == [3, 20]
    model(np.ones((1, 2), np.float32), training=True)
    assert mirror.changes() == ({}, ()), "a random number drawn by a callback must not change the cluster"


def test_a_weight_that_is_not_finite_is_no_change_by_a_callback() -> None:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    mirror = Mirror(model)
    name = next(name for name in mirror._named if name.endswith("kernel"))
    mirror.put({name: np.array([[np.nan], [1.0]], np.float32)}, (0.01,), 10)
    assert mirror.changes() == ({}, ()), "it would be sent to all tasks after each epoch"


def test_updates_that_are_accumulated_are_counted() -> None:
    """With two steps to an update, `iterations` of the optimizer is half the number of steps."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    mirror = Mirror(model)
    mirror.put({}, (0.1,), 10)
    assert int(model.optimizer.iterations) == 5
    assert mirror.changes() == ({}, ())


def test_callbacks_are_reset_when_all_tasks_start_again(tmp_path: Path) -> None:
    """The leader is lost after two epochs; a new one starts from the beginning, and another one from epoch 1."""
    losses = []

    def script(leader: Leader) -> None:
        leader.call("begin", 0, 0)
        kept = leader.call("epoch", 0, 10, loss=3.0).state or {}
        leader.call("epoch", 1, 20, loss=2.0)
        losses.append(list(leader.callbacks.history.history["loss"]))
        leader.hooks = Hooks(leader.to_launcher, leader.inbox, tmp_path)
        leader.call("begin", 0, 0)
        losses.append(list(leader.callbacks.history.history.get("loss", [])))
        leader.state = kept
        leader.call("begin", 1, 10)
        losses.append(list(leader.callbacks.history.history["loss"]))

    Leader(tmp_path, []).run(script)
    assert losses == [[3.0, 2.0], [], [3.0]]


class Beginning(keras.callbacks.Callback):  # type: ignore[misc]
    """Changes weights, the rate and a number of its own at the begin of an epoch, by what they were; opens a file."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.file = io.StringIO()
        self.epochs.append(epoch)
        self.model.layers[0].bias.assign_add([1.0])
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.5)


def test_what_the_begin_of_an_epoch_changes_is_not_changed_again_by_a_resumed_run(tmp_path: Path) -> None:
    """Keras begins each epoch once. The hook is called again all the same: no checkpoint holds its file."""

    def go_on(leader: Leader, epoch: int, saved: CallbackEffects) -> CallbackEffects:
        leader.state = saved.state or {}
        leader.arrays = leader.arrays | saved.arrays
        return leader.call("begin", epoch, 15, rates=saved.learning_rates)

    def script(leader: Leader) -> list[CallbackEffects]:
        leader.call("begin", 0, 0)
        saved = leader.call("epoch", 0, 10, loss=1.0)
        return [saved, go_on(leader, 1, saved)]

    saved, after_restart = Leader(tmp_path, [first := Beginning()]).run(script)
    assert (saved.arrays["model/only/bias"].tolist(), saved.learning_rates) == ([1.0], (0.25,))

    def resumed(leader: Leader) -> list[CallbackEffects]:
        return [go_on(leader, 1, saved), go_on(leader, 2, saved)]

    after_resume, after_end = Leader(tmp_path, [second := Beginning()], epochs=3).run(resumed)
    for effects in (after_restart, after_resume):
        assert (effects.arrays, effects.learning_rates) == ({}, ())
    assert first.epochs == [0, 1]
    assert first.file.getvalue() == second.file.getvalue() == ""
    # Where the checkpoint is of a run that had ended with its first two epochs, the third begins for the first time.
    assert (after_end.arrays["model/only/bias"].tolist(), after_end.learning_rates) == ([2.0], (0.125,))
    assert second.epochs == [0, 1, 2]


class Finishing(keras.callbacks.Callback):  # type: ignore[misc]
    """Changes a weight at the end of the training, and counts."""

    ended = 0

    def on_train_end(self, logs: Any = None) -> None:
        self.ended += 1
        self.model.layers[0].bias.assign_add([1.0])


def test_what_the_end_changes_is_not_changed_again_by_a_call_that_trains_nothing(tmp_path: Path) -> None:
    def first(leader: Leader) -> CallbackEffects:
        leader.call("begin", 0, 0)
        leader.call("epoch", 0, 10, loss=1.0)
        return leader.call("end", 1, 10)

    def again(leader: Leader) -> CallbackEffects:
        leader.arrays, leader.state = leader.arrays | saved.arrays, saved.state or {}
        leader.call("begin", 1, 10)
        return leader.call("end", 1, 10)

    def longer(leader: Leader) -> CallbackEffects:
        leader.arrays, leader.state = leader.arrays | saved.arrays, saved.state or {}
        leader.call("begin", 1, 10)
        leader.call("epoch", 1, 20, loss=1.0)
        return leader.call("end", 2, 20)

    saved = Leader(tmp_path, [Finishing()], epochs=1).run(first)
    assert saved.arrays["model/only/bias"].tolist() == [1.0]
    repeated = Leader(tmp_path, [callback := Finishing()], epochs=1).run(again)
    assert (repeated.arrays, callback.ended) == ({}, 1)
    trained = Leader(tmp_path, [Finishing()], epochs=2).run(longer)
    assert trained.arrays["model/only/bias"].tolist() == [2.0]


def test_an_answer_to_an_earlier_leader_is_ignored(tmp_path: Path) -> None:
    def script(leader: Leader) -> CallbackEffects:
        leader.inbox.answers.put(HookAnswer(1, True, (), "", ""))
        return leader.call("begin", 0, 0)

    assert not Leader(tmp_path, []).run(script).stop


def test_waiting_for_an_answer_has_a_time_limit(tmp_path: Path) -> None:
    leader = Leader(tmp_path, [])
    assert leader.hooks.answer(0.01) is None


def test_a_model_with_other_variables_is_refused(tmp_path: Path) -> None:
    def script(leader: Leader) -> None:
        leader.arrays["model/other/kernel"] = np.zeros(1, np.float32)
        leader.hooks.post("begin", 0, 0, {}, (0.5,), lambda _: leader.arrays, {})

    with pytest.raises(TrainingError, match="the tasks have model/other/kernel, and the model in this process has not"):
        Leader(tmp_path, []).run(script)


class Order(keras.callbacks.CSVLogger):  # type: ignore[misc]
    """Notes every hook; one of Keras's own kind, for which the cluster does not pause."""

    def __init__(self) -> None:
        keras.callbacks.Callback.__init__(self)
        self.called: list[str] = []
        for name in dir(keras.callbacks.Callback):
            if name.startswith("on_") and "_test_batch" not in name and "predict" not in name:
                setattr(self, name, functools.partial(self.note, name))

    def note(self, name: str, *_: Any, **__: Any) -> None:
        self.called.append(name)


@pytest.mark.parametrize("update_freq", ["batch", 2, "epoch"])
def test_hooks_are_called_in_the_order_of_keras(update_freq: Any, tmp_path: Path) -> None:
    """Progress is also told before the first step, and again after an epoch, its validation and the whole run."""
    ours, theirs = Order(), Order()

    def script(leader: Leader) -> None:
        def progress(step: int) -> None:
            leader.session.on_message(ProgressMessage(step, 4, {"loss": 1.0}, task="chief-0"))

        progress(0)
        leader.call("begin", 0, 0)
        progress(0)
        for epoch in range(2):
            for step in (2 * epoch + 1, 2 * epoch + 2):
                progress(step)
            leader.call("epoch", epoch, 2 * epoch + 2, loss=1.0, val_loss=1.0)
            progress(2 * epoch + 2)
        leader.call("end", 2, 4)
        progress(4)

    leader = Leader(tmp_path, [ours, keras.callbacks.TensorBoard(str(tmp_path), update_freq=update_freq)])
    leader.callbacks.needs_pauses = False  # as for callbacks of Keras
    leader.run(script)
    data = np.zeros((4, 2)), np.zeros((4, 1))
    leader.model.fit(*data, 2, epochs=2, callbacks=[theirs], validation_data=data, verbose=0)
    assert ours.called == theirs.called


def test_the_history_has_all_metrics_of_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    def script(leader: Leader) -> None:
        leader.call("begin", 0, 0)
        logs = {"loss": float("inf"), "accuracy": 0.25, "val_loss": float("nan")}
        leader.hooks.post("not finite", 0, 3, logs, (), lambda _: {}, {})

    order = Order()
    leader = Leader(tmp_path, [order, keras.callbacks.TerminateOnNaN()])
    leader.run(script)
    leader.callbacks.end_not_finite(3)
    assert leader.model.stop_training
    assert leader.callbacks.history.history.keys() == {"loss", "accuracy", "val_loss"}
    assert leader.callbacks.history.history["accuracy"] == [0.25]
    hooks = ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"]
    assert order.called == [*hooks, "on_train_end"]
    leader.callbacks.end_not_finite(3)
    assert order.called == [*hooks, "on_train_end"], "nothing may follow the end"


def test_the_history_has_all_metrics_if_the_leader_could_not_tell_them(tmp_path: Path) -> None:
    leader = Leader(tmp_path, [keras.callbacks.TerminateOnNaN()])
    leader.run(lambda leader: (leader.call("begin", 0, 0), leader.call("epoch", 0, 10, loss=1.0, val_mae=2.0)))
    leader.callbacks.end_not_finite(13)
    assert leader.callbacks.history.history.keys() == {"loss", "val_mae"}
    assert np.isnan(leader.callbacks.history.history["val_mae"]).tolist() == [False, True]


def test_a_pause_is_requested_once_until_the_run_pauses(tmp_path: Path) -> None:
    seen: list[int] = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            self.model.stop_training = batch == 7

    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def script(leader: Leader) -> CallbackEffects:
        leader.call("begin", 0, 0)
        for step in (3, 4):
            leader.session.on_message(ProgressMessage(step, 20, {"loss": 1.0}, task="chief-0"))
        assert leader.inbox.pause_wanted.wait(30)
        sent.put(leader.hooks.wanted())
        change = leader.call("pause", 0, 7)
        sent.put(leader.hooks.wanted())
        return change

    change = Leader(tmp_path, [Look()]).run(script)
    assert change.stop
    assert seen == [7], "hooks must be called only at the step of the pause"
    assert (sent.get(), sent.get()) == (True, False)


@pytest.mark.parametrize("pauses", [True, False])
def test_hooks_of_batches_get_the_metrics_that_come_with_their_step(pauses: bool, tmp_path: Path) -> None:
    seen: list[Any] = []

    def script(leader: Leader) -> None:
        leader.call("begin", 0, 0)
        leader.session.on_message(ProgressMessage(3, 20, {"loss": 3.0, "several": [1.0, 2.0]}, task="chief-0"))
        if pauses:
            leader.call("pause", 0, 5, loss=2.0, several=[3.0, 4.0])
        leader.call("end", 1, 20)

    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, logs)))
    leader = Leader(tmp_path, [look])
    leader.callbacks.needs_pauses = pauses
    leader.run(script)
    ((step, logs),) = seen
    assert (step, logs["loss"], logs["several"].tolist()) == ((5, 2.0, [3.0, 4.0]) if pauses else (3, 3.0, [1.0, 2.0]))


@pytest.mark.parametrize(
    ("make", "is_told"),
    [
        (Zeroing, False),
        (keras.callbacks.TerminateOnNaN, False),
        (lambda: keras.callbacks.TensorBoard("board"), False),
        (lambda: keras.callbacks.TensorBoard("board", update_freq=10), True),
        (lambda: keras.callbacks.TensorBoard("board", write_steps_per_second=True), True),
        (lambda: keras.callbacks.ModelCheckpoint("{epoch}.keras"), False),
        (lambda: keras.callbacks.ModelCheckpoint("{epoch}.keras", save_freq=10), True),
        (lambda: keras.callbacks.LambdaCallback(on_train_batch_begin=print), True),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_end=print), False),
    ],
)
def test_hooks_that_want_every_batch_are_told_of(
    make: Callable[[], Any], is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learning rate that they set takes effect only from one of their calls to the next."""
    monkeypatch.chdir(tmp_path)  # where TensorBoard makes its folder
    callback = make()
    text = Leader(tmp_path, [callback]).callbacks.advice()
    name = type(callback).__name__
    assert text.startswith(f"callbacks: {name} has hooks of batches, ") if is_told else text == ""


def test_a_line_of_keras_has_the_steps_of_an_epoch_of_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with_hook = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    callbacks = Callbacks([with_hook], Mirror(model), EpochPlan(epochs=3), 2, None)
    callbacks.begin(0, {}, (), 0, {})
    callbacks.after_epoch(0, {"loss": 0.5}, {}, (), 3)  # before a pause for the batch hooks was granted
    callbacks.pause({}, {}, (), 5)
    callbacks.after_epoch(1, {"loss": 0.25}, {}, (), 7)
    callbacks.after_epoch(2, {"loss": 0.125}, {}, (), 9)
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [
        ("3/3", "0.5000"),
        ("4/4", "0.2500"),
        ("2/2", "0.1250"),
    ]


def test_an_error_of_the_run_reaches_the_caller(tmp_path: Path) -> None:
    def script(leader: Leader) -> None:
        assert threading.current_thread() is not threading.main_thread()
        raise TrainingError("as on the command line")

    with pytest.raises(TrainingError, match="as on the command line"):
        Leader(tmp_path, []).run(script)


class StopsAtBegin(keras.callbacks.Callback):
    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == self.last


@pytest.mark.parametrize("last", [0, 1])
def test_stop_training_in_on_epoch_begin_ends_that_epoch_early(last: int, tmp_path: Path) -> None:
    def script(leader: Leader) -> bool:
        changes = [leader.call("begin", 0, 0), *(leader.call("epoch", n, 10 * n + 10) for n in range(last))]
        assert not any(change.stop for change in changes), "the epoch must take a step before it ends, as in Keras"
        assert leader.inbox.pause_wanted.wait(30.0)
        return leader.call("pause", last, 10 * last + 1).stop

    assert Leader(tmp_path, [StopsAtBegin(last)]).run(script)
