"""mode=sync_replicas in one process: a step is the mean of the first K gradients of the present step."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import REPOSITORY
from tests.replica.small_runs import run_config
from tests.replica.test_sync import assert_equal_weights, train
from tf2dist.config.schema import RunConfig
from tf2dist.errors import ConfigError
from tf2dist.model import packing
from tf2dist.process import heartbeat
from tf2dist.testing import SyncWorkers
from tf2dist.training.loop import PauseRequest, never
from tf2dist.training.parameter_server import schedule

MakeLoop = Callable[..., Any]


def replicas_config(replicas: int | None = None, *args: Any, **more: Any) -> RunConfig:
    config = run_config(*args, **more)
    config.mode = "sync_replicas"
    config.sync_replicas.replicas_to_aggregate = replicas
    return config


def assert_counted(loop: Any, steps: int, replicas: int) -> None:
    """Asserts that each step has this many gradients, and that each gradient is either in a step or was dropped."""
    counts = loop._graphs.deciding.counts()
    assert loop.progress.global_step == loop.updates_applied() == counts.step == steps
    assert counts.aggregated.sum() == sum(loop.progress.local_steps) == steps * replicas
    np.testing.assert_array_equal(counts.aggregated + counts.dropped, counts.pushed)
    assert [int(server.step) for server in loop._graphs.servers] == [steps] * len(loop._graphs.servers)


def weights(loop: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in loop.model.trainable_variables]


@pytest.fixture
def large_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From how many bytes on a tensor travels alone: by default none of these models, with 256 their kernels."""
    monkeypatch.setattr(packing, "LARGE_BYTES", request.param)


@pytest.mark.parametrize(
    ("model", "optimizer", "num_ps", "large_bytes"),
    [
        pytest.param("softmax", "sgd", 1, packing.LARGE_BYTES, marks=pytest.mark.slow),
        pytest.param("dnn", "adam", 1, 256, marks=pytest.mark.slow),
        pytest.param("dnn", "adam", 2, packing.LARGE_BYTES, marks=pytest.mark.slow),
        ("dnn", "adam", 2, 256),
    ],
    indirect=["large_bytes"],
)
@pytest.mark.usefixtures("large_bytes")
def test_all_workers_in_each_step_equal_a_synchronous_one(
    replicas_loop: MakeLoop, sync_workers: SyncWorkers, model: str, optimizer: str, num_ps: int
) -> None:
    """Over 20 steps of 150 of 1,257 examples: two epochs, each with an uneven last step."""
    more: dict[str, Any] = {"hidden_units": [30, 20]} if model == "dnn" else {}
    config = replicas_config(None, model, optimizer, batch_size=50, steps_per_execution=7, **more)
    loop = replicas_loop(config, num_workers=3, num_ps=num_ps)
    for step in (5, 20):
        loop.train(step)
    # test_sync.py shows that it equals three workers.
    config.train.batch_size_per_worker = 150
    expected = sync_workers(train, num_workers=1, args=(config, 20))[0]
    assert_equal_weights(weights(loop), expected["weights"], atol=1e-5)
    assert_counted(loop, 20, 3)
    assert loop.progress.local_steps == (20, 20, 20)
    assert loop.progress.examples == expected["progress"].examples
    assert loop.progress.metrics == pytest.approx(expected["progress"].metrics, rel=1e-4)
    assert not any(loop.facts()["dropped"])


@pytest.mark.parametrize(
    ("num_ps", "large_bytes"),
    [pytest.param(1, packing.LARGE_BYTES, marks=pytest.mark.slow), (2, 256)],
    indirect=["large_bytes"],
)
@pytest.mark.usefixtures("large_bytes")
def test_late_gradients_are_dropped_and_counted(replicas_loop: MakeLoop, num_ps: int) -> None:
    """Two gradients of four workers make a step, so most gradients of the other two come too late."""
    loop = replicas_loop(replicas_config(2, steps_per_execution=10), num_workers=4, num_ps=num_ps)
    for step in (41, 100):
        loop.train(step)
        assert_counted(loop, step, 2)
    assert sum(loop.facts()["dropped"]) > 0
    assert loop._graphs.deciding.counts().refused > 0, "nobody sees that the last calls still move"
    assert loop.progress.loss < 2.2


