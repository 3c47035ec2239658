"""Parts that all training loops share: their interface, progress, pauses, and the steps of a call.

Requests pause the loops. One call of TensorFlow executes enough steps to hide the cost of a call, and few enough to
pause soon.
"""

import abc
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from tf2dist.checkpoint.snapshot import EARLIER_ARRAY, Facts, Frozen, InputFacts, Snapshot
from tf2dist.checkpoint.state import LOSS_SCALE, assign, finalize, values
from tf2dist.config.schema import RunConfig
from tf2dist.data.passes import Sharding
from tf2dist.errors import NotFiniteError
from tf2dist.model.evaluation import Evaluation
from tf2dist.model.model_checks import advice_on_outputs, notes_on
from tf2dist.model.source import EpochPlan
from tf2dist.model.step import OUTSIDE
from tf2dist.tf_internals.keras import set_learning_rates
from tf2dist.training.hooks import CallbackEffects
from tf2dist.training.setup import PreparedRun, TaskContext


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        global_step: updates applied to the model.
        local_steps: the steps of each worker among these updates; those that a cluster of another mode or size took
            before are not counted.
        examples: seen by all workers, in the whole run.
        loss: mean over the steps since the last report; NaN if there were none.
        metrics: the sums of the metrics over all training steps of this process's life, float64; see `Metrics`.
    """

    global_step: int
    local_steps: tuple[int, ...]
    examples: int
    loss: float
    metrics: np.ndarray


Report = Callable[[Progress], None]


class PauseRequest(enum.Flag):
    """The reasons for which a training should pause.

    Attributes:
        SAVE: a checkpoint is due.
        CHANGE: a callback wants to change something. The training pauses for it only after a step, since Keras calls
            such callbacks after a batch.
        STOP: the run was asked to stop.
    """

    NOTHING = 0
    SAVE = enum.auto()
    CHANGE = enum.auto()
    STOP = enum.auto()

    def to_floats(self) -> list[float]:
        """One number for each kind of request, so that the requests of all workers can travel through a sum."""
        return [float(one in self) for one in PauseRequest]

    @classmethod
    def of_sums(cls, sums: list[float]) -> "PauseRequest":
        """The requests of all workers, from the sums of their `to_floats`."""
        # The sum of a kind is positive if any worker requests it.
        return cls(sum(one.value for one, total in zip(PauseRequest, sums, strict=True) if total > 0))


PauseRequests = Callable[[], PauseRequest]  # called from time to time during a training or an evaluation


def never() -> PauseRequest:
    return PauseRequest.NOTHING


class WorkersAway(Exception):
    """A stop is requested, and the workers make no progress with the calls that they were given."""


class Loop(abc.ABC):
    """One task's view of the training.

    Made with ``build(context, start, report, strategy)``. `strategy` is that of the synchronous cluster; if it is None,
    `build` connects to the servers of the cluster.

    Attributes:
        mode: the option.
        leads: whether this task is the leader.
        earlier_updates: the updates that the optimizer had applied before this run.
        start: the snapshot that the run continues from, without the variables of the model and of the
            optimizer; None for a new run.
        restored_from: a line for the user about what was restored from `start`; empty for nothing.
        warning: for the user, about the model; empty for nothing.
        note: for the user, about what differs from Keras; empty for nothing.
        new_optimizer: makes an optimizer like that of the run, without its state.
        by_row: the names of the arrays that are read and assigned piece by piece; see `names_by_row`.
    """

    mode: str
    leads: bool
    progress: Progress

    def __init__(self, context: TaskContext, run: PreparedRun, report: Report) -> None:
        plan, values = run.plan, run.values
        self.config, self.cluster, self.report, self.sizes = context.config, context.cluster, report, run.sizes
        self.sharding, self.target_step = plan.sharding, plan.target_step
        self.start = plan.start.without_variables() if plan.start else None
        self.step, self.model, self.metrics = run.step, run.step.model, run.step.metrics
        self.named, self.by_row, self.restored_from = values.named, values.by_row, values.restored_from
        self.earlier_updates, self.new_optimizer = run.earlier_updates, run.new_optimizer
        self.warning, self.note = advice_on_outputs(run.step), notes_on(run.step, self.optimizer, run.note)
        self._trained: dict[str, np.ndarray] = {}  # the weights that `finalize` has replaced

    @property
    def is_finalized(self) -> bool:
        """Whether the model has other weights now than a snapshot."""
        return bool(self._trained)

    @property
    def epoch_has_ended(self) -> bool:
        """Whether the data have come to their end, in a run whose epochs end with the data."""
        return False

    @property
    def num_unread(self) -> int:
        """The number of workers whose data that end has left unread."""
        return 0

    def begin_epoch(self) -> None:
        """Begins a new pass over the data, if those end the epochs; while no task trains."""
        assert not self.sharding.ends_with_data

    @abc.abstractmethod
    def train(self, until_step: int, pause_request: PauseRequests = never) -> PauseRequest:
        """Trains until exactly `until_step` updates have been applied, `epoch_has_ended`, or a pause is requested.

        Args:
            pause_request: called from time to time; a request makes all tasks pause soon, at the same step.

        Returns:
            What the tasks have requested, even if `until_step` was reached.
        """

    @abc.abstractmethod
    def combine(self, request: PauseRequest) -> PauseRequest:
        """The requests of all tasks that drive the training; all of them must call this, while none trains."""

    @abc.abstractmethod
    def broadcast(self, packed: bytes) -> bytes:
        """Returns the bytes that the leader passes; all tasks that drive the training must call this."""

    @abc.abstractmethod
    def evaluate(self, split: str, pause_request: PauseRequests = never) -> Evaluation:
        """Evaluates "test" or "validation", every example exactly once; WorkersAway: a stop that it cannot wait for."""

    # The variables, while no task trains.

    @abc.abstractmethod
    def _optimizers(self) -> list[tuple[keras.Optimizer, list[keras.Variable]]]:
        """The optimizers that this task can reach, each with the variables that it trains."""

    @property
    def optimizer(self) -> keras.Optimizer:
        """An optimizer of the run; if there are several, all of them have its learning rates."""
        return self._optimizers()[0][0]

    @abc.abstractmethod
    def _freeze_arrays(self) -> Callable[[], dict[str, np.ndarray]]:
        """Keeps the values of all variables as they are now; the result returns them, once."""

    def arrays(self) -> dict[str, np.ndarray]:
        """The values of all variables by name."""
        return self._freeze_arrays()()

    def counted_before(self) -> dict[str, np.ndarray]:
        """`earlier_updates` as an array of a checkpoint, which has none for 0."""
        return {EARLIER_ARRAY: np.array(self.earlier_updates)} if self.earlier_updates else {}

    def small_arrays(self) -> dict[str, np.ndarray]:
        """The values of the variables that are not the model's, and the counts of a LossScaleOptimizer."""
        prefixes = OUTSIDE, LOSS_SCALE
        return values({name: variables for name, variables in self.named.items() if name.startswith(prefixes)})

    def random_states(self) -> dict[str, np.ndarray]:
        """The states of the model's random generators after the steps so far, by name; see `Step`."""
        return self.step.random_states(self.progress.global_step)

    @abc.abstractmethod
    def _state(self) -> tuple[InputFacts, dict[str, np.ndarray]]:
        """The position of the input, and what the mode saves of its own, by its name in a snapshot."""

    def freeze(self, others: Mapping[str, np.ndarray] = MappingProxyType({})) -> Frozen:
        """The state at `progress.global_step`, with the arrays `others` beside it. Only for the leader."""
        position, own = self._state()
        facts = Facts(
            mode=self.mode,
            local_steps=self.progress.local_steps,
            target_step=self.target_step,
            examples=self.progress.examples,
            input=position,
            data=self.config.data.name,
            model=self.config.model,
            optimizer=self.config.optimizer,
            seed=self.config.seed,
            keras=self.config.keras,
        )
        own |= self.counted_before()
        step, own, fetch = self.progress.global_step, {**self._trained, **own, **others}, self._freeze_arrays()
        return lambda: Snapshot(step, fetch() | own, facts)

    def apply(self, effects: CallbackEffects) -> None:
        """Sets variables and learning rates; all tasks that drive the training must call this."""
        assign(self.named, effects.arrays, self.by_row)
        for optimizer, _ in self._optimizers() if effects.learning_rates else []:
            set_learning_rates(optimizer, effects.learning_rates)

    def finalize(self) -> None:
        """Sets the final weights of the model, such as the optimizer's moving averages.

        Later snapshots still hold the weights with which a training would continue. All tasks that drive the training
        must call this.
        """
        self._trained = finalize(self.named, self._optimizers())

    # What is told of the run, and its end.

    def clear_metrics(self) -> bool:
        """Forgets the sums of metrics that are not finite, as Keras does between two epochs.

        While no task trains. Returns whether there were any.
        """
        metrics = self.progress.metrics
        if np.isfinite(metrics).all():
            return False
        self._clear_counted_metrics()
        self.progress = replace(self.progress, metrics=np.where(np.isfinite(metrics), metrics, 0.0))
        return True

    @abc.abstractmethod
    def _clear_counted_metrics(self) -> None:
        """Does the same where the metrics are counted, if that is not `progress`."""

    def loss_error(self, loss: float, step: int, metrics: np.ndarray) -> NotFiniteError:
        """Sets the metrics of `progress` to those of all steps so far; returns the error to raise.

        Args:
            loss: the sum since the start with parameter servers, of the last call with mode=sync.
            step: the global step at which it was found.
        """
        self.progress = replace(self.progress, metrics=metrics)
        return NotFiniteError(f"the loss is {loss} by global step {step}; try a lower learning rate")

    @abc.abstractmethod
    def updates_applied(self) -> int:
        """The number of updates as counted where they are applied, independently of `progress`."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts of the run that only this mode knows, for summary.json."""

    def histograms(self) -> dict[str, np.ndarray]:
        """Counts of this mode for TensorBoard, while no task trains: by name, how often 0, 1, 2, ... occurred."""
        return {}

    @abc.abstractmethod
    def finish(self, result: Evaluation | None) -> None:
        """Ends the training on every task; each logs the headline of `result`. None: the run was stopped."""

    @abc.abstractmethod
    def abandon(self, reason: str) -> None:
        """Tells the tasks that wait for this one, as far as they can be reached, that it has failed."""


