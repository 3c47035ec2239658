"""A small trial for each private name on which the most depends, by which the doctor finds those that have changed."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tf2dist.errors import DataError, InstallationError
from tf2dist.tf_internals import error_texts
from tf2dist.tf_internals.keras import (
    build_metrics,
    count_updates_in,
    counter_of,
    loss_tracker_of,
    momentums,
    place_of,
    seeds_of,
    trained_variables,
    velocities,
)
from tf2dist.tf_internals.tensorflow import (
    CONTEXT,
    CUSTOM_GRADIENT,
    REPLACED,
    keep_threads_from_spinning,
    limit_gpu_memory,
    missing_api,
    module_of,
    optimize_graphs_for_cpus,
    publish_functions,
    replace_custom_gradients,
    use_coordination_service,
)


def missing(probes: Mapping[tuple[Any, str], Callable[[], bool]] | None = None) -> list[str]:
    """Tries each probe, by default those of this file; a line for each that does not work as expected.

    Creates variables and graphs, which initializes the devices: best called in a process of its own.
    """
    missing = []
    for (package, name), works in (PROBES if probes is None else probes).items():
        try:
            if not works():
                missing.append(str(missing_api(package, name)))
        except Exception as error:  # a change in a library may show as an error of any type, from inside of it
            missing.append(str(error if isinstance(error, InstallationError) else missing_api(package, name)))
    # Several probes may fail for the same reason, such as a module that has moved.
    return list(dict.fromkeys(missing))


def with_context(context: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function with another context than that of this process, which takes no change once it is initialized."""
    with mock.patch.object(module_of(CONTEXT), "context", return_value=context):
        return function(*args)


def _context_is_configured() -> bool:
    context = module_of(CONTEXT).Context()
    with_context(context, keep_threads_from_spinning)
    with_context(context, optimize_graphs_for_cpus)
    rewriting = context.config.graph_options.rewrite_options
    settings = rewriting.meta_optimizer_iterations, rewriting.layout_optimizer, rewriting.memory_optimization
    is_short = settings == (rewriting.ONE, rewriting.OFF, rewriting.NO_MEM_OPT)
    with_context(context, limit_gpu_memory, 0.25)
    is_limited = context.config.gpu_options.per_process_gpu_memory_fraction == 0.25
    return bool(context.config.experimental.disable_thread_spinning and is_short and is_limited)


def _service_is_set() -> bool:
    context = module_of(CONTEXT).Context()
    with_context(context, use_coordination_service, "/job:worker/replica:0/task:0", {"worker": 1}, 1.0, 1.0)
    return bool(context.coordination_service.cluster_register_with_barrier)


def _custom_gradients_are_replaced() -> bool:
    module, replacement = module_of(CUSTOM_GRADIENT), mock.Mock(return_value=None)
    with mock.patch.object(module, REPLACED, getattr(module, REPLACED)), tf.Graph().as_default():
        replace_custom_gradients(replacement)
        tf.custom_gradient(lambda x: (x, lambda upstream: upstream))(1.0)
    return bool(replacement.called)


def _published_is_called() -> bool:
    def one() -> np.ndarray:
        return np.ones([], np.int32)

    publish_functions({"tf2dist.one": one})
    return bool(tf.raw_ops.PyFunc(input=[], token="tf2dist.one", Tout=[tf.int32])[0] == 1)


def built(kind: Callable[..., keras.Optimizer], **arguments: Any) -> keras.Optimizer:
    optimizer = kind(learning_rate=0.5, **arguments)
    optimizer.build([keras.Variable([1.0, 2.0])])
    return optimizer


def _slots_are_found() -> bool:
    adam, rmsprop = built(keras.optimizers.Adam), built(keras.optimizers.RMSprop, momentum=0.5)
    slot_lists = [slots(optimizer) for optimizer in (adam, rmsprop) for slots in (momentums, velocities)]
    (variable,) = trained_variables(adam)
    return place_of(adam, variable) == 0 and [len(slots) for slots in slot_lists] == [1] * 4


def _updates_are_counted() -> bool:
    optimizer, counter = built(keras.optimizers.Adam), keras.Variable(7, dtype="int64")
    count_updates_in(optimizer, counter)
    return optimizer.iterations is counter_of(optimizer) is counter


def _seeds_are_found() -> bool:
    model = keras.Sequential([keras.Input([1]), keras.Sequential([keras.layers.Dropout(0.5)])])
    return [id(seed) for seed in seeds_of(model)] == [id(variable) for variable in model.variables]


def compiled() -> keras.Model:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse", metrics=["mae"])
    build_metrics(model, (keras.KerasTensor((None, 1)), keras.KerasTensor((None, 1)), None))
    return model


def _metrics_are_built() -> bool:
    model = compiled()
    # Two metrics, the loss and mae, each with a sum and a count.
    return loss_tracker_of(model) in model.metrics and len(model.metrics_variables) == 4


def text_of(call: Callable[[], Any]) -> str:
    """The text of the error that a call raises; empty if it raises none."""
    try:
        call()
    except Exception as error:  # which type it has belongs to what is tried
        return error_texts.whole_text(error)
    return ""


def _data_error_is_told() -> bool:
    def fail() -> None:
        raise DataError("data (load): is empty")

    call = tf.function(lambda: tf.numpy_function(fail, [], tf.int32), autograph=False)
    return error_texts.data_error(text_of(call)) == "data (load): is empty"


PROBES: dict[tuple[Any, str], Callable[[], bool]] = {
    (tf, "Context._config"): _context_is_configured,
    (tf, "Context.coordination_service"): _service_is_set,
    (tf, REPLACED): _custom_gradients_are_replaced,
    (tf, "FuncRegistry._funcs"): _published_is_called,
    (keras, "Optimizer._get_variable_index"): _slots_are_found,
    (keras, "Optimizer._iterations"): _updates_are_counted,
    (keras, "Layer._seed_generators"): _seeds_are_found,
    (keras, "Trainer._symbolic_build"): _metrics_are_built,
    (tf, "error 'DataError: ...' of a Python function in a graph"): _data_error_is_told,
}
