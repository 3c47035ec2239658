"""Optimizers that cannot be copied, or that need more gradients than one ps has, are refused by name."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import pytest

from tf2dist.errors import ConfigError
from tf2dist.model import support
from tf2dist.model.source import copies_of

layers = keras.layers


class IncompleteConfig(keras.optimizers.SGD):
    """An optimizer whose `get_config` leaves an argument out."""

    def __init__(self, power: float = 1.0, **more: Any) -> None:
        super().__init__(**more)
        self.power = power


class NoArgs(keras.optimizers.SGD):
    """An optimizer whose constructor does not accept its own configuration."""

    def __init__(self) -> None:
        super().__init__(0.1)


# The optimizers are created within the test: an earlier test may join a cluster, and then TensorFlow drops all
# variables that exist.
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: IncompleteConfig(2.0),
            "the configuration of IncompleteConfig leaves out power; give it a get_config with all arguments of its",
        ),
        (
            NoArgs,
            r"NoArgs cannot be made again from its configuration \(.*unexpected keyword .*\); give it a get_config",
        ),
        (IncompleteConfig, ""),
    ],
)
def test_an_optimizer_that_cannot_be_copied_is_refused(make: Callable[[], keras.Optimizer], says: str) -> None:
    model = keras.Sequential([keras.Input([2]), layers.Dense(1)])
    model.compile(make(), "mse")
    with pytest.raises(ConfigError, match=rf"^optimizer \(mine\): {says}") if says else contextlib.nullcontext():
        copies_of(model.optimizer, model.trainable_variables, "mine")


class OwnApply(keras.optimizers.SGD):
    """An optimizer with its own `apply`, which may need the gradients of all variables."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply(grads, trainable_variables)


def test_an_optimizer_that_needs_all_gradients_is_refused() -> None:
    support.check_optimizer(support.SEVERAL_PS, keras.optimizers.SGD())
    support.check_optimizer(support.ASYNC, OwnApply())
    with pytest.raises(ConfigError, match=r"optimizer \(OwnApply\): OwnApply has apply of its own.*; use one ps, or"):
        support.check_optimizer(support.SEVERAL_PS, OwnApply())


def test_clipping_by_the_global_norm_is_refused_with_accumulated_gradients() -> None:
    both, trained = {"global_clipnorm": 1.0, "gradient_accumulation_steps": 2}, [keras.Variable([1.0])]
    for name, value in both.items():
        support.check_optimizer(support.ASYNC, keras.optimizers.SGD(**{name: value}), trained)
    with pytest.raises(ConfigError, match=r"optimizer \(SGD\): with mode=async global_clipnorm cannot clip"):
        support.check_optimizer(support.ASYNC, keras.optimizers.SGD(**both), trained)
