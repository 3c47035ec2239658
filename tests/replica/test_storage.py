"""Variables of a ps that lie in vectors: updated as alone, wherever they lie, and read and assigned as before."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import run_config, server_of
from tf2dist.checkpoint.state import Named, assign, named_variables, values
from tf2dist.model import builtin
from tf2dist.model.packing import LARGE_BYTES, is_large
from tf2dist.model.shards import joined, parts_of
from tf2dist.training.parameter_server.counters import ONES
from tf2dist.training.parameter_server.server import ParameterServer
from tf2dist.training.parameter_server.storage import PackedStorage, Storage, allocate_storage
from tf2dist.training.parameter_server.wire import PackedCount

SHAPES = {"a": (3, 5), "b": (7,), "large": (LARGE_BYTES // 4,), "c": (), "d": (33, 2), "e": (1,)}
KERNELS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd"},
    "momentum": {"name": "momentum", "nesterov": True},
    "adam": {"name": "adam"},
    "adamw": {"name": "adamw"},  # decays all weights
    "rmsprop": {"name": "rmsprop", "momentum": 0.5},
    "clipped": {"name": "adam", "clipvalue": 0.5},
}


def model_of(names: str = "abcde") -> tuple[keras.Model, list[keras.Variable]]:
    """A model whose variables have other values each time only if their names are others."""
    model = keras.Sequential(name="model")
    made = {}
    for name in [*names, "large"]:
        layer = keras.layers.Layer(name=name)
        random = np.random.default_rng(len(name) + ord(name[0])).normal(size=SHAPES[name]).astype(np.float32)
        made[name] = layer.add_weight(
            shape=SHAPES[name], initializer=lambda *_, value=random, **__: tf.constant(value), name="w"
        )
        model.add(layer)
    return model, list(made.values())


def server_with(variables: list[keras.Variable], arguments: dict[str, Any]) -> ParameterServer:
    make = functools.partial(builtin.build_optimizer, {"learning_rate": 0.01, **arguments}, 3)
    server: ParameterServer = server_of(run_config(), variables, make)
    return server


def gradients(variables: list[keras.Variable], step: int) -> list[tf.Tensor]:
    """Other ones for each step, the same for variables of the same shape."""
    return [
        tf.constant(np.random.default_rng((step, v.shape.num_elements())).normal(size=v.shape).astype(np.float32))
        for v in variables
    ]


def push(server: ParameterServer, step: int, changes: list[Any] | None = None) -> None:
    layout, applied = server.push_layout({}), PackedCount.of(tf.constant(float(step), tf.float64))
    sums = tf.zeros([server.counters.added - len(ONES)])
    indices = server.counters.indices(tf.constant(0, tf.int64))
    buckets = layout.pack(changes or gradients(server.trainable, step), applied, sums)
    before = server.counters.now().applied
    assert server.push(buckets, indices, tf.constant(100, tf.int64))[-1] == before + 1


def trained(names: str, arguments: dict[str, Any]) -> Named:
    """The model and the slots after three updates."""
    model, variables = model_of(names)
    server = server_with(variables, arguments)
    server.trace_functions({})
    assert [isinstance(storage, PackedStorage) for storage in server.stored] == [True, False]
    for step in range(3):
        push(server, step)
    return named_variables(model, variables, [server.optimizer])


@pytest.mark.parametrize("kernel", KERNELS)
def test_members_are_updated_as_keras_updates_them(kernel: str) -> None:
    found = values(trained("abcde", KERNELS[kernel]))
    model, variables = model_of()
    optimizer = builtin.build_optimizer({"learning_rate": 0.01, **KERNELS[kernel]}, 3)
    for step in range(3):
        optimizer.apply(gradients(variables, step), variables)
    wanted = values(named_variables(model, variables, [optimizer]))
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_update_is_the_same_wherever_a_variable_lies(kernel: str) -> None:
    """To the last bit, although a kernel computes what is left at the end of an array in another way."""
    together, others = (values(trained(names, KERNELS[kernel])) for names in ("abcde", "ebd"))
    for name, array in others.items():
        np.testing.assert_array_equal(together[name], array, err_msg=name)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["d", "large"])
def test_an_update_of_a_variable_that_is_cut_is_that_of_the_whole(kernel: str, name: str) -> None:
    """To the last bit, and the whole is read and assigned as before."""
    shape = (33, 2) if name == "d" else (131_099, 2)  # small and large, with a length that no packet divides
    rows = 16
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    whole, cut_one = keras.Variable(value), joined([keras.Variable(value[:rows]), keras.Variable(value[rows:])])
    for variables in ([whole], parts_of(cut_one)):
        server = server_with(variables, KERNELS[kernel])
        server.trace_functions({})
        assert isinstance(server.stored[0], PackedStorage) == (name == "d")
        for step in range(3):
            gradient = np.random.default_rng(step).normal(size=shape).astype(np.float32)
            push(server, step, [gradient] if len(variables) == 1 else [gradient[:rows], gradient[rows:]])
    np.testing.assert_array_equal(cut_one.numpy(), whole.numpy())
    cut_one.assign(value)
    np.testing.assert_array_equal(np.concatenate([part.numpy() for part in parts_of(cut_one)]), value)


def test_the_learning_rate_of_vectors_can_be_changed() -> None:
    """As a callback does; it reads and sets the rate of the optimizer that it knows."""
    _, variables = model_of()
    make = functools.partial(builtin.build_optimizer, {"name": "sgd", "learning_rate": 0.5}, 3)
    server = server_of(run_config(), variables, make)
    server.trace_functions({})
    server.optimizer.learning_rate = 0.25
    before, gradient = variables[1].numpy(), gradients(variables, 0)[1]
    push(server, 0)
    np.testing.assert_allclose(variables[1].numpy(), before - 0.25 * gradient.numpy(), rtol=1e-6)


def test_members_are_read_and_assigned_as_any_variable() -> None:
    named = trained("abcde", KERNELS["adam"])
    wanted = {name: array + 1 for name, array in values(named).items()}
    assign(named, wanted)
    for name, array in values(named).items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    (first,) = named["model/a/w"]
    assert (first.shape, first.dtype, first.value.shape) == ((3, 5), "float32", (3, 5))
    np.testing.assert_array_equal(first * 2.0, wanted["model/a/w"] * 2)


def layout(storages: list[Storage]) -> list[list[str]]:
    return [[variable.path for variable in storage.members] for storage in storages]


def variable(name: str, size: int = 3, dtype: str = "float32") -> keras.Variable:
    return keras.Variable(np.zeros(size), dtype=dtype, name=name)


def test_only_neighbours_that_are_updated_alike_share_a_vector() -> None:
    one, two, whole, three, large = [
        *(variable("one"), variable("two"), variable("whole", dtype="int32"), variable("three")),
        variable("large", LARGE_BYTES // 4),
    ]
    mean, count = variable("mean"), variable("count")
    kinds = {id(one): 0, id(two): 0, id(large): 0, id(three): 0, id(whole): 0, id(mean): 1}
    storages = allocate_storage([one, large, two, whole, three, mean, count], kinds)
    assert layout(storages) == [["one", "two"], ["whole"], ["three"], ["mean"], ["count"], ["large"]]
    assert [isinstance(storage, PackedStorage) for storage in storages] == [True, False, True, True, False, False]


def test_a_vector_is_small_itself() -> None:
    third = LARGE_BYTES // 12 + 1
    made = [variable(str(number), third) for number in range(4)]
    made.append(variable("almost large", LARGE_BYTES // 4 - 1))
    storages = allocate_storage(made, {id(one): 0 for one in made})
    assert layout(storages) == [["0", "1"], ["2", "3"], ["almost large"]]
    assert not any(map(is_large, storages))


@pytest.mark.parametrize("arguments", [{"name": "adam", "clipnorm": 0.1}, {"name": "adagrad"}])
def test_where_vectors_would_differ_variables_lie_alone(arguments: dict[str, Any]) -> None:
    """The norm would be another one; without a kernel of TensorFlow for the update, nobody knows what it looks at."""
    _, variables = model_of()
    server = server_with(variables, arguments)
    server.trace_functions({})
    assert not any(isinstance(storage, PackedStorage) for storage in server.stored)


def test_a_variable_that_is_not_decayed_makes_all_lie_alone() -> None:
    _, variables = model_of()

    def make() -> keras.Optimizer:
        optimizer = keras.optimizers.AdamW()
        optimizer.exclude_from_weight_decay(variables[:1])
        return optimizer

    server = server_of(run_config(), variables, make)
    server.trace_functions({})
    assert not any(isinstance(storage, PackedStorage) for storage in server.stored)


def test_a_run_names_few_variables_in_its_calls(async_loop: Callable[..., Any]) -> None:
    """Each one is sent with every call; a model of ten small variables has one vector on each ps."""
    loop = async_loop(run_config("dnn", hidden_units=[20, 20, 20, 20]), num_ps=2)
    loop.train(4)
    assert [len(server.stored) for server in loop._graphs.servers] == [1, 1]
    handles = [one for one in loop._scheduler.function.graph.inputs if one.dtype == tf.resource]
    # Of the vector, the learning rate and three counters on each ps; of what hands out the batches on the first.
    assert len(handles) == 5 * 2 + 3
