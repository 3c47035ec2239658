"""A private name that is missing, or means something else, is named in the error, and by a probe."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.losses import loss
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import attributes
from tensorflow.python.ops import custom_gradient, script_ops

from tests.replica import probes
from tests.replica.keras_objects import (
    BASE_OPTIMIZER,
    BATCH,
    TRAINER,
    built_optimizer,
    compiled_model,
    model_with_metrics,
    random_model,
    several_optimizers,
    shared_random_model,
)
from tf2dist.errors import InstallationError
from tf2dist.tf_constants import KERAS_DEFAULTS
from tf2dist.tf_internals.keras import (
    build_metrics,
    compute_loss,
    config_of,
    count_updates_in,
    counter_of,
    fresh_names,
    groups_of,
    layers_of,
    learning_rate_of,
    leave_losses_unscaled,
    loss_tracker_of,
    losses_of,
    momentums,
    output_trackers_of,
    place_of,
    scale_learning_rate,
    seeds_of,
    trained_variables,
    undecayed,
    velocities,
)
from tf2dist.tf_internals.live_tasks import LiveTasks
from tf2dist.tf_internals.probes import missing, with_context
from tf2dist.tf_internals.tensorflow import (
    as_one_node,
    body_of,
    keep_threads_from_spinning,
    outside_strategies,
    publish_functions,
    replace_custom_gradients,
    use_coordination_service,
    wait_at_barrier,
    watches_variables,
)
from tf2dist.tf_internals.variables import PartitionedVariable

SERVICE = ("/job:worker/replica:0/task:0", {"worker": 1}, 1.0, 1.0)


ANOTHER = re.compile("another")


HANDLER = cluster_coordinator.WorkerPreemptionHandler


def follow_workers(handler: Any) -> None:
    coordinator: Any = SimpleNamespace(_cluster=SimpleNamespace(failure_handler=handler))
    with_context(context.Context(), LiveTasks, 1, set).follow(coordinator)


def leave_strategies(graph: type[tf.Graph]) -> None:
    with graph().as_default(), outside_strategies():
        pass


# One of them reads the library of TensorFlow, a gigabyte.
QUICK = {names: probe for names, probe in probes.PROBES.items() if names != (tf, "environment variables")}


def test_nothing_is_missing() -> None:
    assert missing(probes.PROBES) == []


class MissingApi(NamedTuple):
    """What breaks when a private name moves.

    Attributes:
        breaks: the consequence for the user of this project, if nothing checked the name.
        owner: makes the object that has the name.
        name: the private name.
        use: calls our function that needs the name, with that object.
    """

    breaks: str
    owner: Callable[[], Any]
    name: str
    use: Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.name}: {self.breaks}"


MISSING = [
    MissingApi(
        "idle tasks would spin on the cores that others need",
        context.Context,
        "_config",
        lambda own: with_context(own, keep_threads_from_spinning),
    ),
    MissingApi(
        "the first worker would wait an hour for the others",
        lambda: context.Context,
        "configure_coordination_service",
        lambda _: with_context(context.Context(), use_coordination_service, *SERVICE),
    ),
    MissingApi(
        "the first worker would wait an hour for the others",
        lambda: context.Context,
        "coordination_service",
        lambda _: with_context(context.Context(), use_coordination_service, *SERVICE),
    ),
    MissingApi(
        "a worker that is done would exit while the others are in the middle of a step",
        lambda: context.Context,
        "wait_at_barrier",
        lambda _: wait_at_barrier("end", 1.0),
    ),
    *(
        MissingApi(
            "a worker could not come back until all are there",
            owner,
            name,
            lambda owner: follow_workers(HANDLER(None, None) if isinstance(owner, type) else owner),
        )
        for owner, name in (
            (lambda: HANDLER, "wait_on_failure"),
            (lambda: context.Context, "update_server_def"),
            (lambda: HANDLER(None, None), "_cluster_due_for_update_or_finish"),
            (lambda: HANDLER(None, None), "_error_from_recovery"),
        )
    ),
    MissingApi(
        "a model that updates one network before the other could not be trained synchronously",
        lambda: tf.Graph,
        "_distribution_strategy_stack",
        leave_strategies,
    ),
    MissingApi(
        "a function in a model would keep the tensors of another step",
        lambda: tf.function(lambda: None),
        "_autograph",
        body_of,
    ),
    MissingApi(
        "a tape that watches some variables would have gradients for all",
        tf.GradientTape,
        "_watch_accessed_variables",
        watches_variables,
    ),
    MissingApi(
        "what keras.remat computes a second time would not be trained",
        lambda: custom_gradient,
        "_graph_mode_decorator",
        lambda _: replace_custom_gradients(print),
    ),
    MissingApi(
        "workers could not read their own examples",
        lambda: script_ops,
        "_py_funcs",
        lambda _: publish_functions({}),
    ),
    MissingApi(
        "workers could not read their own examples",
        lambda: script_ops._py_funcs,
        "_funcs",
        lambda _: publish_functions({}),
    ),
    MissingApi(
        "a checkpoint could not name the optimizer's variables",
        built_optimizer,
        "_trainable_variables",
        trained_variables,
    ),
    MissingApi("concurrent updates of Adam would interleave on a ps", built_optimizer, "_momentums", momentums),
    MissingApi("concurrent updates of Adam would interleave on a ps", built_optimizer, "_velocities", velocities),
    MissingApi(
        "a fused kernel would not find the slots of a weight",
        lambda: BASE_OPTIMIZER,
        "_get_variable_index",
        lambda _: place_of(built_optimizer(), None),
    ),
    MissingApi(
        "Adam's bias correction would follow a wrong number of updates",
        built_optimizer,
        "_iterations",
        lambda optimizer: count_updates_in(optimizer, keras.Variable(0)),
    ),
    MissingApi("the optimizer of a resumed run would begin at 0", built_optimizer, "_iterations", counter_of),
    MissingApi("the reported learning rate would be wrong", built_optimizer, "_learning_rate", learning_rate_of),
    MissingApi("a schedule of the user's own could not be copied", built_optimizer, "_learning_rate", config_of),
    MissingApi(
        "weights that are excluded from the decay would decay",
        lambda: BASE_OPTIMIZER,
        "_use_weight_decay",
        lambda _: undecayed(built_optimizer(), [keras.Variable(0.0)]),
    ),
    MissingApi(
        "a layer would be trained by the optimizer of another",
        several_optimizers,
        "_optimizer_map",
        lambda optimizer: groups_of(optimizer, [keras.Variable(0.0)]),
    ),
    MissingApi(
        "a layer would be trained by the optimizer of another",
        lambda: several_optimizers(keras.Variable(0.0)),
        "_var_to_optimizer_idx",
        lambda optimizer: groups_of(optimizer, trained_variables(optimizer)),
    ),
    MissingApi(
        "a model that was trained before could not be built with cut variables",
        lambda: tf.Variable([0.0]),
        "_distribute_strategy",
        lambda part: PartitionedVariable([part])._distribute_strategy,
    ),
    MissingApi(
        "stale updates would count as much as others",
        lambda: BASE_OPTIMIZER,
        "_get_current_learning_rate",
        lambda _: scale_learning_rate(built_optimizer(), lambda: 0.5),
    ),
    MissingApi(
        "a loss that is one number for a batch would count several times",
        lambda: loss,
        "scale_loss_for_distribution",
        lambda _: leave_losses_unscaled(),
    ),
    MissingApi(
        "synchronized layers would be overlooked",
        lambda: (shared_random_model(), keras.Layer)[1],
        "_flatten_layers",
        lambda _: layers_of(shared_random_model()),
    ),
    MissingApi(
        "dropout would drop the same units on every worker, or fail",
        random_model,
        "_seed_generators",
        seeds_of,
    ),
    MissingApi(
        "the metrics would have no variables to sum",
        lambda: TRAINER,
        "_symbolic_build",
        lambda _: build_metrics(compiled_model(), (BATCH[0], list(BATCH[1:]), None)),
    ),
    MissingApi(
        "a compute_loss without the argument training would be refused",
        lambda: TRAINER,
        "_compute_loss",
        lambda _: compute_loss(keras.Sequential(), None, None, None, None, training=True),
    ),
    MissingApi("the loss would not be averaged", model_with_metrics, "_loss_tracker", loss_tracker_of),
    MissingApi(
        "losses that cannot be split among workers would be accepted",
        model_with_metrics,
        "_compile_loss",
        losses_of,
    ),
    MissingApi(
        "the losses of single outputs would be averaged wrongly",
        model_with_metrics,
        "_compile_loss",
        output_trackers_of,
    ),
    MissingApi(
        "losses that cannot be split among workers would be accepted",
        lambda: model_with_metrics()._compile_loss,
        "_flat_losses",
        lambda loss: losses_of(SimpleNamespace(_compile_loss=loss)),
    ),
    MissingApi(
        "the caller's model and those of its tasks would have different names",
        lambda: global_state,
        "get_global_attribute",
        lambda _: fresh_names().__enter__(),
    ),
]


@pytest.mark.parametrize("missing", MISSING, ids=str)
def test_a_missing_name_is_reported(monkeypatch: pytest.MonkeyPatch, missing: MissingApi) -> None:
    owner = missing.owner()
    package = keras if "keras" in str(getattr(owner, "__module__", owner)) else tf
    monkeypatch.delattr(owner, missing.name)
    with pytest.raises(InstallationError) as error:
        missing.use(owner)
    told = str(error.value)
    assert told.startswith(f"{package.__name__} {package.__version__}: has no "), told
    assert f".{missing.name} of the kind that tf2dist uses; install {package.__name__}<" in told
    assert error.value.exit_code == 2


KINDS = [
    (lambda: script_ops._py_funcs, "_funcs", lambda _: publish_functions({})),
    (context.Context, "_config", lambda own: with_context(own, keep_threads_from_spinning)),
    (built_optimizer, "_momentums", momentums),
    (built_optimizer, "_iterations", lambda optimizer: count_updates_in(optimizer, keras.Variable(0))),
    (built_optimizer, "_learning_rate", learning_rate_of),
    (model_with_metrics, "_loss_tracker", loss_tracker_of),
    (model_with_metrics, "_compile_loss", losses_of),
]


@pytest.mark.parametrize(("make", "name", "use"), KINDS, ids=[name for _, name, _ in KINDS])
def test_a_name_with_another_meaning_is_reported(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], name: str, use: Callable[[Any], Any]
) -> None:
    owner = make()
    for other in ({"another": "kind"}, [1, 2]):
        monkeypatch.setattr(owner, name, other)
        with pytest.raises(InstallationError, match=name):
            use(owner)


def test_an_unknown_function_attribute_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise TensorFlow inlines the operations of a ps into the worker's graph, and a step takes twice as long."""
    known = attributes.POLYMORPHIC_FUNCTION_ALLOWLIST - {"_noinline"}
    monkeypatch.setattr(attributes, "POLYMORPHIC_FUNCTION_ALLOWLIST", known)
    with pytest.raises(InstallationError, match="has no _noinline "):
        as_one_node(lambda: None)


