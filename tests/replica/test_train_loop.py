"""The steps of a deep model are executed in a loop, and give what unrolled ones give."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.replica.small_runs import assert_exact, make_long_calls_pay, run_config
from tests.replica.test_resume import assert_same_arrays, taken
from tf2dist import registry
from tf2dist.model import packing
from tf2dist.training.asynchronous import step as async_step
from tf2dist.training.asynchronous.step import LOOPED_OPERATIONS

MakeLoop = Callable[..., Any]


@pytest.fixture
def in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models count as deep ones."""
    monkeypatch.setattr(async_step, "LOOPED_OPERATIONS", 0)


@registry.register_model("deep")
def deep(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    layers = keras.layers
    first = [keras.Input(input_shape), layers.Rescaling(1 / 255), layers.Flatten()]
    return keras.Sequential([*first, *(layers.Dense(8, "tanh") for _ in range(60)), layers.Dense(num_classes)])


@pytest.mark.parametrize(
    ("algorithm", "transfer_dtype"),
    [
        ("plain", "float32"),
        ("plain", "bfloat16"),
        ("plain", "int8"),
        ("staleness_aware", "float32"),
        ("delay_compensated", "float32"),
    ],
)
def test_a_loop_gives_the_same_as_unrolled_steps(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, algorithm: str, transfer_dtype: str
) -> None:
    """Two trainings, of which the first ends within a call and before the end of a pass over the data."""
    monkeypatch.setattr(packing, "LARGE_BYTES", 1000)
    optimizer = "sgd" if algorithm == "delay_compensated" else "adam"
    ends = []
    for operations in (LOOPED_OPERATIONS, 0):
        monkeypatch.setattr(async_step, "LOOPED_OPERATIONS", operations)
        config = run_config("dnn", optimizer, hidden_units=[32])
        config.algorithm.kind, config.cluster.transfer_dtype = algorithm, transfer_dtype
        loop = async_loop(config, num_workers=1, num_ps=2)
        assert loop._graphs.in_loop == (operations == 0)
        for until_step in (25, 60):
            loop.train(until_step)
            assert_exact(loop, until_step)
        ends.append((taken(loop), loop.evaluate("validation")))
    (one, evaluated), (other, as_well) = ends
    assert evaluated == as_well
    assert_same_arrays(one, other, ("",))


@pytest.mark.usefixtures("in_loops")
def test_workers_take_steps_in_loops_beside_each_other(async_loop: MakeLoop) -> None:
    loop = async_loop(run_config())
    for until_step in (95, 96, 300):
        loop.train(until_step)
        assert_exact(loop, until_step)
    assert min(loop.progress.local_steps) > 0


@pytest.mark.usefixtures("in_loops")
@pytest.mark.parametrize("loop_secs", [0.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_longer_calls_need_another_function_only_where_a_loop_is_slow(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, loop_secs: float
) -> None:
    monkeypatch.setattr("tf2dist.training.asynchronous.scheduler.LOOP_SECS", loop_secs)
    config = run_config(steps_per_execution=None)
    make_long_calls_pay(monkeypatch, config)
    loop = async_loop(config)
    first = loop._scheduler.calls
    assert first.num_steps == 1
    # On a slow machine the first of these trainings ends before a worker has executed a longer call.
    for steps in (1500, 1501, 1600, 1700, 1800):
        loop.train(steps)
        assert_exact(loop, steps)
    assert loop._scheduler.num_steps > 1
    assert (loop._scheduler.calls.function is first.function) == (loop_secs == 0.0)


@pytest.mark.usefixtures("in_loops")
def test_calls_in_loops_become_shorter_near_the_end(async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = async_loop(run_config(steps_per_execution=20), num_workers=3)
    scheduled, schedule = [], loop._scheduler._schedule

    def noted(calls: Any) -> Any:
        scheduled.append(calls.num_steps)
        return schedule(calls)

    monkeypatch.setattr(loop._scheduler, "_schedule", noted)
    loop.train(100)
    assert_exact(loop, 100)
    # A third of what is left. One more may follow while an update was admitted and is not yet applied.
    assert scheduled[:11] == [20, 20, 20, 14, 9, 6, 4, 3, 2, 1, 1]
    assert sum(scheduled[11:]) <= 3


def test_models_are_deep_by_their_number_of_operations(async_loop: MakeLoop) -> None:
    assert not async_loop(run_config("cnn"), num_workers=1)._graphs.in_loop
    assert async_loop(run_config("deep"), num_workers=1)._graphs.in_loop


@pytest.mark.parametrize("algorithm", ["bounded", "downpour"])
def test_algorithms_whose_steps_differ_are_unrolled(async_loop: MakeLoop, algorithm: str) -> None:
    config = run_config("deep")
    config.algorithm.kind = algorithm
    assert not async_loop(config, num_workers=1)._graphs.in_loop


@pytest.mark.usefixtures("in_loops")
def test_the_next_batch_waits_for_no_step(async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_step, "ACCELERATOR", "CPU:1")  # stands for a GPU; each worker has such a device
    loop = async_loop(run_config())
    body = body_of(loop._scheduler.calls.function)
    nodes = {node.name: node for node in body.node_def}
    (step,) = (node for node in nodes.values() if node.op == "PartitionedCall" and "/job:ps" not in node.device)
    assert step.device == "/device:CPU:1"
    batches = [node.name for node in nodes.values() if node.op == "If"]
    assert batches, "the next batch"
    assert not reached_from(step.name, nodes) & set(batches)
    loop.train(95)
    assert_exact(loop, 95)


@pytest.mark.usefixtures("in_loops")
def test_a_step_sends_each_ps_and_gets_from_it_as_few_tensors_as_can_be(
    async_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each edge between two tasks is a message in every step, also one that only tells that something has ended."""
    monkeypatch.setattr(packing, "LARGE_BYTES", 1000)
    loop = async_loop(run_config("dnn", hidden_units=[32]), num_workers=1, num_ps=1)
    body = body_of(loop._scheduler.calls.function)
    on_ps = {node.name for node in body.node_def if "/job:ps" in node.device}
    to_ps = {one for node in body.node_def if node.name in on_ps for one in node.input if source(one) not in on_ps}
    from_ps = {one for node in body.node_def if node.name not in on_ps for one in node.input if source(one) in on_ps}
    # The resources of a ps, which are arguments of the body, are on the ps already.
    resources = {one.name for one in body.signature.input_arg if one.type == tf.resource.as_datatype_enum}
    num_buckets = len(loop._graphs.servers[0].push_specs)
    assert len(to_ps - resources) == num_buckets + 1
    assert len(from_ps) == num_buckets
    assert not {source(one) for one in body.control_ret.values()} & on_ps


def body_of(function: Any) -> Any:
    """The body of the loop in a traced function."""
    library = {each.signature.name: each for each in function.graph.as_graph_def().library.function}
    (loop,) = (node for node in function.graph.as_graph_def().node if node.op in ("While", "StatelessWhile"))
    return library[loop.attr["body"].func.name]


def reached_from(name: str, nodes: Any) -> set[str]:
    """The names of the nodes that wait for this one."""
    found = {name}
    while more := {each for each, node in nodes.items() if {source(one) for one in node.input} & found} - found:
        found |= more
    return found


def source(name: str) -> str:
    """The name of the node of an input."""
    return name.lstrip("^").partition(":")[0]
