"""Each private name behaves as this project needs it in the installed TensorFlow and Keras."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context

from tests.replica.keras_objects import BATCH, built_optimizer, compiled_model, random_model
from tf2dist.tf_internals.keras import (
    build_metrics,
    count_updates_in,
    fresh_names,
    layers_of,
    loss_tracker_of,
    losses_of,
    mask_of,
    momentums,
    output_trackers_of,
    place_of,
    seeds_of,
    trained_variables,
    velocities,
)
from tf2dist.tf_internals.live_tasks import LiveTasks
from tf2dist.tf_internals.probes import with_context
from tf2dist.tf_internals.tensorflow import as_one_node, publish_functions, use_coordination_service


def operations_run(function: Callable[[], Any]) -> list[str]:
    """The types of the operations that TensorFlow runs for a function, after it has optimized the graph."""
    context.context().enable_run_metadata()
    try:
        function()
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_run_metadata()
    return [node.op for graph in graphs for node in graph.post_optimization_graph.node]


def test_a_function_stays_one_node() -> None:
    weight = tf.Variable(2.0)

    def several() -> tf.Tensor:
        return tf.sin(tf.exp(weight * 3.0))

    kept, plain = as_one_node(several), tf.function(several, autograph=False)
    calls = [tf.function(lambda function=function: function() + 1.0, autograph=False) for function in (kept, plain)]
    found = ["Mul" in operations_run(call) for call in calls]
    assert found == [False, True]


def test_the_coordination_service_waits_for_all() -> None:
    own = context.Context()
    arguments = "/job:chief/replica:0/task:0", {"chief": 1, "worker": 3}, 2.5, 7.0
    with_context(own, use_coordination_service, *arguments)
    service = own.coordination_service
    assert {job.name: job.num_tasks for job in service.coordinated_job_list} == {"chief": 1, "worker": 3}
    assert (service.cluster_register_timeout_in_ms, service.heartbeat_timeout_in_ms) == (2500, 7000)
    assert service.cluster_register_with_barrier
    assert service.service_leader == "/job:chief/replica:0/task:0"


def test_published_functions_are_called_by_name() -> None:
    def twice(value: np.ndarray) -> np.ndarray:
        return 2 * value

    publish_functions({"tf2dist.twice": twice})
    call = tf.function(lambda: tf.raw_ops.PyFunc(input=[3], token="tf2dist.twice", Tout=[tf.int32]), autograph=False)
    assert int(call()[0]) == 6


def test_slots_are_found_by_variable() -> None:
    variables = [keras.Variable([1.0]), keras.Variable([[2.0, 3.0]])]
    optimizer = keras.optimizers.Adam(0.5)
    optimizer.build(variables)
    assert [id(variable) for variable in trained_variables(optimizer)] == list(map(id, variables))
    optimizer.apply([tf.constant([1.0]), tf.constant([[2.0, 4.0]])], variables)
    place = place_of(optimizer, variables[1])
    np.testing.assert_allclose(momentums(optimizer)[place], [[0.2, 0.4]], rtol=1e-5)
    np.testing.assert_allclose(velocities(optimizer)[place], [[0.004, 0.016]], rtol=1e-5)
    assert momentums(built_optimizer(keras.optimizers.RMSprop)) == []


def test_an_optimizer_counts_updates_in_the_given_variable() -> None:
    optimizer, counter = keras.optimizers.Adam(0.5), keras.Variable(7, dtype="int64")
    count_updates_in(optimizer, counter)
    optimizer.apply([tf.constant(1.0)], [keras.Variable(0.0)])
    assert int(counter) == int(optimizer.iterations) == 8


def test_nested_layers_and_their_seeds_are_found() -> None:
    model = random_model()
    names = [type(layer).__name__ for layer in layers_of(model)]
    assert {"Dropout", "Dense", "GaussianNoise"} < set(names)
    seeds = seeds_of(model)
    assert len(seeds) == 2
    assert {id(seed) for seed in seeds} == {id(variable) for variable in model.non_trainable_variables}


def test_losses_and_metrics_are_built_without_a_batch() -> None:
    model = compiled_model()
    build_metrics(model, (BATCH[0], list(BATCH[1:]), None))
    assert [loss.reduction for loss in losses_of(model)] == ["sum_over_batch_size", "sum"]
    tracker, *others = model.metrics_variables[:2], *output_trackers_of(model)
    assert [id(v) for v in loss_tracker_of(model).variables] == list(map(id, tracker))
    assert len(others) == 2
    assert len(model.metrics_variables) == 2 * (1 + 2 + 1), (
        "a sum and a count for each: the loss, the loss of each output, mae"
    )
    assert not any(v.numpy().any() for v in model.metrics_variables), "tracing changed a value"
    assert all(np.isfinite(v.numpy()).all() for v in model.variables)


def test_masks_follow_the_outputs() -> None:
    """In a graph too, and through layers that pass masks on."""
    found: list[Any] = []
    layers = keras.Sequential([keras.layers.Embedding(5, 2, mask_zero=True), keras.layers.Dropout(0.5)])
    layers.build([None, 3])

    @tf.function(autograph=False)
    def call(words: tf.Tensor) -> None:
        embedded = layers(words)
        found.extend([mask_of(embedded), mask_of(embedded * 1.0)])

    call(tf.constant([[1, 0, 2]]))
    assert (found[0].dtype, found[0].shape.as_list(), found[1]) == (tf.bool, [1, 3], None)


def test_names_restart_in_the_block_and_continue_after_it() -> None:
    before = keras.layers.Dense(1).name
    with fresh_names():
        assert [keras.layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"]
    after = keras.layers.Dense(1).name
    assert int(after.rpartition("_")[2]) == 1 + int(f"0{before.removeprefix('dense').removeprefix('_')}")


class FakeContext:
    """Keeps the workers of each list that it is given."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []

    def set_server_def(self, server_def: Any) -> None:
        self.lists.append(sorted(server_def.cluster.job[0].tasks))

    update_server_def = set_server_def


def test_a_worker_that_comes_must_listen_for_a_while() -> None:
    """A process that ends may close its connections before its port, and TensorFlow would wait for it without end."""
    there, own = {0}, FakeContext()
    live_tasks = with_context(own, LiveTasks, 3, lambda workers: there.intersection(workers))
    cluster = tf.train.ClusterSpec({"worker": ["a:1", "a:2", "a:3"]}).as_cluster_def()
    with live_tasks.connecting():
        own.set_server_def(tf.train.ServerDef(cluster=cluster))
    handler: Any = cluster_coordinator.WorkerPreemptionHandler(None, None)
    live_tasks.follow(SimpleNamespace(_cluster=SimpleNamespace(failure_handler=handler)))  # type: ignore[arg-type]
    handler.stop()
    there |= {1}
    own.update_server_def(None)
    there -= {1}
    own.update_server_def(None)
    there |= {1, 2}
    own.update_server_def(None)
    assert own.lists == [[0]]
    time.sleep(0.6)  # longer than between two looks
    there -= {0}
    own.update_server_def(None)
    assert own.lists == [[0], [1, 2]], "one that is gone unnoticed is left out"
