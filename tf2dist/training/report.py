"""The leader's report: progress to the launcher, numbers to the writers, the result to summary.json."""

import math
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from tf2dist.cluster.spec import Task
from tf2dist.config.decode import flatten
from tf2dist.config.schema import RunConfig
from tf2dist.data.passes import UNKNOWN_STEPS
from tf2dist.messages import ProgressMessage, ResultMessage, ToLauncher, metrics_text
from tf2dist.model.evaluation import Evaluation
from tf2dist.model.metrics import Metrics, scalars_of
from tf2dist.tf_internals.keras import counter_of, inner_optimizers, learning_rate_of
from tf2dist.training.loop import Loop, Progress
from tf2dist.training.writers import JsonlWriter, PatientWriter, RunDescription, TensorBoardWriter, Values

WRITE_EVERY_SECS = 1.0  # into the files
SEND_EVERY_SECS = 0.1  # to the launcher's display
SECTIONS = ("mode", "model", "optimizer", "algorithm", "data", "train", "cluster", "seed")
SCHEDULE = keras.optimizers.schedules.LearningRateSchedule


class _Recent:
    """The metrics of the training steps since they were last read."""

    def __init__(self, metrics: Metrics, before: np.ndarray) -> None:
        self._metrics, self._before = metrics, before

    def read(self, progress: Progress) -> dict[str, Any]:
        results = self._results(progress)
        self._before = progress.metrics
        return {**scalars_of(results), "loss": progress.loss}

    def _results(self, progress: Progress) -> dict[str, Any]:
        new = progress.metrics - self._before
        # Without a step in between, the metrics would be quotients of zeros.
        return self._metrics.results(new) if new.any() else {}


class _OfEpoch(_Recent):
    """The metrics of the steps since an epoch of `fit` began, which Keras gives to the hooks of batches."""

    def __init__(self, metrics: Metrics, before: np.ndarray, has_arrays: bool) -> None:
        super().__init__(metrics, before)
        self._has_arrays = has_arrays

    def read(self, progress: Progress) -> dict[str, Any]:
        results = self._results(progress)
        # A step of a model's own may return no loss, but the display shows one.
        return {"loss": progress.loss, **(results if self._has_arrays else scalars_of(results))}


def results_of(validation: Evaluation | None, test: Evaluation | None) -> dict[str, Any]:
    """The last evaluations, as summary.json holds them."""
    # The format of the file promises this name for every classifier, even without a validation set.
    classifies = test is not None and "accuracy" in test.metrics
    results: dict[str, Any] = {"validation_accuracy": None} if classifies else {}
    for split, evaluation in (("test", test), ("validation", validation)):
        if evaluation:
            results |= {f"{split}_{name}": value for name, value in evaluation.metrics.items()}
            results[f"{split}_examples"] = evaluation.num_examples
    return results


def summary_of(model: keras.Model) -> str:
    """Keras' own table of the layers."""
    lines: list[str] = []
    model.summary(print_fn=lambda text, **_: lines.append(text))
    return "\n".join(lines)


def hparams_of(config: RunConfig) -> dict[str, bool | float | str]:
    """The options that can change the result, by their dotted names; without those that are not set."""
    options = asdict(config)
    sections = (*SECTIONS, "simulate") if config.simulate.is_on else SECTIONS
    # TensorBoard takes no other types; a list, for instance, is shown as its text.
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flatten({section: options[section] for section in sections})
        if value not in (None, [])
    }


class LearningRates:
    """The learning rate of each inner optimizer at any step, without reading the optimizer's own count of steps.

    With mode=async that count lies on a ps, where each read would cost a remote call.
    """

    def __init__(self, optimizer: keras.Optimizer, earlier_updates: int) -> None:
        self._earlier_updates = earlier_updates
        # It leaves out updates, so the step does not tell their number. It lies in this process, since no ps has one.
        has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._counter = counter_of(optimizer) if has_scale else None
        # `optimizer.learning_rate` would evaluate a schedule at the optimizer's own count and hide the schedule itself.
        # A constant rate is read once: whoever changes it makes a new object of this class.
        self._rates = [
            rate if isinstance(rate := learning_rate_of(inner), SCHEDULE) else _number(inner.learning_rate)
            for inner in inner_optimizers(optimizer)
        ]

    def at(self, step: int) -> tuple[float, ...]:
        count = step + self._earlier_updates if self._counter is None else int(self._counter.numpy())
        return tuple(_number(rate(count)) if isinstance(rate, SCHEDULE) else rate for rate in self._rates)

    def scalars(self, step: int) -> dict[str, float]:
        """By name, for curves; those of several optimizers are numbered as in `MultiOptimizer.optimizers`."""
        rates = self.at(step)
        if len(rates) == 1:
            return {"learning_rate": rates[0]}
        return {f"learning_rate_{number}": rate for number, rate in enumerate(rates)}


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))


