"""Private names of Keras: what optimizers, layers and compiled models keep inside."""

import collections
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tf2dist.errors import InstallationError
from tf2dist.tf_internals.tensorflow import attribute, missing_api, module_of

# The variables that every optimizer has, by name; and a variable without a name, which Keras numbers by how many it has
# made before in this process.
COUNTERS = ("iteration", "learning_rate")
UNNAMED = re.compile(r"^variable_\d+$")
# Keras counts here, for each thread, how many objects have been named "dense" and so on.
GLOBAL_STATE = "keras.src.backend.common.global_state"
NAME_COUNTS = "object_name_uids"
SAVING = "keras.src.saving.saving_lib"
# Losses of Keras that compare the examples of a batch, or may sum over them.
MIXING = ("circle_loss", "dice", "tversky")
# The functions that divide a loss by the number of replicas and multiply it again.
LOSS = "keras.src.losses.loss"
SCALES = ("scale_loss_for_distribution", "unscale_loss_for_distribution")


class Lacking(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Stands for an optimizer of a later Keras than the installed one: no object is of this type."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise InstallationError(
            f"keras {keras.__version__}: has no MultiOptimizer, which a step with several updates needs; "
            "install keras>=3.15"
        )


MultiOptimizer: Any = getattr(keras.optimizers, "MultiOptimizer", Lacking)  # since Keras 3.15
ScheduleFreeAdamW: Any = getattr(keras.optimizers, "ScheduleFreeAdamW", Lacking)  # since 3.14


def trained_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built with; its lists of slots are in the same order."""
    return _variables(optimizer, "_trainable_variables")


def momentums(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The first moments of Adam, or the momentum slots of RMSprop, which has none without momentum."""
    return _variables(optimizer, "_momentums")