@pytest.mark.thorough
@pytest.mark.parametrize("large_bytes", [256], indirect=True)
@pytest.mark.usefixtures("large_bytes")
def test_large_models_are_not_sent_once_the_steps_are_made(replicas_loop: MakeLoop) -> None:
    """What calls have left then would take minutes over a slow network; a worker learns of it with its next pull."""
    loop = replicas_loop(replicas_config(1, steps_per_execution=20), num_workers=4, num_ps=2)
    for training, step in enumerate((20, 40), 1):
        loop.train(step)
        counts = loop._graphs.deciding.counts()
        assert counts.step == step
        assert counts.refused <= 4 * training, "steps after the end"
    assert loop.progress.loss < 2.3


def test_the_watchdog_learns_that_the_last_calls_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take minutes over a slow network, and a worker that makes no progress is told from that."""
    noted: list[int] = []
    looks, is_done = iter([1, 2, 2, 2, 3]), iter([*5 * [False], True])
    monkeypatch.setattr(schedule, "MAX_LOOK_SECS", 0.0)
    monkeypatch.setattr(heartbeat, "progress", lambda: noted.append(1))
    coordinator = SimpleNamespace(done=lambda: next(is_done))
    assert not schedule.wait_for_calls(coordinator, never, lambda: next(looks), 1.0)
    assert len(noted) == 3


@pytest.mark.thorough
def test_another_rule_makes_steps_of_fewer_gradients(replicas_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many are enough; the other ps make their steps of the same ones."""
    from tf2dist.training.parameter_server.sync_replicas import SyncReplicasGraphs
    from tf2dist.training.parameter_server.sync_replicas_servers import DecidingServer

    class ThreeThenTwo(DecidingServer):
        def is_complete(self, count: tf.Tensor) -> tf.Tensor:
            return count == 3 - self.step.read_value() % 2

    monkeypatch.setattr(SyncReplicasGraphs, "server_class", ThreeThenTwo)
    loop = replicas_loop(replicas_config(), num_workers=4, num_ps=2)
    loop.train(40)
    counts = loop._graphs.deciding.counts()
    assert (counts.step, counts.aggregated.sum()) == (40, 20 * 3 + 20 * 2)
    assert [int(server.step) for server in loop._graphs.servers] == [40, 40]
    assert loop.progress.loss < 2.2


def test_a_worker_gives_several_gradients_to_a_step(replicas_loop: MakeLoop) -> None:
    """With 4 gradients to a step each of 2 workers gives 2, so a step equals one of 4 workers."""
    loop = replicas_loop(replicas_config(4, steps_per_execution=4), num_workers=2, num_ps=1)
    loop.train(30)
    assert_counted(loop, 30, 4)
    assert loop.progress.local_steps == (60, 60)
    assert not any(loop.facts()["dropped"])


def test_global_clipping_needs_a_single_ps(replicas_loop: MakeLoop) -> None:
    config = replicas_config()
    config.optimizer["global_clipnorm"] = 1.0
    with pytest.raises(ConfigError, match=r"global_clipnorm cannot clip.*; use clipnorm, or cluster.num_ps=1"):
        replicas_loop(config, num_workers=2, num_ps=2)


