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
from tf2dist.model import packing
from tf2dist.testing import SyncWorker, SyncWorkers
from tf2dist.training.hooks import CallbackEffects

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


def after_a_step(loop: Any, kernel: np.ndarray | float) -> dict[str, np.ndarray]:
    """The weights after a step from this kernel."""
    loop.apply(CallbackEffects(arrays={KERNEL: np.broadcast_to(np.float32(kernel), [784, 10]).copy()}))
    loop.train(loop.progress.global_step + 1)
    found: dict[str, np.ndarray] = loop.arrays()
    return found


@pytest.fixture(autouse=True)
def _small_tensors_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGE_BYTES", 1000)


DTYPES = ["bfloat16", pytest.param("float16", marks=pytest.mark.thorough)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_asynchronous_worker(async_loop: MakeLoop, dtype: str) -> None:
    """What lies on the ps, is saved and is evaluated stays exact."""
    loop = async_loop(config_of("float32"), num_workers=1)
    exact, exact_later = after_a_step(loop, 0.0), after_a_step(loop, EXACT)
    loop = async_loop(config_of(dtype), num_workers=1)
    found, found_later = after_a_step(loop, 0.0), after_a_step(loop, EXACT)
    loop = async_loop(config_of(dtype), num_workers=1)
    after_a_step(loop, 0.0)
    rounded_before = after_a_step(loop, 1.0)  # to which EXACT is rounded

    # From 0 the new kernel is the gradient itself, which has been rounded on its way.
    np.testing.assert_array_equal(found[KERNEL], rounded(exact[KERNEL], dtype))
    assert np.any(found[KERNEL] != exact[KERNEL])
    np.testing.assert_array_equal(found[BIAS], exact[BIAS], "small tensors travel as they are")

    np.testing.assert_array_equal(found_later[BIAS], rounded_before[BIAS], "the worker computed with the same kernel")
    np.testing.assert_allclose(found_later[KERNEL] - rounded_before[KERNEL], EXACT - 1, atol=1e-6)
    assert np.max(np.abs(exact_later[BIAS] - found_later[BIAS])) > 1e-4, "the rounding matters to the worker"

    evaluated, snapshot = loop.evaluate("validation"), taken(loop)
    again = async_loop(config_of("float32"), num_workers=1, start=snapshot)
    assert again.evaluate("validation") == evaluated
    np.testing.assert_array_equal(snapshot.arrays[KERNEL], rounded_before[KERNEL])
    assert np.any(rounded(snapshot.arrays[KERNEL], dtype) != snapshot.arrays[KERNEL])


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [pytest.param("staleness_aware", marks=pytest.mark.slow), "delay_compensated"])
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


def train_in_sync(worker: SyncWorker, configs: list[RunConfig]) -> list[dict[str, np.ndarray]]:
    return [after_a_step(built(worker, config), 0.0) for config in configs]


@pytest.mark.parametrize("dtype", DTYPES)
def test_synchronous_workers(sync_workers: SyncWorkers, dtype: str) -> None:
    """With our own all-reduce and with TensorFlow's."""
    configs = [config_of(each, "sync") for each in ("float32", dtype, dtype)]
    configs[-1].cluster.all_reduce = "tensorflow"
    first, second = sync_workers(train_in_sync, 2, (configs,))
    exact, *narrow = first
    for found, other in zip(narrow, second[1:], strict=True):
        np.testing.assert_array_equal(found[KERNEL], other[KERNEL], "the same on both workers")
        np.testing.assert_array_equal(found[KERNEL], rounded(found[KERNEL], dtype), "the sum is rounded, too")
        assert np.any(found[KERNEL] != exact[KERNEL])
        digits = {"bfloat16": 2.0**-7, "float16": 2.0**-9}[dtype]  # each summand and the sum are rounded
        np.testing.assert_allclose(found[KERNEL], exact[KERNEL], rtol=3 * digits, atol=digits * 1e-2)
        np.testing.assert_array_equal(found[BIAS], exact[BIAS])
