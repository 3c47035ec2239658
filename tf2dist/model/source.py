"""Sources of a run: where its model, optimizer and data come from, and how it is cut into epochs.

They come from the names of a configuration, or from a call of `fit`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from tf2dist.config.schema import RunConfig
from tf2dist.data.arrays import Layout
from tf2dist.data.loading import load
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError, naming
from tf2dist.model import model_checks, own_step, support
from tf2dist.model.builtin import build_model, build_optimizer
from tf2dist.model.compiled_step import CompiledStep
from tf2dist.model.interception import prepare_process
from tf2dist.model.optimizer_checks import check_copy, check_optimizer, has_trained, prepare_choice
from tf2dist.model.own_step import OwnStep, has_own_step
from tf2dist.model.shards import all_parts
from tf2dist.model.step import Step, is_own
from tf2dist.tf_internals.keras import MultiOptimizer, compute_loss, config_of, undecayed, with_inner


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The epochs of a run as in `keras.Model.fit`: at the end of each come its metrics, validation and callbacks.

    Attributes:
        epochs: the number of the epoch before which the run ends, counted from 0 like `initial_epoch`.
        steps_per_epoch: global steps; None: one pass over the data by the whole cluster; over streams, to the end of
            the data.
        validation_freq: the number of epochs from one validation to the next, or the numbers of the epochs with a
            validation, counted from 1.
        validation_batch_size: None: as many examples at once as are fast.
        validation_steps: batches to validate on; None: all.
        shuffle: whether every epoch has a permutation of its own.
    """

    epochs: int = 1
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_freq: int | tuple[int, ...] = 1
    validation_batch_size: int | None = None
    validation_steps: int | None = None
    shuffle: bool = True

    def validates(self, epoch: int) -> bool:
        """Whether there is a validation after an epoch, counted from 0."""
        # Keras counts epochs from 1 here, and from 0 everywhere else.
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


MakeOptimizer = Callable[[int], keras.Optimizer]  # of the number of updates in the whole run


