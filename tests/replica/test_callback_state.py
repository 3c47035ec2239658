"""What checkpoints keep of the callbacks of `fit`: plain attributes, that is numbers and text."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tf2dist.errors import CheckpointError
from tf2dist.fitting.callbacks import changes_since, restore, state_of


class Counter(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.kept: Any = None
        self.function = print

    def on_train_begin(self, logs: Any = None) -> None:
        self.count = 1


PLAIN_VALUES: list[Any] = [
    5,
    -0.1,
    float("inf"),
    "é",
    None,
    True,
    [1, [2.5, "a"]],
    (1, (2,)),
    {"a": {3: None}, 4: [0]},
    np.array([[1.5, np.nan]], np.float32),
    np.array([], np.int64),
    [np.ones(2), np.zeros((1, 2), np.uint8)],
]


def plain(value: Any) -> str:
    return repr(value).replace("\n", "") + (str(value.dtype) if isinstance(value, np.ndarray) else "")


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=plain)
def test_plain_values_are_restored_unchanged(value: Any) -> None:
    callback, other = Counter(), Counter()
    before = state_of([callback])
    callback.kept = value
    state = changes_since(before, state_of([callback]))
    assert all(array.dtype.kind in "biuf" and np.isfinite(array).all() for array in state.values())
    restore([other], state)
    assert plain(other.kept) == plain(value)


def test_numpy_scalars_are_restored_as_python_numbers() -> None:
    callback, other = Counter(), Counter()
    callback.kept = [np.float32(0.5), np.int64(3), np.bool_(True), np.str_("a")]
    restore([other], changes_since({}, state_of([callback])))
    assert other.kept == [0.5, 3, True, "a"]
    assert [type(each) for each in other.kept] == [float, int, bool, str]


def test_only_changed_attributes_are_saved_and_functions_are_not() -> None:
    callback = Counter()
    callback.on_train_begin()
    before = state_of([callback])
    assert changes_since(before, state_of([callback])).keys() == {"callbacks"}
    callback.kept = [np.ones(2)]
    callback.function = len  # type: ignore[assignment]
    saved = changes_since(before, state_of([callback]))
    assert saved.keys() == {"callbacks", "callbacks/Counter-0/kept/0"}
    other = Counter()
    other.count = 7
    restore([other], saved)
    assert (other.count, other.function) == (7, print)


def test_arguments_of_the_call_take_precedence_over_the_checkpoint() -> None:
    """`patience` comes from the user, `wait` from the checkpoint; Keras sets the sign of min_delta at the start."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    first, then = (keras.callbacks.EarlyStopping("loss", patience=n, min_delta=0.5) for n in (3, 9))
    for callback in (first, then):
        callback.set_model(model)
        callback.on_train_begin()
    before = state_of([first])
    for epoch, loss in enumerate((1.0, 1.0, 1.0)):
        first.on_epoch_end(epoch, {"loss": loss})
    restore([then], changes_since(before, state_of([first])))
    assert (then.wait, then.best, then.patience) == (2, 1.0, 9)
    then.on_epoch_end(3, {"loss": 0.7})
    assert then.wait == 3, "an improvement smaller than min_delta was counted"


def test_callbacks_are_matched_by_class_and_not_by_position() -> None:
    callbacks = [Counter(), Counter(), keras.callbacks.History()]
    callbacks[1].kept = "second"  # type: ignore[attr-defined]
    others = [keras.callbacks.History(), Counter(), Counter(), Counter()]
    restore(others, changes_since({}, state_of(callbacks)))
    assert [each.kept for each in others[1:]] == [None, "second", None]  # type: ignore[attr-defined]


@pytest.mark.parametrize("spoil", [lambda text: text[1:], lambda text: text.replace(b"array", b"arrow")])
def test_a_damaged_state_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    callback = Counter()
    callback.kept = np.ones(2)
    state = changes_since({}, state_of([callback]))
    state["callbacks"] = np.frombuffer(spoil(state["callbacks"].tobytes()), np.uint8)
    with pytest.raises(CheckpointError, match="the state of the callbacks in its checkpoint cannot be read"):
        restore([callback], state)