CALL_SECS = 0.4  # a request to stop or save waits for a call; longer ones make no run faster
MAX_STEPS = 50  # more would save little more
# With parameter servers the steps of a call are unrolled. A worker prepares all of their operations before its first
# step, which takes seconds for a deep model. And a step takes 20 ns and more for each parameter that it trains.
UNROLLED_STEPS = 50
UNROLLED_OPERATIONS = 30_000
UNROLLED_PARAMETERS = 20_000_000


def steps_in_call_secs(secs_per_step: float) -> int:
    """The number of steps, from 1 to MAX_STEPS, that take about CALL_SECS."""
    return max(1, min(MAX_STEPS, int(CALL_SECS / secs_per_step)))


def unrolled_steps(traced_step: Any, variables: list[keras.Variable], steps_to_pause: float) -> int:
    """The number of unrolled steps in a call.

    Args:
        traced_step: a function with what a worker computes in one step.
        variables: that travel as a whole in each step.
        steps_to_pause: that a worker takes between two points at which all workers wait; it gets two calls for them.
    """
    operations = UNROLLED_OPERATIONS // len(traced_step.graph.get_operations())
    parameters = UNROLLED_PARAMETERS // max(1, sum(int(math.prod(variable.shape)) for variable in variables))
    return max(1, min(UNROLLED_STEPS, operations, parameters, math.ceil(steps_to_pause / 2)))


def steps_to_pause(config: RunConfig, plan: EpochPlan | None, sharding: Sharding, total_steps: int) -> int:
    """The fewest global steps between two ends of an epoch of `fit`, evaluations or checkpoints that are asked for."""
    epoch = sharding.updates_per_pass if plan else None
    given = (epoch, config.train.eval_every_steps, config.checkpoint.every_steps)
    return min([total_steps, *(steps for steps in given if steps)])