def test_a_copy_of_the_service_configuration_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set in a copy is lost, and the first worker would wait an hour for the others."""
    service = context.Context.coordination_service.fget

    def copy_of(self: Any) -> Any:
        copied = type(service(self))()
        copied.CopyFrom(service(self))
        return copied

    monkeypatch.setattr(context.Context, "coordination_service", property(copy_of))
    with pytest.raises(InstallationError, match=r"Context\.coordination_service"):
        with_context(context.Context(), use_coordination_service, *SERVICE)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "tf2dist.tf_internals.error_texts.TOO_LATE",
            ANOTHER,
            "tensorflow {}: has no error 'cannot be modified after initialization'",
        ),
        (
            "tf2dist.tf_internals.error_texts.XLA_FAILURE",
            "no such words",
            "tensorflow {}: has no error 'tf2xla conversion failed'",
        ),
        (
            "tf2dist.tf_internals.error_texts.NO_SERVER",
            "no such words",
            "tensorflow {}: has no error 'Could not start gRPC server'",
        ),
        (
            "tf2dist.tf_internals.error_texts.DATA_ERROR",
            ANOTHER,
            "tensorflow {}: has no error 'DataError: ...' of a Python function",
        ),
        (
            "tf2dist.tf_internals.error_texts.UNKNOWN_CODE",
            ANOTHER,
            "keras {}: has no error 'Could not locate class ...'",
        ),
        ("tf2dist.tf_internals.error_texts.UNSAFE_CODE", ANOTHER, "keras {}: has no error about safe_mode"),
        (
            "tf2dist.tf_internals.error_texts.NODES",
            ANOTHER,
            "tensorflow {}: has no error 'DataError: ...' of a Python function",
        ),
        ("tests.replica.probes.NODES", ANOTHER, "tensorflow {}: has no error '{{function_node ...}} ...'"),
        ("tests.replica.probes.CALLS_PYTHON", "another", "tensorflow {}: has no tensorflow.python.ops.script_ops"),
        ("tests.replica.probes.AUTOGRAPH_FILE", "another", "tensorflow {}: has no __autograph_generated_file"),
        (
            "tests.replica.probes.UNUSED_MODULES",
            ("keras.layers", "keras.gone"),
            "keras {}: has no keras.gone of the kind",
        ),
        pytest.param(
            "tests.replica.probes.OF_TENSORFLOW",
            ("TF_CPP_MIN_LOG_LEVEL", "TF_GONE"),
            "tensorflow {}: has no TF_GONE of the kind",
            marks=pytest.mark.thorough,
        ),
        ("tests.replica.probes.KERAS_ON_TENSORFLOW", {"KERAS_NNX_ENABLED": "0"}, "keras {}: has no KERAS_BACKEND"),
        ("tf2dist.tf_internals.keras.COUNTERS", ("step", "learning_rate"), "keras {}: has no slots of the kind"),
        ("tf2dist.tf_internals.keras.UNNAMED", ANOTHER, "keras {}: has no slots of the kind"),
    ],
)
def test_the_probes_report_another_wording(monkeypatch: pytest.MonkeyPatch, name: str, value: Any, line: str) -> None:
    monkeypatch.setattr(name, value)
    (told,) = missing(probes.PROBES if name.endswith(".OF_TENSORFLOW") else QUICK)
    package = line.partition(" ")[0]
    assert told.startswith(line.replace("{}", {"keras": keras, "tensorflow": tf}[package].__version__, 1))


@pytest.mark.parametrize("name", ["KERAS_FRAME", "COLOURS", "TRACED"])
def test_the_probes_report_another_form_of_reasons(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(f"tf2dist.errors.{name}", "another" if name == "TRACED" else ANOTHER)
    (told,) = missing(QUICK)
    assert "has no error 'Exception encountered when calling ...'" in told


@pytest.mark.parametrize("name", ["KERAS_HOME", "KERAS_DEFAULTS"])
def test_the_probes_report_other_settings_in_keras_json(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    other = "KERAS_FOLDER" if name == "KERAS_HOME" else KERAS_DEFAULTS | {"epsilon": 1e-6}
    for module in ("tf2dist.config.load", "tests.replica.probes"):
        monkeypatch.setattr(f"{module}.{name}", other)
    (told,) = missing(QUICK)
    assert "has no settings in keras.json" in told


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (context, "Context"),
        (context.Context, "wait_at_barrier"),
        (script_ops, "_py_funcs"),
        (BASE_OPTIMIZER, "_get_variable_index"),
        (TRAINER, "_symbolic_build"),
    ],
    ids=str,
)
def test_the_probes_report_what_is_missing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    monkeypatch.delattr(owner, name)
    lines = missing(QUICK)
    assert lines
    assert any(name in line for line in lines), lines
    assert len(lines) <= 3, "everything else exists"
