"""Checks of the user's model and optimizer before any training; a refusal is one line.

Refusals that depend on the way of training are in `support`.
"""

import inspect
from typing import Any

import keras
import tensorflow as tf

from tf2dist.data.arrays import Layout, leaves_of
from tf2dist.data.splits import Splits
from tf2dist.errors import ConfigError, kind_of
from tf2dist.model import features, support
from tf2dist.model.batch_dependence import Dependence, StateChange, loss_dependence, metrics_apart, state_changes
from tf2dist.model.compiled_step import CompiledStep
from tf2dist.model.own_step import OwnStep, has_own_step
from tf2dist.model.step import Step, is_own
from tf2dist.tf_internals.keras import ScheduleFreeAdamW, groups_of, inner_optimizers, inputs_of, layers_of

CROSSENTROPIES = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy)
# Methods of a model by which only Keras trains and validates, each with where its work belongs.
NOT_CALLED = {
    "make_train_function": "write a train_step",
    "make_test_function": "write a test_step",
    "fit": "do what it does to the data before, and the rest in a train_step",
    "evaluate": "do what it does to the data before, and the rest in a test_step",
}
# Types of TensorFlow's operations, by which the graph of a model shows what its outputs are.
PROBABILITIES = ("Softmax", "Sigmoid")
KEEP_VALUES = ("Identity", "Cast", "Reshape", "Squeeze", "StopGradient", "EnsureShape")


def check_builder(name: str, function: Any, fixed: dict[str, Any]) -> None:
    """Refuses a builder of models that does not take the arguments (`fixed`) that every builder is given."""
    parameters = inspect.signature(function).parameters.values()
    takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not takes >= fixed.keys() and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(f"its function must take {' and '.join(fixed)}; write def {name}({', '.join(fixed)})")


def check_images(splits: Splits) -> None:
    """Refuses data that is not one array with classes, for one of the built-in classifiers."""
    shape = splits.input_shape
    if not splits.num_classes or not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ConfigError(f"classifies images, and the data is {splits.layout}; register a model that fits it")


def check_impressions(splits: Splits) -> None:
    """Refuses data that does not show items to users, for `two_tower`."""
    shape = splits.input_shape
    if not isinstance(shape, dict) or shape.keys() != {"user", "item", "context"}:
        raise ConfigError(f"takes user, item and context, and the data is {splits.layout}; register a model that fits")


def check_model(model: Any) -> None:
    """Refuses what a builder returns if it is not a model that can be trained here."""
    if not isinstance(model, keras.Model):
        raise ConfigError(f"its function gives {kind_of(model)}, and must give a keras.Model; return the model")
    if has_own_step(model) and not model.compiled:
        raise ConfigError("has a step of its own, and is not compiled; call its compile")
    if own := [method for method in NOT_CALLED if is_own(model, method)]:
        raise ConfigError(f"has a method {own[0]} of its own, which is not called here; {NOT_CALLED[own[0]]}")


def check_inputs(model: keras.Model, layout: Layout) -> None:
    """Refuses a model that takes more or fewer inputs than the data has, or a single one of another shape."""
    inputs = inputs_of(model)
    if not inputs:  # a subclass of keras.Model declares no inputs; its first call shows what fits
        return
    data_inputs = leaves_of(layout.symbolic()[0])
    if len(inputs) != len(data_inputs):
        raise ConfigError(f"has {len(inputs)} inputs, and x of the data has {len(data_inputs)}")
    if len(data_inputs) > 1:
        return
    shape = list(data_inputs[0].shape[1:])
    expected = list(inputs[0].shape[1:])
    # Keras itself adds or removes a last dimension of 1.
    fits = (expected, [*expected, 1], expected[:-1] if expected[-1:] == [1] else expected)
    if not any(tf.TensorShape(accepted).is_compatible_with(shape) for accepted in fits):
        raise ConfigError(f"takes inputs of {expected}, and the data has {shape}; begin with keras.Input(input_shape)")


def check_outputs(outputs: Any, num_classes: int) -> None:
    """Refuses a model that does not give one logit for each class; `outputs` are symbolic."""
    if not isinstance(outputs, keras.KerasTensor):
        raise ConfigError(f"gives {kind_of(outputs)}, and must give one tensor, the logits of {num_classes} classes")
    if list(outputs.shape[1:]) != [num_classes]:
        shape = [n or "batch" for n in outputs.shape]
        raise ConfigError(
            f"gives [{', '.join(map(str, shape))}], and must give [batch, {num_classes}], a logit for "
            f"each class; end with Dense(num_classes)"
        )


def check_batches(name: str, step: Step, splits: Splits, gathers: bool = True) -> str:
    """Refuses, for several synchronous replicas, what they cannot put together from their parts of a batch.

    Args:
        gathers: whether `tf2dist.gather` gives the tensors of all workers.

    Returns:
        A note for the user about what is neither the sum nor the mean over the examples; empty if nothing is.
    """
    dependence = loss_dependence(step, splits, gathers)
    if dependence is Dependence.SUM:
        of_loss, of_gradients = features.BATCH_SUM, features.GRADIENT_SUM
        raise support.refusal(support.SEVERAL, of_gradients if isinstance(step, OwnStep) else of_loss, name)
    note = ""
    if dependence is Dependence.NEITHER:
        what, whats = ("gradient", "gradients") if isinstance(step, OwnStep) else ("loss", "losses")
        note = (
            f"the {what} of a batch is not the mean over its examples: each step takes the mean of the {whats} of the "
            "workers' batches, as DistributedDataParallel, Horovod and MirroredStrategy do"
        )
    of_changes = _check_changes(name, state_changes(step, splits, gathers), gathers)
    return "; ".join(filter(None, (note, _note_on_metrics(step, splits), of_changes)))


