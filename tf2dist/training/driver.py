"""Drives a run to its end, and says how far it goes: some steps, or the epochs of `keras.Model.fit`.

A run of steps evaluates every so many of them, and the options train.until_accuracy and train.until_secs may end it
early. An epoch ends with its metrics, its validation and its callbacks, which may end the run, too.
"""

import math
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from tf2dist.checkpoint.snapshot import Frozen
from tf2dist.checkpoint.store import NoSaver
from tf2dist.config.schema import TrainConfig
from tf2dist.errors import ConfigError, Interrupted, NotFiniteError
from tf2dist.model.evaluation import Evaluation
from tf2dist.model.metrics import Results
from tf2dist.model.source import EpochPlan
from tf2dist.process import heartbeat
from tf2dist.process.inbox import asked_to_stop
from tf2dist.training.hooks import CallbackEffects, Hooks, NamedArrays
from tf2dist.training.loop import Loop, PauseRequest, WorkersAway
from tf2dist.training.report import LearningRates, NoReporter
from tf2dist.training.setup import EPOCH_ARRAY, EpochPosition

METRICS, STOPPED, RATES = "epoch/metrics", "epoch/stopped", "epoch/learning_rate"  # the names of arrays in a snapshot
CALLBACKS = "callbacks/"
ANSWER_SECS = 1.0  # the longest time between two signs to the other workers that the callbacks are still running


class Driver:
    """Trains from the present step to the end of the run, saves on the way, and reports the result.

    Every task that drives the training has one, and all of them make the same calls in the same order: with mode=sync
    most of these calls wait for the other workers.

    Attributes:
        saved_at: the last step at which the run was given to be saved.
        has_changed: whether callbacks have changed weights or rates since, or the run ends at another step.

    Args:
        splits: the names of those that can be evaluated.
        make_length: makes the length of the run for this driver.
        write_finished_model: called once, when the model has its final weights; writes it on the leader alone.
    """

    def __init__(
        self,
        loop: Loop,
        saver: NoSaver,
        reporter: NoReporter,
        splits: Collection[str],
        make_length: Callable[["Driver"], "Length"],
        write_finished_model: Callable[[], None],
    ) -> None:
        self.loop, self.reporter, self.splits = loop, reporter, splits
        self._saver, self._write_finished_model = saver, write_finished_model
        self.saved_at: int | None = None
        self.has_changed = False
        self._length = make_length(self)

    @property
    def is_at_end(self) -> bool:
        """Whether no step is left to train."""
        return self._length.next_stop(self.loop.progress.global_step) is None

    def drive(self) -> None:
        """Trains, evaluates and reports the result."""
        try:
            self._train()
            self._finish()
        except NotFiniteError:
            self._length.on_not_finite()
            raise

    def _train(self) -> None:
        loop, length, save_every = self.loop, self._length, self.loop.config.checkpoint.every_steps
        length.begin()
        while (stop := length.next_stop(loop.progress.global_step)) is not None:
            if save_every:
                stop = min(stop, next_multiple(save_every, loop.progress.global_step))
            requested = loop.train(stop, self._pause_request)
            heartbeat.progress()
            has_ended, step = length.on_stop(requested), loop.progress.global_step
            if has_ended:
                self.end_at(step)
            is_due = PauseRequest.SAVE in requested or (save_every and step % save_every == 0)
            if is_due or has_ended or step == loop.target_step:
                self.save()
            self._stop_if(requested)
            length.evaluate()

    def _finish(self) -> None:
        """Sets the final weights of the model, and reports the result."""
        loop, length, step = self.loop, self._length, self.loop.progress.global_step
        self.end_at(step)
        loop.finalize()
        length.finish()
        test = self.evaluate("test") if "test" in self.splits else None
        self._saver.retry(step, self._freeze)
        self._write_finished_model()
        self.reporter.on_result(length.validation, test, self._saver.saved_step, length.num_epochs)
        loop.finish(test or length.validation or length.trained)

    def end_at(self, step: int, ended_by: str = "") -> None:
        """Ends the run at another step than planned; `ended_by`: the option that does."""
        # An evaluator learns from the last checkpoint that no other one will follow.
        self.has_changed |= step != self.loop.target_step
        self.loop.target_step = step
        self.reporter.set_target(step, ended_by)

    def evaluate(self, split: str) -> Evaluation:
        """Evaluates a split, and stops the run if that was requested meanwhile."""
        try:
            evaluation = self.loop.evaluate(split, self._pause_request)
        except WorkersAway:
            self.stop()
        is_reported = self._length.reports_metrics
        self.reporter.on_evaluation(split, self.loop.progress.global_step, evaluation, is_reported)
        # All tasks must stop together, and each may have got its signal at another moment of the evaluation.
        self._stop_if(self.loop.combine(self._pause_request()))
        return evaluation

    def _pause_request(self) -> PauseRequest:
        stop = PauseRequest.STOP if asked_to_stop() else PauseRequest.NOTHING
        return stop | self._length.request() | (PauseRequest.SAVE if self._saver.due() else PauseRequest.NOTHING)

    def _freeze(self) -> Frozen:
        return self.loop.freeze(self._length.arrays())

    def save(self) -> None:
        """Saves the run as it is now."""
        self._saver.save(self._freeze, replaces=self.has_changed)
        self.saved_at, self.has_changed = self.loop.progress.global_step, False
        # The leader may have to wait until an earlier checkpoint is written, and the others wait for it in a step.
        heartbeat.progress(0.0 if self.loop.leads else heartbeat.START_SECS)

    def _stop_if(self, requested: PauseRequest) -> None:
        if PauseRequest.STOP in requested:
            self.stop()

    def stop(self) -> NoReturn:
        """Saves the run, and ends it before its last step."""
        self._saver.save(self._freeze, stopping=True)
        self.loop.finish(None)
        raise Interrupted(signal.SIGTERM)


