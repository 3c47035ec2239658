"""cluster.transfer_dtype: large tensors travel in fewer bits, and what a run saves and evaluates is not rounded."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.replica.local_sgd_runs import built
from tests.replica.small_runs import run_config
from tests.replica.test_resume import taken
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError
from tf2dist.model import packing
from tf2dist.model.eight_bits import SIZE, STEP
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.hooks import Change

MakeLoop = Callable[..., Any]
KERNEL, BIAS = "model/logits/kernel", "model/logits/bias"
# Not the same for all logits, of which only the differences matter.
EXACT = np.broadcast_to(1 + 2**-12 * (np.arange(10) % 2), [784, 10]).astype(np.float32)
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def config_of(dtype: str, mode: str = "async", algorithm: str = "plain") -> RunConfig:
    """An update with it changes a weight by its whole gradient."""
    config = run_config("softmax", "sgd", steps_per_execution=2)
    config.mode, config.algorithm.kind, config.cluster.transfer_dtype = mode, algorithm, dtype
    config.optimizer["learning_rate"] = 1.0
    return config


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(NARROW[dtype]).astype(np.float32)


def assert_computed_with_rounded_values(found: dict[str, np.ndarray], rounded_before: dict[str, np.ndarray]) -> None:
    """The first run began with EXACT and the second one with 1, to which bfloat16 rounds it."""
    np.testing.assert_array_equal(found[BIAS], rounded_before[BIAS], "the worker computed with the same kernel")
    np.testing.assert_allclose(found[KERNEL] - rounded_before[KERNEL], EXACT - 1, atol=1e-6)


def assert_in_eight_bits(found: np.ndarray, exact: np.ndarray, num_roundings: int) -> None:
    """Each is less than a step of its block from the other, for each time that it was rounded; not all are equal."""
    padded = np.zeros([2, -(-exact.size // SIZE) * SIZE])
    padded[:, : exact.size] = found.ravel(), exact.ravel()
    arrived, sent = padded.reshape(2, -1, SIZE)
    steps = STEP * np.abs(sent).max(axis=1, keepdims=True) * 1.05
    assert np.all(np.abs(arrived - sent) <= num_roundings * steps)
    assert np.any(arrived != sent)


def after_a_step(loop: Any, kernel: np.ndarray | float) -> dict[str, np.ndarray]:
    """The weights after a step from this kernel."""
    loop.apply(Change(arrays={KERNEL: np.broadcast_to(np.float32(kernel), [784, 10]).copy()}))
    loop.train(loop.progress.global_step + 1)
    found: dict[str, np.ndarray] = loop.arrays()
    return found


@pytest.fixture(autouse=True)
def _small_tensors_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGE_BYTES", 1000)


@pytest.mark.parametrize("dtype", NARROW)
def test_an_asynchronous_worker(async_loop: MakeLoop, dtype: str) -> None:
    exact = after_a_step(async_loop(config_of("float32"), num_workers=1), 0.0)
    loop = async_loop(config_of(dtype), num_workers=1)
    found = after_a_step(loop, 0.0)
    # From 0 the new kernel is the gradient itself, which has been rounded on its way.
    np.testing.assert_array_equal(found[KERNEL], rounded(exact[KERNEL], dtype))
    assert np.any(found[KERNEL] != exact[KERNEL])
    np.testing.assert_array_equal(found[BIAS], exact[BIAS], "small tensors travel as they are")


def test_values_are_rounded_for_the_worker_alone(async_loop: MakeLoop) -> None:
    """What lies on the ps, is saved and is evaluated stays exact."""
    exact = after_a_step(async_loop(config_of("float32"), num_workers=1), EXACT)
    found = after_a_step(async_loop(config_of("bfloat16"), num_workers=1), EXACT)
    loop = async_loop(config_of("bfloat16"), num_workers=1)
    rounded_before = after_a_step(loop, 1.0)
    assert_computed_with_rounded_values(found, rounded_before)
    assert np.max(np.abs(exact[BIAS] - found[BIAS])) > 1e-4, "the rounding matters to the worker"

    evaluated, snapshot = loop.evaluate("validation"), taken(loop)
    again = async_loop(config_of("float32"), num_workers=1, start=snapshot)
    assert again.evaluate("validation") == evaluated
    np.testing.assert_array_equal(snapshot.arrays[KERNEL], rounded_before[KERNEL])
    assert np.any(rounded(snapshot.arrays[KERNEL], "bfloat16") != snapshot.arrays[KERNEL])


@pytest.mark.parametrize("algorithm", ["staleness_aware", "delay_compensated", "bounded"])
def test_algorithms_of_asynchronous_training(async_loop: MakeLoop, algorithm: str) -> None:
    """Without delay they are plain training, also with what travels in narrow floats."""
    ends: dict[str, Snapshot] = {}
    for kind in ("plain", algorithm):
        loop = async_loop(config_of("bfloat16", algorithm=kind), num_workers=1)
        loop.train(8)
        ends[kind] = taken(loop)
    # delay_compensated corrects a gradient for what its weights lack: here, for what was rounded off.
    tolerance = 1e-3 if algorithm == "delay_compensated" else 0.0
    for name in (KERNEL, BIAS):
        np.testing.assert_allclose(ends[algorithm].arrays[name], ends["plain"].arrays[name], atol=tolerance)


@pytest.mark.parametrize("algorithm", ["plain", "bounded"])
def test_an_asynchronous_worker_in_eight_bits(async_loop: MakeLoop, algorithm: str) -> None:
    exact = after_a_step(async_loop(config_of("float32", algorithm=algorithm), num_workers=1), 0.0)
    found = after_a_step(async_loop(config_of("int8", algorithm=algorithm), num_workers=1), 0.0)
    assert_in_eight_bits(found[KERNEL], exact[KERNEL], 1)
    np.testing.assert_array_equal(found[BIAS], exact[BIAS], "small tensors travel as they are")


def test_values_travel_as_bfloat16_where_gradients_have_eight_bits(async_loop: MakeLoop) -> None:
    found, rounded_before = (after_a_step(async_loop(config_of("int8"), num_workers=1), one) for one in (EXACT, 1.0))
    assert_computed_with_rounded_values(found, rounded_before)


def train_in_sync(worker: SyncWorker, configs: list[RunConfig]) -> list[dict[str, np.ndarray]]:
    return [after_a_step(built(worker, config), 0.0) for config in configs]


def test_synchronous_workers(sync_workers: SyncWorkers) -> None:
    """With our own all-reduce and with TensorFlow's."""
    configs = [config_of(dtype, "sync") for dtype in ("float32", "bfloat16", "float16", "bfloat16")]
    configs[-1].cluster.all_reduce = "tensorflow"
    first, second = sync_workers(train_in_sync, 2, (configs,))
    exact, *narrow = first
    for config, found, other in zip(configs[1:], narrow, second[1:], strict=True):
        dtype = config.cluster.transfer_dtype
        np.testing.assert_array_equal(found[KERNEL], other[KERNEL], "the same on both workers")
        np.testing.assert_array_equal(found[KERNEL], rounded(found[KERNEL], dtype), "the sum is rounded, too")
        assert np.any(found[KERNEL] != exact[KERNEL])
        digits = {"bfloat16": 2.0**-7, "float16": 2.0**-9}[dtype]  # each summand and the sum are rounded
        np.testing.assert_allclose(found[KERNEL], exact[KERNEL], rtol=3 * digits, atol=digits * 1e-2)
        np.testing.assert_array_equal(found[BIAS], exact[BIAS])


