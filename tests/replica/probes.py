"""A small trial for each private name and each wording, by which those that have changed are found."""

import importlib.util
import json
import mmap
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tf2dist.config import load
from tf2dist.errors import first_line, reason_of
from tf2dist.tf_constants import (
    AUTOGRAPH_FILE,
    CALL_THREADS,
    CALLS_PYTHON,
    FAIL_FAST,
    GPU_GROWTH,
    IMPORTED_LAST,
    KERAS_DEFAULTS,
    KERAS_HOME,
    KERAS_ON_TENSORFLOW,
    LOG_LEVEL,
    NO_GOOGLE,
    NODES,
    ONEDNN,
    PRIMITIVE_MEMORY,
    PYTHON_FUNCTIONS,
    UNUSED_MODULES,
)
from tf2dist.tf_internals import error_texts
from tf2dist.tf_internals.keras import (
    LOSS,
    NAME_COUNTS,
    SAVING,
    SCALES,
    choose_by_path,
    clip_gradient,
    dataset_of,
    follow_learning_rate,
    fresh_names,
    learning_rate_of,
    leave_losses_unscaled,
    losses_of,
    mask_of,
    name_of,
    new_variable,
    scale_learning_rate,
    seed_of,
    slots_of,
    state_of,
    undecayed,
    with_inner,
)
from tf2dist.tf_internals.live_tasks import COORDINATOR, LiveTasks
from tf2dist.tf_internals.probes import PROBES as CENTRAL
from tf2dist.tf_internals.probes import built, compiled, text_of, with_context
from tf2dist.tf_internals.tensorflow import (
    CONTEXT,
    NO_INLINE,
    as_one_node,
    attribute,
    body_of,
    missing_api,
    module_of,
    outside_strategies,
    this_context,
    watches_variables,
)
from tf2dist.tf_internals.variables import PartitionedVariable, let_lie_in, rows_in_place_of

OF_TENSORFLOW = (LOG_LEVEL, FAIL_FAST, ONEDNN, PRIMITIVE_MEMORY, GPU_GROWTH, CALL_THREADS, NO_GOOGLE)
SETTINGS = "keras.src.backend.config"  # the module of Keras that reads keras.json


def _service_is_there() -> bool:
    # It cannot be called here, since no coordination service runs in this process.
    names = "wait_at_barrier", "set_config_key_value", "get_config_key_value"
    return all(attribute(tf, this_context(), name, Callable) for name in names)


def _one_node_is_kept() -> bool:
    traced = as_one_node(lambda: tf.constant(0)).get_concrete_function()
    return bool(traced.function_def.attr[NO_INLINE].b)


def _functions_are_converted() -> bool:
    def at_least_0(x: tf.Tensor) -> tf.Tensor:
        while x < 0:
            x = x + 1
        return x

    with tf.Graph().as_default():
        return bool(tf.is_tensor(body_of(tf.function(at_least_0))(tf.constant(-1))))


def _workers_are_followed() -> bool:
    context = module_of(CONTEXT).Context()
    handler = attribute(tf, module_of(COORDINATOR), "WorkerPreemptionHandler", type)(None, None)
    live_tasks = with_context(context, LiveTasks, 1, set)
    with live_tasks.connecting():
        pass
    live_tasks.follow(SimpleNamespace(_cluster=SimpleNamespace(failure_handler=handler)))  # type: ignore[arg-type]
    handler.stop()
    return True


def _strategies_are_left() -> bool:
    with tf.Graph().as_default(), tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        with outside_strategies():
            is_left = not tf.distribute.has_strategy()
        return is_left and tf.distribute.has_strategy()


def _slots_are_named() -> bool:
    # These names stand in checkpoints.
    kinds = keras.optimizers.Adam, keras.optimizers.Adagrad, keras.optimizers.RMSprop
    optimizers = built(keras.optimizers.SGD, momentum=0.5), *map(built, kinds)
    slot_names = [attribute_name for optimizer in optimizers for attribute_name in slots_of(optimizer)]
    unnamed = state_of(built(keras.optimizers.Nadam))[-1]
    expected = ["momentums", "_momentums", "_velocities", "_accumulators", "_velocities"]
    return slot_names == expected and len(state_of(optimizers[0])) == 1 and name_of(unnamed) == "variable"


def _new_variables_are_found() -> bool:
    found: list[Any] = []

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        found.append(new_variable(kwargs["initial_value"]))
        return next_creator(**kwargs)

    with tf.variable_creator_scope(create):
        variable = keras.Variable(keras.initializers.RandomUniform(seed=-9), [2, 3])
    drawn = tf.random.stateless_uniform([2, 3], seed_of(found[0].initializer), -0.05, 0.05)
    return np.array_equal(variable.numpy(), drawn)


def _rate_is_found() -> bool:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    return learning_rate_of(keras.optimizers.SGD(schedule)) is schedule


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


