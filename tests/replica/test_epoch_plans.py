"""Epochs compared with Keras: validation_steps, validation_freq and initial_epoch."""

from typing import Any

import pytest

from tests.replica.in_memory_source import RecordingHooks, weights_of
from tests.replica.test_epochs import BATCH, assert_same, config_of, drive, keras_fit, source_of, train_in_sync
from tf2dist.testing import SyncWorkers


@pytest.mark.slow
def test_a_validation_of_some_steps(async_loop: Any, publishing: Any, sync_workers: SyncWorkers) -> None:
    """Only the first two batches of the validation set count, in both modes."""
    source, config, hooks = source_of("regression", validation_steps=2), config_of(BATCH), RecordingHooks()
    expected = keras_fit(source)
    assert expected[0]["val_loss"] != keras_fit(source_of("regression"))[0]["val_loss"]
    publishing(source.load())
    loop = async_loop(config, 1, 1, source=source)
    drive(loop, source, hooks)
    assert_same((hooks.history(), weights_of(loop.model)), expected)
    assert_same(sync_workers(train_in_sync, num_workers=1, args=(source, BATCH))[0], expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("freq", "validated"), [((1, 3), [1, 3]), (2, [2])])
def test_a_validation_in_some_epochs(freq: Any, validated: list[int], async_loop: Any, publishing: Any) -> None:
    source, config, hooks = source_of("regression", validation_freq=freq), config_of(BATCH), RecordingHooks()
    publishing(source.load())
    drive(async_loop(config, 1, 1, source=source), source, hooks)
    assert [epoch + 1 for kind, epoch, _, logs in hooks.calls if kind == "epoch" and "val_loss" in logs] == validated


def test_epochs_are_counted_from_the_initial_one(async_loop: Any, publishing: Any) -> None:
    """From 0, but for `validation_freq`, which counts them from 1."""
    source = source_of("regression", initial_epoch=1, validation_freq=(1, 3))
    config, hooks = config_of(BATCH), RecordingHooks()
    publishing(source.load())
    loop = async_loop(config, 1, 1, source=source)
    drive(loop, source, hooks)
    history, weights = keras_fit(source)
    of_training = {name: values for name, values in history.items() if not name.startswith("val_")}
    assert_same((hooks.history(), weights_of(loop.model)), (of_training, weights))
    validated = [(epoch, "val_loss" in logs) for kind, epoch, _, logs in hooks.calls if kind == "epoch"]
    assert validated == [(1, False), (2, True)]
