"""How a step changes the model's own state, read from its graph: ``new = decay * old + term``.

A worker computes the new state from the one that it has pulled. By the time of its push other workers may have
changed it. The parameter server knows `decay` and `term`, so it can apply the step to the present state, as if one
process took all steps one after the other:

    counters            decay 1           nothing that is added is lost
    moving averages     their momentum    the average stays within the values that the workers saw
    everything else     0                 it is assigned, and the last push wins
"""

import functools
import math
import operator
from collections.abc import Callable, Collection
from typing import NamedTuple

import tensorflow as tf

UNCHANGED = ("Identity", "StopGradient", "Cast")
SUMS = ("Add", "AddV2", "AddN")
WITHOUT_GRADIENT = ("StopGradient", "Floor", "Ceil", "Rint", "Round", "OnesLike", "ZerosLike")


class Recurrence(NamedTuple):
    """How a step changes one variable of the state.

    Attributes:
        decay: the constant factor of the old value; 0 if there is none.
        term: what is added, of the shape and type of the state.
    """

    decay: float
    term: tf.Tensor


def decay_of(new: tf.Tensor, old: tf.Tensor) -> float:
    """The constant factor of `old` in `new`, two tensors of one shape in one graph; 0 if there is none."""
    return _decay(new, _shares_of(old))


def recurrence_of(new: tf.Tensor, old: tf.Tensor) -> Recurrence:
    """The factor and the term of two tensors of one shape in one graph, which must be the default one.

    The term is the one in the graph, not a difference: that would round it once more, and take four operations for each
    variable.
    """
    shares = _shares_of(old)
    decay = _decay(new, shares)
    term = _rest(new, shares, {old.name: None}) if decay else new
    if term is None:
        return Recurrence(decay, tf.zeros_like(old))
    return Recurrence(decay, term if term.shape == old.shape else tf.broadcast_to(term, tf.shape(old)))


def _shares_of(old: tf.Tensor) -> dict[str, float]:
    """The share of the old value in each tensor that it reaches, by name: 1 in itself, NaN where not known yet."""
    return dict.fromkeys(reached_from(old), math.nan) | {old.name: 1.0}


def _decay(new: tf.Tensor, shares: dict[str, float]) -> float:
    decay = _share(new, shares)
    # The ps applies the factor in the type of the state, and an integer has no fractions.
    is_kept = new.dtype.is_floating or decay == 1
    return decay if math.isfinite(decay) and is_kept else 0.0


def reached_from(*tensors: tf.Tensor, barriers: Collection[tf.Tensor] = ()) -> set[str]:
    """The names of all tensors that depend on one of these, and their own.

    Args:
        barriers: beyond these nothing is followed. Those of other graphs may have the same names, and do not count.
    """
    closed = {tensor.name for tensor in barriers if tensor.graph is tensors[0].graph}
    reached, queue = {tensor.name for tensor in tensors}, list(tensors)
    while queue:
        outputs = [one for one in _consumed(queue.pop()) if one.name not in reached and one.name not in closed]
        queue += outputs
        reached.update(output.name for output in outputs)
    return reached


def origins_of(tensor: tf.Tensor, follows: Callable[[tf.Tensor], bool] = lambda _: True) -> list[tf.Operation]:
    """The operations of its graph on which a tensor depends.

    Args:
        follows: whether an input of an operation counts.
    """
    found, queue = {tensor.op.name: tensor.op}, [tensor.op]
    while queue:
        new = [one.op for one in queue.pop().inputs if one.op.name not in found and follows(one)]
        queue += new
        found.update({operation.name: operation for operation in new})
    return list(found.values())


def passes_gradient(tensor: tf.Tensor) -> bool:
    """Whether a gradient may pass through a tensor, as far as its operation and its type tell."""
    # Variants are lists of tensors, and resources variables.
    may_pass = tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype in (tf.variant, tf.resource)
    return may_pass and tensor.op.type not in WITHOUT_GRADIENT


