"""algorithm=downpour: what a call of a worker asks the ps for, how many steps it has, and what is refused."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.replica.small_runs import part_of, run_config
from tests.replica.test_downpour import downpour_config
from tf2dist.errors import ConfigError
from tf2dist.model import models
from tf2dist.model.plan import EpochPlan
from tf2dist.model.source import RegisteredSource
from tf2dist.training.hooks import Change
from tf2dist.training.parameter_server.algorithms.downpour import DownpourServer
from tf2dist.training.parameter_server.algorithms.plain import algorithm_of

MakeLoop = Callable[..., Any]


def calls_of(loop: Any) -> list[str]:
    """What a call of a worker asks the ps for, in this order, without what is only read for the log."""
    graph = loop._scheduler.function.graph
    names = [node.get_attr("f").name for node in graph.get_operations() if node.type == "StatefulPartitionedCall"]
    kinds = {"_pull": "pull", "_push": "push", "push_and_pull": "exchange"}
    return [kind for name in names for function, kind in kinds.items() if name.startswith(f"__inference_{function}_")]


def test_a_call_fetches_only_after_so_many_batches(async_loop: MakeLoop) -> None:
    loop = async_loop(downpour_config(2, 6, steps_per_execution=9), num_ps=1)
    assert calls_of(loop) == ["pull", *(["push", "push", "exchange"] * 2), *["push"] * 3]
    assert calls_of(async_loop(run_config(steps_per_execution=3), num_ps=1)) == ["pull", "exchange", "exchange", "push"]


@pytest.mark.parametrize(("n_fetch", "num_steps"), [(12, 12), (60, 15)])
def test_calls_are_whole_rounds(async_loop: MakeLoop, n_fetch: int, num_steps: int) -> None:
    """They have 50 steps of one batch otherwise; here a step has 4."""
    config = downpour_config(4, n_fetch, steps_per_execution=None)
    assert async_loop(config, num_ps=1)._scheduler.num_steps == num_steps


def test_workers_get_the_present_learning_rate(async_loop: MakeLoop) -> None:
    """Also one that callbacks have set."""
    config = downpour_config(2, 2, optimizer="adam")
    source = RegisteredSource(config)
    source.plan = EpochPlan()
    loop = async_loop(config, source=source)
    servers = loop._graphs.servers
    rates = [float(server.pull_layout.unpack(server.pull()).others[0][0]) for server in servers]
    loop.apply(Change(learning_rate=0.125))
    rates += [float(server.pull_layout.unpack(server.pull()).others[0][0]) for server in servers]
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.125, 0.125])


def test_it_refuses_gradient_accumulation() -> None:
    arguments = {"name": "adam", "gradient_accumulation_steps": 2}
    make = functools.partial(models.build_optimizer, arguments, 10)
    with pytest.raises(ConfigError, match=r"optimizer.gradient_accumulation_steps \(2\): makes one update of several"):
        DownpourServer(part_of([keras.Variable([1.0])], make), algorithm_of(downpour_config(2, 2)))
