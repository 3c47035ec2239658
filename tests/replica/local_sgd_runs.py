"""Runs with algorithm=local_sgd on two workers, several in one life of the workers, which take seconds to start."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

import tf2dist
from tests.replica.in_memory_source import InMemorySource
from tests.replica.small_runs import run_config, sync_loop
from tests.replica.test_epochs import regression
from tests.replica.test_resume import arrived
from tests.replica.test_streams import BATCH, of_generator, streamed
from tf2dist import registry
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.config.schema import AlgorithmConfig, RunConfig
from tf2dist.data.arrays import Arrays
from tf2dist.data.splits import Splits
from tf2dist.model import packing
from tf2dist.testing import SyncWorker
from tf2dist.training.hooks import CallbackEffects
from tf2dist.training.loop import PauseRequest

layers = keras.layers
PAUSES = (7, 14)  # the rounds have 3, 3, 1, 3, 3 and 1 steps; the 13th step of 2 * 50 examples has the last 57
AVERAGES = 6
CHANGED = 1  # the place of a bias among the variables, to which 0.5 is added at the first pause
OUTER: dict[str, Any] = {"outer_momentum": 0.9, "outer_learning_rate": 0.7}


@registry.register_model("normed")
def normed(input_shape: tuple[int, ...], num_classes: int, constrained: bool = True) -> keras.Model:
    """With moving averages, and with weights of which the mean does not fulfil their constraint."""
    constraint = keras.constraints.UnitNorm() if constrained else None
    unit = layers.Dense(12, "tanh", name="unit", kernel_constraint=constraint)
    norm = layers.BatchNormalization(momentum=0.8, name="norm")
    inside = [layers.Rescaling(1 / 255), layers.Flatten(), unit, norm, layers.Dense(num_classes, name="logits")]
    return keras.Sequential([keras.Input(input_shape), *inside])


def local_config(optimizer: str, per_call: int | None = 7, local_steps: int = 3, **algorithm: Any) -> RunConfig:
    config = run_config("normed", optimizer, steps_per_execution=per_call)
    config.mode = "sync"
    config.optimizer |= {"learning_rate": 0.01} if optimizer == "adam" else {"learning_rate": 0.05}
    config.optimizer |= {"momentum": 0.5} if optimizer == "momentum" else {}
    config.algorithm = AlgorithmConfig(kind="local_sgd", local_steps=local_steps, **algorithm)
    return config


def plain_of(config: RunConfig) -> RunConfig:
    return replace(config, algorithm=AlgorithmConfig())


def unconstrained(optimizer: str, **algorithm: Any) -> RunConfig:
    """For plain training, which constrains no mean of weights, and for mode=async."""
    return replace(local_config(optimizer, **algorithm), model={"name": "normed", "constrained": False})


QUICK = {"outer momentum": local_config("momentum", per_call=2, **OUTER)}  # a round takes two calls
LONG = {
    "momentum": local_config("momentum"),
    "sgd": local_config("sgd"),
    "adam": local_config("adam", per_call=None),
    "outer rate": local_config("sgd", per_call=1, outer_learning_rate=1.2),
}
LONG["tensorflow"] = replace(LONG["sgd"], cluster=replace(LONG["sgd"].cluster, all_reduce="tensorflow"))
STREAM = streamed(regression, of_generator, 2, steps=7)
STREAM_CONFIG = local_config("adam", per_call=10)
STREAM_CONFIG.train.batch_size_per_worker = BATCH
INTERRUPTED = local_config("momentum", **OUTER)  # a call takes two rounds
CHANGING = unconstrained("momentum", **OUTER)


class Counts(keras.layers.Layer):  # type: ignore[misc]
    """Counts the steps, and the examples of all workers."""

    def build(self, shape: Any) -> None:
        more = {"shape": (), "initializer": "zeros", "trainable": False}
        self.steps, self.examples = self.add_weight(name="steps", **more), self.add_weight(name="examples", **more)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1)
            self.examples.assign_add(keras.ops.cast(keras.ops.shape(tf2dist.gather(x))[0], "float32"))
        return x


def counting() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), Counts(), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


# The second worker has none of the 9 examples in the second step.
PADDED = InMemorySource(counting, Splits(Arrays(np.ones([9, 3], np.float32), np.ones([9, 1], np.float32))))
PADDED_CONFIG = local_config("sgd")
PADDED_CONFIG.train.batch_size_per_worker = 4


class Counted:
    """An all-reduce that counts how often it is called for the vector of the small tensors, the last of an average."""

    lost = None

    def __init__(self, inner: Any) -> None:
        self._inner, self.calls = inner, 0

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        self.calls += vector.ndim == 1
        found: np.ndarray = self._inner(vector)
        return found


def built(
    worker: SyncWorker, config: RunConfig, start: Snapshot | None = None, given: InMemorySource | None = None
) -> Any:
    packing.LARGE_BYTES = 256  # so that the kernels travel alone, as those of large models do
    return sync_loop(worker, config, given, start if worker.index == 0 else None)


def of_model(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if name.startswith("model/")}


def change(loop: Any) -> None:
    """Changes a variable between two rounds, as a callback may do."""
    name = list(of_model(loop.arrays()))[CHANGED]
    loop.apply(CallbackEffects(arrays={name: loop.arrays()[name] + 0.5}))


def trained(worker: SyncWorker, config: RunConfig, pauses: tuple[int, ...], given: InMemorySource | None = None) -> Any:
    """Trains to each of these steps; returns what the worker has before and afterwards."""
    loop = built(worker, config, given=given)
    before = loop.freeze()().arrays
    if loop._graphs._all_reduce:  # or it is TensorFlow's
        loop._graphs._all_reduce = Counted(loop._graphs._all_reduce)
    for until in pauses:
        loop.train(until)
        if pauses == PAUSES and until == PAUSES[0]:
            change(loop)
    return SimpleNamespace(
        before=before,
        after=loop.freeze()(),
        updates=loop.updates_applied(),
        progress=loop.progress,
        metrics=loop.metrics.results(loop.progress.metrics),
        averages=loop._graphs._all_reduce.calls if loop._graphs._all_reduce else AVERAGES,
        facts=loop.facts(),
    )


def stopped_and_resumed(worker: SyncWorker) -> dict[str, Any]:
    """A run that the second worker asks to stop after its second call, and the same run continued."""
    first = built(worker, INTERRUPTED)
    wants = PauseRequest.STOP if worker.index == 1 else PauseRequest.NOTHING
    requested = first.train(7, lambda: wants if first.progress.global_step > 3 else PauseRequest.NOTHING)
    assert first.progress.global_step == 7
    change(first)
    requested = first.train(14, lambda: wants)
    stopped = arrived(first.freeze()())
    second = built(worker, INTERRUPTED, stopped)
    begun = second.freeze()()
    second.train(14)
    return {"requested": requested, "stopped": stopped, "begun": begun, "resumed": second.freeze()()}


def step_by_step(worker: SyncWorker, optimizer: str) -> dict[str, Any]:
    config = unconstrained(optimizer)
    return {
        f"plain {optimizer}": trained(worker, plain_of(config), (14,)),
        f"{optimizer} step by step": trained(worker, config, tuple(range(1, 15))),
    }


def train_quickly(worker: SyncWorker) -> dict[str, Any]:
    """Several runs in one life of the workers, which take seconds to start."""
    found = {name: trained(worker, config, PAUSES) for name, config in QUICK.items()}
    found["padded"] = trained(worker, PADDED_CONFIG, (2,), PADDED)
    return found | step_by_step(worker, "momentum") | stopped_and_resumed(worker)


def train_long(worker: SyncWorker) -> dict[str, Any]:
    found = {name: trained(worker, config, PAUSES) for name, config in LONG.items()}
    found["stream"] = trained(worker, STREAM_CONFIG, PAUSES, STREAM)
    found["plain adam"] = trained(worker, plain_of(local_config("adam")), (14,))
    found["adam of one step"] = trained(worker, local_config("adam", local_steps=1), (14,))
    return found | step_by_step(worker, "sgd") | changes_of_algorithm(worker)


def changes_of_algorithm(worker: SyncWorker) -> dict[str, Any]:
    """Runs that continue one another: with outer momentum, plain, and with outer momentum again."""
    snapshots: list[Snapshot] = []
    for config, until in ((CHANGING, 7), (plain_of(CHANGING), 14), (CHANGING, 21)):
        loop = built(worker, config, snapshots[-1] if snapshots else None)
        snapshots.append(arrived(loop.freeze()()))
        loop.train(until)
        snapshots.append(arrived(loop.freeze()()))
    return {"changes": snapshots, "updates": loop.updates_applied()}
