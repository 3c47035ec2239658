"""Each private name does on the installed TensorFlow and Keras what it is used for; where it has moved, it is named."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import attributes
from tensorflow.python.ops import script_ops

from tf2dist.errors import InstallationError
from tf2dist.process import tf_internals

SERVICE = ("/job:worker/replica:0/task:0", {"worker": 1}, 1.0, 1.0)


# Keras' own base of its base of all optimizers.
BASE = next(kind for kind in keras.optimizers.Optimizer.__mro__ if "_get_variable_index" in vars(kind))


TRAINER = next(kind for kind in keras.Model.__mro__ if "_symbolic_build" in vars(kind))


def built(kind: Callable[..., keras.Optimizer] = keras.optimizers.Adam) -> keras.Optimizer:
    optimizer = kind(learning_rate=0.5)
    optimizer.build([keras.Variable([1.0, 2.0])])
    return optimizer


def random_model() -> keras.Model:
    inner = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    return keras.Sequential([keras.Input([3]), inner, keras.layers.GaussianNoise(0.1)])


def compiled() -> keras.Model:
    """With two outputs and their losses, and metrics."""
    inputs = keras.Input([3])
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(2)(inputs)])
    model.compile("sgd", ["mse", keras.losses.MeanSquaredError(reduction="sum")], metrics=[["mae"], []])
    return model


BATCH = tuple(keras.KerasTensor((None, size)) for size in (3, 1, 2))


def with_metrics() -> keras.Model:
    model = compiled()
    tf_internals.build_metrics(model, (BATCH[0], list(BATCH[1:]), None))
    return model


one_model = functools.cache(random_model)


def test_nothing_is_missing() -> None:
    assert tf_internals.missing() == []


class Lack(NamedTuple):
    """What breaks when a private name moves.

    Attributes:
        breaks: for the user of this project.
        owner: makes what has the name.
        name: the private one.
        use: our function, given the owner.
    """

    breaks: str
    owner: Callable[[], Any]
    name: str
    use: Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.name}: {self.breaks}"


LACKS = [
    Lack(
        "idle tasks would take the cores of those that work",
        context.Context,
        "_config",
        tf_internals.keep_threads_from_spinning,
    ),
    Lack(
        "the first worker would wait an hour for the others",
        lambda: context.Context,
        "configure_coordination_service",
        lambda _: tf_internals.use_coordination_service(*SERVICE, context.Context()),
    ),
    Lack(
        "the first worker would wait an hour for the others",
        lambda: context.Context,
        "coordination_service",
        lambda _: tf_internals.use_coordination_service(*SERVICE, context.Context()),
    ),
    Lack(
        "a worker that is done would leave the others in the middle of a step",
        lambda: context.Context,
        "wait_at_barrier",
        lambda _: tf_internals.wait_at_barrier("end", 1.0),
    ),
    Lack(
        "workers could not read their own examples",
        lambda: script_ops,
        "_py_funcs",
        lambda _: tf_internals.publish_functions({}),
    ),
    Lack(
        "workers could not read their own examples",
        lambda: script_ops._py_funcs,
        "_funcs",
        lambda _: tf_internals.publish_functions({}),
    ),
    Lack(
        "a checkpoint could not name the optimizer's variables",
        built,
        "_trainable_variables",
        tf_internals.trained_variables,
    ),
    Lack("Adam's updates would mix on a ps", built, "_momentums", tf_internals.momentums),
    Lack("Adam's updates would mix on a ps", built, "_velocities", tf_internals.velocities),
    Lack(
        "a kernel would not know the slots of a weight",
        lambda: BASE,
        "_get_variable_index",
        lambda _: tf_internals.place_of(built(), None),
    ),
    Lack(
        "Adam's bias correction would follow a wrong number of updates",
        built,
        "_iterations",
        lambda optimizer: tf_internals.count_updates_in(optimizer, keras.Variable(0)),
    ),
    Lack("the reported learning rate would be wrong", built, "_learning_rate", tf_internals.learning_rate_of),
    Lack("each update would read the learning rate", built, "_learning_rate", tf_internals.fix_learning_rate),
    Lack(
        "synchronized layers would not be seen",
        lambda: (one_model(), keras.Layer)[1],
        "_flatten_layers",
        lambda _: tf_internals.layers_of(one_model()),
    ),
    Lack(
        "dropout would drop the same units on every worker, or fail",
        random_model,
        "_seed_generators",
        tf_internals.seeds_of,
    ),
    Lack(
        "the metrics would have no variables to add up",
        lambda: TRAINER,
        "_symbolic_build",
        lambda _: tf_internals.build_metrics(compiled(), (BATCH[0], list(BATCH[1:]), None)),
    ),
    Lack("the loss would not be averaged", with_metrics, "_loss_tracker", tf_internals.loss_tracker_of),
    Lack("losses that workers cannot share would pass", with_metrics, "_compile_loss", tf_internals.losses_of),
    Lack("losses of outputs would be averaged wrongly", with_metrics, "_compile_loss", tf_internals.output_trackers_of),
    Lack(
        "losses that workers cannot share would pass",
        lambda: with_metrics()._compile_loss,
        "_flat_losses",
        lambda loss: tf_internals.losses_of(SimpleNamespace(_compile_loss=loss)),
    ),
    Lack(
        "the model of a script would have other names than its tasks'",
        lambda: global_state,
        "get_global_attribute",
        lambda _: tf_internals.fresh_names().__enter__(),
    ),
]


@pytest.mark.parametrize("lack", LACKS, ids=str)
def test_a_name_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch, lack: Lack) -> None:
    owner = lack.owner()
    package = keras if "keras" in str(getattr(owner, "__module__", owner)) else tf
    monkeypatch.delattr(owner, lack.name)
    with pytest.raises(InstallationError) as error:
        lack.use(owner)
    told = str(error.value)
    assert told.startswith(f"{package.__name__} {package.__version__}: has no "), told
    assert f".{lack.name} of the kind that tf2dist uses; install {package.__name__}<" in told
    assert error.value.exit_code == 2


KINDS = [
    (lambda: script_ops._py_funcs, "_funcs", lambda _: tf_internals.publish_functions({})),
    (context.Context, "_config", tf_internals.keep_threads_from_spinning),
    (built, "_momentums", tf_internals.momentums),
    (built, "_iterations", lambda optimizer: tf_internals.count_updates_in(optimizer, keras.Variable(0))),
    (built, "_learning_rate", tf_internals.fix_learning_rate),
    (with_metrics, "_loss_tracker", tf_internals.loss_tracker_of),
    (with_metrics, "_compile_loss", tf_internals.losses_of),
]


@pytest.mark.parametrize(("make", "name", "use"), KINDS, ids=[name for _, name, _ in KINDS])
def test_so_is_one_that_means_something_else(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], name: str, use: Callable[[Any], Any]
) -> None:
    owner = make()
    for other in ({"another": "kind"}, [1, 2]):
        monkeypatch.setattr(owner, name, other)
        with pytest.raises(InstallationError, match=name):
            use(owner)


def test_an_attribute_of_functions_that_is_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow would put the operations of a ps into the graph of the worker one by one: twice the time of a step."""
    known = attributes.POLYMORPHIC_FUNCTION_ALLOWLIST - {"_noinline"}
    monkeypatch.setattr(attributes, "POLYMORPHIC_FUNCTION_ALLOWLIST", known)
    with pytest.raises(InstallationError, match="has no _noinline "):
        tf_internals.as_one_node(lambda: None)


