"""algorithm=local_sgd: what cannot be exact is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from tests.replica.local_sgd_runs import INTERRUPTED, LONG, local_config
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError
from tf2dist.training.synchronous.local_sgd import LocalSgdStep

layers = keras.layers


class OddSlot(keras.optimizers.SGD):  # type: ignore[misc]
    """With a slot that has no mean."""

    def build(self, variables: list[keras.Variable]) -> None:
        super().build(variables)
        self.flag = self.add_variable((), dtype="bool", name="flag")


class Ending(keras.optimizers.SGD):  # type: ignore[misc]
    """With final weights of its own."""

    def finalize_variable_values(self, var_list: list[keras.Variable]) -> None:
        pass


# Functions, so that importing this module makes no variables.
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "gpus": (lambda: {"replicas": 4}, r"algorithm \(local_sgd\): the GPUs of a worker share its variables"),
    "length": (
        lambda: {"config": local_config("sgd", local_steps=200_000)},
        r"algorithm.local_steps \(200000\): a round would have .* give at most 167,772",
    ),
    "synchronized": (
        lambda: {"layer": layers.BatchNormalization(synchronized=True, name="all")},
        r"model \(given\): all is synchronized, and with algorithm=local_sgd no worker waits",
    ),
    "sum": (
        lambda: {"stream": True, "sums": True},
        r"model \(given\): has a loss with reduction=sum, and with algorithm=local_sgd no worker knows",
    ),
    "slot": (
        lambda: {"optimizer": OddSlot()},
        r"optimizer \(OddSlot\): .*flag is of type bool, of which several workers have no mean",
    ),
    "average": (
        lambda: {"optimizer": keras.optimizers.SGD(use_ema=True), "config": INTERRUPTED},
        r"optimizer \(SGD\): its final weights are averages",
    ),
    "own end": (
        lambda: {"optimizer": Ending(), "config": INTERRUPTED},
        r"optimizer \(Ending\): its final weights are averages",
    ),
}


def checked(
    config: RunConfig = LONG["sgd"],
    replicas: int = 2,
    layer: keras.Layer | None = None,
    stream: bool = False,
    sums: bool = False,
    optimizer: keras.Optimizer | None = None,
) -> None:
    model = keras.Sequential([keras.Input((3,)), layer or layers.Dense(2)])
    optimizer = optimizer or keras.optimizers.SGD(momentum=0.5)
    optimizer.build(model.trainable_variables)
    step: Any = SimpleNamespace(model=model, sums_losses=sums, state=[], trace=SimpleNamespace(decays={}))
    workers: Any = SimpleNamespace(num_replicas=replicas, count=2)
    splits: Any = SimpleNamespace(stream=stream)
    LocalSgdStep.check("given", config, workers, splits, step, optimizer)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    """Of each two conditions one alone is accepted."""
    arguments, told = REFUSED[name]
    with pytest.raises(ConfigError, match=told):
        checked(**arguments())
    checked(stream=True)
    checked(sums=True)
    checked(optimizer=keras.optimizers.SGD(use_ema=True))
    checked(config=INTERRUPTED)
