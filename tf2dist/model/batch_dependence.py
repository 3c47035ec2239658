"""How losses and changes of the state depend on the examples of a batch: as their mean, as their sum, or otherwise.

Several synchronous workers add up what they compute from their own parts of a batch. A trial with two batches and with
both as one shows whether that gives what one worker computes from the whole.
"""

import contextlib
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf2dist.data.splits import Splits
from tf2dist.model.batch_attention import recording
from tf2dist.model.compiled_step import CompiledStep
from tf2dist.model.recurrence import reached_from, recurrence_of
from tf2dist.model.shards import by_id
from tf2dist.model.step import Step, step_place
from tf2dist.tf_internals.keras import layers_of, may_mix_examples

SIZES = (2, 4)  # of the two batches; they differ, so that a mean over the batches is none over the examples
TOLERANCE = 1e-3  # relative
ROUNDING = 1e-5  # of float32, in sums over some examples; a larger difference costs only speed
# Of changes of the state and by their rounding, relative to the change and to the value: in float32 and half precision.
TOLERANCES, HALF_TOLERANCES = (TOLERANCE, 2e-6), (0.05, 0.01)
# Of the trial of the state: the seed of the examples, and by how much the weights are moved, since those that begin
# with zeros may hide much. The same batch a second time meets what it has left: a largest mean is above some of it.
MOVE = 0.01
ROUNDS = ((0, 0.0), (0, 0.0), (1, MOVE), (1, MOVE))
CODE_OF_USERS = (keras.layers.Lambda, keras.layers.JaxLayer, keras.layers.TFSMLayer)  # in layers of Keras
MAX_MOVED = 1 << 20  # elements of a weight that is moved; large tables are not copied


class Dependence(enum.Enum):
    """Relation of the loss of a batch, or of what it adds to a variable, to those of its parts."""

    # Or it cannot be known, as that of one with random numbers, such as a variational autoencoder's; or what the loss
    # gathers makes it so.
    MEAN = enum.auto()
    SUM = enum.auto()
    NEITHER = enum.auto()


def loss_dependence(step: Step, splits: Splits, gathers: bool) -> Dependence:
    """How the loss depends on the batch, with what layers add to it; of a model's own step, how its gradients do.

    Args:
        gathers: whether `tf2dist.gather` gives the tensors of all workers.
    """
    if (step.trace.gathers and gathers) or not step.num_parts:
        return Dependence.MEAN

    def of_parts(training: bool) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
        return lambda leaves: [part for number in (0, 1) for part in step.parts(leaves, training, number)]

    # Not as in training, where dropout draws numbers and normalization looks at the batch; unless losses are added in
    # training alone.
    parts = _on_trial(of_parts(False), step, splits)
    if parts is not None and len(parts[0]) != 2 * step.num_parts:
        parts = _on_trial(of_parts(True), step, splits)
    if parts is None:
        return Dependence.MEAN
    # Each was computed twice, with other random numbers.
    number = len(parts[0]) // 2
    repeated = parts[2][number:]
    by_part = {_dependence(*each) for each in zip(*(of_batch[:number] for of_batch in parts), repeated, strict=True)}
    return next((one for one in (Dependence.SUM, Dependence.NEITHER) if one in by_part), Dependence.MEAN)


def metrics_apart(step: CompiledStep, splits: Splits) -> list[str]:
    """The names of the metrics that give another number for a batch than the mean of what its parts give."""
    variables, of_batches = step.metrics.variables, step.forward_trace.batch_metrics
    of_examples = {id(v) for m in step.single_metrics if m not in of_batches for v in m.variables}
    metrics = [m for m in step.single_metrics if m in of_batches or may_mix_examples(m)]
    sizes = [int(np.prod(variable.shape)) for variable in variables]
    parts = metrics and _on_trial(
        lambda leaves: tf.split(step.evaluate(*step.values(), leaves)[1:], sizes), step, splits
    )
    if not parts:
        return []
    # A metric adds a number for a batch, or one for each example.
    apart = {
        id(v)
        for v, first, second, whole in zip(variables, *parts, strict=True)
        if not _is_near(whole, first + second if id(v) in of_examples else _mean(first, second))
    }
    return [metric.name for metric in metrics if apart.intersection(map(id, metric.variables))]


