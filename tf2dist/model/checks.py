"""Checks of the user's model and optimizer before any training; a refusal is one line.

What could be supported and is not yet is refused in `check_model`, `check_inputs` and `check_outputs`.
"""

import inspect
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Layout, leaves_of
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError, kind_of
from tf2dist.model.batch_dependence import Dependence, StateChange, loss_dependence, state_changes
from tf2dist.model.gradients import WAY_OUT
from tf2dist.model.own_step import OwnStep, has_own_step
from tf2dist.model.step import MEANS, WEIGHTED_MEAN, ModelStep
from tf2dist.model.trace import Trace
from tf2dist.tf_internals import groups_of, inner_optimizers, layers_of, seeds_of

CROSSENTROPIES = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy)
# Types of TensorFlow's operations, by which the graph of a model shows what its outputs are.
PROBABILITIES = ("Softmax", "Sigmoid")
KEEP_VALUES = ("Identity", "Cast", "Reshape", "Squeeze", "StopGradient", "EnsureShape")


def check_builder(name: str, function: Any, fixed: dict[str, Any]) -> None:
    """Refuses a builder of models that does not take the arguments (`fixed`) that every builder is given."""
    parameters = inspect.signature(function).parameters.values()
    takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not takes >= fixed.keys() and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(
            f"model ({name}): its function must take {' and '.join(fixed)}; write def {name}({', '.join(fixed)})"
        )


def check_images(name: str, splits: Splits) -> None:
    """Refuses data that is not one array with classes, for one of the built-in classifiers."""
    shape = splits.input_shape
    if not splits.num_classes or not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ConfigError(
            f"model ({name}): classifies images, and the data is {splits.layout}; register a model that fits it"
        )


def check_impressions(name: str, splits: Splits) -> None:
    """Refuses data that does not show items to users, for `two_tower`."""
    shape = splits.input_shape
    if not isinstance(shape, dict) or shape.keys() != {"user", "item", "context"}:
        raise ConfigError(
            f"model ({name}): takes user, item and context, and the data is {splits.layout}; register a model that fits"
        )


def check_model(name: str, model: Any) -> None:
    """Refuses what a builder returns if it is not a model that can be trained here."""
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"model ({name}): its function gives {kind_of(model)}, and must give a keras.Model; return the model"
        )
    if has_own_step(model) and not model.compiled:
        raise ConfigError(f"model ({name}): has a step of its own, and is not compiled; call its compile")
    if has_own_step(model) and model.run_eagerly:
        raise ConfigError(
            f"model ({name}): has run_eagerly=True, but the tasks compile their steps; leave it out, and use tf.print "
            "to see values inside the model"
        )


def check_inputs(name: str, model: keras.Model, layout: Layout) -> None:
    """Refuses a model that takes more or fewer inputs than the data has, or a single one of another shape."""
    inputs = getattr(model, "inputs", None)
    if inputs is None:  # a subclass of keras.Model declares no inputs; its first call shows what fits
        return
    data_inputs = leaves_of(layout.symbolic()[0])
    if len(inputs) != len(data_inputs):
        raise ConfigError(f"model ({name}): has {len(inputs)} inputs, and x of the data has {len(data_inputs)}")
    if len(data_inputs) > 1:
        return
    shape = list(data_inputs[0].shape[1:])
    expected = list(inputs[0].shape[1:])
    # Keras itself adds or removes a last dimension of 1.
    fits = (expected, [*expected, 1], expected[:-1] if expected[-1:] == [1] else expected)
    if not any(tf.TensorShape(accepted).is_compatible_with(shape) for accepted in fits):
        raise ConfigError(
            f"model ({name}): takes inputs of {expected}, and the data has {shape}; begin with keras.Input(input_shape)"
        )


def check_trainable(name: str, model: keras.Model) -> None:
    """Refuses a model with nothing to train, or with variables that are not trained by gradients."""
    if not model.trainable_variables:
        raise ConfigError(f"model ({name}): has no trainable variables")
    if overwritten := [v.path for v in model.trainable_variables if v.overwrite_with_gradient]:
        raise ConfigError(
            f"model ({name}): {overwritten[0]} takes its gradient as its value, as in float8 training; use "
            "devices.precision=bfloat16"
        )


