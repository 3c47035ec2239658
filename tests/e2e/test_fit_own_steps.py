"""`tf2dist.fit` of models with their own `train_step`, held against `keras.Model.fit`."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf2dist
from tests.replica.own_steps import SIZE, Critic, Distiller, Gan
from tf2dist.tf_internals.keras import fresh_names

RNG = np.random.default_rng(0)
X = RNG.integers(0, 255, (120, 28, 28, 1)).astype("uint8")
Y = RNG.integers(0, 10, 120)
TWO = tf2dist.Local(workers=2)


def gan() -> keras.Model:
    keras.utils.set_random_seed(3)
    return Gan((28, 28, 1), 10)


def distiller() -> keras.Model:
    keras.utils.set_random_seed(3)
    return Distiller((28, 28, 1), 10)


def critic() -> keras.Model:
    keras.utils.set_random_seed(3)
    return Critic((28, 28, 1), 10)


def fit(model: Any, run_dir: Path, **more: Any) -> tf2dist.Result:
    given = {"shuffle": False, "verbose": 0, "run_dir": run_dir, "validation_data": (X[:40], Y[:40]), **more}
    return tf2dist.fit(model, X, Y, **given)


def assert_alike(model: keras.Model, other: keras.Model) -> None:
    for one, another in zip(model.weights, other.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), another.numpy(), atol=2e-5)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_two_synchronous_workers_train_a_gan_as_keras_does_and_a_run_goes_on(tmp_path: Path) -> None:
    with fresh_names():
        plain = critic()
    history = plain.fit(
        X,
        Y,
        batch_size=20,
        epochs=4,
        shuffle=False,
        verbose=0,
        validation_data=(X[:40], Y[:40]),
        validation_batch_size=20,
    ).history
    first = fit(critic, tmp_path / "run", mode="sync", cluster=TWO, batch_size=10, epochs=2, validation_batch_size=20)
    rest = fit(critic, tmp_path / "run", mode="sync", cluster=TWO, batch_size=10, epochs=4, validation_batch_size=20)
    for name, values in history.items():
        assert rest.history.history[name] == pytest.approx(values, rel=1e-4), name
        assert first.history.history[name] == pytest.approx(values[:2], rel=1e-4), name
    assert rest.model is not None
    assert_alike(rest.model, plain)
    assert int(rest.model.d_optimizer.iterations.numpy()) == 48, "the critic is trained twice in each of 24 steps"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_with_one_optimizer_trains_as_keras_does(tmp_path: Path) -> None:
    with fresh_names():
        plain = distiller()
    history = plain.fit(X, Y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
    result = fit(distiller, tmp_path / "run", mode="sync", cluster=TWO, batch_size=10, epochs=2, validation_data=None)
    for name, values in history.items():
        assert result.history.history[name] == pytest.approx(values, rel=1e-4), name
    assert result.model is not None
    assert_alike(result.model, plain)
    assert int(result.model.optimizer.iterations.numpy()) == 12


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_asynchronous_workers_train_a_gan(tmp_path: Path, capfd: Any) -> None:
    result = fit(gan, tmp_path / "run", cluster=tf2dist.Local(workers=3, ps=2), batch_size=10, epochs=3, verbose=1)
    assert set(result.history.history) == {"d_loss", "g_loss", "val_d_loss", "val_g_loss"}
    assert result.summary["global_step"] == 36
    assert result.model is not None
    assert int(result.model.g_optimizer.iterations.numpy()) == 36
    first, last = result.history.history["d_loss"][0], result.history.history["d_loss"][-1]
    assert last < first
    assert "reads weights that it has updated: with mode=async" in capfd.readouterr().err


class Saved(Gan):
    """One that Keras can save."""

    def __init__(self, input_shape: Any = (28, 28, 1), num_classes: int = 10, **names: Any) -> None:
        super().__init__(input_shape, num_classes)
        self.generator(np.zeros((1, SIZE)))
        self.discriminator(np.zeros((1, *input_shape)))

    def get_config(self) -> dict[str, Any]:
        return {}

    def get_compile_config(self) -> dict[str, Any]:
        optimizers = {"d_optimizer": self.d_optimizer, "g_optimizer": self.g_optimizer}
        return {name: keras.saving.serialize_keras_object(one) for name, one in optimizers.items()}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**{name: keras.saving.deserialize_keras_object(one) for name, one in config.items()})


@pytest.mark.timeout(600)
def test_a_model_is_sent_if_keras_can_save_it(tmp_path: Path) -> None:
    model = Saved()
    given: dict[str, Any] = {"mode": "sync", "cluster": tf2dist.Local(workers=1), "batch_size": 20}
    fit(model, tmp_path / "run", **given)
    for step in (None, 6):
        assert_alike(tf2dist.load_model(tmp_path / "run", step, custom_objects={"Saved": Saved}), model)
    assert int(tf2dist.load_model(tmp_path / "run", 6, {"Saved": Saved}).d_optimizer.iterations) == 6
    with pytest.raises(tf2dist.ConfigError, match=r"model \(saved\): its d_optimizer has 10 variables, and 2 when"):
        fit(model, tmp_path / "again", **given)
    with pytest.raises(tf2dist.ConfigError, match=r"model \(gan.*\): .*; give .*a function that builds"):
        fit(gan(), tmp_path / "other", **given)
