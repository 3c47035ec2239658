"""Features of models and optimizers that not every way of training supports; `support` says which refuses which."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tf2dist.model.compiled_step import MEANS, WEIGHTED_MEAN, CompiledStep
from tf2dist.model.own_step import Group, repeats
from tf2dist.model.shards import parts_of
from tf2dist.model.step import Step
from tf2dist.tf_internals.keras import ScheduleFreeAdamW, groups_of, inner_optimizers, layers_of, seeds_of, state_of

# Their update of an element depends on this element of the gradient and of the slots alone, so parts of a variable can
# be updated apart. Not so where an update depends on a norm over the variable (Lamb, Muon) or on its rows and columns
# (Adafactor), and a class of a user's own may do either.
ELEMENTWISE = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Adagrad),
    *(keras.optimizers.RMSprop, keras.optimizers.Nadam, keras.optimizers.Adadelta, keras.optimizers.Adamax),
    *(keras.optimizers.Ftrl, keras.optimizers.Lion, ScheduleFreeAdamW),
)


@dataclass(frozen=True, eq=False)
class Feature:
    """Something that a model or an optimizer may have.

    Attributes:
        of: what `find` takes: "model", a model; "step", a `Step`; "losses", a `CompiledStep`; "train_step", an
            `OwnStep`; "optimizer", a `Group`.
        find: what has the feature, such as the path of a variable; None if nothing has it, or if a step must be run.
    """

    of: str
    find: Callable[[Any], str | None] = lambda _: None


def _first(found: Iterable[keras.Variable]) -> str | None:
    return next((variable.path for variable in found), None)


def _when(condition: Any) -> str | None:
    """For features whose texts name nothing."""
    return "" if condition else None


# Features of a model.

EAGER = Feature("model", lambda model: _when(model.run_eagerly))
NOTHING_TRAINED = Feature("model", lambda model: _when(not model.trainable_variables))
OVERWRITTEN = Feature("model", lambda model: _first(v for v in model.trainable_variables if v.overwrite_with_gradient))
CONSTRAINT = Feature("model", lambda model: _first(v for v in model.trainable_variables if v.constraint is not None))
CONSTRAINT_OF_PARTS = Feature(
    "model",
    lambda model: _first(v for v in model.trainable_variables if v.constraint is not None and len(parts_of(v)) > 1),
)
SYNCHRONIZED = Feature(
    "model",
    lambda model: next((layer.name for layer in layers_of(model) if getattr(layer, "synchronized", False)), None),
)

# Features of a step, which its trace shows.


def _made_late(step: Step) -> Iterator[keras.Variable]:
    known = {id(v) for v in step.variables} | {id(v) for v in seeds_of(step.model)}
    return (v for v in step.model.trainable_variables if id(v) not in known)


def _no_sums(step: Step) -> Iterator[keras.Variable]:
    yield from step.trace.not_additive
    # Every epoch begins with zeros in all of these (see `Metrics`), so a metric must, too, whatever an epoch has left.
    for variable in step.model.metrics_variables:
        variable.assign(keras.ops.ones(variable.shape, variable.dtype))
    step.model.reset_metrics()
    yield from (v for v in step.metrics.variables if np.any(v.numpy()))


def _reductions(step: CompiledStep) -> set[Any]:
    return {getattr(loss, "reduction", None) for loss in step.losses}


def _is_weighted(step: CompiledStep) -> bool:
    """Whether a loss is divided by anything but the number of examples."""
    is_one_number = step.forward_trace.has_scalar_loss and len(step.losses) == 1
    is_mean_of_parts = step.forward_trace.divides_by_parts and bool(_reductions(step) & {*MEANS})
    return not (step.has_own_loss or is_one_number) and (WEIGHTED_MEAN in _reductions(step) or is_mean_of_parts)


def _unsigned(variables: Iterable[keras.Variable]) -> str | None:
    # What workers add up are differences, new value less old value, and these types have no negative ones.
    found = (v for v in variables if v.dtype == "bool" or v.dtype.startswith("uint"))
    return next((f"{v.path} is of type {v.dtype}" for v in found), None)


def _not_mean(step: Step) -> str | None:
    changed = [v for v in step.state if id(v) in step.trace.decays]
    found = (f"{v.path} has aggregation='{v.aggregation}'" for v in changed if v.aggregation not in ("none", "mean"))
    return next(found, None)


MADE_LATE = Feature("step", lambda step: _first(_made_late(step)))
NO_SUM = Feature("step", lambda step: _first(_no_sums(step)))
FOREIGN = Feature("step", lambda step: next(iter(step.trace.foreign), None))
BYPASSED = Feature("step", lambda step: next(iter(step.trace.bypassed), None))
UNGRADED = Feature("losses", lambda step: _first(step.hidden))
NO_REDUCTION = Feature("losses", lambda step: _when({None, "none"} & _reductions(step)))
SUM_BESIDE = Feature(
    "losses", lambda step: _when("sum" in _reductions(step) and (len(step.losses) > 1 or step.forward_trace.penalties))
)
# With a mask Keras divides by the parts that are left, whose number differs between the replicas. Only of a single loss
# is the total known in time.
PARTS_BESIDE = Feature(
    "losses", lambda step: _when(_is_weighted(step) and (not step.weighs_losses or step.forward_trace.penalizes_batch))
)
PARTS = Feature("losses", lambda step: _when(_is_weighted(step)))
SUMMED = Feature("step", lambda step: _when(step.sums_losses))
ASSIGNED = Feature("step", lambda step: _first(step.trace.assigned))
IN_PHASES = Feature("train_step", lambda step: _when(step.is_in_phases))
REPEATS = Feature("train_step", lambda step: _when(repeats(step.groups)))
ASSIGNED_UPDATED = Feature("train_step", lambda step: _first(step.trace.assigned) if step.is_in_phases else None)
UNSIGNED = Feature("step", lambda step: _unsigned(step.state))
NOT_MEAN = Feature("step", _not_mean)
GATHERS = Feature("step", lambda step: _when(step.trace.gathers))

# Features that `model_checks.check_batches` finds when it runs a step.

BATCH_SUM = Feature("step")
GRADIENT_SUM = Feature("step")
STATE_SUM = Feature("step")
STATE_NO_MEAN = Feature("step")

# Features of an optimizer.


def _own_apply(trained: Group) -> str | None:
    methods = ("apply", "apply_gradients", "stateless_apply")
    for kind in map(type, inner_optimizers(trained.optimizer)):
        for method in methods:
            if not getattr(kind, method).__module__.startswith("keras."):
                return f"{kind.__name__} has {method}"
    return None


def _cut(trained: Group) -> Iterator[tuple[keras.Optimizer, str]]:
    """The optimizers that train variables of which a ps has only a part, each with the path of the first one."""
    for inner, variables in groups_of(trained.optimizer, trained.variables):
        if path := _first(v for v in variables if len(parts_of(v)) > 1):
            yield inner, path


def _not_elementwise(trained: Group) -> str | None:
    # The exact type: a subclass may have another update.
    found = [(path, type(inner)) for inner, path in _cut(trained) if type(inner) not in ELEMENTWISE]
    return next((f"{path} is cut over several ps, and {kind.__name__}" for path, kind in found), None)


def _any_group(trained: Group, condition: Callable[[keras.Optimizer], Any]) -> str | None:
    groups = groups_of(trained.optimizer, trained.variables)
    return _when(any(condition(inner) for inner, variables in groups if variables))


LOSS_SCALE = Feature(
    "optimizer", lambda trained: _when(isinstance(trained.optimizer, keras.optimizers.LossScaleOptimizer))
)
CLIPS_ACCUMULATED = Feature(
    "optimizer",
    lambda trained: _any_group(trained, lambda one: one.global_clipnorm and one.gradient_accumulation_steps),
)
GLOBAL_CLIPNORM = Feature("optimizer", lambda trained: _any_group(trained, lambda one: one.global_clipnorm))
OWN_APPLY = Feature("optimizer", _own_apply)
NOT_ELEMENTWISE = Feature("optimizer", _not_elementwise)
CLIPNORM = Feature("optimizer", lambda trained: next((path for inner, path in _cut(trained) if inner.clipnorm), None))
UNSIGNED_SLOT = Feature("optimizer", lambda trained: _unsigned(state_of(trained.optimizer)))
FINAL_WEIGHTS = Feature("optimizer", lambda trained: _when(finalizes(trained.optimizer)))
SCHEDULE_FREE = Feature(
    "optimizer", lambda trained: _when(ScheduleFreeAdamW in map(type, inner_optimizers(trained.optimizer)))
)


def finalizes(optimizer: keras.Optimizer) -> bool:
    """Whether the optimizer changes the weights at the end of a training."""
    usual, inner = keras.optimizers.Optimizer.finalize_variable_values, inner_optimizers(optimizer)
    return any(one.use_ema or type(one).finalize_variable_values is not usual for one in inner)
