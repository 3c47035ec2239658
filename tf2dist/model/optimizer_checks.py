"""Checks of optimizers before anything starts."""

from collections.abc import Callable
from typing import Any

import keras

from tf2dist.errors import ConfigError, kind_of, reason_of
from tf2dist.model.copies import PLAIN, different_attribute
from tf2dist.tf_internals.keras import MultiOptimizer, choose_by_path, counter_of, groups_of, inner_optimizers

AROUND_OTHERS = (MultiOptimizer, keras.optimizers.LossScaleOptimizer)


def check_optimizer(name: str, optimizer: Any) -> None:
    """Refuses what is no optimizer, or one of a user's own around others, of which no copy can be made."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"optimizer ({name}): its function gives {kind_of(optimizer)}, and must give a keras.optimizers.Optimizer; "
            "return the optimizer"
        )
    for kind in AROUND_OTHERS:
        if isinstance(optimizer, kind) and type(optimizer) is not kind:
            raise ConfigError(
                f"optimizer ({name}): {type(optimizer).__name__} is a {kind.__name__} of your own, which cannot be "
                f"made again in every task; give keras.optimizers.{kind.__name__}"
            )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _check_inner(name, optimizer, optimizer.inner_optimizer)


def _check_inner(name: str, outer: keras.Optimizer, inner: Any) -> None:
    check_optimizer(name, inner)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            f"optimizer ({name}): has a LossScaleOptimizer inside of a {type(outer).__name__}; put one around it all"
        )


def has_trained(optimizer: keras.Optimizer) -> bool:
    """Whether an optimizer has a state with which a run goes on."""
    has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)  # which may differ without an update
    return bool(optimizer.built and (has_scale or int(optimizer.iterations.numpy())))


def prepare_choice(
    name: str, optimizer: keras.Optimizer, variables: list[keras.Variable], named: list[keras.Variable] | None = None
) -> None:
    """Makes a MultiOptimizer choose by the paths of the variables that it will train; others stay as they are.

    Args:
        named: see `choose_by_path`; None for `variables`.
    """
    check_optimizer(name, optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if not isinstance(optimizer, MultiOptimizer) or not variables:  # a model without is refused
        return
    try:
        choose_by_path(optimizer, variables, named or variables)
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(
            f"optimizer ({name}): its MultiOptimizer does not choose an optimizer for each variable "
            f"({reason_of(error)}); correct its optimizer_map"
        ) from error
    for inner in inner_optimizers(optimizer):
        _check_inner(name, optimizer, inner)
    # Here one count is that of the run.
    counted = [optimizer, *(inner for inner, trained in groups_of(optimizer, variables) if trained)]
    counts = sorted({int(counter_of(one).numpy()) for one in counted})
    if len(counts) > 1:
        raise ConfigError(
            f"optimizer ({name}): its MultiOptimizer and those in it have made {counts[0]} and {counts[-1]} updates "
            "before, and would go on with one count; give new ones"
        )


def check_copy(name: str, optimizer: keras.Optimizer, copy: Callable[[int], keras.Optimizer]) -> None:
    """Refuses an optimizer of a user's own whose copies fail, or have other settings than it has itself."""
    kind, way_out = type(optimizer).__name__, "give it a get_config with all arguments of its __init__"
    try:
        copied = vars(copy(1))
    except Exception as error:  # the user's __init__ may raise anything
        raise ConfigError(
            f"optimizer ({name}): {kind} cannot be made again from its configuration ({reason_of(error)}); {way_out}"
        ) from error
    # An argument that `get_config` leaves out would have its default in the copy, without a word.
    settings = {key: value for key, value in vars(optimizer).items() if isinstance(value, PLAIN) and key != "built"}
    if omitted := different_attribute(settings, copied):
        raise ConfigError(f"optimizer ({name}): the configuration of {kind} leaves out {omitted}; {way_out}")