def next_multiple(every: int, step: int) -> int:
    """The first multiple of a number of steps after a step."""
    return (step // every + 1) * every


class Length:
    """The length of a run: where the driver stops on the way to its end, and what is to be done there.

    Attributes:
        reports_metrics: whether the user is told of evaluations by somebody else.
        validation: the last evaluation on the validation set; None if there was none.
        trained: the metrics of the last epoch's training; None if there are no epochs.
        num_epochs: the epochs that have ended; None if the examples tell.
    """

    reports_metrics = False
    validation: Evaluation | None = None
    trained: Evaluation | None = None
    num_epochs: int | None = None

    def begin(self) -> None:
        """Called before the first step."""

    def next_stop(self, step: int) -> int | None:
        """The first step from `step` on at which something is to be done; None at the end of the run."""
        raise NotImplementedError

    def on_stop(self, requested: PauseRequest) -> bool:
        """Called at a stop, or earlier if a task has requested something; returns whether a callback ends the run."""
        return False

    def evaluate(self) -> None:
        """Called when a stop is over, and what was due is saved."""

    def request(self) -> PauseRequest:
        """The request of this task's callbacks."""
        return PauseRequest.NOTHING

    def arrays(self) -> NamedArrays:
        """The arrays that every snapshot keeps."""
        return {}

    def finish(self) -> None:
        """Called when the model has its final weights, before the test set is evaluated."""

    def on_not_finite(self) -> None:
        """Called when this task ends because the loss is not finite."""


class Steps(Length):
    """The length of a run in steps; every so many of them the validation set is evaluated."""

    def __init__(self, driver: Driver) -> None:
        config = driver.loop.config.train
        self._driver, self._evaluate_every = driver, config.eval_every_steps
        self._condition = StopCondition(config, driver.splits, driver.loop.broadcast)

    def next_stop(self, step: int) -> int | None:
        if step >= (target := self._driver.loop.target_step):
            return None
        return min(target, next_multiple(self._evaluate_every or target, step))

    def evaluate(self) -> None:
        driver, step = self._driver, self._driver.loop.progress.global_step
        is_due = self._evaluate_every and step % self._evaluate_every == 0 and step < driver.loop.target_step
        if not is_due or "validation" not in driver.splits:
            return
        if option := self._condition.reached(driver.evaluate("validation"), driver.reporter.training_secs):
            driver.end_at(step, option)
            driver.save()

    def finish(self) -> None:
        if "validation" in self._driver.splits:
            self.validation = self._driver.evaluate("validation")


class StopCondition:
    """Decides after each evaluation on the validation set whether the training ends there.

    Args:
        splits: the names of those that can be evaluated.
        broadcast: see `loop.Loop`. Each worker has a clock of its own, so the leader's decides.
    """

    def __init__(self, config: TrainConfig, splits: Collection[str], broadcast: Callable[[bytes], bytes]) -> None:
        self._accuracy, self._secs, self._broadcast = config.until_accuracy, config.until_secs, broadcast
        given = {"train.until_accuracy": self._accuracy, "train.until_secs": self._secs}
        for name, value in given.items():
            if value is not None and "validation" not in splits:
                raise ConfigError(f"{name} ({value}): the data has no validation set; leave it out")

    def reached(self, evaluation: Evaluation, training_secs: float) -> str:
        """The option that ends the training now, "" for none; all tasks that drive the training must call this."""
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


@dataclass
class EpochState:
    """The place of a run among its epochs; saved with it.

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
        """The arrays that a snapshot keeps; `metrics`: the sums now."""
        own = {
            EPOCH_ARRAY: self.position.to_array(),
            METRICS: metrics - self.before,
            STOPPED: np.array(self.has_stopped),
        }
        if self.learning_rates:
            own[RATES] = np.array(self.learning_rates)
        return own | {f"{CALLBACKS}{name}": array for name, array in self.callbacks.items()}


class Epochs(Length):
    """The length of a call of `fit`: to the end of its plan, or until a callback ends the run.

    Args:
        hooks: the way to the callbacks; None on other tasks than the leader.
    """

    reports_metrics = True  # the caller of `fit` tells them with the other metrics of the epoch

    def __init__(self, driver: Driver, plan: EpochPlan, hooks: Hooks | None) -> None:
        self._driver, self._loop, self._plan, self._hooks = driver, driver.loop, plan, hooks
        self._state = EpochState.of(plan, self._loop)
        self._has_told = False
        self._reads_progress = bool(hooks and hooks.reads_progress)
        self.trained = Evaluation({"loss": math.nan}, 0)
        self._rates = LearningRates(self._loop.optimizer, self._loop.earlier_updates)

    def begin(self) -> None:
        # Optimizers are built with the rate of the configuration, and snapshots leave the rate out.
        self._apply(CallbackEffects(learning_rates=self._state.learning_rates))
        self._note_end(self._call("begin", {}))
        self._driver.reporter.begin_epoch(self._state.before, self._reads_progress)

    def next_stop(self, step: int) -> int | None:
        """The end of the epoch, which takes several turns if a checkpoint or a callback interrupts it."""
        epoch = self._state.position.epoch
        end = self._state.position.end_of(epoch)
        is_over = self._state.has_stopped or epoch >= self._plan.epochs or end > self._loop.target_step
        return None if is_over else end

    def request(self) -> PauseRequest:
        return PauseRequest.CHANGE if self._hooks and self._hooks.wanted() else PauseRequest.NOTHING

    def arrays(self) -> NamedArrays:
        return self._state.arrays(self._loop.progress.metrics)

    def on_stop(self, requested: PauseRequest) -> bool:
        # The callbacks come before the checkpoint, which must hold what they have changed: a resumed run does not call
        # them again.
        ends_early = PauseRequest.CHANGE in requested and self._call("pause", self._metrics()).stop
        loop, position = self._loop, self._state.position
        if ends_early or loop.epoch_has_ended or loop.progress.global_step == position.end_of(position.epoch):
            self._end_epoch()
        return self._state.has_stopped

    def _end_epoch(self) -> None:
        """Validates, calls the callbacks and moves on to the next epoch."""
        loop, state = self._loop, self._state
        self._tell_unread()
        self._driver.reporter.show_progress()  # before the caller of `fit` tells of the end of the epoch
        logs = self._metrics()
        self.trained = Evaluation(logs, loop.progress.examples)
        if self._validates():
            self.validation = self._driver.evaluate("validation")
            logs = logs | {f"val_{name}": value for name, value in self.validation.metrics.items()}
        self._note_end(self._call("epoch", logs))
        # Only now: a run that is stopped while its callbacks work is saved at the end of this epoch and, when it is
        # resumed, calls them again.
        state.position = state.position.next(loop.progress.global_step)
        if loop.clear_metrics():
            self._driver.reporter.restart_metrics()
        state.before = loop.progress.metrics
        self._driver.reporter.begin_epoch(state.before, self._reads_progress)
        if loop.sharding.ends_with_data:
            loop.begin_epoch()

    def _metrics(self) -> Results:
        """The metrics of the training in this epoch so far."""
        return self._loop.metrics.results(self._loop.progress.metrics - self._state.before)

    def _validates(self) -> bool:
        return self._plan.validates(self._state.position.epoch) and "validation" in self._driver.splits

    def on_not_finite(self) -> None:
        """Leaves the metrics of the epoch for TerminateOnNaN, without waiting: this task ends with an error."""
        logs, step = self._metrics(), self._loop.progress.global_step
        if self._validates():
            names = self.validation.metrics if self.validation else logs
            logs |= {f"val_{name}": math.nan for name in names}
        if self._hooks:
            self._hooks.post("not finite", self._state.position.epoch, step, logs, (), lambda _: {}, {})

    def _tell_unread(self) -> None:
        """Tells once that the end of one worker's data has left batches of others out."""
        if (unread := self._loop.num_unread) and not self._has_told:
            self._has_told = True
            self._driver.reporter.note(
                f"epoch {self._state.position.epoch + 1} ended with the data of one worker; batches of {unread} others "
                "were left out; give all workers equally many"
            )

    def _note_end(self, effects: CallbackEffects) -> None:
        self._state.has_stopped = self._state.has_stopped or effects.stop

    def _call(self, kind: str, logs: dict[str, float]) -> CallbackEffects:
        """Calls the callbacks and carries out what they want, on all tasks at the same step."""
        loop, step = self._loop, self._loop.progress.global_step
        # A resumed run that a callback had ended has no epoch any more that could begin.
        is_over = kind == "begin" and self._state.has_stopped
        epoch = self._plan.epochs if is_over else self._state.position.epoch

        def arrays(with_weights: bool) -> NamedArrays:
            variables = loop.arrays() if with_weights else loop.small_arrays()
            return variables | loop.random_states() | loop.counted_before()

        if self._hooks:
            self._hooks.post(kind, epoch, step, logs, self._rates.at(step), arrays, self._state.callbacks)
        effects = self._answer()
        if effects.is_interrupted:
            self._driver.stop()
        self._apply(effects)
        if effects.state is not None:
            self._state.callbacks = effects.state
        return effects

    def _apply(self, effects: CallbackEffects) -> None:
        self._loop.apply(effects)
        self._driver.has_changed |= bool(effects.arrays or effects.learning_rates)
        if effects.learning_rates:
            self._state.learning_rates = effects.learning_rates
            # The object made before has read the rates once and for all.
            self._rates = LearningRates(self._loop.optimizer, self._loop.earlier_updates)
            self._driver.reporter.set_learning_rates(self._rates)

    def _answer(self) -> CallbackEffects:
        """The effects that the leader's callbacks want; waits for them on all tasks."""
        while True:
            answer = self._hooks.answer(ANSWER_SECS) if self._hooks else None
            # A callback may run for hours, but a stop has seconds. The leader alone decides: if each task looked at its
            # own signal, some would leave this loop while others wait for them in the broadcast.
            if answer is None and asked_to_stop() and self._loop.leads:
                answer = CallbackEffects(is_interrupted=True)
            # The others wait in this broadcast. An empty one lets them report progress to their watchdogs, which would
            # otherwise take them for stalled.
            packed = self._loop.broadcast(answer.to_bytes() if answer else b"")
            heartbeat.progress()
            if packed:
                return answer or CallbackEffects.from_bytes(packed)

    def finish(self) -> None:
        # Callbacks may still set weights here, so what is evaluated, saved and written comes after.
        self._call("end", {})
        if self._driver.has_changed or self._driver.saved_at != self._loop.progress.global_step:
            self._driver.save()
        if self._loop.sharding.ends_with_data:
            self.num_epochs = self._state.position.epoch - self._plan.initial_epoch
