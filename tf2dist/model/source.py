"""Where the model, the optimizer and the data of a run come from: the names of a configuration, or a call of `fit`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras

from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Splits
from tf2dist.data.layout import Layout
from tf2dist.data.loading import load
from tf2dist.errors import ConfigError
from tf2dist.model import checks
from tf2dist.model.models import build_model, build_optimizer
from tf2dist.model.optimizer_checks import check_copy, check_optimizer, prepare_choice
from tf2dist.model.plan import EpochPlan
from tf2dist.model.step import ModelStep
from tf2dist.process.parts import all_parts
from tf2dist.process.tf_internals import config_of, undecayed, with_inner

MakeOptimizer = Callable[[int], keras.Optimizer]  # of the number of updates in the whole run


class Source(Protocol):
    """What is trained; every task's process builds it for itself.

    Attributes:
        name: of the model, for messages.
        plan: of the epochs; None for a run whose length is given in steps.
    """

    name: str
    plan: EpochPlan | None

    def load(self) -> Splits:
        """The data, or this task's view of it."""

    def build(self, splits: Splits) -> keras.Model:
        """A new model, compiled or not; with equal weights in every process that has set the same random seed."""


class RegisteredSource:
    """What the options `model` and `data` name."""

    plan: EpochPlan | None = None

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.name = str(config.model["name"])

    def load(self) -> Splits:
        return load(self._config.data)

    def build(self, splits: Splits) -> keras.Model:
        return build_model(self._config.model, splits)


def build_step(
    source: Source, splits: Splits, config: RunConfig, scope: AbstractContextManager[Any]
) -> tuple[ModelStep, MakeOptimizer]:
    """Builds the model within `scope`, which places its variables, and checks what the trace of a step shows.

    Raises:
        ConfigError: unknown name or argument, or the model does not fit the data.
    """
    with scope:
        model = built_model(source, splits, config.seed)
    is_compiled = model.compiled
    if is_compiled:
        make_optimizer = copies_of(model, source.name)
    else:
        # Keras builds the losses and metrics of a compiled model only. Its optimizer is taken off below, unused.
        compile_classifier(source.name, model, splits.num_classes, "sgd")
        x, _, _ = splits.layout.symbolic()
        checks.check_outputs(source.name, model.compute_output_spec(x), int(splits.num_classes or 0))

        def make_optimizer(total_steps: int) -> keras.Optimizer:
            new = build_optimizer(config.optimizer, total_steps)
            prepare_choice(str(config.optimizer["name"]), new, model.trainable_variables)
            return new

    # The variables of an optimizer that the model has would count as those of the model.
    optimizer, model.optimizer = model.optimizer, None
    step = ModelStep(model, splits.layout)
    # A model that was trained before goes on with its optimizer's slots and schedule, as in `Model.fit`.
    has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)  # which may differ without an update
    if is_compiled and optimizer.built and (has_scale or int(optimizer.iterations.numpy())):
        step.earlier_optimizer = optimizer
    checks.check_metrics(source.name, step)
    checks.check_foreign(source.name, step.trace)
    return step, make_optimizer


def built_model(source: Source, splits: Splits, seed: int) -> keras.Model:
    """A model that has all its variables; the same seed gives the same weights everywhere.

    Raises:
        ConfigError: it is no model that can be trained here.
    """
    # Seeds Python and numpy, too, since a builder may draw its weights from those.
    keras.utils.set_random_seed(seed)
    model = source.build(splits)
    checks.check_model(source.name, model)
    checks.check_inputs(source.name, model, splits.layout)
    if not model.built:
        make_variables(model, splits.layout)
    checks.check_trainable(source.name, model)
    if model.compiled:
        prepare_choice(source.name, model.optimizer, model.trainable_variables)
    return model


def make_variables(model: keras.Model, layout: Layout) -> None:
    """Makes the variables of a subclass of `keras.Model` and of its layers, as its first call does."""
    x, _, _ = layout.symbolic()
    model(keras.tree.map_structure(lambda spec: keras.Input(spec.shape[1:], dtype=spec.dtype), x))


def plain_model(source: Source, splits: Splits, seed: int, new_optimizer: Callable[[], keras.Optimizer]) -> keras.Model:
    """A compiled model of the run with variables in this process, for what is done outside of the cluster.

    Args:
        new_optimizer: for a model that its builder has not compiled.
    """
    model = built_model(source, splits, seed)
    if not model.compiled:
        compile_classifier(source.name, model, splits.num_classes, new_optimizer())
    return model


def compile_classifier(
    name: str, model: keras.Model, num_classes: int | None, optimizer: keras.Optimizer | str
) -> None:
    """Compiles a model that gives the logits of classes.

    Raises:
        ConfigError: the data has no classes.
    """
    if num_classes is None:
        raise ConfigError(f"model ({name}): is not compiled, and the data has no classes; compile it with its loss")
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )


def copies_of(model: keras.Model, name: str) -> MakeOptimizer:
    """Makes optimizers like that of a compiled model, without its state.

    Raises:
        ConfigError: it is of no kind that can be used here.
    """
    return _copies_of(name, model.optimizer, model.trainable_variables)


def _copies_of(name: str, optimizer: keras.Optimizer, variables: list[keras.Variable]) -> MakeOptimizer:
    check_optimizer(name, optimizer)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        copies = [_copies_of(name, inner, variables) for inner in optimizer.optimizers]
        return lambda total_steps: with_inner(optimizer, [copy(total_steps) for copy in copies])
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        copy_inner = _copies_of(name, optimizer.inner_optimizer, variables)
        settings = optimizer.initial_scale, optimizer.dynamic_growth_steps, optimizer.name
        return lambda total_steps: type(optimizer)(copy_inner(total_steps), *settings)
    config = config_of(optimizer)
    excluded = all_parts([variables[index] for index in undecayed(optimizer, variables)])

    def copy(total_steps: int) -> keras.Optimizer:
        # A copy of the configuration, since `from_config` may replace entries of the one that it is given.
        new = type(optimizer).from_config(dict(config))
        if excluded:
            new.exclude_from_weight_decay(var_list=excluded)
        return new

    check_copy(name, optimizer, copy)
    return copy
