"""Optimizers that cannot be copied, or that need what one ps does not have: refused by name."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import pytest

from tf2dist.errors import ConfigError
from tf2dist.model import optimizer_checks
from tf2dist.model.source import copies_of

layers = keras.layers


class Forgets(keras.optimizers.SGD):
    """An optimizer whose `get_config` leaves an argument out."""

    def __init__(self, power: float = 1.0, **more: Any) -> None:
        super().__init__(**more)
        self.power = power


class Fixed(keras.optimizers.SGD):
    """An optimizer whose constructor does not accept its own configuration."""

    def __init__(self) -> None:
        super().__init__(0.1)


# Made within the test: an earlier test may join a cluster, which makes TensorFlow drop all existing variables.
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Forgets(2.0),
            "the configuration of Forgets leaves out power; give it a get_config with all arguments of its",
        ),
        (
            Fixed,
            r"Fixed cannot be made again from its configuration \(.*unexpected keyword .*\); give it a get_config",
        ),
        (Forgets, ""),
    ],
)
def test_an_optimizer_that_cannot_be_copied_is_refused(make: Callable[[], keras.Optimizer], says: str) -> None:
    model = keras.Sequential([keras.Input([2]), layers.Dense(1)])
    model.compile(make(), "mse")
    with pytest.raises(ConfigError, match=rf"^optimizer \(it\): {says}") if says else contextlib.nullcontext():
        copies_of(model, "it")


class Normalizes(keras.optimizers.SGD):
    """An optimizer whose update needs all gradients of the model."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply(grads, trainable_variables)


def test_an_optimizer_that_needs_all_gradients_is_refused() -> None:
    optimizer_checks.check_own_apply("it", keras.optimizers.SGD(), 2)
    optimizer_checks.check_own_apply("it", Normalizes(), 1)
    with pytest.raises(ConfigError, match=r"optimizer \(it\): Normalizes has apply of its own.*; use one ps, or"):
        optimizer_checks.check_own_apply("it", Normalizes(), 2)


def test_clipping_by_the_global_norm_is_refused_with_accumulated_gradients() -> None:
    both = {"global_clipnorm": 1.0, "gradient_accumulation_steps": 2}
    for given in (*({name: value} for name, value in both.items()), both):
        optimizer = keras.optimizers.SGD(**given)
        if given is not both:
            optimizer_checks.check_clipping("sgd", optimizer)
            continue
        with pytest.raises(ConfigError, match=r"optimizer \(sgd\): with mode=async global_clipnorm cannot clip"):
            optimizer_checks.check_clipping("sgd", optimizer)
