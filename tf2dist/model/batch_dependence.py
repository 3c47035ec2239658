"""How losses and changes of the state depend on the examples of a batch: as their mean, as their sum, or otherwise.

Several synchronous workers add up what they compute from their own parts of a batch. A trial with two batches and with
both as one shows whether that gives what one worker computes from the whole.
"""

import contextlib
import enum
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.model.step import ModelStep

SIZES = (2, 4)  # of the two batches; they differ, so that a mean over the batches is none over the examples
TOLERANCE = 1e-3  # relative


class Dependence(enum.Enum):
    """What the loss of a batch is to those of its parts."""

    # Or it cannot be known, as that of one with random numbers, such as a variational autoencoder's; or what the loss
    # gathers makes it so.
    MEAN = enum.auto()
    SUM = enum.auto()
    NEITHER = enum.auto()


def loss_dependence(step: ModelStep, splits: Splits) -> Dependence:
    """How the loss depends on the batch, with what layers add to it; of a model's own step, how its gradients do."""
    # What the losses of a compiled model give for each example has a mean over the batch.
    first = 0 if step.trace.has_scalar_loss or step.has_own_loss else 1
    if step.trace.gathers or (first and not step.trace.penalizes_batch):
        return Dependence.MEAN

    def of_parts(training: bool) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
        return lambda leaves: [part for number in (0, 1) for part in step.parts(leaves, training, number)[0][first:]]

    # Not as in training, where dropout draws numbers and normalization looks at the batch; unless losses are added in
    # training alone.
    parts = _on_trial(of_parts(False), step, splits)
    if parts is not None and len(parts[0]) != 2 * (step.num_parts - first):
        parts = _on_trial(of_parts(True), step, splits)
    if parts is None:
        return Dependence.MEAN
    # Each was computed twice, with other random numbers.
    number = len(parts[0]) // 2
    repeated = parts[2][number:]
    by_part = {_dependence(*each) for each in zip(*(of_batch[:number] for of_batch in parts), repeated, strict=True)}
    return next((one for one in (Dependence.SUM, Dependence.NEITHER) if one in by_part), Dependence.MEAN)


def _dependence(first: np.ndarray, second: np.ndarray, whole: np.ndarray, repeated: np.ndarray) -> Dependence:
    if not np.array_equal(whole, repeated) or _is_near(whole, _mean(first, second)):
        return Dependence.MEAN
    return Dependence.SUM if _is_near(whole, first + second) else Dependence.NEITHER


def _is_near(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.linalg.norm(one - other) <= TOLERANCE * np.linalg.norm(other) + 1e-7)


def sums_over_batch(step: ModelStep, splits: Splits) -> list[keras.Variable]:
    """The variables without an aggregation to which a step adds up something of each example."""
    variables = [v for v in step.trace.from_batch if v.aggregation == "none"]
    if not variables:
        return []

    def of_state(leaves: list[tf.Tensor]) -> list[tf.Tensor]:
        terms = step.parts(leaves, True)[1]
        return [terms[id(variable)] for variable in variables]

    terms = _on_trial(of_state, step, splits)
    if terms is None:
        return []
    # By the nearer one: what dropout and normalization make of a batch depends on the batch a little.
    return [
        variable
        for variable, first, second, whole in zip(variables, *terms, strict=True)
        if np.linalg.norm(whole - (first + second)) < np.linalg.norm(whole - _mean(first, second))
    ]


def _mean(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.average([first, second], 0, SIZES)


def _on_trial(
    function: Callable[[list[tf.Tensor]], list[tf.Tensor]], step: ModelStep, splits: Splits
) -> list[list[np.ndarray]] | None:
    """What a function of the leaves of a batch gives for two batches and for both as one.

    None if the model takes no such batches, or a number is not finite.
    """
    leaves = _examples(step, splits)
    cuts = slice(0, SIZES[0]), slice(SIZES[0], sum(SIZES)), slice(0, sum(SIZES))
    traced = tf.function(function, autograph=False, input_signature=[step.layout.batched(None)])
    with contextlib.suppress(Exception):  # operations of the model raise errors of many types
        results = [[np.array(tensor, np.float64) for tensor in traced([leaf[cut] for leaf in leaves])] for cut in cuts]
        if all(np.isfinite(array).all() for arrays in results for array in arrays):
            return results
    return None


def _examples(step: ModelStep, splits: Splits) -> list[tf.Tensor]:
    """The leaves of some examples of the training set; of a stream, whose examples are not here, made-up ones."""
    if splits.stream is None and len(splits.train) >= sum(SIZES):
        return [tf.constant(leaf) for leaf in splits.train[: sum(SIZES)].leaves]
    return [_made_up(spec) for spec in step.layout.batched(sum(SIZES))]


def _made_up(spec: tf.TensorSpec) -> tf.Tensor:
    shape = [8 if size is None else size for size in spec.shape]
    rng = np.random.default_rng(len(shape))
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.cast(rng.random(shape) if spec.dtype.is_floating else rng.integers(0, 2, shape), spec.dtype)