class NoReporter:
    """The reporter of a task that is not the leader: it does nothing.

    Attributes:
        training_secs: from the first step to the last progress, without the evaluations and the pauses for them.
    """

    training_secs = 0.0

    def set_target(self, step: int, ended_by: str = "") -> None:
        """Tells the reporter that the run ends at another step than planned, and which option has ended it."""

    def restart_metrics(self) -> None:
        """Tells the reporter that sums of metrics are counted from 0 again; see `Loop.clear_metrics`."""

    def begin_epoch(self, before: np.ndarray, has_arrays: bool) -> None:
        """Tells the reporter that an epoch of `fit` begins, or goes on.

        Args:
            before: the sums of metrics at its beginning.
            has_arrays: whether the launcher gets metrics that are several numbers, which take long to send, too.
        """

    def note(self, text: str) -> None:
        """Tells the user a line."""

    def show_progress(self) -> None:
        """Shows the user the present step at once."""

    def set_learning_rates(self, rates: LearningRates) -> None:
        """Tells the reporter that a callback has set other learning rates."""

    def follow(self, loop: Loop) -> None:
        """Reports on this loop from now on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_progress(self, progress: Progress) -> None:
        """Takes the progress of the run; called whenever the loop has some."""

    def on_evaluation(self, split: str, step: int, evaluation: Evaluation, is_reported: bool = False) -> None:
        """Takes the result of an evaluation, during which training was paused.

        Args:
            is_reported: whether the user is told the metrics by somebody else.
        """

    def on_result(
        self,
        validation: Evaluation | None,
        test: Evaluation | None,
        saved_step: int | None,
        num_epochs: int | None = None,
    ) -> None:
        """Sends the content of summary.json to the launcher, which adds what it alone knows.

        Args:
            num_epochs: the epochs that have ended; None if the examples tell.
        """


class Reporter(NoReporter):
    """Follows one run on its leader.

    Args:
        started_at: `time.time()` when the user's command began, from which the start-up is counted.
    """

    def __init__(self, run_dir: Path, task: Task, to_launcher: ToLauncher, started_at: float) -> None:
        self._task, self._to_launcher = task, to_launcher
        self.target_step = 0
        self._loop: Loop | None = None
        self._shown: _Recent  # set by `follow`, as is the next one
        self._filed: _Recent
        self._rates: LearningRates | None = None
        self._description: RunDescription | None = None
        # Of two that write into one folder TensorBoard would read only one.
        folder = run_dir / "tensorboard" / ("" if task.job != "evaluator" else str(task))
        # Told by the clock of the host, which may be set during the run, and counted by one that never goes back.
        self._began_at = time.monotonic() - (time.time() - started_at)
        makes = (
            lambda: JsonlWriter(run_dir / "metrics.jsonl", str(task), self._began_at),
            lambda: TensorBoardWriter(folder, self._description),
        )
        self._writers = [PatientWriter(make, to_launcher.warn) for make in makes]
        self._first_at: float | None = None  # the time of the first report, at which the start-up ends
        self._first: Progress  # set with it
        self._steps = self._examples = 0  # of the training since then
        self._last_at = self._paused_secs = 0.0  # the time of the last report of any kind, and all time of evaluations
        self._sent_at = self._written_at = 0.0

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()

    def follow(self, loop: Loop) -> None:
        self._loop, self.target_step = loop, loop.target_step
        self._rates = LearningRates(loop.optimizer, loop.earlier_updates)
        self.restart_metrics()
        self._description = RunDescription(summary_of(loop.model), hparams_of(loop.config))

    def restart_metrics(self) -> None:
        assert self._loop
        # The display and the files are served at different times, so each has its own last reading.
        self._shown, self._filed = (_Recent(self._loop.metrics, self._loop.progress.metrics) for _ in range(2))

    def begin_epoch(self, before: np.ndarray, has_arrays: bool) -> None:
        assert self._loop
        self._shown = _OfEpoch(self._loop.metrics, before, has_arrays)

    def set_target(self, step: int, ended_by: str = "") -> None:
        if ended_by:
            self._to_launcher.note(f"{ended_by} ended the run at step {step:,} of {self.target_step:,}")
        self.target_step = step

    def note(self, text: str) -> None:
        self._to_launcher.note(text)

    def show_progress(self) -> None:
        if self._loop:
            self._send(self._loop.progress)

    def _send(self, progress: Progress) -> None:
        metrics, rate = self._shown.read(progress), self.steps_per_sec()
        # Rounded as in the summary, or the two might be shown as 147 and 148.
        target = self.target_step if self.target_step < UNKNOWN_STEPS else 0
        self._to_launcher.send(ProgressMessage(progress.global_step, target, metrics, rate and round(rate, 2)))

    def set_learning_rates(self, rates: LearningRates) -> None:
        self._rates = rates

    def on_progress(self, progress: Progress) -> None:
        now, step = time.monotonic(), progress.global_step
        if self._first_at is None:
            self._first_at, self._first = now, progress
        self._steps, self._examples = step - self._first.global_step, progress.examples - self._first.examples
        self._last_at, self.training_secs = now, now - self._first_at - self._paused_secs

        # The launcher's display, and the files, each at its own pace; the last step always goes to both.
        if now - self._sent_at >= SEND_EVERY_SECS or step >= self.target_step:
            self._sent_at = now
            self._send(progress)
        if now - self._written_at >= WRITE_EVERY_SECS or step >= self.target_step:
            self._written_at = now
            scalars = self._filed.read(progress)
            rate = self.steps_per_sec()
            if rate:
                scalars |= {"steps_per_sec": rate, "training_secs": round(self.training_secs, 4)}
            if self._rates:
                scalars |= self._rates.scalars(step)
            self._write(step, scalars)

    def on_evaluation(self, split: str, step: int, evaluation: Evaluation, is_reported: bool = False) -> None:
        # From the last progress on: a pause begins when the last update of the step has been applied.
        now = time.monotonic()
        self._paused_secs += now - (self._last_at or now)
        self._last_at = now
        print(f"{self._task}, global_step={step}, {split} {evaluation.headline}", flush=True)
        if step != self.target_step and not is_reported:  # the launcher shows the last evaluation with the result
            self._to_launcher.note(f"step {step:,}: {split} {metrics_text(evaluation.metrics)}")
        scalars = {f"{split}_{name}": value for name, value in scalars_of(evaluation.metrics).items()}
        if self._first_at:  # not the evaluator, which trains nothing
            scalars["training_secs"] = round(self.training_secs, 4)
        self._write(step, {**scalars, **(self._loop.histograms() if self._loop else {})})

    def _write(self, step: int, values: Values) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def steps_per_sec(self) -> float | None:
        """The steps since the first report of progress, divided by `training_secs`; None while unknown."""
        return self._steps / self.training_secs if self.training_secs > 0 else None

    def on_result(
        self,
        validation: Evaluation | None,
        test: Evaluation | None,
        saved_step: int | None,
        num_epochs: int | None = None,
    ) -> None:
        assert self._loop, "follow was called"
        loop, config, rate = self._loop, self._loop.config, self.steps_per_sec()
        progress = loop.progress
        self.show_progress()  # with the rate of the summary, also if the run has ended before its last step
        summary = {
            "mode": config.mode,
            "model": config.model["name"],
            "parameters": sum(math.prod(variable.shape) for variable in loop.model.trainable_variables),
            "optimizer": config.optimizer["name"],
            "data": config.data.name,
            "seed": config.seed,
            "cluster": {"worker": loop.cluster.num_workers, "ps": loop.cluster.num_ps},
            "target_step": self.target_step,
            "global_step": progress.global_step,
            "saved_step": saved_step,
            "updates_applied": loop.updates_applied(),
            "examples_seen": progress.examples,
            "epochs": round(progress.examples / loop.sharding.num_examples, 4) if num_epochs is None else num_epochs,
            **results_of(validation, test),
            "steps_per_sec": round(rate, 2) if rate else None,
            "examples_per_sec": round(self._examples / self.training_secs, 1) if rate else None,
            "startup_secs": round((self._first_at or time.monotonic()) - self._began_at, 3),
            "wall_secs": round(time.monotonic() - self._began_at, 3),
            "workers": [{"index": i, "local_steps": steps} for i, steps in enumerate(progress.local_steps)],
            **loop.facts(),
            **({"simulated": asdict(config.simulate)} if config.simulate.is_on else {}),
            "versions": {
                "python": platform.python_version(),
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            },
        }
        self._to_launcher.send(ResultMessage(summary))
