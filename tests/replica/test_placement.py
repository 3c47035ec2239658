"""The placement of variables on ps changes neither the results of a run nor its checkpoints."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.replica.small_runs import run_config
from tests.replica.test_resume import assert_same_arrays, taken
from tf2dist.checkpoint.snapshot import Snapshot
from tf2dist.config.schema import RunConfig

MakeLoop = Callable[..., Any]


def placed(placement: str) -> RunConfig:
    config = run_config("dnn", "adam", hidden_units=[30, 20])
    config.cluster.placement = placement
    return config


def tasks_of(loop: Any) -> dict[str, int]:
    """The number of the ps on which each variable lies."""
    return {variable.path: tf.DeviceSpec.from_string(variable.value.device).task for variable in loop.model.variables}


def test_a_variable_goes_to_the_ps_with_the_fewest_bytes(
    async_loop: MakeLoop, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first kernel is larger than all other variables; dealt out in turn, all kernels would be on the same ps."""
    found = tasks_of(async_loop(placed("balanced")))
    assert list(found.values()) == [0, 1, 1, 1, 1, 1], found
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("ps-")]
    for ps, num_bytes in enumerate((94_080, 3_440)):
        assert f"ps-{ps}: {num_bytes:,} bytes of the model, {3 * num_bytes // 1000}," in told[ps], "Adam has two more"


def test_results_and_checkpoints_equal_those_of_one_ps(async_loop: MakeLoop) -> None:
    """A run that is resumed with the other placement ends with the results of a run on a single ps."""
    snapshot = None
    for placement, num_ps, until_step in (("balanced", 2, 15), ("round_robin", 2, 25), ("balanced", 2, 35)):
        loop = async_loop(placed(placement), num_workers=1, num_ps=num_ps, start=snapshot)
        loop.train(until_step)
        snapshot = taken(loop)
    whole = async_loop(placed("round_robin"), num_workers=1, num_ps=1)
    whole.train(35)
    assert snapshot is not None
    assert_same_arrays(snapshot, taken(whole), ("model/", "optimizer/"))


@pytest.mark.slow
def test_sync_replicas_accepts_a_placement(replicas_loop: MakeLoop) -> None:
    ends: dict[str, Snapshot] = {}
    for placement in ("balanced", "round_robin"):
        config = placed(placement)
        config.mode = "sync_replicas"
        loop = replicas_loop(config, num_workers=1, num_ps=2)
        assert sum(tasks_of(loop).values()) == {"balanced": 5, "round_robin": 3}[placement]
        loop.train(10)
        ends[placement] = taken(loop)
    assert_same_arrays(ends["balanced"], ends["round_robin"], ("model/", "optimizer/"))
