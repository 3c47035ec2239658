"""`tf2dist.fit` with several optimizers, and with a scale of the loss, held against `keras.Model.fit`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf2dist
from tests.e2e.test_fit import X, Y, assert_same, keras_fit, on_one_worker, weights_agree

layers, optimizers = keras.layers, keras.optimizers


def dense(units: int, seed: int) -> keras.layers.Layer:
    return layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed))


def several() -> keras.Model:
    """One of the optimizers has been chosen by an object, which cannot be sent to the tasks."""
    first = dense(8, 1)
    model = keras.Sequential([keras.Input([4]), first, layers.Activation("tanh"), dense(1, 2)])
    of_first = {id(variable) for variable in first.variables}
    adam, sgd = optimizers.Adam(0.02), optimizers.SGD(0.05, momentum=0.5)
    model.compile(optimizers.MultiOptimizer(lambda variable: adam if id(variable) in of_first else sgd), "mse")
    return model


class SlowsOne(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        adam = self.model.optimizer.optimizers[0]
        adam.learning_rate = adam.learning_rate / 2


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_several_optimizers(tmp_path: Path, mode: str) -> None:
    """A compiled model, trained twice, with a callback that changes the rate of one of them."""
    ours, theirs = several(), several()
    for number in range(2):
        history = theirs.fit(X, Y, batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=[SlowsOne()]).history
        result = on_one_worker(ours, tmp_path / str(number), epochs=2, mode=mode, callbacks=[SlowsOne()])
        assert_same(result.history, history)
    assert weights_agree(ours, theirs)
    for model in (ours, tf2dist.load_model(tmp_path / "1")):
        adam, sgd = model.optimizer.optimizers
        assert (int(adam.iterations), int(sgd.iterations)) == (40, 40)
        assert [float(adam.learning_rate), float(sgd.learning_rate)] == pytest.approx([0.02 / 16, 0.05])


@pytest.fixture
def float16() -> Iterator[None]:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def half(optimizer: keras.Optimizer, **more: Any) -> keras.Model:
    model = keras.Sequential([keras.Input([4]), dense(8, 1), layers.Activation("tanh"), dense(1, 2)])
    model.compile(optimizer, "mse", **more)
    return model


def scaled_by_a_constant() -> keras.Model:
    return half(optimizers.SGD(0.05, loss_scale_factor=1024.0), auto_scale_loss=False)


@pytest.mark.thorough  # replica/test_loss_scale.py has the updates and the finished model
@pytest.mark.usefixtures("float16")
def test_a_loss_that_is_scaled_for_float16(tmp_path: Path) -> None:
    """A compiled model, to which Keras has added the scale, trained twice."""
    ours, theirs = (half(optimizers.Adam(0.02), loss_weights=[100.0]) for _ in range(2))
    for number in range(2):
        history = theirs.fit(X, Y, batch_size=20, epochs=1, shuffle=False, verbose=0).history
        result = on_one_worker(ours, tmp_path / str(number), epochs=1, mode="sync")
        np.testing.assert_allclose(result.history["loss"], history["loss"], rtol=5e-3)
        assert result.summary["global_step"] == 10
    applied = int(theirs.optimizer.iterations)
    assert 0 < applied < 20, "some updates must overflow, or nothing is shown"
    for model in (ours, tf2dist.load_model(tmp_path / "1")):
        assert int(model.optimizer.iterations) == applied
        assert float(model.optimizer.dynamic_scale) == float(theirs.optimizer.dynamic_scale)


@pytest.mark.thorough
@pytest.mark.usefixtures("float16")
def test_float16_with_a_constant_scale_in_async(tmp_path: Path) -> None:
    _, history = keras_fit(scaled_by_a_constant, epochs=2)
    result = on_one_worker(scaled_by_a_constant, tmp_path, epochs=2)
    np.testing.assert_allclose(result.history["loss"], history["loss"], rtol=5e-3)
    assert {layer.compute_dtype for layer in tf2dist.load_model(tmp_path).layers} == {"float16"}
