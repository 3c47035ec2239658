"""The model in the caller's process that callbacks see: it holds the variables of the cluster between two steps."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf2dist.checkpoint.snapshot import EARLIER_ARRAY, Snapshot, have_same_bits
from tf2dist.checkpoint.state import averages_left_out, named_variables
from tf2dist.data.arrays import Layout, Tree, have_same_structure
from tf2dist.errors import ConfigError, FitError, InstallationError, TrainingError, kind_of, reason_of, users_location
from tf2dist.model.compiled_step import CompiledStep
from tf2dist.model.copies import PLAIN, different_attribute, settings_of
from tf2dist.model.features import finalizes
from tf2dist.model.optimizer_checks import prepare_choice
from tf2dist.model.own_step import OwnStep, has_own_step, updates_per_step
from tf2dist.model.source import make_variables
from tf2dist.model.step import OUTSIDE, generators, read_directly
from tf2dist.tf_internals.keras import (
    build_metrics,
    config_of,
    counters_of,
    inner_optimizers,
    layers_of,
    learning_rate_of,
    set_learning_rates,
    trained_variables,
)
from tf2dist.training.hooks import NamedArrays

RatesAndSeeds = tuple[tuple[float, ...], NamedArrays]
LayerSettings = list[tuple[keras.Layer, dict[str, Any]]]


class Mirror:
    """Copies the cluster's variables into a model, and finds what callbacks have changed in it.

    Args:
        model: compiled and built, the one that callbacks see.
        worker_model: a model made as the workers make theirs, with the same layers as `model` in the same order, so
            that its variables have the names that the cluster uses; None if `model` itself was made so.
        layout: of the data; None if the steps of the model are those of Keras and read its own variables alone.

    Attributes:
        optimizer: of all trained variables.
        step: of the weights that the model holds; -1 while it holds its own, and None before the first call.
    """

    def __init__(
        self, model: keras.Model, worker_model: keras.Model | None = None, layout: Layout | None = None
    ) -> None:
        self.model, self._layout = model, layout
        self.step: int | None = None
        self._outside: dict[str, keras.Variable] = {}
        self._outside_values: NamedArrays = {}
        self.optimizer, self._per_step = _optimizer_of(model, layout)
        self._named = _named(self, worker_model or model, layout)
        self._generators = generators(model)
        self._trainable = {id(variable): variable.path for variable in model.trainable_variables}
        self._cluster_arrays: NamedArrays = {}
        # Unlike `iterations` they count the updates, too, that an optimizer only accumulates.
        self._counters = counters_of(self.optimizer)
        self._cluster_count = int(self._counters[0].numpy())
        # A LossScaleOptimizer leaves out updates; how many it has applied is among the arrays.
        self._counts_steps = not isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        self._cluster_rates: tuple[float, ...] = ()
        self._of_schedule = _read_by_schedule(self.optimizer)
        self._schedule_values = [np.array(_value(variable)) for variable in self._of_schedule]
        self._settings = self._settings_now()

    def put(self, arrays: NamedArrays, learning_rates: tuple[float, ...], step: int) -> None:
        """Copies the variables of the cluster at a step into the model.

        Args:
            arrays: all, or no weights and slots if no callback looks at them before the next call.
        """
        if self._layout and not self._outside and any(name.startswith(OUTSIDE) for name in arrays):
            shapes = {name: array.shape for name, array in arrays.items() if name.startswith(OUTSIDE)}
            self._find_outside(self._layout, shapes)
        has_weights = any(name.startswith("model/") for name in arrays)
        if has_weights or self.step is None:
            self.step = step if has_weights else -1
        for name, array in arrays.items():
            if name == EARLIER_ARRAY:
                continue
            variable = self._named.get(name, self._generators.get(name))
            if variable is None:
                raise TrainingError(
                    f"model: the tasks have {name}, and the model in this process has not; the function that builds "
                    "it must give the same layers at each call"
                )
            variable.assign(array)
        # A run counts its steps from 0, but a model that was trained before goes on with its own count in Keras, and
        # learning rate schedules depend on it. Of a run that goes on the model at hand may have been trained longer.
        counted = step + int(arrays.get(EARLIER_ARRAY, 0))
        self._cluster_count = counted if self._counts_steps else int(self._counters[0].numpy())
        for counter, times in zip(self._counters, self._per_step, strict=True):
            counter.assign(times * self._cluster_count)
        for average, variable in averages_left_out(self._named, arrays).items() if has_weights and counted else ():
            self._named[average].assign(self._named[variable])
        set_learning_rates(self.optimizer, learning_rates)
        # What is mapped from a file is kept as it came, for which no memory is taken. The rest is read back.
        self._cluster_arrays = {
            name: array if isinstance(array, np.memmap) else np.array(_value(self._named[name]))
            for name, array in arrays.items()
            if name in self._named
        }
        # Read back from the model: its variables may round a rate, and that must not look like a change by a callback.
        self._cluster_rates = self._learning_rates()

    def put_saved(self, snapshot: Snapshot) -> None:
        """Copies the variables of a checkpoint into the model."""
        names = {*self._named, EARLIER_ARRAY}
        arrays = {name: array for name, array in snapshot.arrays.items() if name in names}
        self.put(arrays, self._learning_rates(), snapshot.step)

    def rates_and_seeds(self) -> RatesAndSeeds:
        """What a checkpoint does not have of the model."""
        return self._learning_rates(), {name: np.array(_value(seed)) for name, seed in self._generators.items()}

    def finish(self, snapshot: Snapshot, state: RatesAndSeeds) -> None:
        """Makes the model the finished one of a run of which this is the last checkpoint."""
        rates, seeds = state
        set_learning_rates(self.optimizer, rates)
        self.put_saved(snapshot)
        for name, seed in seeds.items():
            self._generators[name].assign(seed)
        if finalizes(self.optimizer):  # a run goes on from the weights before that
            self.optimizer.finalize_variable_values(trained_variables(self.optimizer))

    def restore_outside(self) -> None:
        """Gives the variables that are not the model's what they held in this process before the training."""
        # A task that imports the user's module creates its own, and does not know what the user has assigned since.
        for name, array in self._outside_values.items():
            self._outside[name].assign(array)

    def _find_outside(self, layout: Layout, in_tasks: dict[str, tuple[int, ...]]) -> None:
        """Finds the variables that a step reads and that are not the model's; `in_tasks`: the shapes in the tasks."""
        self._outside = outside_of(self.model, layout)
        shapes = {name: tuple(variable.shape) for name, variable in self._outside.items()}
        if shapes != in_tasks:
            paths = ", ".join(variable.path for variable in self._outside.values()) or "none"
            raise FitError(
                f"model: its steps read {len(in_tasks)} variables in the tasks that are not its own, and other ones in "
                f"this process ({paths}); make them its own, as with model.beta = beta, in a function that builds it"
            )
        rates = [learning_rate_of(inner) for inner in inner_optimizers(self.optimizer)]
        kept = set(map(id, self.optimizer.variables)) - set(map(id, rates))
        if read := [variable.path for variable in self._outside.values() if id(variable) in kept]:
            raise FitError(
                f"model: its steps read {read[0]} of its optimizer, as metrics do that show the rate of a schedule, "
                "and the tasks keep it elsewhere; log the rate in on_epoch_end of a callback, as with "
                "logs['rate'] = float(self.model.optimizer.learning_rate)"
            )
        self._outside_values = {name: np.array(_value(variable)) for name, variable in self._outside.items()}
        self._named |= self._outside

    def changes(self) -> tuple[NamedArrays, tuple[float, ...]]:
        """The arrays that differ from those of the cluster, and the learning rates if one differs."""
        self._check_settings()
        for counter, times in zip(self._counters, self._per_step, strict=True):
            if (count := int(counter.numpy())) != (wanted := times * self._cluster_count):
                raise FitError(
                    f"callbacks: optimizer.iterations was {wanted} and is {count} now, but only the cluster counts "
                    "updates; do not assign it in a callback"
                )
        trainable = {id(variable): variable.path for variable in self.model.trainable_variables}
        if changed := trainable.keys() ^ self._trainable.keys():
            path = next(path for key, path in (self._trainable | trainable).items() if key in changed)
            raise FitError(
                f"callbacks: whether {path} is trained was changed, but the steps of the tasks are made "
                "already; set `trainable` before the model is compiled, and call fit once for each choice"
            )
        for variable, value in zip(self._of_schedule, self._schedule_values, strict=True):
            if not np.array_equal(_value(variable), value, equal_nan=True):
                raise FitError(
                    f"callbacks: {variable.name} was changed, which the schedule of the learning rate reads, but the "
                    "tasks have schedules of their own; give the optimizer a number, and assign its learning_rate"
                )
        # One after the other, which needs no second copy of large ones. By their bits: a weight that is NaN differs
        # from itself, and would be sent back after every call.
        changes = {
            name: array
            for name, of_cluster in self._cluster_arrays.items()
            if not have_same_bits(array := _value(self._named[name]), of_cluster)
        }
        rates = self._learning_rates()
        return changes, rates if rates != self._cluster_rates else ()

    def layer_settings(self) -> LayerSettings:
        """Numbers and texts by which layers of the model are what they are; Keras reads them in its first step."""
        return [
            (layer, {key: value for key, value in settings_of(layer).items() if isinstance(value, PLAIN)})
            for layer in layers_of(self.model)
        ]

    def check_layer_settings(self, before: LayerSettings) -> None:
        """Refuses settings that a callback has changed before the first step; all later ones Keras ignores."""
        for layer, settings in before:
            if (key := different_attribute(settings, vars(layer))) is not None:
                was, now = settings[key], vars(layer).get(key)
                raise FitError(
                    f"callbacks: {key} of {layer.name} was {was!r} and is {now!r} now, but the steps of the tasks are "
                    "made already; set it before fit"
                )

    def _check_settings(self) -> None:
        now = self._settings_now()
        for key, value in self._settings.items():
            # By identity unless both are plain values: == of variables compares what they hold.
            new = now.get(key)
            if new is not value and not (isinstance(new, PLAIN) and isinstance(value, PLAIN) and new == value):
                was, became = (repr(one) if isinstance(one, PLAIN) else kind_of(one) for one in (value, new))
                raise FitError(
                    f"callbacks: {key[1]} was {was} and is {became} now, but the steps of the tasks are made already; "
                    "set it before fit"
                )

    def _settings_now(self) -> dict[tuple[int, str], Any]:
        """Settings of optimizers that are no variables; Keras takes them when it traces the first step."""
        settings: dict[tuple[int, str], Any] = {(0, "model.optimizer"): self.model.optimizer}
        inner = inner_optimizers(self.optimizer)
        for one in inner:
            # Of its own attributes those that make another optimizer; others may be a callback's notes.
            names = config_of(one).keys() & vars(one).keys() - {"name"}
            plain = {name: value for name in names if isinstance(value := getattr(one, name), PLAIN)}
            settings |= {(id(one), f"{type(one).__name__}.{name}"): value for name, value in plain.items()}
        return settings | {(id(one), f"{type(one).__name__}.learning_rate"): learning_rate_of(one) for one in inner}

    def _learning_rates(self) -> tuple[float, ...]:
        """The learning rate of each inner optimizer; 0 for a schedule, which callbacks cannot change."""
        rates = [learning_rate_of(inner) for inner in inner_optimizers(self.optimizer)]
        numbers = (keras.ops.convert_to_numpy(rate) if isinstance(rate, keras.Variable) else 0.0 for rate in rates)
        return tuple(map(float, numbers))


