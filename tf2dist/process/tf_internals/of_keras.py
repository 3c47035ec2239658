"""What this project uses of TensorFlow and Keras beyond their public names, each behind a function with a name of ours.

Another release may rename any of it, and an assignment to an attribute that nobody reads any more changes nothing. So
each function looks whether what it touches is there and of the kind that it knows; all of them raise
`InstallationError`, which tells the name and the installed version. `missing` tries them all.
"""

import collections
import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.errors import InstallationError
from tf2dist.requirements import tested_versions

CONTEXT = "tensorflow.python.eager.context"
PYTHON_FUNCTIONS = "tensorflow.python.ops.script_ops"
NO_INLINE = "_noinline"
GLOBAL_STATE = "keras.src.backend.common.global_state"
NAME_COUNTS = "object_name_uids"
ABSENT = object()


def keep_threads_from_spinning(context: Any = None) -> None:
    """Lets idle threads of this process sleep. To be called before TensorFlow touches a device.

    Args:
        context: another one than this process's.
    """
    context = context or _context()
    _attribute(tf, context, "_config", tf.compat.v1.ConfigProto | None)
    options = tf.compat.v1.ConfigProto.Experimental(disable_thread_spinning=True)
    context._config = tf.compat.v1.ConfigProto(experimental=options)


def use_coordination_service(
    leader: str, num_tasks: Mapping[str, int], register_secs: float, heartbeat_secs: float, context: Any = None
) -> None:
    """Has the strategy of synchronous workers that is made after this wait for all of them, and watch them.

    Args:
        leader: TensorFlow's name of the task that runs the service.
        num_tasks: of each job.
        register_secs: how long it waits for them. The limit holds for the leader itself only if registration is a
            barrier, which the function of TensorFlow does not set.
        heartbeat_secs: a task that gives no sign of life for so long is lost to the others.
        context: another one than this process's.
    """
    context = context or _context()
    configure = _attribute(tf, context, "configure_coordination_service", Callable)
    with _relying_on(tf, "Context.configure_coordination_service"):
        configure(
            service_type="standalone",
            service_leader=leader,
            cluster_register_timeout_in_ms=int(register_secs * 1000),
            heartbeat_timeout_in_ms=int(heartbeat_secs * 1000),
        )
    with _relying_on(tf, "Context.coordination_service"):
        service = context.coordination_service
        for job, number in num_tasks.items():
            service.coordinated_job_list.add(name=job, num_tasks=number)
        service.cluster_register_with_barrier = True
        if context.coordination_service != service:
            raise ValueError("it is a copy, which nobody reads")


def wait_at_barrier(name: str, timeout_secs: float) -> None:
    """Waits until every task of the coordination service has come to the barrier of this name."""
    _attribute(tf, _context(), "wait_at_barrier", Callable)(name, int(timeout_secs * 1000))


def as_one_node(function: Callable[..., Any]) -> Any:
    """A `tf.function` whose call stays a single node of the graph that makes it, however many operations it has."""
    with _relying_on(tf, NO_INLINE):
        return tf.function(function, autograph=False, experimental_attributes={NO_INLINE: True})