def test_synchronous_workers_in_eight_bits(sync_workers: SyncWorkers) -> None:
    configs = [config_of(dtype, "sync") for dtype in ("float32", "int8")]
    workers = sync_workers(train_in_sync, 3, (configs,))
    exact, found = workers[0]
    for _, other in workers[1:]:
        np.testing.assert_array_equal(found[KERNEL], other[KERNEL], "the same on all workers")
    np.testing.assert_array_equal(found[BIAS], exact[BIAS])
    # The steps of a sum are at most as large as those of its summands together, of which each is rounded, too.
    assert_in_eight_bits(found[KERNEL], exact[KERNEL], 8)


def go_on_in_sync(worker: SyncWorker, config: RunConfig) -> tuple[dict[str, np.ndarray], ...]:
    """What a run and a resumed one end with."""
    loop = built(worker, config)
    loop.train(3)
    middle = loop.snapshot()
    loop.train(6)
    again = built(worker, config, start=middle)
    again.train(6)
    return loop.arrays(), again.arrays()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_resumed_run_rounds_alike(sync_workers: SyncWorkers, num_workers: int) -> None:
    for whole, resumed in sync_workers(go_on_in_sync, num_workers, (config_of("int8", "sync"),)):
        np.testing.assert_array_equal(resumed[KERNEL], whole[KERNEL])


def refused_in_sync(worker: SyncWorker, config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        built(worker, config)
    return str(caught.value)


def test_tensorflow_adds_no_eight_bits(sync_workers: SyncWorkers) -> None:
    config = config_of("int8", "sync")
    config.cluster.all_reduce = "tensorflow"  # as where workers cannot connect, or have GPUs
    for message in sync_workers(refused_in_sync, 2, (config,)):
        assert message.startswith("cluster.transfer_dtype (int8): is for tf2dist's own all-reduce, ")