def outside_of(model: keras.Model, layout: Layout) -> dict[str, keras.Variable]:
    """The variables that a training step reads and that are not the model's, by their names in the cluster."""
    if has_own_step(model):
        return {name: variables[0] for name, variables in _own_step(model, layout).outside.items()}
    with _without_optimizer(model):  # as the step of the tasks
        return {name: variables[0] for name, variables in CompiledStep(model, layout).outside.items()}


@contextlib.contextmanager
def _without_optimizer(model: keras.Model) -> Iterator[None]:
    optimizer, model.optimizer = model.optimizer, None
    try:
        yield
    finally:
        model.optimizer = optimizer


def _read_by_schedule(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The variables that a schedule of the learning rate reads, beside those of the optimizer."""
    scheduled = [inner for inner in inner_optimizers(optimizer) if callable(learning_rate_of(inner))]
    if not scheduled:
        return []
    traced = tf.function(lambda: [inner.learning_rate for inner in scheduled], autograph=False).get_concrete_function()
    return read_directly(traced, optimizer.variables)


def _own_step(model: keras.Model, layout: Layout) -> OwnStep:
    return OwnStep(model, layout, model.name, None)


def _optimizer_of(model: keras.Model, layout: Layout | None) -> tuple[keras.Optimizer, list[int]]:
    """The optimizer of all trained variables of a compiled model, built, and how much a step moves its counters."""
    step = _own_step(model, layout) if has_own_step(model) and layout else None
    optimizer = step.optimizer if step else model.optimizer
    # An optimizer makes its variables only when it is built.
    if not optimizer.built:
        optimizer.build(step.trainable if step else model.trainable_variables)
    return optimizer, updates_per_step(optimizer, step.groups) if step else [1] * len(counters_of(optimizer))


def _named(mirror: Mirror, worker_model: keras.Model, layout: Layout | None) -> dict[str, keras.Variable]:
    """The variables of the model and its optimizer, by the names that those of `worker_model` have in checkpoints."""
    # If both models are one object, it is built once.
    of_worker = mirror.optimizer if worker_model is mirror.model else _optimizer_of(worker_model, layout)[0]
    named = named_variables(worker_model, worker_model.weights, [of_worker])
    names = {id(variables[0]): name for name, variables in named.items()}
    # Paired by position: Keras numbers unnamed layers separately in each process, so only the order is the same.
    pairs = [*zip(worker_model.weights, mirror.model.weights, strict=True)]
    pairs += zip(of_worker.variables, mirror.optimizer.variables, strict=True)
    return {names[id(source)]: variable for source, variable in pairs if id(source) in names}


def _value(variable: keras.Variable) -> np.ndarray:
    """The value as checkpoints hold it: numpy's files do not know bfloat16, and float32 holds it exactly.

    The array may share the memory of the variable, so it is to be read at once; `numpy()` and Keras would copy it.
    """
    array = np.asarray(tf.convert_to_tensor(variable))
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)


def build(model: keras.Model, name: str, layout: Layout, with_optimizer: bool = True) -> None:
    """Creates the variables of a model that has none yet, and those of its metrics, as `keras.Model.fit` does.

    Args:
        name: of the model, for messages.
        layout: of the data.
        with_optimizer: whether its optimizer gets its variables, too; one that has counted updates gets them anyway.
    """
    try:
        make_variables(model, name, layout)
    except ConfigError:
        raise
    except Exception as error:  # as below
        raise FitError(f"{_uncallable(name, layout, reason_of(error))}{users_location(error)}") from error
    if has_own_step(model):
        return
    counters = counters_of(model.optimizer) if isinstance(model.optimizer, keras.Optimizer) else []
    with_optimizer = with_optimizer or any(int(counter.numpy()) for counter in counters)
    if with_optimizer:
        _build_optimizer(model, name)
    try:
        with contextlib.nullcontext() if with_optimizer else _without_optimizer(model):
            build_metrics(model, layout.symbolic())
    except InstallationError:
        raise
    except Exception as error:  # Keras raises errors of many types, and user code of any
        raise FitError(_misfit(model, name, layout, reason_of(error))) from error


def _build_optimizer(model: keras.Model, name: str) -> None:
    """Raises FitError if the optimizer has no slots for the model's variables, or cannot make them."""
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.Optimizer):  # compiled without one, which is refused later
        return
    prepare_choice(name, optimizer, model.trainable_variables)
    prefix = f"model ({name}): its optimizer {type(optimizer).__name__}"
    try:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    except Exception as error:  # the user's `build` may raise anything
        raise FitError(f"{prefix} cannot be built ({reason_of(error)}{users_location(error)}); correct it") from error
    owned = set(map(id, trained_variables(optimizer)))
    if unknown := [variable.path for variable in model.trainable_variables if id(variable) not in owned]:
        raise FitError(
            f"{prefix} was built for other variables, without {unknown[0]}; compile the model with a new one"
        )


def _misfit(model: keras.Model, name: str, layout: Layout, reason: str) -> str:
    """The mistake in the data of a model whose metrics cannot be built, and the way out."""
    x, y, _ = layout.symbolic()
    try:
        outputs = model.compute_output_spec(x)
    except Exception:
        return _uncallable(name, layout, reason)
    if y is None:
        return f"y: is None, and model ({name}) has losses or metrics that compare with it ({reason}); give y"
    if not have_same_structure(y, outputs):
        return (
            f"y ({_shape_of(y)}): must be built like the outputs of the model, {_shape_of(outputs)}; give an array for "
            "each output, in the same dicts and lists"
        )
    return (
        f"model ({name}): its losses or metrics do not take {layout} ({reason}); compile it with others, or give other "
        "data"
    )


def _uncallable(name: str, layout: Layout, reason: str) -> str:
    return f"model ({name}): cannot be called with x of the data, {layout} ({reason}); give what it takes"


def _shape_of(tree: Tree) -> str:
    """Such as {'a': *, 'b': [*, *]}."""
    return str(keras.tree.map_structure(lambda _: "*", tree)).replace("'*'", "*")