def _rows_are_taken() -> bool:
    variable, ids = keras.Variable([[1.0], [2.0], [3.0]]), tf.constant([2, 0])
    optimizer = keras.optimizers.SGD(1.0, clipvalue=2.0)
    optimizer.build([variable])
    with rows_in_place_of([variable], ids):
        gradient = clip_gradient(optimizer, tf.constant([[1.0], [4.0]]) * variable)
        optimizer.update_step(gradient, variable.value, optimizer.learning_rate)
    return bool(np.array_equal(variable, [[-1.0], [2.0], [1.0]]))


def _rate_is_followed() -> bool:
    optimizer, leader, weight = keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.25), keras.Variable(0.0)
    optimizer.build([weight])
    follow_learning_rate(optimizer, leader)
    optimizer.apply([tf.constant(-1.0)], [weight])
    return float(weight.numpy()) == 0.25


def _choices_are_kept() -> bool:
    if not hasattr(keras.optimizers, "MultiOptimizer"):  # before Keras 3.15
        return True
    variables = [keras.Variable([1.0], name="first"), keras.Variable([1.0], name="second")]
    rates = iter([0.5, 0.25])  # a third optimizer is never made
    optimizer = keras.optimizers.MultiOptimizer(lambda _: keras.optimizers.SGD(next(rates)))
    choose_by_path(optimizer, variables, variables)
    other = with_inner(optimizer, [keras.optimizers.SGD(0.125), keras.optimizers.SGD(1.0)])
    for each in (optimizer, other):
        each.build(variables)
        each.apply([tf.constant([1.0])] * 2, variables)
    return [float(variable.numpy()[0]) for variable in variables] == [0.375, -0.25]


def _losses_are_found() -> bool:
    return [loss.reduction for loss in losses_of(compiled())] == ["sum_over_batch_size"]


def _masks_are_found() -> bool:
    masked = keras.layers.Masking()(tf.zeros([1, 2, 3]))
    return mask_of(masked) is not None


def _losses_are_left_unscaled() -> bool:
    module, loss = module_of(LOSS), keras.losses.MeanSquaredError()
    of_four = mock.patch.object(tf.distribute, "get_strategy", return_value=SimpleNamespace(num_replicas_in_sync=4))
    with mock.patch.multiple(module, **{name: getattr(module, name) for name in SCALES}), of_four:
        scaled = float(loss([[2.0]], [[0.0]]))
        leave_losses_unscaled()
        return (scaled, float(loss([[2.0]], [[0.0]]))) == (1.0, 4.0)


def _names_begin_again() -> bool:
    # Takes the name "dense", or a later one, from the counts outside of the block.
    keras.layers.Dense(1)
    with fresh_names():
        return bool(keras.layers.Dense(1).name == "dense")


def _datasets_are_found() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.h5")
        for mode in "wr":
            store = module_of(SAVING).H5IOStore(path, mode=mode)
            if mode == "w":
                store.make("layer")["0"] = np.ones([2, 3])
                store.close()
        dataset = dataset_of(store.get("layer"), "0")
        is_found = dataset.shape == (2, 3) and not isinstance(dataset, np.ndarray) and dataset[1, 2] == 1
        store.close()
        return bool(is_found)


def _late_change_is_told() -> bool:
    tf.constant(0)  # initializes the devices
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    texts = [
        text_of(lambda: tf.config.threading.set_intra_op_parallelism_threads(threads + 1)),
        text_of(lambda: tf.config.set_visible_devices([], "CPU")),
    ]
    return all(map(error_texts.devices_are_in_use, texts))


def _xla_failure_is_told() -> bool:
    compiled = tf.function(tf.strings.as_string, autograph=False, jit_compile=True)
    text = text_of(lambda: compiled(tf.constant(1.0)))
    return error_texts.is_xla_failure(text) and error_texts.xla_reason(text).startswith("AsString (No registered")