class Source(Protocol):
    """A model with its data; every task's process builds it for itself.

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
    """The model and the data that the options `model` and `data` name."""

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
) -> tuple[Step, MakeOptimizer]:
    """Builds the model within `scope`, which places its variables, and checks what the trace of a step shows."""
    prepare_process()
    with scope:
        model = built_model(source, splits, config.seed)
        if has_own_step(model):
            return _build_own_step(source, splits, model)
    if not model.compiled:
        # Keras builds the losses and metrics of a compiled model only. Its optimizer is taken off again, unused: one
        # compiled without could not be cloned.
        compile_classifier(source.name, model, splits.num_classes, "sgd")
        model.optimizer = None
        x, _, _ = splits.layout.symbolic()
        with naming(f"model ({source.name})"):
            model_checks.check_outputs(model.compute_output_spec(x), int(splits.num_classes or 0))
    if model.optimizer:
        make_optimizer = copies_of(model.optimizer, model.trainable_variables, source.name)
    else:

        def make_optimizer(total_steps: int) -> keras.Optimizer:
            new = build_optimizer(config.optimizer, total_steps)
            prepare_choice(str(config.optimizer["name"]), new, model.trainable_variables)
            return new

    # The variables of an optimizer that the model has would count as those of the model.
    optimizer, model.optimizer = model.optimizer, None
    step = CompiledStep(model, splits.layout)
    if not step.trainable:
        raise ConfigError(
            f"model ({source.name}): its loss depends on none of its trainable variables; compile it with another loss"
        )
    if optimizer and has_trained(optimizer):
        step.earlier_optimizer = optimizer
    support.check_step(support.ALL, source.name, step)
    return step, make_optimizer


def _build_own_step(source: Source, splits: Splits, model: keras.Model) -> tuple[Step, MakeOptimizer]:
    """Builds the step of a model that has its own steps; see `build_step`."""
    step = OwnStep(model, splits.layout, source.name, _tested(splits))
    support.check_step(support.ALL, source.name, step)
    if has_trained(step.optimizer):
        step.earlier_optimizer = step.optimizer
    return step, copies_of(step.optimizer, step.trainable, source.name)


def built_model(source: Source, splits: Splits, seed: int) -> keras.Model:
    """A model that has all its variables; the same seed gives the same weights everywhere."""
    # Seeds Python and numpy, too, since a builder may draw its weights from those.
    keras.utils.set_random_seed(seed)
    model = source.build(splits)
    make_variables(model, source.name, splits.layout, _tested(splits))
    support.check_model(support.BUILT, source.name, model)
    if model.compiled and model.optimizer and not has_own_step(model):
        prepare_choice(source.name, model.optimizer, model.trainable_variables)
    return model


def _tested(splits: Splits) -> Layout | None:
    """The layout of what is evaluated; None if there is nothing."""
    return splits.evaluated_layout if splits.evaluated else None


def make_variables(model: keras.Model, model_name: str, layout: Layout, tested: Layout | None = None) -> None:
    """Makes the variables of a model that has none yet, as its first step in Keras does.

    Args:
        layout: of the data.
        tested: the layout of what is evaluated; None if there is nothing.
    """
    with naming(f"model ({model_name})"):
        model_checks.check_model(model)
    support.check_model(support.COMPILED, model_name, model)
    if has_own_step(model):
        own_step.build(model, layout, model_name, tested)
        return
    with naming(f"model ({model_name})"):
        model_checks.check_inputs(model, layout)
    # A subclass of `keras.Model` learns the shape of its input from its first call.
    if not model.built:
        x, _, _ = layout.symbolic()
        model(keras.tree.map_structure(lambda spec: keras.Input(spec.shape[1:], dtype=spec.dtype), x))
    if model.compiled and is_own(model, "compute_loss"):  # which may have layers

        def call(*leaves: tf.Tensor) -> None:
            x, y, sample_weight = layout.pack(list(leaves))
            compute_loss(model, x, y, model(x), sample_weight, training=True)

        tf.function(call, autograph=False).get_concrete_function(*layout.batched(None))


def plain_model(source: Source, splits: Splits, seed: int, new_optimizer: Callable[[], keras.Optimizer]) -> keras.Model:
    """A compiled model of the run with variables in this process, for what is done outside of the cluster.

    Args:
        new_optimizer: for a model that its builder has not compiled, or without an optimizer.
    """
    model = built_model(source, splits, seed)
    if not model.compiled:
        compile_classifier(source.name, model, splits.num_classes, new_optimizer())
    elif not model.optimizer and not has_own_step(model):
        arguments = keras.saving.deserialize_keras_object(model.get_compile_config())
        model.compile(**{**arguments, "optimizer": new_optimizer()})
    return model


def compile_classifier(
    model_name: str, model: keras.Model, num_classes: int | None, optimizer: keras.Optimizer | str
) -> None:
    """Compiles a model that gives the logits of classes."""
    if num_classes is None:
        raise ConfigError(
            f"model ({model_name}): is not compiled, and the data has no classes; compile it with its loss"
        )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )


def copies_of(optimizer: keras.Optimizer, trainable: list[keras.Variable], model_name: str) -> MakeOptimizer:
    """Makes optimizers like that of a compiled model, without its state.

    Args:
        trainable: the variables that it trains.
    """
    check_optimizer(model_name, optimizer)
    if isinstance(optimizer, MultiOptimizer):
        copies = [copies_of(inner, trainable, model_name) for inner in optimizer.optimizers]
        return lambda total_steps: with_inner(optimizer, [copy(total_steps) for copy in copies])
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        copy_inner = copies_of(optimizer.inner_optimizer, trainable, model_name)
        settings = optimizer.initial_scale, optimizer.dynamic_growth_steps, optimizer.name
        return lambda total_steps: type(optimizer)(copy_inner(total_steps), *settings)
    config = config_of(optimizer)
    excluded = all_parts([trainable[index] for index in undecayed(optimizer, trainable)])

    def copy(total_steps: int) -> keras.Optimizer:
        # A copy of the configuration, since `from_config` may replace entries of the one that it is given.
        new = type(optimizer).from_config(dict(config))
        if excluded:
            new.exclude_from_weight_decay(var_list=excluded)
        return new

    check_copy(model_name, optimizer, copy)
    return copy