def check_outputs(name: str, outputs: Any, num_classes: int) -> None:
    """Refuses a model that does not give one logit for each class; `outputs` are symbolic."""
    if not isinstance(outputs, keras.KerasTensor):
        raise ConfigError(
            f"model ({name}): gives {kind_of(outputs)}, and must give one tensor, the logits of {num_classes} classes"
        )
    if list(outputs.shape[1:]) != [num_classes]:
        shape = [n or "batch" for n in outputs.shape]
        raise ConfigError(
            f"model ({name}): gives [{', '.join(map(str, shape))}], and must give [batch, {num_classes}], a logit for "
            f"each class; end with Dense(num_classes)"
        )


def check_losses(name: str, step: ModelStep, num_replicas: int) -> None:
    """Refuses losses whose gradient over a whole step does not follow from the gradients of the replicas.

    Args:
        num_replicas: how many share a step; 1 with mode=async, where every step is of one worker's batch.
    """
    kinds = {getattr(loss, "reduction", None) for loss in step.losses}
    if None in kinds or "none" in kinds:
        raise ConfigError(
            f"model ({name}): has a loss that gives no single number; give it reduction='sum_over_batch_size'"
        )
    if num_replicas == 1:
        return
    # A mean is weighted by the replica's share of the step, a sum is not: their total cannot be treated as either.
    if "sum" in kinds and (len(step.losses) > 1 or step.trace.penalties):
        raise ConfigError(
            f"model ({name}): a loss with reduction=sum beside others cannot be shared by synchronous workers; use "
            "sum_over_batch_size, or mode=async"
        )
    # With a mask Keras divides by the parts that are left, whose number differs between the replicas. Only of a single
    # loss is the total known in time.
    if _is_weighted(step, kinds) and (not step.weighs_losses or step.trace.penalizes_batch):
        raise ConfigError(
            f"model ({name}): has several losses, of which one is divided by the parts of the outputs that a mask or "
            "weights leave, or by the length of a batch, and no synchronous worker alone knows how many these are; "
            "give sample_weight instead of a mask and batches of one length, or use mode=async"
        )


def check_unweighted(name: str, step: ModelStep, option: str) -> None:
    """Refuses losses that are divided by what only the forward pass shows, where the shares of the workers are fixed.

    Args:
        option: the choice that makes it so.
    """
    if _is_weighted(step, {getattr(loss, "reduction", None) for loss in step.losses}):
        raise ConfigError(
            f"model ({name}): its loss is divided by the parts of the outputs that a mask or weights leave, which "
            f"differ between the workers, and with {option} all gradients count alike; use mode=sync or mode=async"
        )


def _is_weighted(step: ModelStep, reductions: set[Any]) -> bool:
    """Whether a loss is divided by anything but the number of examples."""
    is_one_number = step.trace.has_scalar_loss and len(step.losses) == 1
    return not (step.has_own_loss or is_one_number) and (
        WEIGHTED_MEAN in reductions or (step.trace.divides_by_parts and bool(reductions & {*MEANS}))
    )


def check_metrics(name: str, step: ModelStep) -> None:
    """Refuses metrics whose variables are not sums over the examples."""
    not_sums = list(step.trace.not_additive)
    # A step begins with zeros in all of these (see `Metrics`), so a metric must, too.
    step.model.reset_metrics()
    not_sums += [v for v in step.metrics.variables if np.any(v.numpy())]
    if not_sums:
        raise ConfigError(
            f"model ({name}): the metric variable {not_sums[0].path} is no sum over the examples, so several workers "
            "cannot add it up; leave the metric out, and compute it with the trained model"
        )


def check_made(name: str, step: ModelStep) -> None:
    """Refuses variables that are made when a step is traced, too late to be trained."""
    known = {id(v) for v in step.variables} | {id(v) for v in seeds_of(step.model)}
    if made := [v for v in step.model.trainable_variables if id(v) not in known]:
        raise ConfigError(
            f"model ({name}): {made[0].path} is made in the first step and would not be trained; make it in __init__ "
            "or build of the model"
        )