def velocities(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The second moments of Adam and RMSprop."""
    return _variables(optimizer, "_velocities")


def _variables(optimizer: keras.Optimizer, name: str) -> list[keras.Variable]:
    # A LossScaleOptimizer that Keras has built as it trained has tuples.
    variables: list[keras.Variable] = list(attribute(keras, optimizer, name, list | tuple))
    # A list of something else, such as of names, would pass the check of its type.
    if not all(isinstance(variable, keras.Variable) for variable in variables):
        raise missing_api(keras, f"{type(optimizer).__name__}.{name}")
    return variables


def slots_of(optimizer: keras.Optimizer) -> dict[str, list[keras.Variable]]:
    """The lists, by the names of their attributes, in which an optimizer has a variable for each that it trains."""
    left = set(map(id, state_of(optimizer)))
    number = len(trained_variables(optimizer))
    slots = {}
    # By the form of an attribute and not by a list of names, since every optimizer has its own, and users write more.
    for attribute_name, values in vars(optimizer).items():
        if isinstance(values, list) and len(values) == number and all(id(value) in left for value in values):
            slots[attribute_name] = values
            left -= {id(value) for value in values}
    return slots


def state_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The variables of an optimizer but for its count of updates and its learning rate."""
    return [variable for variable in optimizer.variables if variable.name not in COUNTERS]


class NewVariable(NamedTuple):
    """The value or initializer from which Keras makes a new variable."""

    initializer: keras.Initializer
    shape: tuple[int, ...]


def new_variable(initial_value: Any) -> NewVariable | None:
    """From the function that Keras gives TensorFlow as the value of a variable; None for any other value."""
    names = inspect.getclosurevars(initial_value).nonlocals if inspect.isfunction(initial_value) else {}
    initializer, variable = names.get("initializer"), names.get("self")
    if not isinstance(initializer, keras.Initializer) or not isinstance(variable, keras.Variable):
        return None
    return NewVariable(initializer, tuple(variable.shape))


def seed_of(initializer: keras.Initializer) -> list[int] | None:
    """The seed with which an initializer calls TensorFlow; None if it has none, or another one at each call."""
    seed = getattr(initializer, "seed", None)
    return [seed % (2**31 - 2), 0] if isinstance(seed, int) else None


def name_of(variable: keras.Variable) -> str:
    """The name of a variable, the same in every process."""
    return UNNAMED.sub("variable", variable.name)


def inner_optimizers(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """The optimizers of which each has variables of its own: those in others, or the optimizer itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return inner_optimizers(optimizer.inner_optimizer)
    return list(optimizer.optimizers) if isinstance(optimizer, MultiOptimizer) else [optimizer]


def groups_of(
    optimizer: keras.Optimizer, variables: list[keras.Variable]
) -> list[tuple[keras.Optimizer, list[keras.Variable]]]:
    """Every inner optimizer with those of the variables that it trains; those of a MultiOptimizer in its own order."""
    groups: dict[int, tuple[keras.Optimizer, list[keras.Variable]]]
    groups = {id(inner): (inner, []) for inner in inner_optimizers(optimizer)}
    for variable in variables:
        inner = _optimizer_for(optimizer, variable)
        groups.setdefault(id(inner), (inner, []))[1].append(variable)
    return list(groups.values())


def _optimizer_for(optimizer: keras.Optimizer, variable: keras.Variable) -> keras.Optimizer:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _optimizer_for(optimizer.inner_optimizer, variable)
    if not isinstance(optimizer, MultiOptimizer):
        return optimizer
    if optimizer.built:  # it has chosen once and for all: a function may return a new optimizer at each call
        chosen = attribute(keras, optimizer, "_var_to_optimizer_idx", dict)
        number = chosen.get(attribute(keras, optimizer, "_var_key", Callable)(variable))
        if number is not None:
            return optimizer.optimizers[number]
    return attribute(keras, optimizer, "_optimizer_map", Callable)(variable)


def choose_by_path(optimizer: keras.Optimizer, variables: list[keras.Variable], named: list[keras.Variable]) -> None:
    """Makes a MultiOptimizer choose as it does for these variables, but by their paths, whatever it has chosen by.

    Then it can be saved, also if it has a function, and chooses the same for parts of the variables. Keras saves an
    optimizer that stands at two keys twice, so each of them gets one key.

    Args:
        named: the variables of another model of the same kind, in the same order, by whose paths it chooses.
    """
    groups = groups_of(optimizer, variables)
    patterns = dict(zip(map(id, variables), _patterns([variable.path for variable in named]), strict=True))
    # An optimizer that trains nothing keeps its place, and gets a pattern that matches nothing.
    keys = [
        "|".join(patterns[id(variable)] for variable in trained) or "|".join(["(?!)"] * (number + 1))
        for number, (_, trained) in enumerate(groups)
    ]
    inner = [optimizer for optimizer, _ in groups]
    for one in inner:
        one.loss_scale_factor = optimizer.loss_scale_factor
    optimizer._optimizer_map = keras.optimizers.OptimizerMap(inner[-1], dict(zip(keys[:-1], inner[:-1], strict=True)))
    optimizer._inner_optimizers = inner


def _patterns(paths: list[str]) -> Iterator[str]:
    """For each path one that matches it alone."""
    # When Keras loads a model, it may leave out names of models at the beginning of a path, or put some there.
    for path in paths:
        parts = path.split("/")
        ends = ("/".join(parts[-number:]) for number in range(1, len(parts) + 1))
        end = next((end for end in ends if sum(f"/{each}".endswith(f"/{end}") for each in paths) == 1), None)
        yield f"(.*/)?{re.escape(end)}" if end else re.escape(path)


def with_inner(optimizer: keras.Optimizer, inner: list[keras.Optimizer]) -> keras.Optimizer:
    """A new MultiOptimizer that chooses by the same paths, with others in the places of the inner optimizers."""
    paths = attribute(keras, optimizer, "_optimizer_map", keras.optimizers.OptimizerMap)
    by_path = keras.optimizers.OptimizerMap(inner[-1], dict(zip(paths, inner[:-1], strict=True)))
    return MultiOptimizer(by_path, optimizer.loss_scale_factor, optimizer.name)


def counter_of(optimizer: keras.Optimizer) -> keras.Variable:
    """The variable that counts every call of an optimizer; `iterations` skips those that only accumulate gradients.

    With a LossScaleOptimizer these are the calls of the one in it, of which it leaves some out.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return counter_of(optimizer.inner_optimizer)
    return attribute(keras, optimizer, "_iterations", keras.Variable)


def counters_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The counters of an optimizer and of those in it."""
    counters = [counter_of(one) for one in (optimizer, *inner_optimizers(optimizer))]
    return list({id(counter): counter for counter in counters}.values())


def place_of(optimizer: keras.Optimizer, variable: Any) -> int:
    """The index in `trained_variables` of a variable as `update_step` gets it."""
    # `update_step` gets TensorFlow's variable and not Keras's, so a search in the list would not find it by identity.
    place: int = attribute(keras, optimizer, "_get_variable_index", Callable)(variable)
    return place


def count_updates_in(optimizer: keras.Optimizer, counter: keras.Variable) -> None:
    """Makes an optimizer count its updates in the given variable."""
    # `iterations` is read-only. Adam's bias correction and schedules read the attribute, so both follow the counter.
    for one in (optimizer, *inner_optimizers(optimizer)):
        counter_of(one)
        one._iterations = counter


def learning_rate_of(optimizer: keras.Optimizer) -> Any:
    """The learning rate as it was given: a variable, a number, a schedule, or another function."""
    # The public `learning_rate` calls a schedule or function, and returns one number of it.
    return attribute(keras, optimizer, "_learning_rate", keras.Variable | float | Callable)


def config_of(optimizer: keras.Optimizer) -> dict[str, Any]:
    """The configuration of an optimizer, with the object itself if its rate is a schedule or another function."""
    rate = learning_rate_of(optimizer)
    if not callable(rate):
        return dict(optimizer.get_config())
    # Keras would serialize it, and those that users write need not support that.
    optimizer._learning_rate = 0.0
    try:
        return {**optimizer.get_config(), "learning_rate": rate}
    finally:
        optimizer._learning_rate = rate


def set_learning_rates(optimizer: keras.Optimizer, rates: Sequence[float]) -> None:
    """Sets the learning rate of each inner optimizer that has no schedule, to which Keras refuses to assign one."""
    inner = inner_optimizers(optimizer)
    if len(inner) != len(rates):  # those of another optimizer, with which the run began
        return
    for one, rate in zip(inner, rates, strict=True):
        if not callable(learning_rate_of(one)):
            one.learning_rate = rate


def scale_learning_rate(optimizer: keras.Optimizer, factor: Callable[[], Any]) -> None:
    """Makes an optimizer multiply its learning rate by what `factor` returns, wherever it uses it; None for 1."""
    current = attribute(keras, optimizer, "_get_current_learning_rate", Callable)

    def scaled() -> Any:
        by = factor()
        return current() if by is None else current() * by

    # Not `learning_rate`, which callbacks read and set and which may be a schedule. The updates of Keras's optimizers
    # and weight decay both read the rate here.
    optimizer._get_current_learning_rate = scaled


def follow_learning_rate(optimizer: keras.Optimizer, leader: keras.Optimizer) -> None:
    """Makes an optimizer use the learning rate of another one, whatever that may be."""
    optimizer._get_current_learning_rate = attribute(keras, leader, "_get_current_learning_rate", Callable)


def undecayed(optimizer: keras.Optimizer, variables: list[keras.Variable]) -> list[int]:
    """The indices of those variables to which an optimizer would not apply its weight decay."""
    # `exclude_from_weight_decay` is no part of the configuration: neither copies nor saved models would know it.
    excluded = getattr(optimizer, "_is_excluded_from_weight_decay", None)
    if callable(excluded):  # Keras 3.16 asks with its own variable, when it builds the optimizer
        return [index for index, variable in enumerate(variables) if excluded(variable)]
    uses = attribute(keras, optimizer, "_use_weight_decay", Callable)
    # Earlier ones ask with TensorFlow's variable, whose name is the whole path: `var_names` may be names of layers.
    return [index for index, variable in enumerate(variables) if not uses(variable.value)]


def clip_gradient(optimizer: keras.Optimizer, gradient: Any) -> Any:
    """The gradient of one variable as an optimizer clips it, by value or by a norm."""
    return attribute(keras, optimizer, "_clip_gradients", Callable)([gradient])[0]


def layers_of(model: keras.Layer) -> list[keras.Layer]:
    """The model itself and all its layers, nested ones included."""
    # The public `model.layers` lists only the outermost.
    layers: list[keras.Layer] = attribute(keras, model, "_flatten_layers", Callable)()
    return layers


def inputs_of(model: keras.Model) -> list[keras.KerasTensor]:
    """The inputs that a functional model declares; none for a subclass of keras.Model."""
    # In a class of the user's the attribute may be anything.
    declared = keras.tree.flatten(getattr(model, "inputs", ()))
    return [tensor for tensor in declared if isinstance(tensor, keras.KerasTensor)]


def table_of(layer: keras.Layer) -> keras.Variable | None:
    """The variable in which an Embedding looks rows up, and does nothing else with it; None for other layers."""
    # A subclass may do more in its call, or have other rows than those of its variable. One that is quantized, or
    # fine-tuned with LoRA, computes its rows.
    kind = keras.layers.Embedding
    if (
        not isinstance(layer, kind)
        or type(layer).call is not kind.call
        or type(layer).embeddings is not kind.embeddings
    ):
        return None
    if not layer.built or layer.lora_enabled or layer.quantization_mode:
        return None
    table: keras.Variable = attribute(keras, layer, "_embeddings", keras.Variable)
    return table


def dataset_of(store: Any, key: str) -> Any:
    """The dataset of h5py that a file has under a key for a layer that is being loaded, of which nothing is read yet.

    Returns:
        None if the file is of another kind, or has none.
    """
    module = module_of(SAVING)
    if not isinstance(store, attribute(keras, module, "H5IOStore", type)):
        return None
    # It refuses links to other files, which a file that comes from somebody else may have.
    get = attribute(keras, module, "safe_get_h5_dataset", Callable)
    # Its `store[key]` reads the whole.
    return get(attribute(keras, store, "_h5_entry_group", Mapping), key) if key in store else None


def own_layers_of_keras(model: keras.Model) -> list[keras.Layer]:
    """The layers of a model that Keras defines and that have no layers inside."""
    layers = [layer for layer in layers_of(model) if type(layer).__module__.partition(".")[0] == "keras"]
    return [layer for layer in layers if len(layers_of(layer)) == 1]


def seeds_of(model: keras.Model) -> list[keras.Variable]:
    """The seeds of the random layers of a model, which are among its non-trainable variables."""
    # By object and not by name: a layer of the user's may call any variable "seed_generator_state".
    generators = [each for layer in layers_of(model) for each in attribute(keras, layer, "_seed_generators", list)]
    return [generator.state for generator in generators]


def build_metrics(model: keras.Model, batch: tuple[Any, Any, Any]) -> None:
    """Builds the losses and metrics of a compiled model, as `Model.fit` does with its first batch.

    Args:
        batch: the tree (x, y, sample_weight) of `keras.KerasTensor`.
    """
    # Calling the metrics on a real batch would create their variables too, but would also count that batch.
    attribute(keras, model, "_symbolic_build", Callable)(data_batch=batch)


def loss_tracker_of(model: keras.Model) -> keras.metrics.Metric:
    """The metric that averages the loss of a compiled model."""
    return attribute(keras, model, "_loss_tracker", keras.metrics.Metric)


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
    """The loss of a batch; a `compute_loss` of the user's need not take `training`."""
    return attribute(keras, model, "_compute_loss", Callable)(x, y, y_pred, sample_weight, training=training)


def losses_of(model: keras.Model) -> list[Any]:
    """The losses of a compiled model whose metrics are built, without those of `add_loss` and regularizers."""
    # A model compiled without a loss has None here, and is trained by `add_loss` alone. Losses that a `compute_loss` of
    # the user's never calls are never built.
    compiled = attribute(keras, model, "_compile_loss", keras.losses.Loss | None)
    if compiled is None or not compiled.built:
        return []
    return [one.loss for one in attribute(keras, compiled, "_flat_losses", list)]


def output_trackers_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that average the loss of each output; empty for one output. The metrics must have been built."""
    compiled = attribute(keras, model, "_compile_loss", keras.losses.Loss | None)
    return [] if compiled is None else list(attribute(keras, compiled, "metrics", list))


def may_mix_examples(one: keras.losses.Loss | keras.metrics.Metric) -> bool:
    """Whether its value for an example may depend on others of the batch; of one that is not Keras's nobody knows."""
    function = getattr(one, "fn", type(one))  # of a loss that was given as a function
    if isinstance(one, keras.metrics.MeanMetricWrapper):
        function = attribute(keras, one, "_fn", Callable)
    is_of_keras = all(str(code.__module__).startswith("keras.") for code in (type(one), function))
    return not is_of_keras or getattr(function, "__name__", "") in MIXING


def leave_losses_unscaled() -> None:
    """Makes losses under a strategy, in this process, what they are outside of one.

    Keras divides the mean of each by the number of replicas, but neither a loss that is one number for a batch nor
    what a `compute_loss` of the user's returns.
    """
    module = module_of(LOSS)
    for name in SCALES:
        attribute(keras, module, name, Callable)
        setattr(module, name, lambda value: value)


def mask_of(output: Any) -> Any:
    """The mask that Keras layers have attached to a tensor, or None."""
    # Keras sets this attribute only on tensors with a mask, so its absence says nothing about the version; a probe
    # checks it instead.
    return getattr(output, "_keras_mask", None)


def profiles(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether a callback records a profile of some batches."""
    return bool(attribute(keras, callback, "_should_trace", bool))


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Names layers and models made in the block as a new process would: "dense", "dense_1" and so on."""
    # The caller of `fit` may have made models before, and a task starts from nothing: without this the same function
    # would give them variables of different names, and no snapshot would fit.
    get, put = (
        attribute(keras, module_of(GLOBAL_STATE), f"{what}_global_attribute", Callable) for what in ("get", "set")
    )
    before = get(NAME_COUNTS)
    # A new mapping instead of a cleared one, so that the counts of the caller's own models survive.
    put(NAME_COUNTS, collections.defaultdict(int))
    try:
        yield
    finally:
        put(NAME_COUNTS, before if before is not None else collections.defaultdict(int))
