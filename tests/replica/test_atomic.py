"""Updates that reach a ps at the same time: none is lost, and no two are interleaved."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replica.small_runs import run_config, server_of
from tf2dist import registry
from tf2dist.model import builtin
from tf2dist.training.parameter_server.counters import ONES
from tf2dist.training.parameter_server.server import ParameterServer
from tf2dist.training.parameter_server.wire import PackedCount

NUM_PUSHES = 300
KERNELS = ("sgd", "momentum", "adam", "adamw", "rmsprop")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in KERNELS},
    "adamw": {"name": "adamw", "weight_decay": 0.0},  # weight decay would make the update depend on the weight
    "momentum": {"name": "momentum", "momentum": 0.9},
    "nesterov": {"name": "momentum", "momentum": 0.9, "nesterov": True},
    "rmsprop with momentum": {"name": "rmsprop", "momentum": 0.5},
    "adagrad": {"name": "adagrad"},  # this one and those below run under the lock
    "amsgrad": {"name": "adam", "amsgrad": True},
    "nadam": {"name": "nadam"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "averaged": {"name": "adam", "use_ema": True},
    "accumulated": {"name": "adam", "gradient_accumulation_steps": 2},
}
MARKS = {"momentum": [pytest.mark.thorough], "adam": []}
registry.register_optimizer("nadam")(keras.optimizers.Nadam)


@pytest.mark.parametrize(
    "optimizer", [pytest.param(name, marks=MARKS.get(name, [pytest.mark.slow])) for name in OPTIMIZERS]
)
def test_concurrent_pushes_are_all_applied(async_loop: Callable[..., Any], optimizer: str) -> None:
    config = run_config("dnn", steps_per_execution=10, hidden_units=[500])  # large enough that updates overlap
    config.optimizer = {"learning_rate": 0.01, **OPTIMIZERS[optimizer]}
    loop = async_loop(config, num_workers=4)
    reference, weight = builtin.build_optimizer(config.optimizer, NUM_PUSHES), keras.Variable(0.0)
    for _ in range(NUM_PUSHES):
        reference.apply([tf.constant(1.0)], [weight])
    # Adam's bias correction depends on the order of overlapping updates, which is not fixed.
    is_ordered = hasattr(reference, "beta_1")
    np.testing.assert_allclose(push_at_once(loop), float(weight.numpy()), rtol=0.01 if is_ordered else 1e-5)


def push_at_once(loop: Any) -> np.ndarray:
    """Lets all workers push gradients of 1; returns the change of the weights."""
    servers = loop._graphs.servers

    def push(gradient: tf.Tensor) -> None:
        for server in servers:
            indices = server.counters.indices(tf.constant(0, tf.int64))
            server.push(update_of(server, gradient), indices, tf.constant(NUM_PUSHES, tf.int64))

    function = tf.function(push, autograph=False).get_concrete_function(tf.TensorSpec([], tf.float32))
    before = [variable.numpy() for variable in loop.model.trainable_variables]
    for _ in range(NUM_PUSHES):
        loop._coordinator.schedule(function, args=(tf.constant(1.0),))
    loop._coordinator.join()
    after = [variable.numpy() for variable in loop.model.trainable_variables]
    return np.concatenate([(new - old).ravel() for new, old in zip(after, before, strict=True)])


def server_with(weight: keras.Variable, arguments: dict[str, Any]) -> ParameterServer:
    """A ps of one weight, whose optimizer has these arguments."""
    make = functools.partial(builtin.build_optimizer, arguments, 3)
    server: ParameterServer = server_of(run_config(), [weight], make)
    return server


def update_of(server: ParameterServer, gradient: tf.Tensor) -> list[tf.Tensor]:
    """The buckets that a worker pushes: the same gradient for all weights of a ps."""
    layout, never = server.push_layout({}), PackedCount.of(tf.constant(0.0, tf.float64))
    return layout.pack(
        [tf.fill(variable.shape, gradient) for variable in layout.variables],
        never,
        tf.zeros([server.counters.added - len(ONES)]),
    )


def before(name: str, inputs: dict[str, list[str]]) -> set[str]:
    """The nodes of a function that are certain to have run before this one."""
    found: set[str] = set()
    names = [name]
    while names:
        new = set(inputs.get(names.pop(), [])) - found
        found |= new
        names += new
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS | OTHERS)
def test_an_update_is_one_kernel_or_runs_alone(optimizer: str) -> None:
    """Interleaved updates would divide the momentum of one by the velocity of the other; most runs would diverge."""
    arguments = {"learning_rate": 0.01, **(OPTIMIZERS | OTHERS)[optimizer]}
    server = server_with(keras.Variable([1.0, 2.0]), arguments)
    server.trace_functions({})
    signature = (
        server.push_layout({}).specs,
        tf.TensorSpec([server.counters.added, 1], tf.int64),
        tf.TensorSpec([], tf.int64),
    )
    push = tf.function(server._push, autograph=False).get_concrete_function(*signature)
    graph = push.graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    kernels = [node for node in nodes if node.op.startswith("ResourceApply")]
    assert [node.attr["use_locking"].b for node in kernels] == [True] * len(kernels)
    is_locked = any(node.op == "MutexLock" for node in nodes)
    for function in graph.library.function:
        inputs = {node.name: [name.lstrip("^").partition(":")[0] for name in node.input] for node in function.node_def}
        for node in function.node_def:
            if node.op == "ConsumeMutexLock":  # releases the lock
                writes = {other.name for other in function.node_def if other.op.startswith(("Assign", "If"))}
                assert writes, "the function contains no update"
                assert writes <= before(node.name, inputs)
    assert [len(kernels) == 1, is_locked].count(True) == 1


class Halving(keras.optimizers.Optimizer):
    """Halves its learning rate after each update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, learning_rate * gradient)
        self.assign(self._learning_rate, self._learning_rate / 2)


def test_an_optimizer_that_changes_its_rate_keeps_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.OPTIMIZERS, "halving", Halving)
    weight = keras.Variable([0.0])
    arguments = {"name": "halving", "learning_rate": 1.0}
    server = server_with(weight, arguments)
    server.trace_functions({})
    indices = server.counters.indices(tf.constant(0, tf.int64))
    for _ in range(3):
        server.push(update_of(server, tf.constant(-1.0)), indices, tf.constant(3, tf.int64))
    np.testing.assert_allclose(weight, [1 + 0.5 + 0.25])