def check_foreign(name: str, trace: Trace) -> None:
    """Refuses a call that assigns variables outside of the model, such as Keras' global random generator."""
    if trace.foreign:
        raise ConfigError(
            f"model ({name}): its call changes {trace.foreign[0]}, which is no variable of the model, so every step "
            "would find it unchanged; make it a weight of a layer (add_weight), or for random functions a "
            "keras.random.SeedGenerator of a layer; a recurrent layer needs stateful=False"
        )


def check_reads(name: str, trace: Trace) -> None:
    """Refuses a call that reads variables of the model past Keras, so that a step's values do not reach it."""
    if trace.bypassed:
        raise ConfigError(
            f"model ({name}): its call reads {trace.bypassed[0]} as a variable of TensorFlow, as a function does that "
            f"was traced before, and would not train it; {WAY_OUT}"
        )


def check_gradients(name: str, step: ModelStep) -> None:
    """Refuses a model of which a step leaves variables untrained that `keras.Model.fit` trains."""
    if not step.trace.ungraded:
        return
    if lost := step.graded_by_keras(step.trace.ungraded):
        raise ConfigError(
            f"model ({name}): {lost[0].path} gets no gradient here, and gets one in keras.Model.fit; {WAY_OUT}"
        )


def check_assigned(name: str, trace: Trace) -> None:
    """Refuses, for mode=async, a model that assigns trainable variables: updates of other workers would be lost."""
    if trace.assigned:
        raise ConfigError(
            f"model ({name}): its call assigns {trace.assigned[0].path}, which is trained: with mode=async the updates "
            "that other workers made meanwhile would be lost; use mode=sync"
        )


def check_updates(name: str, step: ModelStep) -> str:
    """Refuses, for mode=async, a step of the model's own that trains a variable twice; returns a note for the user.

    A worker pushes all updates of a step at its end, and has computed them from the values at its beginning.
    """
    if not isinstance(step, OwnStep) or not step.is_in_phases:
        return ""
    if step.repeats:
        raise ConfigError(
            f"model ({name}): its train_step applies an optimizer, or trains a variable, more than once, and with "
            "mode=async all updates of a step are computed from the values at its beginning; use mode=sync"
        )
    return (
        "the train_step reads weights that it has updated: with mode=async it finds the values that it began with, and "
        "its updates are applied at its end"
    )


def check_whole_updates(name: str, step: ModelStep, option: str) -> None:
    """Refuses a step of the model's own that goes on with what it has updated, where updates wait for the step's end.

    Args:
        option: the choice that makes them wait.
    """
    if isinstance(step, OwnStep) and step.is_in_phases:
        raise ConfigError(
            f"model ({name}): its train_step goes on with what it has updated, and with {option} all updates are "
            "applied at the end of a step; use mode=sync with algorithm=plain, or mode=async"
        )


def check_state(name: str, state: list[keras.Variable]) -> None:
    """Refuses, for mode=sync, state whose change has no mean over the workers."""
    # What workers add up are differences, new value less old value, and these types have no negative ones.
    unsigned = [variable for variable in state if variable.dtype == "bool" or variable.dtype.startswith("uint")]
    if unsigned:
        raise ConfigError(
            f"model ({name}): {unsigned[0].path} is of type {unsigned[0].dtype}, and its changes on several workers "
            "have no mean; make it float32 or int32, or use mode=async"
        )


def check_batches(name: str, step: ModelStep, splits: Splits, gathers: bool = True) -> str:
    """Refuses, for several synchronous replicas, what they cannot put together from their parts of a batch.

    Args:
        gathers: whether `tf2dist.gather` gives the tensors of all workers.

    Returns:
        A note for the user about what is neither the sum nor the mean over the examples; empty if nothing is.
    """
    dependence = loss_dependence(step, splits, gathers)
    if dependence is Dependence.SUM and isinstance(step, OwnStep):
        raise ConfigError(
            f"model ({name}): the gradients of its train_step are a sum over the batch, of which several synchronous "
            "workers would take the mean; take the mean over the examples, or use mode=async"
        )
    if dependence is Dependence.SUM:
        raise ConfigError(
            f"model ({name}): its loss is a sum over the batch, of which several synchronous workers would take the "
            "mean; give the mean over the examples, or to compile a loss with reduction='sum', or use mode=async"
        )
    note = ""
    if dependence is Dependence.NEITHER:
        what, whats = ("gradient", "gradients") if isinstance(step, OwnStep) else ("loss", "losses")
        note = (
            f"the {what} of a batch is not the mean over its examples: each step takes the mean of the {whats} of the "
            "workers' batches, as DistributedDataParallel, Horovod and MirroredStrategy do"
        )
    return "; ".join(filter(None, (note, _check_changes(name, state_changes(step, splits, gathers), gathers))))