def publish_functions(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Makes functions of this process callable for graphs, by ``tf.raw_ops.PyFunc`` with their names as tokens.

    `tf.numpy_function` makes up names that are known only where the graph is made. TensorFlow holds the functions by
    weak references.
    """
    registry = _attribute(tf, _module(PYTHON_FUNCTIONS), "_py_funcs", object)
    _attribute(tf, registry, "_funcs", weakref.WeakValueDictionary).update(functions)


def trained_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Those that an optimizer was built with; its own lists of variables have their order."""
    return _variables(optimizer, "_trainable_variables")


def momentums(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Adam's and RMSprop's first list of variables; RMSprop's is empty without momentum."""
    return _variables(optimizer, "_momentums")


def velocities(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Adam's and RMSprop's second list of variables."""
    return _variables(optimizer, "_velocities")


def _variables(optimizer: keras.Optimizer, name: str) -> list[keras.Variable]:
    found: list[keras.Variable] = _attribute(keras, optimizer, name, list)
    if not all(isinstance(variable, keras.Variable) for variable in found):
        raise lack(keras, f"{type(optimizer).__name__}.{name}")
    return found


def place_of(optimizer: keras.Optimizer, variable: Any) -> int:
    """Where a variable, as `update_step` is given it, stands in `trained_variables`."""
    place: int = _attribute(keras, optimizer, "_get_variable_index", Callable)(variable)
    return place


def count_updates_in(optimizer: keras.Optimizer, counter: keras.Variable) -> None:
    """Has an optimizer read and count its updates in a variable of the caller's."""
    _attribute(keras, optimizer, "_iterations", keras.Variable)
    optimizer._iterations = counter


def learning_rate_of(optimizer: keras.Optimizer) -> Any:
    """A variable, a number, or a schedule or other function, which `optimizer.learning_rate` would call."""
    return _attribute(keras, optimizer, "_learning_rate", keras.Variable | float | Callable)


def fix_learning_rate(optimizer: keras.Optimizer) -> None:
    """Makes a number of a learning rate that is a variable: each update would read it anew."""
    rate = learning_rate_of(optimizer)
    if isinstance(rate, keras.Variable):
        optimizer._learning_rate = float(rate.numpy())


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """The model and all layers in it, those within layers, too."""
    layers: list[keras.Layer] = _attribute(keras, model, "_flatten_layers", Callable)()
    return layers


def seeds_of(model: keras.Model) -> list[keras.Variable]:
    """The variables of the random layers of a model, which are among its variables that are not trained."""
    generators = [each for layer in layers_of(model) for each in _attribute(keras, layer, "_seed_generators", list)]
    return [generator.state for generator in generators]


def build_metrics(model: keras.Model, batch: tuple[Any, Any, Any]) -> None:
    """Builds the losses and metrics of a compiled model, as `Model.fit` does with its first batch.

    Args:
        batch: the tree (x, y, sample_weight) of `keras.KerasTensor`.
    """
    _attribute(keras, model, "_symbolic_build", Callable)(data_batch=batch)


def loss_tracker_of(model: keras.Model) -> keras.metrics.Metric:
    """The metric that averages the loss of a compiled model."""
    return _attribute(keras, model, "_loss_tracker", keras.metrics.Metric)


def losses_of(model: keras.Model) -> list[Any]:
    """The losses of a compiled model whose metrics are built; those of `add_loss` and regularizers are not there."""
    compiled = _attribute(keras, model, "_compile_loss", keras.losses.Loss | None)
    return [] if compiled is None else [one.loss for one in _attribute(keras, compiled, "_flat_losses", list)]


def output_trackers_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that average the losses of the single outputs, if there are several; the model is built."""
    compiled = _attribute(keras, model, "_compile_loss", keras.losses.Loss | None)
    return [] if compiled is None else list(_attribute(keras, compiled, "metrics", list))


def mask_of(output: Any) -> Any:
    """The mask that Keras' layers have given to a tensor; None without one."""
    return getattr(output, "_keras_mask", None)


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Gives what is made in the block the names that it would have in a new process, such as "dense" and "dense_1"."""
    get, put = (
        _attribute(keras, _module(GLOBAL_STATE), f"{what}_global_attribute", Callable) for what in ("get", "set")
    )
    before = get(NAME_COUNTS)
    put(NAME_COUNTS, collections.defaultdict(int))
    try:
        yield
    finally:
        put(NAME_COUNTS, before if before is not None else collections.defaultdict(int))


def _context() -> Any:
    return _attribute(tf, _module(CONTEXT), "context", Callable)()


def _module(name: str) -> Any:
    with _relying_on(keras if name.startswith("keras") else tf, name):
        return importlib.import_module(name)


def _attribute(package: Any, owner: Any, name: str, kind: Any) -> Any:
    """An attribute of an object, which must be of the kind.

    Raises:
        InstallationError: it is not there, or not of the kind.
    """
    value = getattr(owner, name, ABSENT)
    if value is ABSENT or not isinstance(value, kind):
        raise lack(package, f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    return value


@contextlib.contextmanager
def _relying_on(package: Any, name: str) -> Iterator[None]:
    """Takes an error of a kind that a renamed thing causes as the lack of `name`."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise lack(package, name) from error


def lack(package: Any, name: str) -> InstallationError:
    """What a user reads of a private name that has moved."""
    tested = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        tested = str(tested_versions().get(package.__name__, ""))
    return InstallationError(
        f"{package.__name__} {package.__version__}: has no {name} of the kind that tf2dist uses; install "
        f"{package.__name__}{tested or ' of a version that tf2dist is tested with'}"
    )


def missing() -> list[str]:
    """What the installed TensorFlow and Keras lack of all this, a line each.

    Makes variables, graphs and so devices: best called in a process of its own.
    """
    found = []
    for (package, name), works in PROBES.items():
        try:
            if not works():
                found.append(str(lack(package, name)))
        except Exception as error:  # the library's own errors, too, are of what has changed in it
            found.append(str(error if isinstance(error, InstallationError) else lack(package, name)))
    return list(dict.fromkeys(found))


def _spinning_stops() -> bool:
    context = _module(CONTEXT).Context()
    keep_threads_from_spinning(context)
    return bool(context.config.experimental.disable_thread_spinning)


def _service_is_set() -> bool:
    context = _module(CONTEXT).Context()
    use_coordination_service("/job:worker/replica:0/task:0", {"worker": 1}, 1.0, 1.0, context)
    return bool(context.coordination_service.cluster_register_with_barrier)


def _barrier_is_there() -> bool:
    return bool(_attribute(tf, _context(), "wait_at_barrier", Callable))


def _one_node_is_kept() -> bool:
    traced = as_one_node(lambda: tf.constant(0)).get_concrete_function()
    return bool(traced.function_def.attr[NO_INLINE].b)


def _published_is_called() -> bool:
    def one() -> np.ndarray:
        return np.ones([], np.int32)

    publish_functions({"tf2dist.one": one})
    return bool(tf.raw_ops.PyFunc(input=[], token="tf2dist.one", Tout=[tf.int32])[0] == 1)


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
    return loss_tracker_of(model) in model.metrics and len(model.metrics_variables) == 4


def _losses_are_found() -> bool:
    return [loss.reduction for loss in losses_of(_compiled())] == ["sum_over_batch_size"]


def _masks_are_found() -> bool:
    masked = keras.layers.Masking()(tf.zeros([1, 2, 3]))
    return mask_of(masked) is not None


def _names_begin_again() -> bool:
    keras.layers.Dense(1)
    with fresh_names():
        return bool(keras.layers.Dense(1).name == "dense")


PROBES: dict[tuple[Any, str], Callable[[], bool]] = {
    (tf, "Context._config"): _spinning_stops,
    (tf, "Context.coordination_service"): _service_is_set,
    (tf, "Context.wait_at_barrier"): _barrier_is_there,
    (tf, NO_INLINE): _one_node_is_kept,
    (tf, "FuncRegistry._funcs"): _published_is_called,
    (keras, "Optimizer._get_variable_index"): _slots_are_found,
    (keras, "Optimizer._iterations"): _updates_are_counted,
    (keras, "Optimizer._learning_rate"): _rate_is_fixed,
    (keras, "Layer._seed_generators"): _seeds_are_found,
    (keras, "Trainer._symbolic_build"): _metrics_are_built,
    (keras, "CompileLoss._flat_losses"): _losses_are_found,
    (keras, "_keras_mask"): _masks_are_found,
    (keras, NAME_COUNTS): _names_begin_again,
}
