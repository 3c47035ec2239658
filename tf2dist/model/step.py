"""The training step of all modes, as a pure function of its inputs, and what all steps have in common."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf2dist.data.arrays import Layout
from tf2dist.model.batch_attention import num_calls
from tf2dist.model.interception import prepare_process
from tf2dist.model.metrics import Metrics
from tf2dist.model.recurrence import decay_of, reached_from
from tf2dist.model.scopes import CallScope
from tf2dist.model.shards import by_id, keras_variable, parts_of, read_rows
from tf2dist.model.tables import TableLookups
from tf2dist.tf_internals.keras import own_layers_of_keras, seeds_of

OUTSIDE = "outside/"  # the names of variables that are not the model's begin so
WORKER_STRIDE = 1 << 32  # between the seeds of two workers; the seeds of a model's layers are smaller

NewValue = tuple[keras.Variable, tf.Tensor, tf.Tensor]  # a variable, its new and its old value
Mapping = list[tuple[keras.Variable, tf.Tensor]]  # variables with the values that they have in a scope


class StepOutput(NamedTuple):
    """The contribution of one worker to a step.

    Attributes:
        gradients: one for each trainable variable, of the worker's share of the loss.
        state: the new values of `Step.state`, such as moving averages.
        sums: float32 [2 + Metrics.size]: the worker's share of the loss, the number of its examples, and what they
            add to the metrics.
        weight: float32 []: by which the gradients and the loss in `sums` are multiplied. That is the worker's share of
            the examples, so that the parts of all workers add up, unless `Step.weighs_losses`: then the total has
            to be divided by the weights of all workers.
    """

    gradients: list[tf.Tensor]
    state: list[tf.Tensor]
    sums: tf.Tensor
    weight: tf.Tensor


class Trace(NamedTuple):
    """Properties of a call of the model in training, which is traced and not run.

    Attributes:
        assigned: the trainable variables that the call assigns.
        draws: how often the call draws from each of its random generators.
        not_additive: the variables of metrics to which a step does more than add.
        foreign: the paths of variables that the call assigns and that do not belong to the model.
        outside: the variables that the call reads and that do not belong to the model.
        bypassed: the paths of the model's variables that the call reads in another way than through Keras.
        decays: of the state that the user's own layers change, by id: the factor of the old value, see `recurrence`.
        from_batch: those of these variables whose change depends on the batch.
        gathers: whether the call or a loss calls `tf2dist.gather`.
    """

    assigned: list[keras.Variable]
    draws: list[int]
    not_additive: list[keras.Variable]
    foreign: list[str]
    outside: list[keras.Variable]
    bypassed: list[str]
    decays: dict[int, float]
    from_batch: list[keras.Variable]
    gathers: bool

    def note_direct_reads(self, traced: Any, known: Sequence[keras.Variable]) -> None:
        """Notes what a call has read by TensorFlow and not through Keras.

        Args:
            traced: a `tf.types.experimental.ConcreteFunction` that has called the model.
            known: the variables of the model.
        """
        paths = {id(part.value.handle): variable.path for variable in known for part in parts_of(variable)}
        self.bypassed.extend(paths[id(tensor)] for tensor in traced.captured_inputs if id(tensor) in paths)
        self.outside.extend(read_directly(traced, [*known, *self.outside]))


def is_own(model: keras.Model, method: str) -> bool:
    """Whether a method is not that of `keras.Model`, but of the model's class or of the object alone."""
    return method in vars(model) or getattr(type(model), method) is not getattr(keras.Model, method)


def without_padding(sums: tf.Tensor, share: tf.Tensor | None) -> tf.Tensor:
    """The sums of a batch, or zeros if its examples are padding; `share`: as a step is given it."""
    # By a choice: a product with 0 would keep a NaN.
    return sums if share is None else tf.where(share > 0, sums, tf.zeros_like(sums))


