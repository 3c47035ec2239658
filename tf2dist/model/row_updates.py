"""Updates of some rows of a variable by an optimizer of Keras; what one takes does not grow with the variable."""

from typing import Any

import keras
import tensorflow as tf

from tf2dist.process.tf_internals import (
    AtomicRows,
    Rows,
    clip_gradient,
    place_of,
    rows_in_place_of,
    slots_of,
    undecayed,
)

# Each has slots of the form of the variable, and its update of an element depends on nothing else but that element and
# the number of the update. Not so Nadam, which multiplies its momenta of all steps into one number, and
# ScheduleFreeAdamW, which weighs an element by how often it was updated.
BY_ROW = (
    *(keras.optimizers.SGD, keras.optimizers.Adagrad, keras.optimizers.RMSprop, keras.optimizers.Adam),
    *(keras.optimizers.AdamW, keras.optimizers.Adamax, keras.optimizers.Ftrl, keras.optimizers.Adadelta),
    keras.optimizers.Lion,
)


def can_be_lazy(optimizer: keras.Optimizer) -> bool:
    """Whether an optimizer can update rows alone, though Keras' own update may move the other rows as well."""
    # The exact type: a subclass may have another update.
    return type(optimizer) in BY_ROW and not optimizer.use_ema and not optimizer.gradient_accumulation_steps


def is_exact_by_row(optimizer: keras.Optimizer) -> bool:
    """Whether the update of Keras changes nothing in a row whose gradient is zero."""
    if not can_be_lazy(optimizer) or optimizer.weight_decay:
        return False
    kind = type(optimizer)
    return kind is keras.optimizers.Adagrad or (kind is keras.optimizers.SGD and not optimizer.momentum)


def is_one_operation(optimizer: keras.Optimizer) -> bool:
    """Whether `apply_rows` is one atomic operation, so that several may run at the same time."""
    return is_exact_by_row(optimizer) and type(optimizer) is keras.optimizers.SGD


def apply_rows(
    optimizer: keras.Optimizer,
    gradient: tf.Tensor,
    variable: keras.Variable,
    ids: tf.Tensor,
    runs_alone: bool = False,
) -> None:
    """Does for some rows of a variable what `Optimizer.apply` does for it all, but does not count the update.

    Args:
        optimizer: one that `can_be_lazy`, built with the variable.
        gradient: float [U, ...], of these rows.
        variable: it has a `tf.Variable` of its own.
        ids: integers [U], each of them once.
        runs_alone: whether no two updates of the variable run at the same time, which takes less time; the caller also
            ensures that with an optimizer that is not one operation.
    """
    kind = Rows if runs_alone or not is_one_operation(optimizer) else AtomicRows
    gradient = clip_gradient(optimizer, gradient)  # other rows add nothing to a norm
    decays = optimizer.weight_decay is not None and not undecayed(optimizer, [variable])
    place = place_of(optimizer, variable.value)
    with rows_in_place_of([variable, *(slots[place] for slots in slots_of(optimizer).values())], ids, kind):
        rows: Any = variable.value
        if decays:
            rate, decay = (tf.cast(value, rows.dtype) for value in (optimizer.learning_rate, optimizer.weight_decay))
            rows.assign_sub(rows * decay * rate)
        # That of the class: in the object a kernel for whole variables may stand in its place; see `make_atomic`.
        type(optimizer).update_step(optimizer, gradient, rows, optimizer.learning_rate)
