"""algorithm=bounded: no worker is more than the bound of steps ahead of the slowest that lives."""

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import assert_exact, part_of, run_config
from tests.replica.test_resume import taken
from tf2dist.cluster.spec import Cluster
from tf2dist.config.algorithms import AlgorithmConfig
from tf2dist.config.schema import RunConfig, SimulateConfig
from tf2dist.linux import unused_ports
from tf2dist.model import models
from tf2dist.testing import PsCluster
from tf2dist.training import stragglers
from tf2dist.training.loop import PauseRequest
from tf2dist.training.parameter_server.algorithms.bounded import INDEX, GatedServer
from tf2dist.training.parameter_server.algorithms.plain import algorithm_of
from tf2dist.training.parameter_server.counters import ONES
from tf2dist.training.parameter_server.wire import PackedCount
from tf2dist.training.stragglers import publish

MakeLoop = Callable[..., Any]
STRAGGLER = 3


@pytest.fixture
def publishing(cluster: PsCluster) -> Iterator[Callable[[RunConfig], None]]:
    """Publishes the delays of a configuration in this process, as each worker does."""
    yield lambda config: publish(config, cluster.cluster)
    stragglers._published.clear()


def bounded_config(bound: int | None, delay_secs: float = 0.0, **more: Any) -> RunConfig:
    """With a straggler, unless the delay is 0; None: plain training."""
    config = run_config(**more)
    if bound:
        config.algorithm = AlgorithmConfig(kind="bounded", bound=bound)
    config.simulate = SimulateConfig(delay_secs=[0.0] * STRAGGLER + [delay_secs])
    return config


class Observer:
    """Reads the steps of all workers, all at one moment, again and again; counted from now."""

    def __init__(self, loop: Any) -> None:
        self._counters, self._is_over = loop._graphs.servers[0].counters, threading.Event()
        self._begun_at = self._counters.now().steps
        self.leads: list[int] = []

    def __enter__(self) -> "Observer":
        self._thread = threading.Thread(target=self._observe)
        self._thread.start()
        return self

    def _observe(self) -> None:
        while not self._is_over.is_set():
            steps = self._counters.now().steps - self._begun_at
            self.leads.append(int(steps.max() - steps.min()))

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.mark.parametrize(("bound", "num_ps"), [pytest.param(1, 2, marks=pytest.mark.slow), (3, 1), (None, 1)])
def test_the_bound_holds_with_a_straggler(
    async_loop: MakeLoop, publishing: Callable[[RunConfig], None], bound: int | None, num_ps: int
) -> None:
    config = bounded_config(bound, 0.02, steps_per_execution=5)
    publishing(config)
    loop = async_loop(config, num_ps=num_ps)
    with Observer(loop) as observer:
        for until in (60, 203):
            loop.train(until)
            assert_exact(loop, until)
    assert len(observer.leads) > 100
    if bound is None:
        assert max(observer.leads) > 10
        assert "lead" not in loop.facts()
        return
    assert max(observer.leads) == bound, "it goes as far as it may, and no further"
    assert loop.facts()["lead"] == {"max": bound}
    assert loop.facts()["bound"] == bound


@pytest.mark.slow
def test_a_run_with_short_epochs_and_pauses_is_resumed(
    async_loop: MakeLoop, publishing: Callable[[RunConfig], None]
) -> None:
    """Calls are longer than the epochs and the bound, and the clocks restart with each start."""
    config = bounded_config(2, 0.01, optimizer="adam", steps_per_execution=10)
    publishing(config)
    loop = async_loop(config)
    for until in (3, 10, 11, 60):
        loop.train(until)
        assert_exact(loop, until)
    paused = loop.train(10_000, lambda: PauseRequest.SAVE if loop.progress.global_step > 100 else PauseRequest.NOTHING)
    assert paused == PauseRequest.SAVE
    stopped_at = loop.progress.global_step
    assert 100 < stopped_at < 10_000
    assert_exact(loop, stopped_at)
    saved = taken(loop)

    # Two workers of plain training are far apart; their clocks begin at 0 all the same.
    plain = async_loop(bounded_config(None, 0.05, optimizer="adam"), start=saved)
    plain.train(stopped_at + 400)
    apart = np.ptp(plain.progress.local_steps)
    assert apart > 10
    resumed = async_loop(config, num_ps=1, start=taken(plain))
    with Observer(resumed) as observer:
        resumed.train(stopped_at + 500)
    assert_exact(resumed, stopped_at + 500)
    assert max(observer.leads) == 2
    assert resumed.facts()["lead"] == {"max": 2}


