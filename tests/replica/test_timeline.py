"""The recording of the workers' steps: what it writes in every mode, and that it is in no graph without the option."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replica.small_runs import run_config
from tests.replica.test_sync import train
from tf2dist.config.schema import RunConfig, SimulateConfig
from tf2dist.testing import PsCluster, SyncWorker, SyncWorkers
from tf2dist.training import stragglers
from tf2dist.training.stragglers import DELAY_TOKEN, TIMELINE_TOKEN

MakeLoop = Callable[..., Any]
DELAY_SECS = 0.05


@pytest.fixture
def publishing(
    cluster: PsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[RunConfig], None]]:
    """Publishes the recorder and the delays of a configuration in this process, as each worker does."""

    def publish(config: RunConfig) -> None:
        monkeypatch.setattr(stragglers, "FLUSH_SECS", -1.0)
        stragglers.publish(config, cluster.cluster, tmp_path)

    yield publish
    stragglers._published_functions.clear()


def config_of(delays: list[float] | None = None) -> RunConfig:
    config = run_config(steps_per_execution=5)
    config.timeline = True
    config.simulate = SimulateConfig(delay_secs=delays or [])
    return config


def steps_of(run_dir: Path, worker: int) -> np.ndarray:
    """When each step began and ended, [n, 2]."""
    return np.loadtxt(run_dir / "timeline" / f"worker-{worker}.csv", delimiter=",", ndmin=2)


def nodes_of(loop: Any, token: str = TIMELINE_TOKEN) -> int:
    """How many nodes of a call record when a step begins or ends, or with the other token how many delay one."""
    nodes = loop._scheduler.function.graph.as_graph_def().node
    return sum(node.op == "PyFunc" and node.attr["token"].s.decode() == token for node in nodes)


@pytest.mark.parametrize("fixture", ["async_loop", pytest.param("replicas_loop", marks=pytest.mark.slow)])
def test_without_the_option_nothing_is_in_the_graph(fixture: str, request: pytest.FixtureRequest) -> None:
    make: MakeLoop = request.getfixturevalue(fixture)
    loop = make(run_config())
    assert nodes_of(loop) == nodes_of(loop, DELAY_TOKEN) == 0


def test_a_step_begins_when_what_was_pulled_is_on_the_worker(async_loop: MakeLoop) -> None:
    """A control dependency on what a ps has made would not wait for its transfer."""
    loop = async_loop(config_of([DELAY_SECS] * 2), num_workers=2)
    called = [op for op in loop._scheduler.function.graph.get_operations() if op.type == "PyFunc"]
    calls = [op for op in called if op.get_attr("token").decode() in (TIMELINE_TOKEN, DELAY_TOKEN)]
    assert len(calls) == 15, "a begin, a delay and an end of each of the five steps of a call"
    assert nodes_of(loop) == 10
    for call in calls:
        assert {one.device for one in call.control_inputs} == {call.device}


@pytest.mark.parametrize("fixture", ["async_loop", pytest.param("replicas_loop", marks=pytest.mark.thorough)])
def test_the_steps_of_a_mode_with_ps(
    fixture: str, request: pytest.FixtureRequest, publishing: Callable[[RunConfig], None], tmp_path: Path
) -> None:
    make: MakeLoop = request.getfixturevalue(fixture)
    config = config_of([0.0, DELAY_SECS])
    publishing(config)
    loop = make(config, num_workers=2)
    loop.train(40)
    steps = [steps_of(tmp_path, worker) for worker in range(2)]
    # More than were applied: updates beyond the end, or late ones, were computed too.
    assert sum(map(len, steps)) >= loop.progress.global_step
    for one in steps:
        assert (one[:, 1] >= one[:, 0]).all()
        assert (np.diff(one[:, 0]) > 0).all(), "a worker takes one step after the other"
        assert (one[1:, 0] >= one[:-1, 1]).all()
    delays = [np.median(one[:, 1] - one[:, 0]) for one in steps]
    assert delays[-1] >= DELAY_SECS


def recorded(worker: SyncWorker, config: RunConfig, folder: str) -> dict[str, Any]:
    stragglers.FLUSH_SECS = -1.0
    stragglers.publish(config, worker.cluster, Path(folder))
    return train(worker, config, 20)


@pytest.mark.slow
def test_the_steps_of_sync(sync_workers: SyncWorkers, tmp_path: Path) -> None:
    plain = sync_workers(train, num_workers=2, args=(run_config(), 20))
    found = sync_workers(recorded, num_workers=2, args=(config_of([0.0, DELAY_SECS]), str(tmp_path)))
    for one, other in zip(found[0]["weights"], plain[0]["weights"], strict=True):
        np.testing.assert_array_equal(one, other, err_msg="recording changes no numbers")
    steps = [steps_of(tmp_path, worker) for worker in range(2)]
    assert [len(one) for one in steps] == [20, 20]
    assert (steps[1][:, 1] - steps[1][:, 0] >= DELAY_SECS).all()
    # Worker 0 begins no step before the slow one has ended the one before.
    assert (steps[0][1:, 0] >= steps[1][:-1, 1]).all()


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "timeline").touch()
    recorder = stragglers.Recorder(tmp_path / "timeline")
    for has_ended in (False, True, True, False, True):
        assert recorder(np.array(0), np.array(has_ended)) == 0
