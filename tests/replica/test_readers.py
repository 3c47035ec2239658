"""Which calls of callbacks bring the weights to the process that has called `fit`."""

import functools
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tf2dist.fitting.readers import HOOKS, calls_with_weights, reaches_no_model, reads_progress

MODEL = keras.Sequential()  # not built, since a file of tests may run no operation
RATE, HELPERS, HOLDER = 0.9, [1.0], {"model": MODEL}


def halve(epoch: int, rate: float) -> float:
    return RATE * rate / 2 if epoch else float(np.exp(-0.1)) * math.sqrt(rate)


def repeat(epoch: int, rate: float) -> float:
    return repeat(epoch - 1, rate) if epoch else halve(0, rate)


def look(epoch: int, rate: float) -> float:
    return float(MODEL.count_params()) * rate


def look_deeper(epoch: int, rate: float) -> float:
    return look(epoch, rate)


def look_inside(epoch: int, rate: float) -> float:
    return float(len(HOLDER)) * rate


def look_by_import(epoch: int, rate: float) -> float:
    import tests.replica.test_readers as module

    return float(module.RATE)


def look_by_name(epoch: int, rate: float) -> float:
    return float(globals()["MODEL"].count_params())


def look_by_default(epoch: int, rate: float, model: Any = MODEL) -> float:
    return rate


def look_within(epoch: int, rate: float) -> float:
    return float(sum(layer.count_params() for layer in MODEL.layers))


def closure(held: Any) -> Any:
    return lambda epoch, rate: rate if held else 0.0


def closure_without_value() -> Any:
    def look_later(epoch: int, rate: float) -> float:
        return float(model.count_params())

    if not MODEL:
        model = MODEL
    return look_later


LATER = None


def look_at_what_comes_later(epoch: int, rate: float) -> float:
    return float(LATER.count_params())  # type: ignore[attr-defined]


def look_at_what_is_not_there_yet(epoch: int, rate: float) -> float:
    return float(made_later.count_params())  # type: ignore[name-defined]  # noqa: F821


def look_at_itself(epoch: int, rate: float) -> float:
    return float(look_at_itself.model.count_params())  # type: ignore[attr-defined]


look_at_itself.model = MODEL  # type: ignore[attr-defined]


@functools.wraps(math.sqrt)
def look_like_a_library(epoch: int, rate: float) -> float:
    return float(MODEL.count_params())


def call_in_turn(epoch: int, rate: float) -> float:
    return call_back(epoch - 1, rate) if epoch else rate


def call_back(epoch: int, rate: float) -> float:
    return call_in_turn(epoch, rate)


@pytest.mark.parametrize(
    "function", [halve, repeat, call_in_turn, closure(1.0), lambda epoch, logs: print(epoch, logs)]
)
def test_a_function_that_reaches_no_model(function: Any) -> None:
    assert reaches_no_model(function)


SEES = [
    *(look, look_deeper, look_inside, look_by_import, look_by_name, look_by_default, look_within, look_at_itself),
    *(look_at_what_comes_later, look_at_what_is_not_there_yet, look_like_a_library, closure(look_like_a_library)),
    *(
        closure_without_value(),
        closure(MODEL),
        closure([MODEL]),
        functools.partial(halve, 0),
        MODEL.count_params,
        MODEL,
    ),
]


@pytest.mark.parametrize("function", SEES)
def test_a_function_that_may_reach_one(function: Any) -> None:
    assert not reaches_no_model(function)


class Prints(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        print(epoch)


class Checkpoints(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    pass


class Terminates(keras.callbacks.TerminateOnNaN):  # type: ignore[misc]
    pass


def with_own_hook(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    callback.on_epoch_end = look
    return callback


ALL = set(HOOKS)


def cases(folder: Path) -> list[tuple[keras.callbacks.Callback, set[str]]]:
    kinds = keras.callbacks
    return [
        (kinds.History(), set()),
        (kinds.CSVLogger(str(folder / "a.csv")), set()),
        (kinds.ReduceLROnPlateau("loss"), set()),
        (kinds.EarlyStopping("loss"), set()),
        (kinds.EarlyStopping("loss", restore_best_weights=True), ALL - {"pause"}),
        (kinds.ModelCheckpoint(str(folder / "a.keras")), {"epoch"}),
        (kinds.ModelCheckpoint(str(folder / "a.keras"), save_freq=3), {"epoch", "pause"}),
        (Checkpoints(str(folder / "a.keras")), {"begin", "epoch", "pause"}),
        (kinds.TensorBoard(str(folder)), set()),
        (kinds.TensorBoard(str(folder), histogram_freq=1), {"epoch"}),
        (kinds.LearningRateScheduler(halve), set()),
        (kinds.LearningRateScheduler(look), {"begin", "epoch"}),
        (kinds.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch)), set()),
        (kinds.LambdaCallback(on_train_end=lambda logs: print(MODEL.get_weights())), {"end"}),
        (Prints(), {"epoch"}),
        (kinds.Callback(), set()),
        (kinds.TerminateOnNaN(), {"begin", "epoch"}),
        (Terminates(), {"begin", "epoch", "pause"}),
        (with_own_hook(kinds.CSVLogger(str(folder / "a.csv"))), {"begin", "epoch", "end"}),
    ]


@pytest.mark.parametrize("number", range(19))
def test_the_calls_in_which_a_callback_needs_the_weights(number: int, tmp_path: Path) -> None:
    callback, expected = cases(tmp_path)[number]
    assert calls_with_weights([callback]) == expected, type(callback)


def test_callbacks_that_read_the_metrics_of_the_progress(tmp_path: Path) -> None:
    """Keras's own look at numbers alone, and hooks that need a pause get the metrics with it."""
    kinds = keras.callbacks
    prints = kinds.LambdaCallback(on_train_batch_end=lambda batch, logs: print(logs))
    saves = kinds.ModelCheckpoint(str(tmp_path / "a.keras"), save_freq=3)
    found = [reads_progress(given) for given in ([], [kinds.TensorBoard("b")], [prints], [saves], [prints, saves])]
    assert found == [False, False, True, False, False]