def test_updates_that_were_admitted_and_lost_are_made_again(async_loop: MakeLoop) -> None:
    """As of a worker that has died in between: then updates are missing, and all further ones are refused."""
    loop = async_loop(bounded_config(1), num_workers=3)
    loop.train(50)
    for server in loop._graphs.servers:
        server.admitted.assign_add(30)
    loop.train(200)
    assert_exact(loop, 200)


class ByHand:
    """A ps of one variable at which updates are made by hand, and the clocks by the definition.

    Attributes:
        clocks: of the workers; infinite for one that is away.
    """

    def __init__(self, num_workers: int, bound: int) -> None:
        self.bound, self.clocks = bound, np.zeros(num_workers)
        make = functools.partial(models.build_optimizer, {"name": "sgd", "learning_rate": 0.1}, 100)
        variable = keras.Variable([1.0, 2.0])
        self.server = GatedServer(part_of([variable], make, num_workers), algorithm_of(run_config()), bound)
        self.server.trace_push({})
        self._look = self.server.on_device(self.server._clocks._look, INDEX)

    def push(self, worker: int) -> None:
        layout, index = self.server.push_layout({}), tf.constant(worker, tf.int64)
        count = PackedCount.of(tf.constant(0.0, tf.float64))
        vector = layout.pack([tf.ones([2])], count, tf.zeros([self.server.counters.added - len(ONES)]))
        self.server.push(vector, self.server.counters.indices(index), tf.constant(10_000, tf.int64), index)
        self.clocks[worker] += 1

    def must_wait(self, worker: int) -> bool:
        found = bool(self._look(tf.constant(worker, tf.int64))[1])
        others = np.delete(self.clocks, worker).min()
        if np.isinf(self.clocks[worker]):
            self.clocks[worker] = others
        expected = self.clocks[worker] + 1 - others > self.bound
        np.testing.assert_array_equal(self.server.clock_state()[:-1], self.clocks)
        assert found == expected, f"worker {worker}, clocks {self.clocks}"
        return found

    def retire(self, worker: int) -> None:
        self.server.retire(tf.constant(worker, tf.int64))
        self.clocks[worker] = np.inf


@pytest.mark.parametrize("bound", [1, 3])
def test_who_has_to_wait(bound: int) -> None:
    """In a random sequence of steps by four workers, of which the slowest is lost now and then."""
    by_hand, random = ByHand(4, bound), np.random.default_rng(bound)
    waited, largest = 0, 0.0
    for number in range(300):
        worker = int(random.choice(4, p=[0.4, 0.3, 0.2, 0.1]))
        if number % 60 == 50:
            by_hand.retire(int(np.argmin(by_hand.clocks)))
        if by_hand.must_wait(worker):
            waited += 1
            continue
        by_hand.push(worker)
        clocks = by_hand.clocks[np.isfinite(by_hand.clocks)]
        largest = max(largest, np.ptp(clocks))
    assert waited > 20
    assert largest == bound
    assert by_hand.server.clock_state().numpy()[-1] == bound


@pytest.mark.parametrize(
    ("release", "may_go_on"),
    [
        pytest.param(lambda by_hand: by_hand.push(1), True, id="the slowest takes a step"),
        pytest.param(lambda by_hand: by_hand.retire(1), True, id="the slowest is lost"),
        pytest.param(lambda by_hand: by_hand.server.close(), False, id="the training pauses"),
    ],
)
def test_who_waits_goes_on_at_once(release: Callable[[ByHand], None], may_go_on: bool) -> None:
    by_hand = ByHand(2, 2)
    by_hand.push(0)
    by_hand.push(0)
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    begin = functools.partial(by_hand.server.begin, tf.constant(0, tf.int64))
    threading.Thread(target=lambda: found.put(begin()), daemon=True).start()
    with pytest.raises(queue.Empty):
        found.get(timeout=0.3)
    release(by_hand)
    count = by_hand.server.pull_layout.unpack(found.get(timeout=10)).applied.value()
    assert (float(count) >= 0) is may_go_on


def test_nobody_waits_for_a_worker_that_cannot_be_reached(
    async_loop: MakeLoop, publishing: Callable[[RunConfig], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """The slow worker executes its calls, but at its address nobody listens: it comes back with each step."""
    config = bounded_config(1, 3.0, steps_per_execution=1)
    publishing(config)
    loop = async_loop(config, num_ps=1)
    addresses = loop._cluster.jobs["worker"]
    elsewhere = (*addresses[:STRAGGLER], f"localhost:{unused_ports(1)[0]}")
    loop._scheduler.cluster = Cluster("async", {**loop._cluster.jobs, "worker": elsewhere})
    loop.train(300)
    assert_exact(loop, 300)
    assert loop.progress.local_steps[STRAGGLER] <= 10, "the others waited for it"
    assert (
        "worker-3 cannot be reached (connection refused): the other workers no longer wait for it"
        in capfd.readouterr().out
    )
