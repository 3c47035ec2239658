"""Private names of TensorFlow: its context, its coordination service, and how functions are called in graphs.

Private names of TensorFlow and of Keras are accessed by `module_of`, `attribute` and `relying_on`, with an error that
names the one that has moved.
"""

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any

import keras
import tensorflow as tf

from tf2dist.errors import InstallationError
from tf2dist.tf_constants import PYTHON_FUNCTIONS, tested_versions

# An object of our own, since None is a legitimate value of several of these attributes.
ABSENT = object()


def module_of(name: str) -> Any:
    """A private module by its dotted name.

    Raises:
        InstallationError: there is none.
    """
    with relying_on(keras if name.startswith("keras") else tf, name):
        return importlib.import_module(name)


def attribute(package: Any, owner: Any, name: str, kind: Any) -> Any:
    """An attribute of an object, which must be an instance of `kind`.

    Raises:
        InstallationError: it does not exist, or is of another type.
    """
    value = getattr(owner, name, ABSENT)
    # A name that stays while its meaning changes would do more harm than one that is gone: nothing would fail.
    if value is ABSENT or not isinstance(value, kind):
        raise missing_api(package, f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    return value


@contextlib.contextmanager
def relying_on(package: Any, name: str) -> Iterator[None]:
    """Reports an error of a type that a renamed name or parameter causes as the lack of `name`."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise missing_api(package, name) from error


def missing_api(package: Any, name: str) -> InstallationError:
    """The error for a private name that has moved."""
    tested = ""
    # The requirements are those of the installed distribution; a bare copy of the sources has none.
    with contextlib.suppress(metadata.PackageNotFoundError):
        tested = str(tested_versions().get(package.__name__, ""))
    return InstallationError(
        f"{package.__name__} {package.__version__}: has no {name} of the kind that tf2dist uses; install "
        f"{package.__name__}{tested or ' of a version that tf2dist is tested with'}"
    )


CONTEXT = "tensorflow.python.eager.context"
AUTOGRAPH = "tensorflow.python.autograph.core.ag_ctx"
CUSTOM_GRADIENT = "tensorflow.python.ops.custom_gradient"
REPLACED = "_graph_mode_decorator"  # what a decorated function looks up in it when it is called in a graph
# An attribute of functions: TensorFlow refuses names that are not on its list, so a renamed one is noticed.
NO_INLINE = "_noinline"


def keep_threads_from_spinning() -> None:
    """Lets idle threads of this process sleep. Must be called before TensorFlow initializes its devices."""
    experimental = tf.compat.v1.ConfigProto.Experimental(disable_thread_spinning=True)
    _configure(tf.compat.v1.ConfigProto(experimental=experimental))


def optimize_graphs_for_cpus() -> None:
    """Has TensorFlow optimize the graphs of this process in less time; for runs in which no task has a GPU.

    By default TensorFlow runs all passes over a graph twice, and two of them are for GPUs: one changes the order of the
    axes of images, one computes values a second time or keeps them in the memory of the host. The second round left out
    11 of the 4,843 operations of MobileNetV2 and took a third of the time. Must be called before TensorFlow initializes
    its devices.
    """
    options = tf.compat.v1.ConfigProto()
    rewriting = options.graph_options.rewrite_options
    with relying_on(tf, "RewriterConfig"):
        rewriting.meta_optimizer_iterations = rewriting.ONE
        rewriting.layout_optimizer = rewriting.OFF
        rewriting.memory_optimization = rewriting.NO_MEM_OPT
    _configure(options)


def _configure(options: tf.compat.v1.ConfigProto) -> None:
    """Adds options for which `tf.config` has no setters to those of this process."""
    context = this_context()
    before = attribute(tf, context, "_config", tf.compat.v1.ConfigProto | None)
    # The context merges `_config` into the configuration that it builds when it is initialized, so that thread counts
    # set through `tf.config` stay as they are.
    context._config = tf.compat.v1.ConfigProto()
    context._config.CopyFrom(before or context._config)
    context._config.MergeFrom(options)


def limit_gpu_memory(fraction: float) -> None:
    """Gives this process a fixed fraction of the memory of each of its GPUs, which TensorFlow then takes at once.

    `tf.config` has only limits in megabytes, for which the size of the memory would have to be known before TensorFlow
    initializes its devices. Must be called before that.
    """
    gpu_options = tf.compat.v1.GPUOptions(per_process_gpu_memory_fraction=fraction)
    _configure(tf.compat.v1.ConfigProto(gpu_options=gpu_options))


def use_coordination_service(
    leader: str, num_tasks: Mapping[str, int], register_secs: float, heartbeat_secs: float
) -> None:
    """Makes the next synchronous strategy wait for all workers, and detect workers that are lost.

    Args:
        leader: TensorFlow's name of the task that runs the service.
        num_tasks: the number of tasks by job.
        register_secs: how long it waits for them to register.
        heartbeat_secs: a task without a sign of life for this long counts as lost.
    """
    context = this_context()
    configure = attribute(tf, context, "configure_coordination_service", Callable)
    with relying_on(tf, "Context.configure_coordination_service"):
        configure(
            service_type="standalone",
            service_leader=leader,
            cluster_register_timeout_in_ms=int(register_secs * 1000),
            heartbeat_timeout_in_ms=int(heartbeat_secs * 1000),
        )
    with relying_on(tf, "Context.coordination_service"):
        service = context.coordination_service
        for job, number in num_tasks.items():
            service.coordinated_job_list.add(name=job, num_tasks=number)
        # Without a barrier the timeout applies to the other workers only: the leader itself would wait for an hour.
        # The function of TensorFlow above has no parameter for it.
        service.cluster_register_with_barrier = True
        # What is set in a copy is lost; a release that returns one must not bring the hour back unnoticed.
        if context.coordination_service != service:
            raise ValueError("it is a copy, which nobody reads")


def wait_at_barrier(name: str, timeout_secs: float) -> None:
    """Waits until every task of the coordination service has come to the barrier of this name."""
    attribute(tf, this_context(), "wait_at_barrier", Callable)(name, int(timeout_secs * 1000))


def exchange(name: str, own: str, task: str, tasks: Iterable[str], timeout_secs: float) -> list[str]:
    """The texts of all tasks of the coordination service, each of which passes its own under the same name.

    Args:
        task: the name of this task, which is one of `tasks`.
    """
    context = this_context()
    attribute(tf, context, "set_config_key_value", Callable)(f"tf2dist/{name}/{task}", own)
    get = attribute(tf, context, "get_config_key_value", Callable)
    return [str(get(f"tf2dist/{name}/{other}", int(timeout_secs * 1000))) for other in tasks]


def as_one_node(function: Callable[..., Any]) -> Any:
    """A `tf.function` whose call stays a single node in the calling graph, however many operations it has."""
    # TensorFlow inlines calls by default. The operations of a ps would then stand in the worker's graph one by one,
    # which doubles the time of a step.
    with relying_on(tf, NO_INLINE):
        return tf.function(function, autograph=False, experimental_attributes={NO_INLINE: True})


def body_of(function: Any) -> Callable[..., Any]:
    """The Python function of a `tf.function` as TensorFlow traces it, converted by AutoGraph if it asks for that."""
    body: Callable[..., Any] = function.python_function
    if not attribute(tf, function, "_autograph", bool):
        return body
    module = module_of(AUTOGRAPH)
    # Without it nothing is converted within a function that does not use AutoGraph itself.
    with relying_on(tf, "ControlStatusCtx"):
        enabled = module.ControlStatusCtx(status=module.Status.ENABLED)
    with relying_on(tf, "tf_convert"):
        converted: Callable[..., Any] = tf.__internal__.autograph.tf_convert(body, enabled, user_requested=True)
    return converted


def watches_variables(tape: tf.GradientTape) -> bool:
    """Whether a tape records what is computed from variables without being told to watch them."""
    return bool(attribute(tf, tape, "_watch_accessed_variables", bool))


def replace_custom_gradients(replacement: Callable[..., Any]) -> None:
    """Makes this process call ``replacement(original, function, args, options)`` in graphs for `tf.custom_gradient`.

    Args:
        replacement: returns what ``original(function, args, options)`` would: the result of ``function(*args)[0]``,
            with the gradient of ``function(*args)[1]``.
    """
    module = module_of(CUSTOM_GRADIENT)
    setattr(module, REPLACED, functools.partial(replacement, attribute(tf, module, REPLACED, Callable)))


@contextlib.contextmanager
def outside_strategies() -> Iterator[None]:
    """A block in which the graph that is being made is in no scope of a strategy, whatever surrounds it."""
    # In a strategy's scope the optimizers of Keras update its variables alone.
    stack = attribute(tf, tf.compat.v1.get_default_graph(), "_distribution_strategy_stack", list)
    scopes = list(stack)
    stack.clear()
    try:
        yield
    finally:
        stack[:] = scopes


def publish_functions(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Makes functions of this process callable from graphs, by ``tf.raw_ops.PyFunc`` with their names as tokens.

    The caller must keep the functions alive, since TensorFlow holds them by weak references.
    """
    # `tf.numpy_function` generates a token that is known only in the process that makes the graph. The coordinator
    # makes the graphs that run on the workers, so both must know the token in advance.
    registry = attribute(tf, module_of(PYTHON_FUNCTIONS), "_py_funcs", object)
    attribute(tf, registry, "_funcs", weakref.WeakValueDictionary).update(functions)


def this_context() -> Any:
    """The eager context of this process."""
    return attribute(tf, module_of(CONTEXT), "context", Callable)()
