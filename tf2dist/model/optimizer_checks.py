"""What an optimizer cannot do here, refused before anything starts."""

from collections.abc import Callable
from typing import Any

import keras

from tf2dist.errors import ConfigError, kind_of, reason_of
from tf2dist.model.shards import Part
from tf2dist.tf_internals import choose_by_path, counter_of, groups_of, inner_optimizers

# Their update of an element depends on this element of the gradient and of the slots alone, so parts of a variable can
# be updated apart. Not so where an update depends on a norm over the variable (Lamb, Muon) or on its rows and columns
# (Adafactor), and a class of a user's own may do either.
ELEMENTWISE = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Adagrad),
    *(keras.optimizers.RMSprop, keras.optimizers.Nadam, keras.optimizers.Adadelta, keras.optimizers.Adamax),
    *(keras.optimizers.Ftrl, keras.optimizers.Lion, keras.optimizers.ScheduleFreeAdamW),
)
AROUND_OTHERS = (keras.optimizers.MultiOptimizer, keras.optimizers.LossScaleOptimizer)
PLAIN = (bool, int, float, str, type(None))  # the types of an optimizer's settings, other than a schedule


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


def check_loss_scale(name: str, optimizer: keras.Optimizer, where: str) -> None:
    """Refuses a LossScaleOptimizer where not all gradients of an update are known in one place.

    Args:
        where: the option that it cannot be combined with.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            f"optimizer ({name}): a LossScaleOptimizer leaves out the updates whose gradients overflow, of which with "
            f"{where} nobody sees all; use mode=sync, or give its inner optimizer, with loss_scale_factor if need be, "
            "and auto_scale_loss=False to model.compile, or devices.precision=bfloat16, which needs no scaling"
        )


def prepare_choice(
    name: str, optimizer: keras.Optimizer, variables: list[keras.Variable], named: list[keras.Variable] | None = None
) -> None:
    """Makes a MultiOptimizer choose by the paths of the variables that it will train; others stay as they are.

    Args:
        named: see `choose_by_path`; None for `variables`.

    Raises:
        ConfigError: it gives no optimizer for a variable, or one that cannot be used here.
    """
    check_optimizer(name, optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if not isinstance(optimizer, keras.optimizers.MultiOptimizer) or not variables:  # a model without is refused
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
    if omitted := [key for key, value in settings.items() if key not in copied or copied[key] != value]:
        raise ConfigError(f"optimizer ({name}): the configuration of {kind} leaves out {omitted[0]}; {way_out}")


def check_own_apply(name: str, optimizer: keras.Optimizer, num_ps: int) -> None:
    """Refuses an optimizer of a user's own that may look at all gradients, of which each ps has only a part."""
    methods = ("apply", "apply_gradients", "stateless_apply")
    for kind in map(type, inner_optimizers(optimizer)):
        overridden = [method for method in methods if not getattr(kind, method).__module__.startswith("keras.")]
        if overridden and num_ps > 1:
            raise ConfigError(
                f"optimizer ({name}): {kind.__name__} has {overridden[0]} of its own, and would get only the "
                "variables of one ps there; use one ps, or mode=sync"
            )


def check_clipping(name: str, optimizer: keras.Optimizer) -> None:
    """Refuses, for mode=async, to clip by the norm over all ps what each ps has accumulated by itself."""
    if optimizer.global_clipnorm and optimizer.gradient_accumulation_steps:
        raise ConfigError(
            f"optimizer ({name}): with mode=async global_clipnorm cannot clip what gradient_accumulation_steps has "
            "added up on the parameter servers; use clipnorm, or mode=sync"
        )


def check_parts(name: str, optimizer: keras.Optimizer, variables: list[keras.Variable]) -> None:
    """Refuses what needs a whole variable, of which a ps has only a part."""
    parts = [variable for variable in variables if isinstance(variable, Part)]
    if not parts:
        return
    way_out = "use cluster.placement=balanced"
    subject = f"with cluster.placement=partitioned {parts[0].path} is cut over several ps, and"
    # The exact type: a subclass may have another update.
    if type(optimizer) not in ELEMENTWISE:
        raise ConfigError(
            f"optimizer ({name}): {subject} {type(optimizer).__name__} may need the whole of it in an update; {way_out}"
        )
    if optimizer.clipnorm:
        raise ConfigError(f"optimizer ({name}): {subject} clipnorm needs the norm of its whole gradient; {way_out}")
    if constrained := [part.path for part in parts if part.constraint is not None]:
        raise ConfigError(f"model: {subject} the constraint of {constrained[0]} needs the whole of it; {way_out}")


def check_init_from(optimizer: keras.Optimizer, takes_weights: bool) -> None:
    """Refuses an optimizer that has begun with the drawn weights when the run takes others (`takes_weights`)."""
    kinds = [type(inner) for inner in inner_optimizers(optimizer)]
    if takes_weights and keras.optimizers.ScheduleFreeAdamW in kinds:
        raise ConfigError(
            "init_from: ScheduleFreeAdamW has a sequence that begins with the model's own first weights; use another "
            "optimizer"
        )