def _note_on_metrics(step: Step, splits: Splits) -> str:
    apart = metrics_apart(step, splits) if isinstance(step, CompiledStep) else []
    if not apart:
        return ""
    return (
        f"{', '.join(apart)}: the number of a batch is not the mean over its examples, and in training the history has "
        "the mean of those of the workers' batches; a validation takes the batches of keras.Model.fit"
    )


def _check_changes(name: str, changes: list[StateChange], gathers: bool) -> str:
    """Refuses changes of the state, as `check_batches` does."""
    # A moving average of what is no mean goes on from the mean of the workers' values, as that of a variance does in
    # BatchNormalization. Of largest values, queues or last examples a mean is none of them.
    others = [change for change in changes if change.dependence is Dependence.NEITHER]
    if odd := [change.variable.path for change in others if not change.decay]:
        compute = "compute it from" if gathers else "use mode=sync, and compute it from"
        raise support.refusal(support.SEVERAL, features.STATE_NO_MEAN, name, odd[0], compute=compute)
    if added := [change.variable.path for change in changes if change.dependence is Dependence.SUM]:
        raise support.refusal(support.SEVERAL, features.STATE_SUM, name, added[0])
    if not others:
        return ""
    paths = ", ".join(change.variable.path for change in others)
    return (
        f"{paths}: what a step adds is not the mean over the examples of its batch, and each step adds the mean of "
        "what the workers' batches give, as BatchNormalization does; aggregation='mean' says that this is meant"
    )


def notes_on(step: Step, optimizer: keras.Optimizer, note: str) -> str:
    """What differs from Keras in a model and its optimizer; empty for nothing.

    Args:
        note: what is known already.
    """
    of_optimizer = note_on_first_values(optimizer) or note_on_lookups(step, optimizer)
    return "; ".join(filter(None, (note, of_optimizer, note_on_numbers(step), note_on_gradients(step))))


def advice_on_outputs(step: Step) -> str:
    """A warning if the loss takes outputs for logits that look like probabilities; empty otherwise."""
    if not isinstance(step, CompiledStep):
        return ""
    losses, tensor = [loss for loss in step.losses if isinstance(loss, CROSSENTROPIES)], step.forward_trace.outputs
    if not (len(losses) == 1 and losses[0].get_config()["from_logits"] and tf.is_tensor(tensor)):
        return ""
    while tensor.op.type in KEEP_VALUES:  # for example a cast to float32 at the end of a model in bfloat16
        tensor = tensor.op.inputs[0]
    if tensor.op.type not in PROBABILITIES:
        return ""
    function = tensor.op.type.lower()
    return (
        f"the model ends with {function}, and its outputs are taken for logits, to which the loss applies a softmax of "
        f"its own: it will learn slowly; leave the {function} out"
    )


def note_on_phases(step: Step) -> str:
    """Difference from Keras, with mode=async, in a step that reads what it has updated; empty if nothing does."""
    if not isinstance(step, OwnStep) or not step.is_in_phases:
        return ""
    return (
        "the train_step reads weights that it has updated: with mode=async it finds the values that it began with, and "
        "its updates are applied at its end"
    )


def note_on_numbers(step: Step) -> str:
    """Difference from Keras in the numbers that a step of the model's own returns; empty if nothing does."""
    if not isinstance(step, OwnStep):
        return ""
    names = dict.fromkeys([*step.metrics.numbers, *step.evaluated.numbers])
    if not names:
        return ""
    return (
        f"{', '.join(names)}: the history has the mean over the steps of an epoch, and keras.Model.fit shows that of "
        "the last step; to have the same, return the result of a keras.metrics.Mean"
    )


def note_on_gradients(step: Step) -> str:
    """The variables that Keras names when its optimizer finds no gradient for them; empty if there are none."""
    trained = set(map(id, step.trainable))
    left_out = [variable.path for variable in step.model.trainable_variables if id(variable) not in trained]
    if isinstance(step, OwnStep) or not left_out:
        return ""
    return f"{', '.join(left_out)}: the loss does not depend on them, so they stay as they are"


def note_on_lookups(step: Step, optimizer: keras.Optimizer) -> str:
    """Difference from Keras on TensorFlow for rows that a batch looks up twice; empty if nothing does."""
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
    """Difference from `keras.Model.fit` in an optimizer that begins with the weights; empty if nothing does."""
    # `fit` builds the optimizer inside the graph of its steps. There the assignment of the weights to the sequence that
    # is updated is a part of each step.
    if ScheduleFreeAdamW not in map(type, inner_optimizers(optimizer)):
        return ""
    return (
        "ScheduleFreeAdamW: its sequence begins with the weights once, as the method demands; keras.Model.fit on "
        "TensorFlow sets it to the weights again in each step, unless optimizer.build was called before"
    )