def _taken_port_is_told() -> bool:
    with socket.create_server(("localhost", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        return error_texts.port_is_taken(text_of(lambda: tf.distribute.Server({"worker": [address]})))


def _unknown_code_is_told() -> bool:
    unknown = {"class_name": "Mine", "config": {}, "module": "mine", "registered_name": "Mine"}
    text = text_of(lambda: keras.saving.deserialize_keras_object(unknown))
    return error_texts.unknown_code(text) == ("class", "Mine")


def _unsafe_code_is_told() -> bool:
    saved = keras.saving.serialize_keras_object(keras.layers.Lambda(lambda x: x))
    return error_texts.is_unsafe_code(text_of(lambda: keras.saving.deserialize_keras_object(saved)))


def _reasons_are_told() -> bool:
    def fail(x: tf.Tensor) -> None:
        raise ValueError("too small")

    def reason(call: Callable[..., Any]) -> str:
        try:
            call(tf.zeros([1]))
        except ValueError as error:
            return reason_of(error)
        return ""

    return [reason(keras.layers.Lambda(fail)), reason(tf.function(fail))] == ["too small"] * 2


def _nodes_are_told() -> bool:
    text = text_of(lambda: tf.io.decode_png(b"none"))
    return first_line(NODES.sub("", text)).startswith("Unknown image file format")


def _python_is_called() -> bool:
    files: list[str] = []

    def look() -> np.ndarray:
        files.extend(place.filename for place in traceback.extract_stack())
        return np.zeros([])

    tf.function(lambda: tf.numpy_function(look, [], tf.float64), autograph=False)()
    return any(file.endswith(CALLS_PYTHON) for file in files)


def _autograph_names_its_files() -> bool:
    files: list[str] = []

    def look() -> None:
        files.extend(place.filename for place in traceback.extract_stack())

    tf.function(look)()
    return any(AUTOGRAPH_FILE in file for file in files)


def _unused_modules_are_there() -> bool:
    if lacking := [name for name in UNUSED_MODULES if not importlib.util.find_spec(name)]:
        raise missing_api(keras, " and no ".join(lacking))
    return True


def _last_import_is_there() -> bool:
    package, file = IMPORTED_LAST
    return package == keras.__name__ and (Path(keras.__file__).parent / file).exists()


def _variables_are_read() -> bool:
    # Not by their effects, for which TensorFlow would have to be imported again: by their names in its libraries.
    left = set(OF_TENSORFLOW)
    libraries = Path(tf.sysconfig.get_lib()).glob("*.so*")
    for library in sorted(libraries, key=lambda path: path.stat().st_size):  # one has a gigabyte
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            left = {name for name in left if content.find(name.encode()) < 0}
    if left:
        raise missing_api(tf, " and no ".join(sorted(left)))
    return True


def _settings_are_read() -> bool:
    other = {"floatx": "float64", "image_data_format": "channels_first", "epsilon": 0.25}
    wrong = {"backend": "jax", "nnx_enabled": True}
    agree = []
    for variable in ("HOME", KERAS_HOME):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, KERAS_ON_TENSORFLOW):
            os.environ.pop(KERAS_HOME, None)
            os.environ[variable] = folder
            agree.append(_settings_in_keras() == load.from_file() == KERAS_DEFAULTS)
            Path(load.path()).write_text(json.dumps(other | wrong))
            agree.append(_settings_in_keras() == load.from_file() == other)
    return all(agree)


def _settings_in_keras() -> dict[str, Any]:
    """What Keras would have as its settings if it were imported now."""
    # A second instance of the module, which reads everything anew.
    spec = module_of(SETTINGS).__spec__
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if (module.backend(), module.is_nnx_enabled()) != ("tensorflow", False):
        raise missing_api(keras, "KERAS_BACKEND and no KERAS_NNX_ENABLED")
    return {name: getattr(module, name)() for name in KERAS_DEFAULTS}


PROBES: dict[tuple[Any, str], Callable[[], bool]] = {
    **CENTRAL,
    (tf, "Context.wait_at_barrier"): _service_is_there,
    (tf, "PolymorphicFunction._autograph"): _functions_are_converted,
    (tf, "GradientTape._watch_accessed_variables"): lambda: watches_variables(tf.GradientTape()),
    (tf, "WorkerPreemptionHandler"): _workers_are_followed,
    (tf, NO_INLINE): _one_node_is_kept,
    (tf, "Graph._distribution_strategy_stack"): _strategies_are_left,
    (keras, "slots"): _slots_are_named,
    (keras, "Optimizer._learning_rate"): _rate_is_found,
    (keras, "Optimizer._get_current_learning_rate"): _rate_is_scaled,
    (keras, "Optimizer._get_current_learning_rate of another"): _rate_is_followed,
    (keras, "Optimizer._use_weight_decay"): _excluded_are_found,
    (keras, "Optimizer._clip_gradients"): _rows_are_taken,
    (keras, "MultiOptimizer._optimizer_map"): _choices_are_kept,
    (keras, "Variable._initialize_with_initializer"): _new_variables_are_found,
    (keras, "Variable._initialize"): _parts_are_taken,
    (keras, "Variable._value"): _views_are_taken,
    (keras, "CompileLoss._flat_losses"): _losses_are_found,
    (keras, "_keras_mask"): _masks_are_found,
    (keras, SCALES[0]): _losses_are_left_unscaled,
    (keras, NAME_COUNTS): _names_begin_again,
    (keras, "H5IOStore._h5_entry_group"): _datasets_are_found,
    (tf, "error 'cannot be modified after initialization'"): _late_change_is_told,
    (tf, f"error '{error_texts.XLA_FAILURE}'"): _xla_failure_is_told,
    (tf, f"error '{error_texts.NO_SERVER}'"): _taken_port_is_told,
    (keras, "error 'Could not locate class ...'"): _unknown_code_is_told,
    (keras, "error about safe_mode"): _unsafe_code_is_told,
    (keras, "error 'Exception encountered when calling ...'"): _reasons_are_told,
    (tf, "error '{{function_node ...}} ...'"): _nodes_are_told,
    (tf, PYTHON_FUNCTIONS): _python_is_called,
    (tf, AUTOGRAPH_FILE): _autograph_names_its_files,
    (keras, "modules that no task uses"): _unused_modules_are_there,
    (keras, "the module that is imported last"): _last_import_is_there,
    (tf, "environment variables"): _variables_are_read,
    (keras, "settings in keras.json"): _settings_are_read,
}
