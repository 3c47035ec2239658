"""Drives a run through its epochs, as `keras.Model.fit` does, and says when it ends before its last step.

Each epoch ends with its metrics, its validation and its callbacks. What ends a training early are the options
train.until_accuracy and train.until_secs.
"""

import math
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from tf2dist.checkpoint.snapshot import Frozen, Snapshot
from tf2dist.checkpoint.store import NoSaver
from tf2dist.cluster.spec import Cluster
from tf2dist.config.schema import RunConfig, TrainConfig
from tf2dist.errors import ConfigError, Interrupted, NotFiniteError
from tf2dist.model.evaluate import Evaluation
from tf2dist.model.source import EpochPlan
from tf2dist.process import heartbeat
from tf2dist.process.sigterm import asked_to_stop
from tf2dist.training.about import LearningRates
from tf2dist.training.hooks import Change, Hooks, NamedArrays
from tf2dist.training.loop import EPOCH_ARRAY, EpochPosition, Loop, PauseRequest, WorkersAway
from tf2dist.training.report import NoReporter

METRICS, STOPPED, RATES = "epoch/metrics", "epoch/stopped", "epoch/learning_rate"  # the names of arrays in a snapshot
CALLBACKS = "callbacks/"
ANSWER_SECS = 1.0  # the longest time between two signs to the other workers that the callbacks are still running


@dataclass
class EpochState:
    """Where a run stands among its epochs; saved with it.

    Attributes:
        before: the sums of the metrics when the epoch began.
        has_stopped: whether a callback has ended the run.
        callbacks: the state of the callbacks.
        learning_rates: the last ones that a callback has set; empty if none has.
    """

    position: EpochPosition
    before: np.ndarray
    has_stopped: bool
    callbacks: NamedArrays
    learning_rates: tuple[float, ...] = ()

    @classmethod
    def of(cls, plan: EpochPlan, loop: Loop) -> "EpochState":
        """The state in which the run of a loop continues."""
        none = np.zeros(loop.metrics.size)
        arrays = loop.start.arrays if loop.start else {}
        done = arrays.get(METRICS, none)
        # The sums of a process begin at 0, so those of the part of the epoch that was trained before are a negative
        # beginning. A model compiled with other metrics now cannot use them, and counts the rest of the epoch alone.
        return cls(
            position=EpochPosition.of(loop.start, plan, loop.sharding),
            before=loop.progress.metrics - (done if done.shape == none.shape else none),
            has_stopped=bool(arrays.get(STOPPED, False)),
            callbacks={name.removeprefix(CALLBACKS): a for name, a in arrays.items() if name.startswith(CALLBACKS)},
            learning_rates=tuple(arrays[RATES].ravel().tolist()) if RATES in arrays else (),
        )

    def arrays(self, metrics: np.ndarray) -> NamedArrays:
        """What a snapshot keeps.

        Args:
            metrics: the sums of the metrics now.
        """
        own = {
            EPOCH_ARRAY: self.position.to_array(),
            METRICS: metrics - self.before,
            STOPPED: np.array(self.has_stopped),
        }
        if self.learning_rates:
            own[RATES] = np.array(self.learning_rates)
        return own | {f"{CALLBACKS}{name}": array for name, array in self.callbacks.items()}