def _check_changes(name: str, changes: list[StateChange], gathers: bool) -> str:
    """See `check_batches`, for the state."""
    # A moving average of what is no mean goes on from the mean of the workers' values, as that of a variance does in
    # BatchNormalization. Of largest values, queues or last examples a mean is none of them.
    others = [change for change in changes if change.dependence is Dependence.NEITHER]
    if odd := [change.variable.path for change in others if not change.decay]:
        way_out = "compute it from" if gathers else "use mode=sync, and compute it from"
        raise ConfigError(
            f"model ({name}): every step gives {odd[0]} a value that is not shown to be a mean over its batch, and "
            f"several synchronous workers would take the mean of theirs; {way_out} tf2dist.gather(...) of what it "
            "takes from the batch, or say that the mean is meant, as in add_weight(aggregation='mean'), or use "
            "mode=async"
        )
    if added := [change.variable.path for change in changes if change.dependence is Dependence.SUM]:
        raise ConfigError(
            f"model ({name}): every step adds to {added[0]} a sum over its batch, of which several synchronous "
            "workers would take the mean; say which you mean, as in add_weight(aggregation='sum'), or use mode=async"
        )
    if not others:
        return ""
    paths = ", ".join(change.variable.path for change in others)
    return (
        f"{paths}: what a step adds is not the mean over the examples of its batch, and each step adds the mean of "
        "what the workers' batches give, as BatchNormalization does; aggregation='mean' says that this is meant"
    )


def check_aggregation(name: str, step: ModelStep, option: str) -> None:
    """Refuses state of which several replicas take anything but the mean of their changes.

    Args:
        option: the choice by which they take the mean.
    """
    changed = [v for v in step.state if id(v) in step.trace.decays]
    if not_means := [v for v in changed if v.aggregation not in ("none", "mean")]:
        raise ConfigError(
            f"model ({name}): {not_means[0].path} has aggregation='{not_means[0].aggregation}', and with {option} the "
            "workers take the mean of their changes; use mode=sync with algorithm=plain, or mode=async"
        )


def check_last_batch(name: str, model: keras.Model, last_batch: int, num_workers: int) -> None:
    """Refuses synchronized layers if a worker has no example in the last step of a pass over the data.

    That worker computes an example of padding, with weight 0. A synchronized layer would count it like the others.

    Args:
        last_batch: examples in that step, of all workers together; 0 if it is as large as the others.
    """
    synchronized = _synchronized(model)
    if synchronized and 0 < last_batch < num_workers:
        raise ConfigError(
            f"model ({name}): {synchronized[0].name} is synchronized, and the last step of a pass over the data has "
            f"{last_batch} examples for {num_workers} workers; choose another train.batch_size_per_worker"
        )


def check_compiled(name: str, step: ModelStep, by_xla_for_several: bool) -> None:
    """Refuses synchronized layers and `gather` with XLA and several workers: XLA cannot compile their all-reduce."""
    if not by_xla_for_several:
        return
    if synchronized := _synchronized(step.model):
        raise ConfigError(
            f"model ({name}): {synchronized[0].name} is synchronized, which devices.xla=true cannot compile for "
            "several workers; leave one of the two out"
        )
    if step.trace.gathers:
        raise ConfigError(
            f"model ({name}): calls tf2dist.gather, which devices.xla=true cannot compile for several workers; leave "
            "one of the two out"
        )


