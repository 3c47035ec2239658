"""algorithm=downpour."""
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
from tests.replica.small_runs import assert_exact, run_config
from tf2dist.config.schema import AlgorithmConfig

@pytest.mark.parametrize("num_workers,num_ps", [(1, 1), (4,2)])
@pytest.mark.parametrize("n", [(1,1),(4,4),(2,4)])
def test_try(async_loop, n, num_workers, num_ps):
    config = run_config("cnn", batch_norm=True, dropout=0.3, steps_per_execution=4)
    config.algorithm = AlgorithmConfig(kind="downpour", n_push=n[0], n_fetch=n[1])
    loop = async_loop(config, num_workers=num_workers, num_ps=num_ps)
    loop.train(50)
    assert_exact(loop, 50)
    print(loop.progress, loop.facts(), loop._graphs._decays)
