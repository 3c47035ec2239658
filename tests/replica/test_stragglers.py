"""Simulated stragglers: how long and when workers are delayed, and that graphs are unchanged without a simulation."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replica.small_runs import assert_exact, run_config
from tests.replica.test_resume import taken
from tests.replica.test_sync import train
from tf2dist.cluster.spec import Cluster
from tf2dist.config.schema import RunConfig, SimulateConfig
from tf2dist.testing import PsCluster, SyncWorker, SyncWorkers
from tf2dist.training import stragglers
from tf2dist.training.loop import CALL_SECS
from tf2dist.training.stragglers import DELAY_TOKEN, Sleeper, longest_secs, publish

MakeLoop = Callable[..., Any]


def delays(seed: int = 3, **simulated: Any) -> Sleeper:
    return Sleeper(SimulateConfig(**simulated), seed, pausing=1)


def test_delays_are_drawn_from_the_seed_the_worker_and_the_step() -> None:
    one, again = (delays(delay_secs=[0.0, 2.0, 2.0], distribution="exponential") for _ in range(2))
    drawn = [one.secs(1, step) for step in range(1, 2001)]
    assert drawn == [again.secs(1, step) for step in range(1, 2001)]
    assert len(set(drawn)) == len(drawn)
    others = [delays(4, delay_secs=[0.0, 2.0, 2.0], distribution="exponential").secs(1, 1), one.secs(2, 1)]
    assert drawn[0] not in others
    # Of an exponential distribution the mean and the standard deviation are equal.
    assert np.mean(drawn) == pytest.approx(2.0, rel=0.1)
    assert np.std(drawn) == pytest.approx(2.0, rel=0.1)
    assert {one.secs(0, step) for step in range(1, 100)} == {0.0}


def test_constant_delays_and_a_pause() -> None:
    made = delays(delay_secs=[0.0, 0.5], pause="worker-1 at 300 for 2.5")
    assert [made.secs(worker, 300) for worker in (0, 1)] == [0.0, 0.5]
    assert [made.pause_secs(*place) for place in ((0, 300), (1, 299), (1, 300), (1, 301))] == [0.0, 0.0, 2.5, 0.0]


def test_the_watchdog_allows_for_simulated_delays() -> None:
    config = run_config(steps_per_execution=None)
    assert longest_secs(config) == 0
    config.simulate = SimulateConfig(delay_secs=[0.0, 3.0], pause="worker-0 at 1 for 100")
    assert longest_secs(config) == 103
    config.train.steps_per_execution = 10
    assert longest_secs(config) == 130


@pytest.fixture
def publishing(cluster: PsCluster) -> Iterator[Callable[[RunConfig], None]]:
    """Publishes the delays of a configuration in this process, as each worker does."""
    yield lambda config: publish(config, cluster.cluster, Path())
    stragglers._published_functions.clear()


def calls_of(loop: Any) -> list[str]:
    """The nodes that sleep in the graph of a call."""
    nodes = loop._scheduler.function.graph.as_graph_def().node
    return [node.name for node in nodes if node.op == "PyFunc" and node.attr["token"].s.decode() == DELAY_TOKEN]


@pytest.mark.thorough
def test_without_a_simulation_no_delay_is_in_the_graph(async_loop: MakeLoop) -> None:
    plain = async_loop(run_config())
    assert calls_of(plain) == []
    config = run_config(steps_per_execution=10)
    config.simulate.delay_secs = [0.0, 0.0, 0.0, 0.1]
    assert len(calls_of(async_loop(config, num_workers=4))) == 10, "each step of a call needs one node"


@pytest.mark.thorough
def test_a_delayed_asynchronous_worker_does_a_smaller_share(
    async_loop: MakeLoop, publishing: Callable[[RunConfig], None]
) -> None:
    config = run_config(steps_per_execution=10)
    config.simulate.delay_secs = [0.0, 0.0, 0.0, 0.1]
    publishing(config)
    loop = async_loop(config, num_workers=4)
    loop.train(20)  # lets every worker prepare its graph
    before, begun_at = loop.progress.local_steps, time.monotonic()
    loop.train(1000)
    secs = time.monotonic() - begun_at
    assert_exact(loop, 1000)
    *others, late = (after - steps for after, steps in zip(loop.progress.local_steps, before, strict=True))
    assert late * 2 < min(others)
    # Calls have 10 steps; one may have been in flight at each end.
    assert (late - 20) * 0.1 <= secs


def test_a_pause_occurs_once(
    async_loop: MakeLoop, publishing: Callable[[RunConfig], None], capfd: pytest.CaptureFixture[str]
) -> None:
    config = run_config()
    config.simulate.pause = "worker-1 at 5 for 0.5"
    publishing(config)
    loop = async_loop(config)
    for steps in (12, 40, 60):  # at each of these, updates are refused and their steps taken again
        loop.train(steps)
    assert_exact(loop, 60)
    assert loop.progress.local_steps[1] >= 5
    assert capfd.readouterr().out.count("worker=1, local_step=5: a simulated pause of 0.5 s") == 1

    publishing(config)  # as in new processes
    resumed = async_loop(config, start=taken(loop))
    resumed.train(90)
    assert_exact(resumed, 90)
    assert "a simulated pause" not in capfd.readouterr().out


def test_calls_do_not_make_a_delay_longer(async_loop: MakeLoop) -> None:
    config = run_config(steps_per_execution=None)
    config.simulate.delay_secs = [0.0, 0.0, 0.0, 0.1]
    assert async_loop(config, num_workers=4)._scheduler.num_steps == CALL_SECS / 0.1


def timed(worker: SyncWorker, config: RunConfig, steps: int) -> tuple[dict[str, Any], float]:
    """Trains with the delays of the configuration; returns what `train` does, and the seconds."""
    publish(config, worker.cluster, Path())
    begun_at = time.monotonic()
    return train(worker, config, steps), time.monotonic() - begun_at


@pytest.mark.slow
def test_all_synchronous_workers_wait_for_a_delayed_one(sync_workers: SyncWorkers) -> None:
    config = run_config(steps_per_execution=None)
    plain = sync_workers(train, num_workers=2, args=(config, 20))
    config.simulate = SimulateConfig(delay_secs=[0.0, 0.1], pause="worker-0 at 7 for 0.8")
    for (found, secs), expected in zip(sync_workers(timed, num_workers=2, args=(config, 20)), plain, strict=True):
        assert secs >= 20 * 0.1 + 0.8, "the delays of one worker must not shorten the pause of another"
        for one, other in zip(found["weights"], expected["weights"], strict=True):
            np.testing.assert_array_equal(one, other, err_msg="a delay changes no numbers")


def test_the_first_synchronous_worker_may_be_a_chief() -> None:
    config = run_config()
    config.simulate.pause = "chief-0 at 1 for 1"
    publish(config, Cluster("sync", {"chief": ("a:1",), "worker": ("b:1",)}), Path())
    assert stragglers._published_functions[DELAY_TOKEN].pausing == 0  # type: ignore[attr-defined]
    stragglers._published_functions.clear()