def test_a_service_that_is_a_copy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set in it would be lost, and the first worker would wait an hour for the others."""
    service = context.Context.coordination_service.fget

    def copy_of(self: Any) -> Any:
        copied = type(service(self))()
        copied.CopyFrom(service(self))
        return copied

    monkeypatch.setattr(context.Context, "coordination_service", property(copy_of))
    with pytest.raises(InstallationError, match=r"Context\.coordination_service"):
        tf_internals.use_coordination_service(*SERVICE, context.Context())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (context, "Context"),
        (context.Context, "wait_at_barrier"),
        (script_ops, "_py_funcs"),
        (BASE, "_get_variable_index"),
        (TRAINER, "_symbolic_build"),
    ],
    ids=str,
)
def test_all_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    monkeypatch.delattr(owner, name)
    lines = tf_internals.missing()
    assert lines
    assert any(name in line for line in lines), lines
    assert len(lines) <= 2, "the rest is there"


def operations_run(function: Callable[[], Any]) -> list[str]:
    """The names of the operations that TensorFlow runs for a function, when it has optimized its graph."""
    context.context().enable_run_metadata()
    try:
        function()
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_run_metadata()
    return [node.op for graph in graphs for node in graph.post_optimization_graph.node]


def test_one_node_stays_one() -> None:
    weight = tf.Variable(2.0)

    def several() -> tf.Tensor:
        return tf.sin(tf.exp(weight * 3.0))

    kept, plain = tf_internals.as_one_node(several), tf.function(several, autograph=False)
    calls = [tf.function(lambda function=function: function() + 1.0, autograph=False) for function in (kept, plain)]
    found = ["Mul" in operations_run(call) for call in calls]
    assert found == [False, True]


def test_the_coordination_service_waits_for_all() -> None:
    own = context.Context()
    tf_internals.use_coordination_service("/job:chief/replica:0/task:0", {"chief": 1, "worker": 3}, 2.5, 7.0, own)
    service = own.coordination_service
    assert {job.name: job.num_tasks for job in service.coordinated_job_list} == {"chief": 1, "worker": 3}
    assert (service.cluster_register_timeout_in_ms, service.heartbeat_timeout_in_ms) == (2500, 7000)
    assert service.cluster_register_with_barrier
    assert service.service_leader == "/job:chief/replica:0/task:0"


def test_published_functions_are_called_by_their_names() -> None:
    def twice(value: np.ndarray) -> np.ndarray:
        return 2 * value

    tf_internals.publish_functions({"tf2dist.twice": twice})
    call = tf.function(lambda: tf.raw_ops.PyFunc(input=[3], token="tf2dist.twice", Tout=[tf.int32]), autograph=False)
    assert int(call()[0]) == 6


def test_slots_belong_to_their_variables() -> None:
    variables = [keras.Variable([1.0]), keras.Variable([[2.0, 3.0]])]
    optimizer = keras.optimizers.Adam(0.5)
    optimizer.build(variables)
    assert [id(variable) for variable in tf_internals.trained_variables(optimizer)] == list(map(id, variables))
    optimizer.apply([tf.constant([1.0]), tf.constant([[2.0, 4.0]])], variables)
    place = tf_internals.place_of(optimizer, variables[1])
    np.testing.assert_allclose(tf_internals.momentums(optimizer)[place], [[0.2, 0.4]], rtol=1e-5)
    np.testing.assert_allclose(tf_internals.velocities(optimizer)[place], [[0.004, 0.016]], rtol=1e-5)
    assert tf_internals.momentums(built(keras.optimizers.RMSprop)) == []


def test_an_optimizer_counts_in_the_variable_that_it_is_given() -> None:
    optimizer, counter = keras.optimizers.Adam(0.5), keras.Variable(7, dtype="int64")
    tf_internals.count_updates_in(optimizer, counter)
    optimizer.apply([tf.constant(1.0)], [keras.Variable(0.0)])
    assert int(counter) == int(optimizer.iterations) == 8


def test_a_rate_is_a_number_once_it_is_fixed() -> None:
    optimizer = built(keras.optimizers.SGD)
    tf_internals.fix_learning_rate(optimizer)
    assert tf_internals.learning_rate_of(optimizer) == 0.5
    (weight,) = tf_internals.trained_variables(optimizer)
    optimizer.apply([tf.constant([1.0, 1.0])])
    np.testing.assert_allclose(weight, [0.5, 1.5])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    scheduled = built(lambda learning_rate: keras.optimizers.SGD(schedule))
    tf_internals.fix_learning_rate(scheduled)
    assert tf_internals.learning_rate_of(scheduled) is schedule


def test_layers_and_seeds_are_found_wherever_they_are() -> None:
    model = random_model()
    names = [type(layer).__name__ for layer in tf_internals.layers_of(model)]
    assert {"Dropout", "Dense", "GaussianNoise"} < set(names)
    seeds = tf_internals.seeds_of(model)
    assert len(seeds) == 2
    assert {id(seed) for seed in seeds} == {id(variable) for variable in model.non_trainable_variables}


def test_losses_and_metrics_are_built_without_a_batch() -> None:
    model = compiled()
    tf_internals.build_metrics(model, (BATCH[0], list(BATCH[1:]), None))
    assert [loss.reduction for loss in tf_internals.losses_of(model)] == ["sum_over_batch_size", "sum"]
    tracker, *others = model.metrics_variables[:2], *tf_internals.output_trackers_of(model)
    assert [id(v) for v in tf_internals.loss_tracker_of(model).variables] == list(map(id, tracker))
    assert len(others) == 2
    assert len(model.metrics_variables) == 2 * (1 + 2 + 1), "a sum and a count: the loss, of each output, mae"
    assert not any(v.numpy().any() for v in model.metrics_variables), "a trace changes nothing"
    assert all(np.isfinite(v.numpy()).all() for v in model.variables)


def test_masks_go_with_the_outputs() -> None:
    """Also in a graph, and through layers that keep them."""
    found: list[Any] = []
    layers = keras.Sequential([keras.layers.Embedding(5, 2, mask_zero=True), keras.layers.Dropout(0.5)])
    layers.build([None, 3])

    @tf.function(autograph=False)
    def call(words: tf.Tensor) -> None:
        embedded = layers(words)
        found.extend([tf_internals.mask_of(embedded), tf_internals.mask_of(embedded * 1.0)])

    call(tf.constant([[1, 0, 2]]))
    assert (found[0].dtype, found[0].shape.as_list(), found[1]) == (tf.bool, [1, 3], None)


def test_names_begin_again_and_go_on() -> None:
    before = keras.layers.Dense(1).name
    with tf_internals.fresh_names():
        assert [keras.layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"]
    after = keras.layers.Dense(1).name
    assert int(after.rpartition("_")[2]) == 1 + int(f"0{before.removeprefix('dense').removeprefix('_')}")