class Step(abc.ABC):
    """Calls a built Keras model without side effects, so that its variables may live anywhere.

    Attributes:
        model: the model.
        layout: of the data.
        metrics: of the model, in training.
        evaluated: those of an evaluation.
        trace: what a call of it shows.
        trainable: the variables that receive gradients.
        state: the variables to which a call gives new values: the non-trainable ones, and those trainable ones
            that the call assigns, as spectral normalization does. The states of random generators are left out:
            they follow from the worker and the step, so a resumed run repeats them. Worker 0 has those that plain
            Keras would have at this step.
        others, seeds: the variables of the model that are not trained, and those among them of random generators.
        loss_scale: the factor by which the optimizer wants the loss scaled up, against underflow; the gradients
            are divided by it again. If it is a variable, a LossScaleOptimizer divides them.
        earlier_optimizer: the optimizer that has trained the model before; None for a new model.
        sums_losses: whether the losses are sums over the batch instead of means.
        weighs_losses: whether the loss is a mean over parts of the output, of which only the forward pass shows how
            many there are.
        outside: variables that a step reads where they are, since they are not the model's, such as the factor of a
            penalty that a callback changes; by names for checkpoints, which their order gives.
        lookups: of the calls in large tables.
    """

    metrics: Metrics
    evaluated: Metrics
    trace: Trace
    lookups: TableLookups
    sums_losses = weighs_losses = False

    def __init__(self, model: keras.Model, layout: Layout) -> None:
        prepare_process()
        self.model, self.layout = model, layout
        self.loss_scale: float | keras.Variable | None = None
        self.earlier_optimizer: keras.Optimizer | None = None

    @abc.abstractmethod
    def __call__(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        place: tf.Tensor,
        share: tf.Tensor | None = None,
        positions: Sequence[tf.Tensor] = (),
    ) -> StepOutput:
        """One forward and backward pass at the given values of the variables.

        Args:
            trainable: one for each of `self.trainable`; of `tables` the rows of `Lookups.ids`, and so the gradients.
            leaves: of the worker's batch, see `Layout`.
            place: int64 [2]: the worker, and the number of steps before this one.
            share: the part of the whole step's examples that is in this batch; 0 if they are padding. None: all.
            positions: see `Lookups`.
        """

    @abc.abstractmethod
    def evaluate(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        layout: Layout | None = None,
        positions: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        """The sums over some examples, float64 [1 + Metrics.size]: their number, and what they add to the metrics.

        Args:
            layout: of the examples, which may have weights where those of the training have none; None: the same.
            positions: see `Lookups`.
        """

    @property
    @abc.abstractmethod
    def depends_on_batches(self) -> bool:
        """Whether the metrics of many examples depend on how they are cut into batches, as some of Keras' do."""

    @property
    @abc.abstractmethod
    def num_parts(self) -> int:
        """How many numbers or tensors `parts` has; 0 if all of them are known to be means over the batch."""

    @abc.abstractmethod
    def parts(self, leaves: list[tf.Tensor], training: bool, number: int = 0) -> list[tf.Tensor]:
        """The results of a batch that may be no mean over it, such as its loss.

        Args:
            number: of the step whose random numbers are drawn.
        """

    def divide_variables(self, trainable: list[keras.Variable]) -> None:
        """Divides the variables of the model into the trained ones, the state, and those of random generators."""
        # Variables are looked up by id, here and below: == of Keras variables compares what they hold.
        of_seeds, trained = set(map(id, seeds_of(self.model))), set(map(id, trainable))
        others = [*self.model.non_trainable_variables, *self.model.trainable_variables]
        self.trainable, self.others = trainable, [v for v in others if id(v) not in trained]
        self.seeds = [v for v in self.others if id(v) in of_seeds]
        # Read once, to become constants of the graph: the variables may lie on a ps, and no step changes them.
        with tf.init_scope():  # an own step is divided while it is traced
            self._seed_values = [np.array(v.value) for v in self.seeds]
        self._draws = [0] * len(self.seeds)  # of a step; known once one has been traced
        self.state = [v for v in self.others if id(v) not in of_seeds]

    def keep(self, trace: Trace) -> None:
        """Keeps what a trace shows, once the variables are divided."""
        self.trace, self._draws = trace, trace.draws
        self.state += trace.assigned
        self.outside = {f"{OUTSIDE}{number}": [variable] for number, variable in enumerate(trace.outside)}

    @property
    def variables(self) -> list[keras.Variable]:
        """Every variable once; at the end of `state` stand trainable ones again."""
        return [*self.trainable, *self.state[: len(self.state) - len(self.trace.assigned)]]

    def random_states(self, step: int) -> dict[str, np.ndarray]:
        """The states of the random generators after `step` steps, as in plain Keras; named as in `generators`."""
        values = {
            id(v): value + np.array([0, step * draws], value.dtype)
            for v, value, draws in zip(self.seeds, self._seed_values, self._draws, strict=True)
        }
        return {name: values[id(v)] for name, v in generators(self.model).items()}

    @property
    def single_metrics(self) -> list[keras.metrics.Metric]:
        """The metrics of the model; Keras keeps those that it was compiled with as one."""
        return [single for metric in self.model.metrics for single in getattr(metric, "metrics", [metric])]

    def metrics_of_batches(
        self, scope: CallScope, mapping: Mapping, leaves: list[tf.Tensor]
    ) -> list[keras.metrics.Metric]:
        """The metrics that take a batch as one, whatever its size, such as a mean of losses.

        Args:
            scope, mapping: of a call that is traced, on these leaves.
        """
        reached = reached_from(*leaves)
        # They count a batch as 1, and others its examples.
        return [
            m
            for m in self.single_metrics
            if any(new.name not in reached for _, new, _ in changes(scope, mapping, m.variables))
        ]

    @property
    def tables(self) -> list[keras.Variable]:
        """The trainable variables of which a step takes rows in the place of their values."""
        return self.lookups.tables

    def all_variables(self) -> list[keras.Variable]:
        """The variables of the model and its metrics."""
        return [*self.trainable, *self.others, *self.metrics.variables]

    def values(self, ids: Sequence[tf.Tensor] = ()) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The present values of the trainable variables and of the state.

        Args:
            ids: the rows of `tables` that are read in their places; see `Lookups`.
        """
        rows = {id(table): read_rows(table, own) for table, own in zip(self.tables, ids, strict=True)}
        trainable = [rows[id(v)] if id(v) in rows else tf.convert_to_tensor(v.value) for v in self.trainable]
        return trainable, [tf.convert_to_tensor(v.value) for v in self.state]

    def evaluate_function(self, layout: Layout | None = None) -> Any:
        """`evaluate`, traced once for any number of examples: Keras' metrics ask whether that number is fixed."""
        signature = (*self.specs_of(self.trainable, self.state), (layout or self.layout).batched(None))

        # Not by functools.partial: TensorFlow would take the layout for an argument.
        def evaluate(trainable: list[tf.Tensor], state: list[tf.Tensor], leaves: list[tf.Tensor]) -> tf.Tensor:
            return self.evaluate(trainable, state, leaves, layout)

        return tf.function(evaluate, autograph=False, input_signature=signature)

    def scope_values(
        self, trainable: list[tf.Tensor], state: list[tf.Tensor], metrics: list[tf.Tensor], place: tf.Tensor
    ) -> Mapping:
        """The variables of a scope, with their values."""
        values = by_id(self.state, state) | self._generators(place)
        others = [(variable, values[id(variable)]) for variable in self.others]
        of_metrics = list(zip(self.metrics.variables, metrics, strict=True))
        trained = [p for p in zip(self.trainable, trainable, strict=True) if not self.lookups.is_table(p[0])]
        return [*trained, *others, *of_metrics]

    def _generators(self, place: tf.Tensor) -> dict[int, tf.Tensor]:
        """The states of the random generators before a step, by id: a seed and a count of draws."""
        if not self.seeds:
            return {}
        worker, step = tf.unstack(place)
        states = {}
        for variable, value, draws in zip(self.seeds, self._seed_values, self._draws, strict=True):
            # Another seed for each worker, or all would drop the same units; Keras adds 1 to the count for each draw.
            offset = tf.cast(tf.stack([worker * WORKER_STRIDE, step * draws]), variable.dtype)
            states[id(variable)] = tf.constant(value, variable.dtype) + offset
        return states

    def traced(self, run: Callable[[Mapping, list[tf.Tensor]], CallScope]) -> Trace:
        """Traces a step, without running it.

        Args:
            run: runs it with these values on the leaves of a batch, and returns the scope in which it has done so.
        """
        traces: list[Trace] = []
        calls = num_calls()

        # The values come as arguments of a graph, in which `decay_of` can follow what becomes of the metrics'.
        def call(
            trainable: list[tf.Tensor], state: list[tf.Tensor], metrics: list[tf.Tensor], leaves: list[tf.Tensor]
        ) -> None:
            mapping = self.scope_values(trainable, state, metrics, tf.zeros([2], tf.int64))
            scope = run(mapping, leaves)
            metric_changes = changes(scope, mapping, self.metrics.variables)
            changed, reached = self._changed_by_users(scope, mapping), reached_from(*leaves)
            traces.append(
                Trace(
                    assigned=[v for v in self.trainable if id(v) in scope.assigned],
                    draws=[scope.num_updates.get(id(v), 0) for v in self.seeds],
                    not_additive=[v for v, new, old in metric_changes if decay_of(new, old) != 1],
                    foreign=scope.foreign,
                    outside=scope.outside,
                    bypassed=[],
                    decays={id(v): decay_of(new, old) for v, new, old in changed},
                    from_batch=[v for v, new, _ in changed if new.name in reached],
                    gathers=num_calls() > calls,
                )
            )

        signature = (*self.specs_of(self.trainable, self.state, self.metrics.variables), self.layout.batched(None))
        traced = tf.function(call, autograph=False).get_concrete_function(*signature)
        traces[-1].note_direct_reads(traced, self.all_variables())
        return traces[-1]

    def _changed_by_users(self, scope: CallScope, mapping: Mapping) -> list[NewValue]:
        """The state that a call changes, with its new and old values, but for that of Keras's own layers."""
        # Their changes have a mean over the replicas.
        of_keras = [v for layer in own_layers_of_keras(self.model) for v in layer.variables]
        known = {id(v) for v in of_keras if v.aggregation == "none"}
        return changes(scope, mapping, [v for v in self.state if id(v) not in known])

    @staticmethod
    def specs_of(*parts: list[keras.Variable]) -> list[list[tf.TensorSpec]]:
        return [[tf.TensorSpec(v.shape, v.dtype) for v in variables] for variables in parts]


def changes(scope: CallScope, mapping: Mapping, variables: list[keras.Variable]) -> list[NewValue]:
    """The new values of those variables to which a call has given other ones than `mapping` has."""
    old = {id(variable): value for variable, value in mapping}
    values = [(v, scope.state_mapping[id(v)], old[id(v)]) for v in variables]
    return [(v, new, before) for v, new, before in values if new is not before]


def read_directly(traced: Any, known: Sequence[keras.Variable]) -> list[keras.Variable]:
    """The variables of TensorFlow that a function reads and that Keras does not know, in the order of the first reads.

    Args:
        traced: the function, a `tf.types.experimental.ConcreteFunction`.
        known: variables of Keras, which are left out.
    """
    of_known = {id(part.value.handle) for variable in known for part in parts_of(variable)}
    # What a function reads it has as an argument more; its list of variables is in no order.
    order = {id(tensor): number for number, tensor in enumerate(traced.captured_inputs)}
    variables = [variable for variable in traced.variables if id(variable.handle) not in of_known]
    variables.sort(key=lambda variable: order.get(id(variable.handle), len(order)))
    return [keras_variable(variable) for variable in variables]


def generators(model: keras.Model) -> dict[str, keras.Variable]:
    """The states of a model's random generators by name: numbers, as the layers stand in the same order everywhere."""
    return {f"random/{number}": variable for number, variable in enumerate(seeds_of(model))}


def step_place(worker: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """The place of a step, for `Step`: int64 [2]."""
    return tf.stack([tf.cast(worker, tf.int64), tf.cast(step, tf.int64)])