def mixes_examples(step: Step, splits: Splits) -> bool:
    """Whether what an example adds to the metrics in an evaluation may depend on the other ones of its batch."""
    # A model that certainly does not mix them needs no trial, which takes time.
    layers = layers_of(step.model)
    # A functional model also has operations that are no layers, such as a mean over the examples. In a class of the
    # user's the attribute may be anything, so it is read only after all layers have turned out to be Keras's.
    operations = (operation for layer in layers for operation in getattr(layer, "operations", ()))
    if all(map(_keeps_examples_apart, layers)) and all(map(_keeps_examples_apart, operations)):
        return False

    def values(ids: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        # Moved, since a factor that begins with zeros would hide what the model does later.
        trainable, state = step.values(ids)
        pairs = zip(step.trainable, trainable, strict=True)
        return [x if step.lookups.is_table(v) else _moved(x, tf.constant(MOVE)) for v, x in pairs], state

    # Without tables the values are read once: each time the parameter servers send all of them.
    read = None if step.tables else values(step.lookups.look_up(_examples(step, splits, 0), training=False).ids)

    def sums(leaves: list[tf.Tensor]) -> list[tf.Tensor]:
        lookups = step.lookups.look_up(leaves, training=False)
        return [step.evaluate(*(read or values(lookups.ids)), leaves, positions=lookups.positions)]

    # To trace a deep model takes longer than a few calls of it, but rows of tables are looked up in graphs alone.
    found = _on_trial(sums, step, splits, is_traced=bool(step.tables))
    if found is None:
        return True
    (first,), (second,), (whole,) = found
    return not np.allclose(whole, first + second, rtol=ROUNDING, atol=ROUNDING)


def _keeps_examples_apart(operation: keras.Operation) -> bool:
    """Whether it is certain that an operation mixes no examples in an evaluation, as of most layers of Keras."""
    if not isinstance(operation, keras.Layer) or isinstance(operation, CODE_OF_USERS):
        return False
    kind = type(operation)
    codes = [kind, *(getattr(operation, name, kind) for name in ("activation", "recurrent_activation"))]
    if not all(str(getattr(code, "__module__", "")).startswith("keras.") for code in codes):
        return False
    # The axis of the examples is 0, or a negative number that depends on the rank of the input.
    axes = keras.tree.flatten(getattr(operation, "axis", ()))
    return all(isinstance(axis, int) and (axis == -1 or axis > 0) for axis in axes)


def _dependence(first: np.ndarray, second: np.ndarray, whole: np.ndarray, repeated: np.ndarray) -> Dependence:
    if not np.array_equal(whole, repeated) or _is_near(whole, _mean(first, second)):
        return Dependence.MEAN
    return Dependence.SUM if _is_near(whole, first + second) else Dependence.NEITHER


def _is_near(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.linalg.norm(one - other) <= TOLERANCE * np.linalg.norm(other) + 1e-7)


class StateChange(NamedTuple):
    """How a step changes a variable.

    Attributes:
        dependence: of what the step adds to `decay` times the old value; NEITHER also if that cannot be shown.
        decay: see `recurrence`.
    """

    variable: keras.Variable
    dependence: Dependence
    decay: float


def state_changes(step: Step, splits: Splits, gathers: bool) -> list[StateChange]:
    """How a step changes each variable without an aggregation that depends on the worker's own batch or random numbers.

    Args:
        gathers: whether `tf2dist.gather` gives the tensors of all workers.
    """
    draws = step.trace.decays if any(step.trace.draws) else {}
    known = {*draws, *map(id, step.trace.from_batch), *map(id, step.trace.assigned)}
    variables = [v for v in step.state if id(v) in known and v.aggregation == "none"]
    if not variables:
        return []
    trial = _StateTrial(step, variables, gathers)
    rounds = []
    with contextlib.suppress(Exception):  # operations of the model raise errors of many types
        for seed, move in ROUNDS if trial.changed else ():
            rounds.append(trial.compare(_examples(step, splits, seed), move))
    return [
        StateChange(variable, _of_rounds([of_all[place] for of_all in rounds]), decay)
        for place, (variable, decay) in enumerate(trial.changed)
    ]


def _of_rounds(found: list[Dependence | None]) -> Dependence:
    """By those rounds that show any dependence; a largest value, for example, may not move in one of them."""
    shown = [one for one in found if one]
    if not shown or Dependence.NEITHER in shown:
        return Dependence.NEITHER
    return Dependence.SUM if Dependence.SUM in shown else Dependence.MEAN


class _StateTrial:
    """Computes what a step adds to variables, from values of the state that follow each other.

    Attributes:
        changed: the variables whose new values may differ between the workers, with their decays.
    """

    def __init__(self, step: Step, variables: list[keras.Variable], gathers: bool) -> None:
        self._step, self._ids, self._gathers = step, set(map(id, variables)), gathers
        self._state = step.values()[1]
        halves = [layer for layer in layers_of(step.model) if layer.compute_dtype in ("bfloat16", "float16")]
        self._tolerances = HALF_TOLERANCES if halves else TOLERANCES
        self.changed: list[tuple[keras.Variable, float]] = []
        signature = (
            *step.specs_of(step.state),
            step.layout.batched(None),
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([]),
        )
        self._call = tf.function(self._new_state, autograph=False, input_signature=signature)
        self._call.get_concrete_function()  # to know `changed`

    def _new_state(
        self, state: list[tf.Tensor], leaves: list[tf.Tensor], number: tf.Tensor, move: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """In the graph: the new state, and for `changed` what a step adds, and from where the values move to that."""
        trainable = [_moved(value, move) for value in self._step.values()[0]]
        with recording() as gathered:
            new_state = self._step(trainable, state, leaves, step_place(tf.constant(0), number)).state
        reached = reached_from(*leaves, number, barriers=gathered if self._gathers else ())
        old = by_id([*self._step.state, *self._step.trainable], [*state, *trainable])
        found = [
            (variable, recurrence_of(new, old[id(variable)]))
            for variable, new in zip(self._step.state, new_state, strict=True)
            if id(variable) in self._ids and new.name in reached
        ]
        self.changed = [(variable, recurrence.decay) for variable, recurrence in found]
        begun = [tf.zeros_like(one.term) if one.decay else old[id(variable)] for variable, one in found]
        return new_state, [recurrence.term for _, recurrence in found], begun

    def compare(self, leaves: list[tf.Tensor], move: float) -> list[Dependence | None]:
        """How what a step adds to each variable depends on the examples of a batch; None if it does not show.

        Args:
            leaves: of examples for the batches of `SIZES`, and of others in their places.
            move: see `ROUNDS`.
        """
        first, second, *others = np.split(np.arange(2 * sum(SIZES)), np.cumsum([*SIZES, SIZES[0]]))

        def call(*parts: np.ndarray, number: int = 0) -> tuple[list[Any], ...]:
            batch = [tf.gather(leaf, np.concatenate(parts)) for leaf in leaves]
            state, *found = self._call(self._state, batch, tf.constant(number, tf.int64), tf.constant(move))
            return state, *([np.array(tensor, np.float64) for tensor in tensors] for tensors in found)

        new_state, whole, begun = call(first, second)
        terms = [call(first)[1], call(second)[1], whole, call(first, second, number=1)[1]]
        is_random = not all(map(np.array_equal, whole, terms[-1]))
        pairs = [(first, second), others, (others[0], second), (first, others[1])] if is_random else []
        mixed = [call(*pair)[1] for pair in pairs] or [whole]
        self._state = new_state
        each = zip(zip(*terms, strict=True), zip(*mixed, strict=True), begun, self.changed, strict=True)
        return [self._dependence(of_parts, of_mixed, old, decay) for of_parts, of_mixed, old, (_, decay) in each]

    def _dependence(
        self, terms: tuple[np.ndarray, ...], mixed: tuple[np.ndarray, ...], begun: np.ndarray, decay: float
    ) -> Dependence | None:
        """Relation of the terms of a variable; see `compare`.

        Args:
            terms: of two batches, of both as one, and of that with other random numbers.
            mixed: of batches of two parts, of two others, and of one part and the other one in turn.
            begun: from where the values move to the terms.
        """
        first, second, whole, repeated = terms
        if not all(np.isfinite(one).all() for one in terms) or all(np.array_equal(one, whole) for one in terms):
            return None
        of_change, of_value = self._tolerances
        begun = np.where(np.isfinite(begun), begun, 0)
        change = max(np.linalg.norm(one - begun) for one in terms)
        tolerance = of_change * change + of_value * np.linalg.norm(whole) + 1e-12

        mean, total = _mean(first, second), first + second
        to_mean, to_sum = np.linalg.norm(whole - mean), np.linalg.norm(whole - total)
        is_random = not np.array_equal(whole, repeated)
        if not is_random and to_mean <= tolerance:
            return Dependence.MEAN
        # By the nearer one: what normalization makes of a batch depends on the batch a little.
        if to_sum < to_mean and (decay or to_sum < np.linalg.norm(total) / 4):
            return Dependence.SUM
        # Batches of one size draw the same numbers, unless these are TensorFlow's own; then it cannot be known.
        if is_random and decay and not np.array_equal(whole, mixed[0]):
            return Dependence.MEAN
        if is_random and decay and np.linalg.norm(mixed[0] + mixed[1] - mixed[2] - mixed[3]) <= tolerance:
            return Dependence.MEAN
        return Dependence.NEITHER


def _moved(value: tf.Tensor, move: tf.Tensor) -> tf.Tensor:
    if not value.dtype.is_floating or value.shape.num_elements() > MAX_MOVED:
        return value
    return value + tf.cast(move * tf.random.stateless_normal(value.shape, [0, 0]), value.dtype)


def _mean(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.average([first, second], 0, SIZES)


def _on_trial(
    function: Callable[[list[tf.Tensor]], list[tf.Tensor]], step: Step, splits: Splits, is_traced: bool = True
) -> list[list[np.ndarray]] | None:
    """Results of a function of the leaves of a batch, for two batches and for both as one.

    None if the model takes no such batches, or a number is not finite.
    """
    leaves = _examples(step, splits, 0)
    cuts = slice(0, SIZES[0]), slice(SIZES[0], sum(SIZES)), slice(0, sum(SIZES))
    signature = [step.layout.batched(None)]
    call = tf.function(function, autograph=False, input_signature=signature) if is_traced else function
    with contextlib.suppress(Exception):  # operations of the model raise errors of many types
        results = [[np.array(tensor, np.float64) for tensor in call([leaf[cut] for leaf in leaves])] for cut in cuts]
        if all(np.isfinite(array).all() for arrays in results for array in arrays):
            return results
    return None


def _examples(step: Step, splits: Splits, seed: int) -> list[tf.Tensor]:
    """The leaves of some examples of the training set; of a stream, whose examples are not here, made-up ones."""
    rng, total = np.random.default_rng(seed), 2 * sum(SIZES)
    if splits.stream is None and len(splits.train):
        rows = rng.choice(len(splits.train), total, replace=len(splits.train) < total)
        return [tf.constant(leaf) for leaf in splits.train.take(rows)]
    return [_made_up(spec, rng) for spec in step.layout.batched(total)]


def _made_up(spec: tf.TensorSpec, rng: np.random.Generator) -> tf.Tensor:
    shape = [8 if size is None else size for size in spec.shape]
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.cast(rng.random(shape) if spec.dtype.is_floating else rng.integers(0, 2, shape), spec.dtype)
