"""Every optimizer of Keras, and every setting that they share, gives the results of `keras.Model.fit`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest

from tests.replica.in_memory_source import InMemorySource, RecordingHooks, weights_of
from tests.replica.test_epochs import BATCH, SEED, assert_same, config_of, drive, examples, table, train_in_sync
from tf2dist.data.splits import Splits
from tf2dist.model.source import EpochPlan
from tf2dist.testing import SyncWorker, SyncWorkers

layers, optimizers = keras.layers, keras.optimizers
EPOCHS = 2
Make = Callable[[], keras.Optimizer]


class InverseTimeDecay(optimizers.schedules.LearningRateSchedule):  # type: ignore[misc, name-defined]
    """A custom schedule without `get_config`."""

    def __call__(self, step: Any) -> Any:
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))


class OwnMomentum(optimizers.Optimizer):  # type: ignore[misc, name-defined]
    """A custom optimizer: SGD with momentum."""

    def build(self, variables: list[keras.Variable]) -> None:
        if not self.built:
            super().build(variables)
            self.slots = [self.add_variable_from_reference(each, name="slot") for each in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        slot = self.slots[self._get_variable_index(variable)]
        self.assign(slot, slot * 0.9 + gradient)
        self.assign_sub(variable, slot * learning_rate)


CLASSES = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam")
OPTIMIZERS: dict[str, Make] = {
    **{name: lambda kind=name: getattr(optimizers, kind)(0.02) for name in (*CLASSES, "RMSprop", "SGD")},  # type: ignore[misc, name-defined]
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.02),
    "own": lambda: OwnMomentum(0.02),
    "nesterov": lambda: optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "schedule": lambda: optimizers.AdamW(optimizers.schedules.CosineDecay(0.01, 8, warmup_steps=3, warmup_target=0.05)),
    "own schedule": lambda: optimizers.SGD(InverseTimeDecay()),
    "a rate that is a function": lambda: optimizers.SGD(lambda: 0.02),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.01, clipvalue=0.1),
    "global_clipnorm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "weight_decay": lambda: optimizers.SGD(0.01, weight_decay=0.5),
    "use_ema": lambda: optimizers.Adam(0.01, use_ema=True),
    "ema_overwrite_frequency": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "gradient_accumulation_steps": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "loss_scale_factor": lambda: optimizers.SGD(0.01, loss_scale_factor=128.0),
    "several": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.Nadam(0.02, global_clipnorm=0.1, weight_decay=0.1),
            {
                ".*first/kernel": optimizers.SGD(optimizers.schedules.CosineDecay(0.01, 8), momentum=0.9),
                "nothing/.*": optimizers.Adam(0.1),
                ".*first/bias": optimizers.Nadam(0.03),
            },
        ),
        loss_scale_factor=128.0,
    ),
    "a new one for each variable": lambda: optimizers.MultiOptimizer(
        lambda variable: optimizers.Adam(0.02) if "first" in variable.path else optimizers.AdamW(0.05)
    ),
}
# Variables that weight decay leaves out; an empty dict stands for the variables of the first layer.
EXCLUSIONS: dict[str, dict[str, Any]] = {
    "without its biases": {"var_names": ["bias"]},
    "without a layer": {},
    "without a layer by its name": {"var_names": ["first"]},
}


def compiled(name: str) -> keras.Model:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(8, "relu", name="first"), layers.Dense(1)])
    if name in EXCLUSIONS:
        optimizer = optimizers.SGD(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(**(EXCLUSIONS[name] or {"var_list": model.layers[0].weights}))
    else:
        optimizer = OPTIMIZERS[name]()
    if name == "ScheduleFreeAdamW":  # otherwise Keras would set its sequence to the weights in each step
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    return model


@dataclass(frozen=True)
class Compiled:
    """Makes a model with one of these optimizers; unlike a lambda it can be sent to another process."""

    name: str

    def __call__(self) -> keras.Model:
        return compiled(self.name)


def source_of(name: str) -> InMemorySource:
    plan = EpochPlan(epochs=EPOCHS, shuffle=False, validation_batch_size=BATCH)
    train = examples(table, 200).train
    return InMemorySource(Compiled(name), Splits(train, None, num_classes=None), plan)


def keras_fit(name: str) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    keras.utils.set_random_seed(SEED)
    model, train = compiled(name), source_of(name).splits.train
    model.run_eagerly = True  # tracing takes longer than these eight steps
    history = model.fit(train.x, train.y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return history.history, weights_of(model)


# An asynchronous worker handles each of these in another way, and "several" has a schedule and a scale of the loss.
# `make thorough` tests the next ones, and `make slow` the rest.
FIRST = (
    *("ScheduleFreeAdamW", "own", "global_clipnorm"),
    *("ema_overwrite_frequency", "gradient_accumulation_steps", "several", "without a layer"),
)
THOROUGH = ("Adafactor", "Muon", "a new one for each variable", "without its biases")
REST = [name for name in (*OPTIMIZERS, *EXCLUSIONS) if name not in (*FIRST, *THOROUGH)]


@pytest.mark.parametrize(
    "name",
    [
        *FIRST,
        *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH),
        *(pytest.param(name, marks=pytest.mark.slow) for name in REST),
    ],
)
def test_one_asynchronous_worker_equals_keras(name: str, async_loop: Any, publishing: Any) -> None:
    source, config, hooks = source_of(name), config_of(BATCH), RecordingHooks()
    publishing(source.load())
    loop = async_loop(config, 1, 2, source=source)
    drive(loop, source, hooks)
    assert_same((hooks.history(), weights_of(loop.model)), keras_fit(name))
    assert ("ScheduleFreeAdamW" in loop.note) == (name == "ScheduleFreeAdamW"), loop.note


def train_with_all(worker: SyncWorker) -> dict[str, Any]:
    return {name: train_in_sync(worker, source_of(name), BATCH) for name in (*OPTIMIZERS, *EXCLUSIONS)}


@pytest.mark.slow
@pytest.mark.timeout(600)  # every optimizer, twice
def test_one_synchronous_worker_equals_keras(sync_workers: SyncWorkers) -> None:
    (found,) = sync_workers(train_with_all, 1, ())
    for name, one in found.items():
        try:
            assert_same(one, keras_fit(name))
        except AssertionError as error:
            raise AssertionError(name) from error
