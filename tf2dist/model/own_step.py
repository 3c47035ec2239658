"""The step of a model that has its own `train_step`, `test_step` or `compute_metrics`, run as it is written."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf2dist.data.arrays import Layout
from tf2dist.errors import ConfigError, TfDistError, kind_of, naming, reason_of, users_location
from tf2dist.model.copies import PLAIN
from tf2dist.model.interception import prepare_process
from tf2dist.model.metrics import LoggedMetrics, flat
from tf2dist.model.optimizer_checks import prepare_choice
from tf2dist.model.scopes import WAY_OUT, TrainScope, Update, building, intercept_updates, is_zero
from tf2dist.model.step import Mapping, Step, StepOutput, Trace, is_own, without_padding
from tf2dist.model.tables import TableLookups
from tf2dist.tf_internals.keras import MultiOptimizer, counter_of, groups_of, inner_optimizers

OWN_STEPS = ("train_step", "test_step", "compute_metrics")  # methods of a model by which `fit` would train it
# By id of a tensor: it, the metric whose result it is, and its name if the metric has several results.
Results = dict[int, tuple[Any, keras.metrics.Metric, str]]


class Group(NamedTuple):
    """Variables that an optimizer trains."""

    optimizer: keras.Optimizer
    variables: list[keras.Variable]


class OwnStep(Step):
    """The step of a model that is trained by its own methods.

    Attributes:
        optimizer: of all trained variables; a MultiOptimizer if a step has several updates.
        groups: what each update of a step trains, in the order of the updates.
        is_in_phases: whether the step has to apply an update before it goes on, since it reads what was updated.

    Args:
        tested: the layout of what is evaluated; None if there is nothing, so that no `test_step` is needed.
    """

    metrics: LoggedMetrics
    evaluated: LoggedMetrics
    groups: list[Group]
    is_in_phases: bool

    def __init__(self, model: keras.Model, layout: Layout, model_name: str, tested: Layout | None) -> None:
        super().__init__(model, layout)
        self._name, self.lookups = model_name, TableLookups(model, layout)
        self._graded = build(model, layout, model_name, tested)
        self.divide_variables(list(model.trainable_variables))
        self.metrics = self.evaluated = LoggedMetrics(model, {}, set())
        with _naming_method(model_name, "train_step"):
            trace = self.traced(self._run)
            self._check_optimizers(trace)
        self.evaluated = self._trace_evaluation(tested) if tested else self.metrics
        self.keep(trace)
        self.optimizer = optimizer_of(model_name, self.groups)

    @property
    def num_parts(self) -> int:
        return sum(len(group.variables) for group in self.groups)

    @property
    def depends_on_batches(self) -> bool:
        return True

    def __call__(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        place: tf.Tensor,
        share: tf.Tensor | None = None,
        positions: Sequence[tf.Tensor] = (),
        apply: Callable[[int, list[tf.Tensor]], list[tf.Tensor]] | None = None,
    ) -> StepOutput:
        """Calls `train_step` of the model; see `Step`. Tables travel as a whole, so there are no positions.

        Args:
            apply: called with the number of each update in the step and its gradients, multiplied by the share; applies
                them, and returns the new values of the variables. None to return the gradients of all updates.
        """

        def weighted(update: Update) -> list[tf.Tensor]:
            # In the type of the gradients, such as float16.
            return [g if share is None else g * tf.cast(share, g.dtype) for g in update.gradients]

        def applied(update: Update) -> list[tf.Tensor]:
            return apply(len(scope.updates) - 1, weighted(update)) if apply else []

        scope = self._train_scope(trainable, state, place, applied if apply else None)
        with scope:
            logs = flat(self.model.train_step(_data(self.layout, leaves)))
            changes = [*self.metrics.changes(scope, share), *self.metrics.changes_by(logs, share)]
            # It may be a variable, which has its value only here.
            loss = tf.cast(logs["loss"], tf.float32) if "loss" in logs else scope.loss()
        count = tf.cast(tf.shape(leaves[0])[0], tf.float32)
        weight = tf.ones([]) if share is None else share
        sums = tf.concat([[loss * weight, count], *changes], 0)
        gradients = [] if apply else [gradient for update in scope.updates for gradient in weighted(update)]
        new_state = [scope.state_mapping[id(v)] for v in self.state]
        return StepOutput(gradients, new_state, without_padding(sums, share), weight)

    def parts(self, leaves: list[tf.Tensor], training: bool, number: int = 0) -> list[tf.Tensor]:
        """The gradients of a training batch."""
        trainable, state = self.values()
        scope = self._train_scope(trainable, state, tf.constant([0, number], tf.int64))
        with scope:
            self.model.train_step(_data(self.layout, leaves))
        return [gradient for update in scope.updates for gradient in update.gradients]

    def evaluate(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        leaves: list[tf.Tensor],
        layout: Layout | None = None,
        positions: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        with self._train_scope(trainable, state, tf.zeros([2], tf.int64)) as scope:
            logs = flat(self.model.test_step(_data(layout or self.layout, leaves)))
            count = tf.cast(tf.shape(leaves[0])[0], tf.float32)
            changes = [*self.evaluated.changes(scope), *self.evaluated.changes_by(logs)]
        return tf.cast(tf.concat([[count], *changes], 0), tf.float64)

    def _train_scope(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        place: tf.Tensor,
        apply: Callable[[Update], list[tf.Tensor]] | None = None,
    ) -> TrainScope:
        mapping = self.scope_values(trainable, state, self.metrics.zeros(), place)
        return TrainScope(mapping, list(self.model.trainable_variables), apply)

    def _run(self, mapping: Mapping, leaves: list[tf.Tensor]) -> TrainScope:
        """Runs a step to be traced, and notes what it trains and returns."""
        with TrainScope(mapping, self.trainable) as scope, _recorded(self.model.metrics) as results:
            logged = _logged(self.model.train_step(_data(self.layout, leaves)), results)
        self._read_updates(scope)
        of_batches = self.metrics_of_batches(scope, mapping, leaves)
        self.metrics = LoggedMetrics(self.model, logged, {id(v) for metric in of_batches for v in metric.variables})
        return scope

    def _read_updates(self, scope: TrainScope) -> None:
        """Learns from a trace what the step trains."""
        if not scope.updates:
            raise ConfigError(
                "applies no optimizer of the model; call apply or apply_gradients of one in its attributes"
            )
        optimizers: dict[int, keras.Optimizer] = {}  # by id of the variable
        for update in scope.updates:
            one = update.optimizer
            if one is not self.model.optimizer and one.use_ema and not one.ema_overwrite_frequency:
                raise ConfigError(
                    f"applies {one.name} with use_ema, and keras.Model.fit finishes the averages of model.optimizer "
                    "alone; leave use_ema out, or give ema_overwrite_frequency"
                )
            for variable in update.variables:
                if optimizers.setdefault(id(variable), update.optimizer) is not update.optimizer:
                    raise ConfigError(f"trains {variable.path} by two optimizers; give each variable one")
        pairs = [pair for update in scope.updates for pair in zip(update.variables, update.gradients, strict=True)]
        trained = {id(variable) for variable, gradient in pairs if not is_zero(gradient)}
        if lost := [variable.path for key, variable in self._graded.items() if key not in trained]:
            raise ConfigError(f"gives {lost[0]} no gradient here, and does so in keras.Model.fit; {WAY_OUT}")
        self.groups = [Group(update.optimizer, update.variables) for update in scope.updates]
        self.is_in_phases = scope.reads_updated or repeats(self.groups)
        self.divide_variables(trained_by(self.groups))

    def _check_optimizers(self, trace: Trace) -> None:
        """Refuses what depends on the state of an optimizer, which lies elsewhere: on a ps, or in a copy."""
        of_optimizers = {id(v): v for optimizer in optimizers_of(self.model).values() for v in optimizer.variables}
        if read := [v for v in trace.outside if id(v) in of_optimizers]:
            raise ConfigError(f"reads {read[0].path} of its optimizer, which the tasks keep elsewhere; leave that out")

    def _trace_evaluation(self, layout: Layout) -> LoggedMetrics:
        """The metrics that `test_step` returns."""
        logged: list[LoggedMetrics] = []

        def call(leaves: list[tf.Tensor]) -> None:
            scope = self._train_scope(*self.values(), tf.zeros([2], tf.int64))
            with scope, _recorded(self.model.metrics) as results:
                returned = _logged(self.model.test_step(_data(layout, leaves)), results)
            if scope.updates:
                raise ConfigError("applies an optimizer")
            logged.append(LoggedMetrics(self.model, returned, set()))

        with _naming_method(self._name, "test_step"):
            tf.function(call, autograph=False).get_concrete_function(layout.batched(None))
        return logged[-1]


def trained_by(groups: list[Group]) -> list[keras.Variable]:
    """The variables that the updates of a step train."""
    return list({id(v): v for group in groups for v in group.variables}.values())


def repeats(groups: list[Group]) -> bool:
    """Whether the updates of a step use an optimizer, or train a variable, more than once."""
    optimizers, variables = Counter[int](), Counter[int]()
    for group in groups:
        optimizers[id(group.optimizer)] += 1
        variables.update(map(id, group.variables))
    return max([*optimizers.values(), *variables.values()]) > 1


def optimizers_in(optimizer: keras.Optimizer, groups: list[Group]) -> list[keras.Optimizer]:
    """For each update of a step the one that applies it: of `optimizer`, which trains all, or of those in it."""
    by_variable = {id(v): inner for inner, variables in groups_of(optimizer, trained_by(groups)) for v in variables}
    return [by_variable[id(group.variables[0])] for group in groups]


def updates_per_step(optimizer: keras.Optimizer, groups: list[Group]) -> list[int]:
    """By how much a step moves each of `counters_of` this optimizer, which trains all variables."""
    times = Counter(map(id, optimizers_in(optimizer, groups)))
    # A single optimizer is the only one in itself.
    moved = {id(counter_of(inner)): times[id(inner)] for inner in inner_optimizers(optimizer)}
    return list(({id(counter_of(optimizer)): 1} | moved).values())


def optimizer_of(model_name: str, groups: list[Group]) -> keras.Optimizer:
    """The optimizer of all that the updates of a step train; a MultiOptimizer if there are several updates."""
    inner = list({id(group.optimizer): group.optimizer for group in groups}.values())
    if len(inner) == 1 and not repeats(groups):
        return inner[0]
    by_variable = {id(v): group.optimizer for group in groups for v in group.variables}
    optimizer = MultiOptimizer(lambda variable: by_variable[id(variable)])
    prepare_choice(model_name, optimizer, trained_by(groups))
    if all(one.built for one in inner):  # the model was trained before
        optimizer.build(trained_by(groups))
        counter_of(optimizer).assign(counter_of(inner[0]))
    return optimizer


def has_own_step(model: keras.Model) -> bool:
    """Whether a model is trained or evaluated by a method of its own."""
    return any(is_own(model, method) for method in OWN_STEPS)


def build(model: keras.Model, layout: Layout, model_name: str, tested: Layout | None) -> dict[int, keras.Variable]:
    """Makes the variables of a compiled model that has its own steps, as its first step in Keras makes them.

    Args:
        layout: of a training batch.
        tested: see `OwnStep`.

    Returns:
        The variables that the step of Keras trains, by id.
    """
    graded: dict[int, keras.Variable] = {}
    prepare_process()
    intercept_updates(list(optimizers_of(model).values()))
    for method, batch in (("train_step", layout), ("test_step", tested)):
        if batch is None:
            continue
        before = _counts(model)
        with _naming_method(model_name, method), building() as given:
            _traced(getattr(model, method), batch)
            if changed := [key for key, value in _counts(model).items() if before.get(key, value) != value]:
                raise ConfigError(
                    f"changes self.{changed[0]} in Python, which happens when it is traced and not in each step; make "
                    "it a weight (add_weight), or leave it out"
                )
        graded |= given
    return graded


def _traced(method: Callable[[Any], Any], layout: Layout) -> None:
    def call(*leaves: tf.Tensor) -> None:
        method(_data(layout, list(leaves)))

    tf.function(call, autograph=False).get_concrete_function(*layout.batched(None))


def _data(layout: Layout, leaves: list[tf.Tensor]) -> Any:
    """A batch as Keras gives it to the methods of a model."""
    return keras.utils.pack_x_y_sample_weight(*layout.pack(leaves))


def optimizers_of(model: keras.Model) -> dict[str, keras.Optimizer]:
    """The optimizers in the attributes of a model, also in lists and dicts, such as "d_optimizer" and "several/0"."""
    found: dict[str, keras.Optimizer] = {}
    queue = [(name, value) for name, value in vars(model).items() if not name.startswith("_self_")]  # TensorFlow's own
    while queue:
        name, value = queue.pop()
        if isinstance(value, keras.Optimizer):
            found[name] = value
        elif isinstance(value, dict | list | tuple):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            queue += [(f"{name}/{key}", part) for key, part in parts]
    return found


def _counts(model: keras.Model) -> dict[str, Any]:
    """The attributes that are plain values, but for those of Keras."""
    known = vars(keras.Model())
    return {key: value for key, value in vars(model).items() if key not in known and isinstance(value, PLAIN)}


def _logged(logs: Any, results: Results) -> dict[str, tuple[keras.metrics.Metric, str] | None]:
    """The sources of what a step returns, by name; see `LoggedMetrics`."""
    if not isinstance(logs, dict):
        raise ConfigError(f"returns {kind_of(logs)}, and must return a dict of metrics by name")
    logged = {}
    for name, value in flat(logs).items():
        logged[name] = results.get(id(value), (None,))[1:] or None
        if logged[name] is None and not _is_number(value):
            raise ConfigError(f"returns {name}, which is no single number; return its mean, or the result of a metric")
    return logged


def _is_number(value: Any) -> bool:
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):  # None, and what is no tensor, such as a ragged one
        return False
    kind = tensor.dtype
    return bool(tensor.shape.rank == 0 and (kind.is_floating or kind.is_integer or kind.is_bool))


@contextmanager
def _recorded(metrics: list[keras.metrics.Metric]) -> Iterator[Results]:
    """The results that metrics give in the block, by the ids of the tensors."""
    results: Results = {}

    def recording(metric: keras.metrics.Metric) -> Callable[[], Any]:
        def result() -> Any:
            value = type(metric).result(metric)
            parts = flat(value).items() if isinstance(value, dict) else [("", value)]
            # The tensor is kept, or another one could get its id.
            results.update({id(tensor): (tensor, metric, name) for name, tensor in parts})
            return value

        unconverted: Callable[[], Any] = tf.autograph.experimental.do_not_convert(result)
        return unconverted

    for metric in metrics:
        metric.result = recording(metric)
    try:
        yield results
    finally:
        for metric in metrics:
            del metric.result  # the method of the class shows again


@contextmanager
def _naming_method(model_name: str, method: str) -> Iterator[None]:
    """Errors of a method of the user's model are told with its name and that of the model."""
    with naming(f"model ({model_name})"):
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"its {method} {error}") from None
        except TfDistError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise ConfigError(f"its {method} fails ({reason_of(error)}{users_location(error)}); correct it") from error