def test_a_ps_that_does_not_know_of_a_step_is_told(replicas_loop: MakeLoop) -> None:
    """This happens if a worker completes a step on one ps and dies before it pulls from the other."""
    loop = replicas_loop(replicas_config(optimizer="adam"), num_workers=2, num_ps=2)
    loop.train(20)
    (follower,) = loop._graphs.following
    before = [v.numpy() for v in follower.variables]
    follower.step.assign(19)
    loop._align_servers()
    assert_counted(loop, 20, 2)
    assert any((v.numpy() != old).any() for v, old in zip(follower.variables, before, strict=True))
    after = [v.numpy() for v in follower.variables]
    loop._align_servers()
    for v, expected in zip(follower.variables, after, strict=True):
        np.testing.assert_array_equal(v.numpy(), expected, "a step is applied once")


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(replicas_loop: MakeLoop) -> None:
    """With moving averages, dropout, Adam, a pause in the middle of the calls, and another number of ps."""
    config = replicas_config(None, "cnn", "adam", batch_size=20, steps_per_execution=3, dropout=0.3, batch_norm=True)
    straight = replicas_loop(config, num_workers=2, num_ps=1)
    straight.train(12)
    expected = straight.freeze()()
    stopped = replicas_loop(config, num_workers=2, num_ps=1)
    assert stopped.train(12, lambda: PauseRequest.STOP if stopped.progress.global_step > 2 else PauseRequest.NOTHING)
    saved = stopped.freeze()()
    assert 2 < saved.step < 12
    resumed = replicas_loop(config, num_workers=2, num_ps=2, start=saved)
    resumed.train(12)
    assert_counted(resumed, 12, 2)
    found = resumed.freeze()()
    assert found.facts == expected.facts
    for name, array in expected.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array, atol=1e-5, err_msg=name)


def test_a_stop_does_not_wait_for_workers_that_do_not_respond(replicas_loop: MakeLoop) -> None:
    """Here one of two workers is busy with a call that does not end, and the other waits for its gradient."""
    released = threading.Event()

    def wait() -> None:
        released.wait(60)

    @tf.function(autograph=False)
    def busy() -> None:
        tf.numpy_function(wait, [], [])

    loop = replicas_loop(replicas_config(steps_per_execution=5), num_workers=2, num_ps=2)
    loop.train(50)
    before = weights(loop)
    loop._coordinator.schedule(busy)
    try:
        deadline = time.monotonic() + 3.0
        stop = loop.train(100, lambda: PauseRequest.STOP if time.monotonic() > deadline else PauseRequest.NOTHING)
        assert stop is PauseRequest.STOP
        assert loop.freeze()().step == 50
        assert_counted(loop, 50, 2)
    finally:
        released.set()
    loop._coordinator.join()
    assert_equal_weights(weights(loop), before, atol=0)
    assert_counted(loop, 50, 2)


@pytest.mark.slow
def test_no_function_is_created_while_many_hosts_train() -> None:
    """As with mode=async: TensorFlow sends each new function to all hosts, and hangs if one cannot be reached."""
    code = """if True:
        import os
        from dataclasses import replace
        import numpy as np
        from tensorflow.python.eager import context
        from tests.replica.small_runs import context_of, run_config
        from tf2dist.training.parameter_server import batches, schedule
        from tf2dist.training.parameter_server.sync_replicas import SyncReplicasLoop
        from tf2dist.testing import COORDINATOR, start_ps_cluster
        schedule.MAX_LOOK_SECS = 0.0  # so that it looks at the progress of each evaluation
        config = run_config(steps_per_execution=None)
        config.mode = "sync_replicas"
        cluster = replace(start_ps_cluster(num_ps=2).cluster, mode="sync_replicas", is_managed=False)
        chief = context_of(config, cluster, COORDINATOR)
        batches.publish(chief.splits)
        loop = SyncReplicasLoop.build(chief, None, lambda progress: None)
        # Each worker makes the functions of its pipeline in its own process.
        batches._published["tf2dist.train"](np.array([[0, 1]]), np.array(loop.sharding.order))
        known = context.context().list_function_names()
        for steps in (50, 75):
            loop.train(steps)
            loop.evaluate("validation")
            loop.evaluate("test")
            loop.freeze()()
        print(loop._scheduler.num_steps, context.context().list_function_names() - known, flush=True)
        os._exit(0)  # the servers of the cluster are in this process
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["50 set()"]), done.stderr
