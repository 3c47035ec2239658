"""The calls that the coordinator gives to asynchronous workers: their size, their number, their graphs."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import REPOSITORY
from tests.replica.small_runs import assert_exact, run_config
from tests.replica.test_epochs import source_of
from tf2dist import registry
from tf2dist.errors import TaskLostError
from tf2dist.training.loop import PauseRequest, WorkersAway, unrolled_steps
from tf2dist.training.parameter_server import graphs, schedule
from tf2dist.training.parameter_server.server import ParameterServer

MakeLoop = Callable[..., Any]


def test_the_input_is_prefetched_to_the_accelerator(async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "ACCELERATOR", "CPU:1")  # stands for a GPU; each worker has such a device
    loop = async_loop(run_config(steps_per_execution=3), num_workers=1)
    names = {device.name for device in tf.config.list_logical_devices()}
    assert "/job:worker/replica:0/task:0/device:CPU:1" in names
    nodes = {node.name: node for node in loop._scheduler.function.graph.as_graph_def().node}
    steps = [node for node in nodes.values() if node.op == "PartitionedCall"]
    assert len(steps) == 3
    for step in steps:
        assert step.device == "/device:CPU:1"
        inputs = [nodes[name.partition(":")[0]] for name in step.input]
        copies = [node for node in inputs if node.op == "Identity" and node.device == "/device:CPU:1"]
        batches = [nodes[copy.input[0].partition(":")[0]] for copy in copies]
        assert [batch.op for batch in batches] == ["EnsureShape"] * 2, "images and labels as the worker gathers them"
        assert all(batch.device == "/device:CPU:0" for batch in batches)
        assert not any(name.startswith("^") for copy in copies for name in copy.input), (
            "a copy has a control dependency on a step"
        )
    loop.train(8)
    assert_exact(loop, 8)


@registry.register_model("deep")
def deep(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    layers = keras.layers
    first = [keras.Input(input_shape), layers.Rescaling(1 / 255), layers.Flatten()]
    return keras.Sequential([*first, *(layers.Dense(8, "tanh") for _ in range(60)), layers.Dense(num_classes)])


@pytest.mark.parametrize(
    ("model", "given", "num_steps"),
    [
        ({"model": "softmax"}, None, 50),
        pytest.param({"model": "deep"}, None, 28, marks=pytest.mark.thorough),
        pytest.param({"model": "deep"}, 2, 2, marks=pytest.mark.slow),
        pytest.param({"model": "dnn", "hidden_units": [1500, 1500]}, None, 5, marks=pytest.mark.thorough),
    ],
)
def test_deep_and_large_models_get_short_calls(
    async_loop: MakeLoop, model: dict[str, Any], given: int | None, num_steps: int
) -> None:
    loop = async_loop(run_config(**model, steps_per_execution=given), num_workers=1)
    assert loop._scheduler.num_steps == num_steps
    if given is not None:
        loop.train(5)
        assert_exact(loop, 5)


def test_how_many_steps_are_unrolled() -> None:
    """Fewer of a step with many operations, and of one with many parameters."""
    traced = SimpleNamespace(graph=SimpleNamespace(get_operations=lambda: [None] * 1000))
    large: list[Any] = [SimpleNamespace(shape=(2000, 2000))]
    assert [unrolled_steps(traced, variables, 1e6) for variables in ([], large)] == [30, 5]


def test_workers_share_the_steps_between_two_evaluations(async_loop: MakeLoop) -> None:
    config = run_config(model="softmax", steps_per_execution=None)
    config.train.eval_every_steps = 12
    assert async_loop(config, num_workers=2)._scheduler.num_steps == 3


def test_every_worker_gets_a_part_of_an_epoch(async_loop: MakeLoop) -> None:
    loop = async_loop(run_config(steps_per_execution=50), num_workers=3, source=source_of("regression"))
    assert loop._graphs.sharding.updates_per_pass == 6
    assert loop._scheduler.num_steps == 2


def test_a_worker_asks_the_ps_once_a_step(async_loop: MakeLoop) -> None:
    """What one step pushes and the next one pulls is one exchange."""
    graph = async_loop(run_config(steps_per_execution=3), num_ps=1)._scheduler.function.graph
    names = [node.get_attr("f").name for node in graph.get_operations() if node.type == "StatefulPartitionedCall"]
    kinds = {"pulled": "pull", "_push": "push", "_exchange": "exchange"}
    asked = [kind for name in names for function, kind in kinds.items() if name.startswith(f"__inference_{function}_")]
    assert asked == ["pull", "exchange", "exchange", "push"]


@pytest.mark.thorough
def test_a_call_still_in_flight_does_not_cause_more_calls(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training counts on there being none, so an evaluation waits for all of them."""

    @tf.function(autograph=False)
    def slow() -> None:
        tf.numpy_function(lambda: time.sleep(0.5), [], [])

    loop = async_loop(run_config(), num_workers=4)
    loop.train(200)
    schedule, calls = loop._coordinator.schedule, []

    def counted(function: Any, args: Any) -> Any:
        calls.append(function)
        return schedule(function, args=args)

    schedule(slow)
    loop.evaluate("validation")
    monkeypatch.setattr(loop._coordinator, "schedule", counted)
    loop.train(220)
    assert len(calls) == 4
    assert_exact(loop, 220)


