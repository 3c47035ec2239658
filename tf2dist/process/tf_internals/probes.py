"""One small trial for each private name, by which the doctor finds those that have moved."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.errors import InstallationError
from tf2dist.process.tf_internals.lacks import attribute, lack, module_of
from tf2dist.process.tf_internals.of_keras import (
    NAME_COUNTS,
    build_metrics,
    count_updates_in,
    fix_learning_rate,
    follow_learning_rate,
    fresh_names,
    loss_tracker_of,
    losses_of,
    mask_of,
    momentums,
    place_of,
    scale_learning_rate,
    seeds_of,
    trained_variables,
    undecayed,
    velocities,
)
from tf2dist.process.tf_internals.of_tensorflow import (
    CONTEXT,
    NO_INLINE,
    as_one_node,
    keep_threads_from_spinning,
    limit_gpu_memory,
    optimize_graphs_for_cpus,
    publish_functions,
    this_context,
    use_coordination_service,
)
from tf2dist.process.tf_internals.stand_ins import PartitionedVariable, let_lie_in


def missing() -> list[str]:
    """What the installed TensorFlow and Keras lack of all this, a line each.

    Creates variables and graphs, which initializes the devices: best called in a process of its own.
    """
    found = []
    for (package, name), works in PROBES.items():
        try:
            if not works():
                found.append(str(lack(package, name)))
        except Exception as error:  # a change in a library may show as an error of any type, from inside of it
            found.append(str(error if isinstance(error, InstallationError) else lack(package, name)))
    # Several probes may fail for the same reason, such as a module that has moved.
    return list(dict.fromkeys(found))


def _context_is_configured() -> bool:
    # A context of its own, here and below: that of the process may be initialized, and takes no change then.
    context = module_of(CONTEXT).Context()
    keep_threads_from_spinning(context)
    optimize_graphs_for_cpus(context)
    rewriting = context.config.graph_options.rewrite_options
    found = rewriting.meta_optimizer_iterations, rewriting.layout_optimizer, rewriting.memory_optimization
    is_short = found == (rewriting.ONE, rewriting.OFF, rewriting.NO_MEM_OPT)
    limit_gpu_memory(0.25, context)
    is_limited = context.config.gpu_options.per_process_gpu_memory_fraction == 0.25
    return bool(context.config.experimental.disable_thread_spinning and is_short and is_limited)


def _service_is_set() -> bool:
    context = module_of(CONTEXT).Context()
    use_coordination_service("/job:worker/replica:0/task:0", {"worker": 1}, 1.0, 1.0, context)
    return bool(context.coordination_service.cluster_register_with_barrier)


def _service_is_there() -> bool:
    # It cannot be called here, since no coordination service runs in this process.
    names = "wait_at_barrier", "set_config_key_value", "get_config_key_value"
    return all(attribute(tf, this_context(), name, Callable) for name in names)


def _one_node_is_kept() -> bool:
    traced = as_one_node(lambda: tf.constant(0)).get_concrete_function()
    return bool(traced.function_def.attr[NO_INLINE].b)


def _published_is_called() -> bool:
    def one() -> np.ndarray:
        return np.ones([], np.int32)

    publish_functions({"tf2dist.one": one})
    return bool(tf.raw_ops.PyFunc(input=[], token="tf2dist.one", Tout=[tf.int32])[0] == 1)


# The optimizers create their slots when they are built, and not before.
def _built(kind: Callable[..., keras.Optimizer], **arguments: Any) -> keras.Optimizer:
    optimizer = kind(learning_rate=0.5, **arguments)
    optimizer.build([keras.Variable([1.0, 2.0])])
    return optimizer


def _slots_are_found() -> bool:
    adam, rmsprop = _built(keras.optimizers.Adam), _built(keras.optimizers.RMSprop, momentum=0.5)
    found = [slots(optimizer) for optimizer in (adam, rmsprop) for slots in (momentums, velocities)]
    (variable,) = trained_variables(adam)
    return place_of(adam, variable) == 0 and [len(slots) for slots in found] == [1] * 4


def _updates_are_counted() -> bool:
    optimizer, counter = _built(keras.optimizers.Adam), keras.Variable(7, dtype="int64")
    count_updates_in(optimizer, counter)
    return optimizer.iterations is counter


def _rate_is_fixed() -> bool:
    optimizer = _built(keras.optimizers.SGD)
    fix_learning_rate(optimizer)
    return isinstance(optimizer.learning_rate, float)


def _rate_is_scaled() -> bool:
    optimizer, weight = keras.optimizers.SGD(0.5), keras.Variable(0.0)
    optimizer.build([weight])
    scale_learning_rate(optimizer, lambda: 0.5)
    optimizer.apply([tf.constant(-1.0)], [weight])
    return float(weight.numpy()) == 0.25


def _excluded_are_found() -> bool:
    optimizer, variables = keras.optimizers.SGD(weight_decay=0.1), [keras.Variable([1.0]), keras.Variable([1.0])]
    optimizer.exclude_from_weight_decay(variables[1:])
    return undecayed(optimizer, variables) == [1]


def _parts_are_taken() -> bool:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope() as strategy:
        value = PartitionedVariable([tf.Variable([1.0]), tf.Variable([2.0])])
        with tf.variable_creator_scope(lambda *_, **__: value):
            variable = keras.Variable("zeros", shape=[2])
        # An optimizer places the slots of a variable beside it, and knows those that it leaves out.
        with strategy.extended.colocate_vars_with(value):
            optimizer = keras.optimizers.SGD(weight_decay=0.1)
    optimizer.exclude_from_weight_decay([variable])
    return variable.value is value and undecayed(optimizer, [variable]) == [0]


def _views_are_taken() -> bool:
    variable, vector = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0, 0.0])
    let_lie_in(vector, [variable])
    variable.assign([3.0, 4.0])
    return [*vector.numpy(), *(variable + 1.0).numpy()] == [3.0, 4.0, 0.0, 4.0, 5.0]


def _rate_is_followed() -> bool:
    optimizer, leader, weight = keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.25), keras.Variable(0.0)
    optimizer.build([weight])
    follow_learning_rate(optimizer, leader)
    optimizer.apply([tf.constant(-1.0)], [weight])
    return float(weight.numpy()) == 0.25


def _seeds_are_found() -> bool:
    model = keras.Sequential([keras.Input([1]), keras.Sequential([keras.layers.Dropout(0.5)])])
    return [id(seed) for seed in seeds_of(model)] == [id(variable) for variable in model.variables]


def _compiled() -> keras.Model:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse", metrics=["mae"])
    build_metrics(model, (keras.KerasTensor((None, 1)), keras.KerasTensor((None, 1)), None))
    return model


def _metrics_are_built() -> bool:
    model = _compiled()
    # Two metrics, the loss and mae, each with a sum and a count.
    return loss_tracker_of(model) in model.metrics and len(model.metrics_variables) == 4


def _losses_are_found() -> bool:
    return [loss.reduction for loss in losses_of(_compiled())] == ["sum_over_batch_size"]


def _masks_are_found() -> bool:
    masked = keras.layers.Masking()(tf.zeros([1, 2, 3]))
    return mask_of(masked) is not None


def _names_begin_again() -> bool:
    # Takes the name "dense", or a later one, from the counts outside of the block.
    keras.layers.Dense(1)
    with fresh_names():
        return bool(keras.layers.Dense(1).name == "dense")


# By the package and the private name that the probe stands for, which is what the user reads if it fails.
PROBES: dict[tuple[Any, str], Callable[[], bool]] = {
    (tf, "Context._config"): _context_is_configured,
    (tf, "Context.coordination_service"): _service_is_set,
    (tf, "Context.wait_at_barrier"): _service_is_there,
    (tf, NO_INLINE): _one_node_is_kept,
    (tf, "FuncRegistry._funcs"): _published_is_called,
    (keras, "Optimizer._get_variable_index"): _slots_are_found,
    (keras, "Optimizer._iterations"): _updates_are_counted,
    (keras, "Optimizer._learning_rate"): _rate_is_fixed,
    (keras, "Optimizer._get_current_learning_rate"): _rate_is_scaled,
    (keras, "Optimizer._get_current_learning_rate of another"): _rate_is_followed,
    (keras, "Optimizer._use_weight_decay"): _excluded_are_found,
    (keras, "Variable._initialize"): _parts_are_taken,
    (keras, "Variable._value"): _views_are_taken,
    (keras, "Layer._seed_generators"): _seeds_are_found,
    (keras, "Trainer._symbolic_build"): _metrics_are_built,
    (keras, "CompileLoss._flat_losses"): _losses_are_found,
    (keras, "_keras_mask"): _masks_are_found,
    (keras, NAME_COUNTS): _names_begin_again,
}
