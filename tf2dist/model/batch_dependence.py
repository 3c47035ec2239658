"""How penalties and changes of the state depend on the examples of a batch: as their mean, as their sum, or otherwise.

Several synchronous workers add up what they compute from their own parts of a batch. A trial with two batches and with
both as one shows whether that gives what one worker computes from the whole.
"""

import contextlib
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Splits
from tf2dist.model.step import ModelStep

SIZES = (2, 4)  # of the two batches; they differ, so that a mean over the batches is none over the examples
TOLERANCE = 1e-3  # relative


def penalty_is_no_mean(step: ModelStep, splits: Splits) -> bool:
    """Whether a loss that a layer adds for a whole batch is not the mean over its examples.

    Of one that depends on random numbers, as in a variational autoencoder, it cannot be known: False.
    """
    if not step.trace.penalizes_batch:
        return False

    def of_penalties(training: bool) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
        return lambda leaves: [*step.parts(leaves, training)[0], *step.parts(leaves, training, number=1)[0]]

    # Not as in training, where dropout draws numbers and normalization looks at the batch; unless losses are added in
    # training alone.
    penalties = _on_trial(of_penalties(False), step, splits)
    if penalties is not None and len(penalties[0]) != 2 * len(step.trace.penalties):
        penalties = _on_trial(of_penalties(True), step, splits)
    if penalties is None:
        return False
    first, second, whole = map(np.array, penalties)
    # Each penalty was computed twice, with other random numbers.
    whole, repeated = np.split(whole, 2)
    count = len(whole)
    agrees = np.isclose(whole, _mean(first, second)[:count], TOLERANCE, 1e-7)
    return not np.all(agrees | (whole != repeated))


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