@pytest.mark.thorough
def test_updates_that_have_begun_are_not_scheduled_again(async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look may come when one ps has begun to apply the last updates, and another one has not applied them yet."""

    @tf.function(autograph=False)
    def slow() -> None:
        tf.numpy_function(lambda: time.sleep(0.5), [], [])

    loop = async_loop(run_config(), num_workers=4)
    loop.train(200)
    coordinator, late = loop._coordinator, loop._graphs.servers[1]
    schedule, counts, behind = coordinator.schedule, late.counts, [3, 2, 1]
    calls: list[Any] = []

    def counted(function: Any, args: Any) -> Any:
        if not calls:
            schedule(slow)  # so that not all calls are done at these looks
        calls.append(function)
        return schedule(function, args=args)

    def seen_late() -> tf.Tensor:
        now = counts().numpy()
        if behind and now[1] == 220:
            now[1] -= behind.pop(0)
        return tf.constant(now)

    monkeypatch.setattr(coordinator, "schedule", counted)
    monkeypatch.setattr(late, "counts", seen_late)
    loop.train(220)
    assert not behind
    assert len(calls) == 4
    assert_exact(loop, 220)


@pytest.mark.parametrize("what", ["training", pytest.param("evaluating", marks=pytest.mark.slow)])
def test_a_stop_does_not_wait_for_workers_that_do_not_respond(async_loop: MakeLoop, what: str) -> None:
    """Here all workers are busy with a call that does not end."""
    released = threading.Event()

    def wait() -> None:
        released.wait(60)

    @tf.function(autograph=False)
    def busy() -> None:
        tf.numpy_function(wait, [], [])

    loop = async_loop(run_config(steps_per_execution=5, optimizer="adam"))
    loop.train(20)
    before = [variable.numpy() for variable in loop.model.trainable_variables]
    for _ in range(2):
        loop._coordinator.schedule(busy)
    begun = time.monotonic()
    try:
        if what == "evaluating":
            with pytest.raises(WorkersAway):
                loop.evaluate("test", lambda: PauseRequest.STOP)
        else:
            assert loop.train(120, lambda: PauseRequest.STOP) is PauseRequest.STOP
            loop._coordinator.schedule(loop._scheduler.function, args=(tf.constant(120, tf.int64),))
        assert time.monotonic() - begun < 10
    finally:
        released.set()
    loop._coordinator.join()
    assert_exact(loop, 20)
    assert loop.freeze()().step == 20
    for old, new in zip(before, loop.model.trainable_variables, strict=True):
        np.testing.assert_array_equal(new.numpy(), old)


@registry.register_model("sleeping")
def sleeping(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    def sleep(images: Any) -> Any:
        tf.numpy_function(lambda: time.sleep(0.15), [], [])
        return images

    layers = keras.layers
    slow = layers.Lambda(sleep, output_shape=input_shape)
    return keras.Sequential([keras.Input(input_shape), slow, layers.Flatten(), layers.Dense(num_classes)])


@pytest.mark.thorough
def test_a_stop_does_not_wait_for_long_calls(async_loop: MakeLoop) -> None:
    """With 20 steps of 0.15 s each call takes 3 s, and two of each worker are in flight."""
    loop = async_loop(run_config("sleeping", steps_per_execution=20), num_workers=3)
    stop = loop.train(1000, lambda: PauseRequest.STOP if loop.progress.global_step >= 3 else PauseRequest.NOTHING)
    assert stop is PauseRequest.STOP
    stopped_at = loop.progress.global_step
    assert not loop._coordinator.done(), "the calls are in flight"
    assert stopped_at < 60, "fewer than the steps of the first call of each worker"
    saved = loop.freeze()()
    loop._coordinator.join()
    assert_exact(loop, stopped_at)
    after = loop.freeze()()
    for name, array in saved.arrays.items():
        np.testing.assert_array_equal(after.arrays[name], array, name)
    loop.train(stopped_at + 3)
    assert_exact(loop, stopped_at + 3)


def test_ps_at_different_counts_are_not_saved(async_loop: MakeLoop) -> None:
    """This happens if the last worker pushes to one ps and dies before it pushes to the other."""
    loop = async_loop(run_config())
    ahead = loop._graphs.servers[0]
    ahead.restore(ahead.counters.now()._replace(applied=1))
    with pytest.raises(TaskLostError, match=r"the ps have applied \[1, 0\] updates: this cannot be saved"):
        schedule.close_servers(loop._graphs.servers, 50)


@registry.register_optimizer("slow_to_apply")
class SlowToApply(keras.optimizers.SGD):
    """SGD whose update is slow on a ps."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        tf.numpy_function(lambda: time.sleep(1.0), [], [])
        super().update_step(gradient, variable, learning_rate)


def test_a_stop_saves_the_updates_that_the_ps_are_applying(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop does not wait for workers, but it does wait for every numbered update."""
    monkeypatch.setattr(schedule, "SETTLE_SECS", 60.0)  # a busy machine may need longer than usual for two updates
    config = run_config("softmax", "slow_to_apply", steps_per_execution=1)
    config.grace_secs = 0.1
    loop = async_loop(config, num_workers=2)
    servers = loop._graphs.servers

    def stop_in_an_update() -> PauseRequest:
        # Wait until both workers have reached both ps: after the stop a worker cannot start a push to the second one.
        are_waiting = all(numbered == applied + 2 for numbered, applied in schedule.counts_of(servers))
        return PauseRequest.STOP if are_waiting else PauseRequest.NOTHING

    assert loop.train(20, stop_in_an_update) is PauseRequest.STOP
    saved, counts = loop.freeze()(), schedule.counts_of(servers)
    assert 0 < saved.step < 20
    loop._coordinator.join()
    assert (
        [applied for _, applied in schedule.counts_of(servers)]
        == [applied for _, applied in counts]
        == [saved.step] * 2
    )
    after = loop.freeze()()
    for name, array in saved.arrays.items():
        np.testing.assert_array_equal(after.arrays[name], array, name)


def test_an_early_stop_sets_no_count_while_workers_push(async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that gives its number back would otherwise let an update in after the step that is saved."""
    # Of calls of one step none may be in flight any more when a busy machine looks, and then the counts may be set.
    config = run_config("softmax", "slow_to_apply", steps_per_execution=5)
    loop = async_loop(config, num_workers=2)
    set_counts = []

    def stop() -> PauseRequest:
        if not loop.progress.global_step:
            return PauseRequest.NOTHING
        monkeypatch.setattr(ParameterServer, "number_on_from_applied", lambda server: set_counts.append(server))
        return PauseRequest.STOP

    assert loop.train(1000, stop) is PauseRequest.STOP
    assert set_counts == []
    loop._coordinator.join()


def test_how_long_a_stop_waits_for_workers() -> None:
    assert schedule.longest_silence(0.0, 2, grace_secs=10.0) == 5.0, "no step has been measured yet"
    assert schedule.longest_silence(100.0, 2, grace_secs=10.0) == 2.0
    assert schedule.longest_silence(1.0, 2, grace_secs=10.0) == 4.0, "a step takes 2 s"
    assert schedule.longest_silence(0.1, 2, grace_secs=10.0) == 5.0
    assert schedule.longest_silence(100.0, 2, grace_secs=1.0) == 0.5


@pytest.mark.thorough  # what it guards costs time, and no result
def test_no_function_is_created_while_many_hosts_train() -> None:
    """TensorFlow sends each new function to all hosts, and hangs if one of them cannot be reached.

    Runs in a separate process, because TensorFlow creates some functions only once in a process.
    """
    code = """if True:
        import os
        from dataclasses import replace
        import numpy as np
        from tensorflow.python.eager import context
        from tests.replica.small_runs import context_of, run_config
        from tf2dist.training.parameter_server import batches, schedule
        from tf2dist.training.parameter_server.async_loop import AsyncLoop
        from tf2dist.testing import COORDINATOR, start_ps_cluster
        schedule.MAX_LOOK_SECS = 0.0  # every evaluation is looked at
        config = run_config(steps_per_execution=None)
        cluster = replace(start_ps_cluster().cluster, is_managed=False)
        chief = context_of(config, cluster, COORDINATOR)
        batches.publish(chief.splits)
        loop = AsyncLoop.build(chief, None, lambda progress: None)
        # Each worker makes the functions of its pipeline in its own process.
        batches._published["tf2dist.train"](np.array([[0, 1]]), np.array(loop.sharding.order))
        known = context.context().list_function_names()
        for steps in (100, 150):
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


@pytest.mark.thorough  # likewise memory
def test_the_first_copies_of_several_threads_move_no_table() -> None:
    """TensorFlow doubles its table of the functions that copy from tasks whenever it is full, while others read it."""
    code = """if True:
        import os, sys
        import tensorflow as tf
        from tf2dist.testing import start_ps_cluster
        cluster = start_ps_cluster(num_workers=4)
        coordinator = cluster.coordinator
        print("connected", file=sys.stderr, flush=True)
        one = tf.function(lambda: (tf.ones([3]), tf.ones([3], tf.float64), tf.ones([3], tf.int64)))
        for value in [coordinator.schedule(one) for _ in range(40)]:
            coordinator.fetch(value)
        print(flush=True)
        os._exit(0)  # the servers of the cluster are in this process
    """
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "cluster_function_library_runtime=1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    before, after = (part.count("CFLR::Instantiate") for part in done.stderr.split("connected\n"))
    assert after > 4, "no copy needed a function of its own"
    room = 1 << before.bit_length() if before else 0  # the size of the table after it was filled one by one
    assert before + after <= room


def test_few_calls_are_in_flight(async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps are requested, and however slow the workers are."""
    loop = async_loop(run_config(steps_per_execution=2))
    schedule = loop._coordinator.schedule
    ahead: list[int] = []
    windows: list[int] = []  # the window grows with the speed of the workers

    def note(*args: Any, **kwargs: Any) -> Any:
        windows.append(loop._scheduler.window())
        ahead.append(len(ahead) * 2 - int(loop._graphs.servers[0].numbered.numpy()))
        return schedule(*args, **kwargs)

    monkeypatch.setattr(loop._coordinator, "schedule", note)
    loop.train(100, lambda: PauseRequest.STOP if len(ahead) > 50 else PauseRequest.NOTHING)
    assert 0 < max(ahead) <= max(windows) + 2
    assert len(ahead) <= 52, "calls were made for steps that are done"


def test_xla_compiles_the_step(async_loop: MakeLoop) -> None:
    config = run_config()
    config.devices.xla = True
    loop = async_loop(config, num_workers=1)
    assert "_XlaMustCompile" in str(loop._scheduler.function.graph.as_graph_def())
    loop.train(10)
    assert_exact(loop, 10)