def check_unsynchronized(name: str, model: keras.Model, option: str, way_out: str) -> None:
    """Refuses synchronized layers where a worker computes its gradient without the others.

    Args:
        option: the choice that makes it so.
        way_out: another choice.
    """
    if synchronized := _synchronized(model):
        raise ConfigError(
            f"model ({name}): {synchronized[0].name} is synchronized, and with {option} no worker waits for the "
            f"others while it computes; leave synchronized out, or use {way_out}"
        )


def _synchronized(model: keras.Model) -> list[keras.Layer]:
    return [layer for layer in layers_of(model) if getattr(layer, "synchronized", False)]


class Advice(NamedTuple):
    """What the user should know of a model before it is trained; each is empty if there is nothing.

    Attributes:
        warning: asks for a change.
        note: says what differs from Keras, and asks for nothing.
    """

    warning: str
    note: str


def advice_on(step: ModelStep, optimizer: keras.Optimizer, note: str) -> Advice:
    """What is to be said of a model and its optimizer.

    Args:
        note: what is known already.
    """
    notes = (note, note_on_first_values(optimizer) or note_on_lookups(step, optimizer), note_on_numbers(step))
    return Advice(advice_on_outputs(step), "; ".join(filter(None, notes)))


def advice_on_outputs(step: ModelStep) -> str:
    """A warning if the loss takes outputs for logits that look like probabilities; empty otherwise."""
    losses = [loss for loss in step.losses if isinstance(loss, CROSSENTROPIES)]
    if not (len(losses) == 1 and losses[0].get_config()["from_logits"] and tf.is_tensor(step.trace.outputs)):
        return ""
    tensor = step.trace.outputs
    while tensor.op.type in KEEP_VALUES:  # for example a cast to float32 at the end of a model in bfloat16
        tensor = tensor.op.inputs[0]
    if tensor.op.type not in PROBABILITIES:
        return ""
    function = tensor.op.type.lower()
    return (
        f"the model ends with {function}, and its outputs are taken for logits, to which the loss applies a softmax of "
        f"its own: it will learn slowly; leave the {function} out"
    )


def note_on_numbers(step: ModelStep) -> str:
    """What differs from Keras in the numbers that a step of the model's own returns; empty if nothing does."""
    if not isinstance(step, OwnStep):
        return ""
    names = dict.fromkeys([*step.metrics.numbers, *step.evaluated.numbers])
    if not names:
        return ""
    return (
        f"{', '.join(names)}: the history has the mean over the steps of an epoch, and keras.Model.fit shows that of "
        "the last step; to have the same, return the result of a keras.metrics.Mean"
    )


def note_on_lookups(step: ModelStep, optimizer: keras.Optimizer) -> str:
    """What differs from Keras on TensorFlow for rows that a batch looks up twice; empty if nothing does."""
    # On TensorFlow Keras' gradient of a table is sparse, with an entry for each look-up; the packed one is dense. For
    # an update that is linear in the gradient, as SGD's is, that is the same.
    groups = groups_of(optimizer, step.trainable)
    squared = {id(v) for inner, trained in groups if not isinstance(inner, keras.optimizers.SGD) for v in trained}
    embeddings = [layer for layer in layers_of(step.model) if isinstance(layer, keras.layers.Embedding)]
    tables = [layer for layer in embeddings if any(id(weight) in squared for weight in layer.trainable_weights)]
    if not tables:
        return ""
    return (
        f"{tables[0].name}: the gradients of a row that a batch looks up several times are added up before the "
        "optimizer squares them, as Keras does on JAX and PyTorch; on TensorFlow it squares each of them"
    )


def note_on_first_values(optimizer: keras.Optimizer) -> str:
    """What differs from `keras.Model.fit` in an optimizer that begins with the weights; empty if nothing does."""
    # `fit` builds the optimizer inside the graph of its steps. There the assignment of the weights to the sequence that
    # is updated is a part of each step.
    if keras.optimizers.ScheduleFreeAdamW not in map(type, inner_optimizers(optimizer)):
        return ""
    return (
        "ScheduleFreeAdamW: its sequence begins with the weights once, as the method demands; keras.Model.fit on "
        "TensorFlow sets it to the weights again in each step, unless optimizer.build was called before"
    )