def _consumed(tensor: tf.Tensor) -> list[tf.Tensor]:
    """The tensors that operations compute from a tensor."""
    outputs = []
    for consumer in tensor.consumers():
        # Such an operation, as custom gradients have, gives each of its inputs at the same place.
        each = consumer.type == "IdentityN"
        outputs += [one for i, one in enumerate(consumer.outputs) if not each or consumer.inputs[i].name == tensor.name]
    return outputs


def _share(tensor: tf.Tensor, shares: dict[str, float]) -> float:
    """The factor of the old state in a tensor; NaN if it is not constant.

    Args:
        shares: this factor by name, for the tensors that depend on the old state; NaN where it has to be found, and
            is then filled in.
    """
    # What does not depend on the old state, and so is not among them, has none of it.
    stored = shares.get(tensor.name, 0.0)
    if not math.isnan(stored):
        return stored
    operation, inputs = tensor.op, list(tensor.op.inputs)
    share = math.nan
    # A cast from a float to an integer rounds, so a cast keeps the factor only within one kind of numbers.
    if operation.type in UNCHANGED and _kind(inputs[0].dtype) == _kind(tensor.dtype):
        share = _share(inputs[0], shares)
    elif operation.type in SUMS:
        share = sum(_share(term, shares) for term in inputs)
    elif operation.type == "Sub":
        share = _share(inputs[0], shares) - _share(inputs[1], shares)
    elif operation.type == "Neg":
        share = -_share(inputs[0], shares)
    elif operation.type == "Mul":
        variable, factor = inputs if tf.get_static_value(inputs[1]) is not None else inputs[::-1]
        share = _share(variable, shares) * _constant(factor)
    elif operation.type == "RealDiv":
        share = _share(inputs[0], shares) / _constant(inputs[1])
    # Any other operation, such as a maximum, leaves NaN: the old value has no constant factor there.
    shares[tensor.name] = share
    return share


def _kind(dtype: tf.DType) -> str:
    return "float" if dtype.is_floating else "bool" if dtype.is_bool else "other"


def _rest(tensor: tf.Tensor, shares: dict[str, float], rests: dict[str, tf.Tensor | None]) -> tf.Tensor | None:
    """A tensor less its share of the old state, which is constant; None if nothing is left.

    Args:
        shares: those that `_share` has found.
        rests: what is left of some tensors, by name, among them the old state itself; others are added.
    """
    # The shape of the old state, for example, depends on it and is a constant all the same.
    if tensor.name not in shares or tf.get_static_value(tensor) is not None:
        return tensor
    if tensor.name not in rests:
        rests[tensor.name] = _combined(tensor, [_rest(term, shares, rests) for term in tensor.op.inputs])
    return rests[tensor.name]


def _combined(tensor: tf.Tensor, rests: list[tf.Tensor | None]) -> tf.Tensor | None:
    """The result of a tensor's operation for these inputs instead of its own; None stands for 0."""
    kind, first, last = tensor.op.type, rests[0], rests[-1]
    if kind == "Sub" and last is not None:  # not by its negative, which unsigned numbers have none of
        return (tf.zeros_like(last) if first is None else first) - last
    if kind in (*SUMS, "Sub"):
        terms = [rest for rest in rests if rest is not None]
        return functools.reduce(operator.add, terms) if terms else None
    if kind not in (*UNCHANGED, "Neg", "Mul", "RealDiv"):  # with any other one the share would have been NaN
        raise ValueError(f"{kind} has a share of the old state, and is not followed")
    if first is None or last is None:
        return None
    if kind == "Mul":
        return first * last
    if kind == "RealDiv":
        return first / last
    return -first if kind == "Neg" else tf.cast(first, tensor.dtype)


def _constant(tensor: tf.Tensor) -> float:
    """The value of a constant of one element; NaN for any other tensor."""
    value = tf.get_static_value(tensor)
    return float(value.item()) if value is not None and value.size == 1 and value.item() else math.nan