class EpochDriver:
    """Trains epoch by epoch to the end of the plan, or until a callback ends the run.

    Every task that drives the training has one, and all of them make the same calls in the same order: with mode=sync
    most of these calls wait for the other workers.

    Args:
        splits: the names of those that can be evaluated.
        write_finished_model: called once, when the model has its final weights; writes it on the leader alone.
    """

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        loop: Loop,
        saver: NoSaver,
        reporter: NoReporter,
        splits: Collection[str],
        write_finished_model: Callable[[], None],
        plan: EpochPlan,
        hooks: Hooks,
    ) -> None:
        self._config, self._cluster, self._plan, self._loop = config, cluster, plan, loop
        self._saver, self._reporter, self._hooks, self._splits = saver, reporter, hooks, splits
        self._write_finished_model = write_finished_model
        self._state = EpochState.of(plan, loop)
        self._validation: Evaluation | None = None
        self._has_told = False
        self._last = Evaluation({"loss": math.nan}, 0)  # the metrics of the last epoch's training
        self._rates = LearningRates(loop.optimizer, loop.earlier_updates)

    def drive(self) -> None:
        """Trains, evaluates and reports the result.

        Raises:
            Interrupted: a task was asked to stop; the run is saved.
            NotFiniteError: the loss is not finite; the callbacks are told the metrics.
        """
        try:
            self._drive()
        except NotFiniteError:
            self._tell_not_finite()
            raise

    def _drive(self) -> None:
        loop, target = self._loop, self._loop.target_step
        # Optimizers are built with the rate of the configuration, and snapshots leave the rate out.
        self._apply(Change(learning_rates=self._state.learning_rates))
        has_ended = self._is_ended(self._call("begin", {}))

        # An epoch takes several turns if a checkpoint or a callback interrupts it.
        while not has_ended and self._state.position.epoch < self._plan.epochs and self._epoch_end() <= target:
            epoch_end = self._epoch_end()
            requested = self._train(epoch_end)
            ends_early = PauseRequest.CHANGE in requested and self._call("pause", {}).stop
            # The callbacks come before the checkpoint, which must hold what they have changed: a resumed run does not
            # call them again.
            if ends_early or loop.epoch_has_ended or loop.progress.global_step == epoch_end:
                has_ended = self._end_epoch()
            is_due = PauseRequest.SAVE in requested or self._is_multiple(self._config.checkpoint.every_steps)
            if is_due or has_ended or loop.progress.global_step == target:
                self._save()
            self._stop_if(requested)
        self._finish()

    def _epoch_end(self) -> int:
        return self._state.position.end_of(self._state.position.epoch)

    def _train(self, until_step: int) -> PauseRequest:
        """Trains to the step, or to an earlier one at which a checkpoint is due."""
        step, every = self._loop.progress.global_step, self._config.checkpoint.every_steps
        if every:
            until_step = min(until_step, (step // every + 1) * every)
        requested = self._loop.train(until_step, self._pause_request)
        heartbeat.progress()
        return requested

    def _pause_request(self) -> PauseRequest:
        stop = PauseRequest.STOP if asked_to_stop() else PauseRequest.NOTHING
        save = PauseRequest.SAVE if self._saver.due() else PauseRequest.NOTHING
        return stop | save | (PauseRequest.CHANGE if self._hooks.wanted() else PauseRequest.NOTHING)

    def _is_multiple(self, every: int | None) -> bool:
        return every is not None and self._loop.progress.global_step % every == 0

    def _end_epoch(self) -> bool:
        """Validates, calls the callbacks and moves on to the next epoch; returns whether the run has ended."""
        loop, state = self._loop, self._state
        self._tell_unread()
        self._reporter.show_progress()  # before the caller of `fit` tells of the end of the epoch
        logs = loop.metrics.results(loop.progress.metrics - state.before)
        self._last = Evaluation(logs, loop.progress.examples)
        if self._plan.validates(state.position.epoch) and "validation" in self._splits:
            self._validation = self._evaluate("validation")
            logs = logs | {f"val_{name}": value for name, value in self._validation.metrics.items()}
        has_ended = self._is_ended(self._call("epoch", logs))
        # Only now: a run that is stopped while its callbacks work is saved at the end of this epoch and, when it is
        # resumed, calls them again.
        state.position = state.position.next(loop.progress.global_step)
        state.before = loop.progress.metrics
        if loop.sharding.ends_with_data:
            loop.begin_epoch()
        return has_ended

    def _tell_not_finite(self) -> None:
        """Tells the callbacks the metrics of the epoch, without waiting: this task ends with an error."""
        progress, epoch = self._loop.progress, self._state.position.epoch
        logs = self._loop.metrics.results(progress.metrics - self._state.before)
        if self._plan.validates(epoch) and "validation" in self._splits:
            names = self._validation.metrics if self._validation else logs
            logs |= {f"val_{name}": math.nan for name in names}
        self._hooks.post("not finite", epoch, progress.global_step, logs, (), dict, {})

    def _tell_unread(self) -> None:
        """Tells once that the end of one worker's data has left batches of others out."""
        if (unread := self._loop.num_unread) and not self._has_told:
            self._has_told = True
            self._reporter.note(
                f"epoch {self._state.position.epoch + 1} ended with the data of one worker; batches of {unread} others "
                "were left out; give all workers equally many"
            )

    def _is_ended(self, change: Change) -> bool:
        self._state.has_stopped = self._state.has_stopped or change.stop
        return self._state.has_stopped

    def _call(self, kind: str, logs: dict[str, float]) -> Change:
        """Calls the callbacks and carries out what they want, on all tasks at the same step.

        Raises:
            Interrupted: a task was asked to stop meanwhile; the run is saved.
        """
        loop, step = self._loop, self._loop.progress.global_step
        # A resumed run that a callback had ended has no epoch any more that could begin.
        is_over = kind == "begin" and self._state.has_stopped
        epoch = self._plan.epochs if is_over else self._state.position.epoch

        def arrays() -> NamedArrays:
            return loop.arrays() | loop.random_states()

        self._hooks.post(kind, epoch, step, logs, self._rates.at(step), arrays, self._state.callbacks)
        change = self._answer()
        if change.is_interrupted:
            self._stop_if(PauseRequest.STOP)
        self._apply(change)
        if change.state is not None:
            self._state.callbacks = change.state
        return change

    def _apply(self, change: Change) -> None:
        self._loop.apply(change)
        if change.learning_rates:
            self._state.learning_rates = change.learning_rates
            # The object made before has read the rates once and for all.
            self._rates = LearningRates(self._loop.optimizer, self._loop.earlier_updates)
            self._reporter.set_learning_rates(self._rates)

    def _answer(self) -> Change:
        """What the leader's callbacks want; waits for it on all tasks."""
        while True:
            answer = self._hooks.answer(ANSWER_SECS)
            # A callback may run for hours, but a stop has seconds. The leader alone decides: if each task looked at its
            # own signal, some would leave this loop while others wait for them in the broadcast.
            if answer is None and asked_to_stop() and self._loop.leads:
                answer = Change(is_interrupted=True)
            # The others wait in this broadcast. An empty one lets them report progress to their watchdogs, which would
            # otherwise take them for stalled.
            packed = self._loop.broadcast(answer.to_bytes() if answer else b"")
            heartbeat.progress()
            if packed:
                return answer or Change.from_bytes(packed)

    def _evaluate(self, split: str) -> Evaluation:
        try:
            evaluation = self._loop.evaluate(split, self._pause_request)
        except WorkersAway:
            self._stop_if(PauseRequest.STOP)  # saves, and raises Interrupted
            raise
        # The caller of `fit` tells of it with the other metrics of the epoch.
        self._reporter.on_evaluation(split, self._loop.progress.global_step, evaluation, is_told=True)
        # All tasks must stop together, and each may have got its signal at another moment of the evaluation.
        self._stop_if(self._loop.combine(self._pause_request()))
        return evaluation

    def _freeze(self) -> Frozen:
        frozen, own = self._loop.freeze(), self._state.arrays(self._loop.progress.metrics)

        def fetch() -> Snapshot:
            snapshot = frozen()
            return replace(snapshot, arrays=snapshot.arrays | own)

        return fetch

    def _save(self) -> None:
        self._saver.save(self._freeze)
        heartbeat.progress()

    def _stop_if(self, requested: PauseRequest) -> None:
        if PauseRequest.STOP in requested:
            self._saver.save(self._freeze, stopping=True)
            self._loop.finish(None)
            raise Interrupted(signal.SIGTERM)

    def _finish(self) -> None:
        """Sets the final weights of the model, and reports the result."""
        loop, step = self._loop, self._loop.progress.global_step
        loop.target_step = step  # a callback may have ended the run early
        self._reporter.set_target(step)
        loop.finalize()
        # Callbacks may still set weights here, so what is evaluated, saved and written comes after.
        self._call("end", {})
        test = self._evaluate("test") if "test" in self._splits else None
        self._saver.save(self._freeze)
        self._saver.retry(step, self._freeze)
        epochs = self._state.position.epoch - self._plan.initial_epoch if loop.sharding.ends_with_data else None
        self._write_finished_model()
        self._reporter.on_result(
            self._config, self._cluster, loop, self._validation, test, self._saver.saved_step, epochs
        )
        loop.finish(test or self._validation or self._last)


class Goal:
    """Decides after each evaluation on the validation set whether the training ends there.

    Args:
        splits: the names of those that can be evaluated.
        broadcast: see `loop.Loop`. Each worker has a clock of its own, so the leader's decides.

    Raises:
        ConfigError: there is a goal, and no validation set.
    """

    def __init__(self, config: TrainConfig, splits: Collection[str], broadcast: Callable[[bytes], bytes]) -> None:
        self._accuracy, self._secs, self._broadcast = config.until_accuracy, config.until_secs, broadcast
        given = {"train.until_accuracy": self._accuracy, "train.until_secs": self._secs}
        for name, value in given.items():
            if value is not None and "validation" not in splits:
                raise ConfigError(f"{name} ({value}): the data has no validation set; leave it out")

    def reached(self, evaluation: Evaluation, training_secs: float) -> str:
        """The option that ends the training now, "" for none; all tasks that drive the training must call this.

        Raises:
            ConfigError: there is a goal for the accuracy, and the model has none.
        """
        if self._accuracy is not None:
            if "accuracy" not in evaluation.metrics:
                raise ConfigError(
                    f"train.until_accuracy ({self._accuracy}): the model has no accuracy; give train.steps instead"
                )
            if evaluation.metrics["accuracy"] >= self._accuracy:
                return f"train.until_accuracy={self._accuracy}"
        if self._secs is not None and self._broadcast(bytes([training_secs >= self._secs])) == b"\1":
            return f"train.until_secs={self._secs}"
        return ""
